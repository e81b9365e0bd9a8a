"""Checkpoints of each format, read from the bytes: codes and numbers as they were written, and what is none."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.errors import CalibrationError
from onnxq.interop.checkpoints import WeightCodes, open_checkpoint
from tests.interop import checkpoints as kit

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def compressed(bits: int, **data: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"targets": ["Linear"], "weights": weights} | data},
    }


def read_one(folder: Path) -> WeightCodes:
    (weight,) = open_checkpoint(folder).weights
    return weight.read()


def draw(seed: int, bits: int, rows: int, columns: int, size: int) -> tuple[Any, Any, Any]:
    """Codes, scales and zero points of a weight."""
    rng, groups = np.random.default_rng(seed), -(-columns // size)
    codes = rng.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    return codes, rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float16), rng.integers(1, 1 << bits, (rows, groups))


SEEDS = st.integers(0, 2**32)


@given(SEEDS, st.sampled_from([2, 3, 4, 8]), st.integers(1, 3), st.booleans(), st.booleans())
def test_gptq_gives_the_codes_that_are_packed(seed: int, bits: int, blocks: int, second: bool, act_order: bool) -> None:
    codes, scale, zero = draw(seed, bits, 32, 32 * blocks, 32)
    groups = np.arange(32 * blocks) // 32
    groups = np.random.default_rng(seed).permutation(groups) if act_order else groups
    tensors, values = kit.gptq("m", codes, scale, zero, groups, bits, second=second)
    config = GPTQ | {"bits": bits, "checkpoint_format": "gptq_v2" if second else "gptq"}
    with TemporaryDirectory() as folder:
        found = read_one(kit.write_safetensors(Path(folder) / "m.safetensors", tensors, config))
    order = np.arange(32 * blocks) if found.order is None else found.order
    np.testing.assert_array_equal(found.codes, codes[:, order])
    assert (groups[order] == np.arange(32 * blocks) // 32).all()
    np.testing.assert_array_equal(found.zero, zero)
    np.testing.assert_array_equal(found.scale, scale)
    np.testing.assert_array_equal(found.dequantize(), values)


@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
def test_awq_gives_the_codes_that_were_packed(seed: int, eights: int, blocks: int) -> None:
    codes, scale, zero = draw(seed, 4, 8 * eights, 32 * blocks, 32)
    tensors, values = kit.awq("m", codes, scale, zero, 32)
    with TemporaryDirectory() as folder:
        found = read_one(kit.write_safetensors(Path(folder) / "m.safetensors", tensors, AWQ))
    np.testing.assert_array_equal(found.codes, codes)
    np.testing.assert_array_equal(found.zero, zero)
    np.testing.assert_array_equal(found.dequantize(), values)


@given(SEEDS, st.integers(2, 8), st.integers(1, 70), st.integers(1, 9), st.booleans(), st.booleans())
def test_compressed_tensors_give_the_codes_that_were_packed(
    seed: int, bits: int, columns: int, rows: int, uneven: bool, act_order: bool
) -> None:
    columns = columns if not act_order else 64
    codes, scale, zero = draw(seed, bits, rows, columns, 32)
    groups = np.random.default_rng(seed).permutation(np.arange(columns) // 32) if act_order else None
    tensors, values = kit.packed("m", codes, scale, bits, 32, zero if uneven else None, groups)
    with TemporaryDirectory() as folder:
        found = read_one(kit.write_safetensors(Path(folder) / "m.safetensors", tensors, compressed(bits)))
    order = np.arange(columns) if found.order is None else found.order
    np.testing.assert_array_equal(found.codes, codes[:, order])
    assert found.symmetric or uneven
    np.testing.assert_array_equal(found.dequantize(), values)


@pytest.mark.parametrize("shape", [(6, 1), (6,), (1,), ()])
@pytest.mark.parametrize("static", [False, True])
def test_int_quantized_weights_and_scales_of_their_data(tmp_path: Path, shape: tuple[int, ...], static: bool) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (6, 10)).astype(np.int8)
    scale = np.asarray(rng.uniform(0.01, 0.1, shape), np.float32)
    tensors = {"m.weight": codes, "m.weight_scale": scale, "other.weight": scale}
    if static:
        tensors |= {"m.input_scale": np.float32([0.25]), "m.input_zero_point": np.int8([3])}
    config = compressed(8, input_activations={"num_bits": 8, "type": "int", "dynamic": not static})
    (weight,) = open_checkpoint(kit.write_safetensors(tmp_path / "m.safetensors", tensors, config)).weights
    assert (weight.data.scale, weight.data.zero) == ((0.25, 3) if static else (None, 0))
    assert "one scale a row" in weight.form
    np.testing.assert_array_equal(weight.read().dequantize(), codes * scale.reshape(-1, 1))
    assert weight.read().symmetric


@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
def test_gguf_blocks_give_the_codes_that_were_packed(seed: int, rows: int, blocks: int) -> None:
    codes, scale, _ = draw(seed, 4, rows, 32 * blocks, 32)
    scale *= np.random.default_rng(seed).choice([-1, 1], scale.shape).astype(np.float16)
    wide = np.random.default_rng(seed).integers(-128, 128, codes.shape).astype(np.int8)
    kinds = {
        "a": (2, *kit.q4_0(codes, scale)),
        "b": (3, *kit.q4_1(codes, scale, -scale / 3)),
        "c": (8, *kit.q8_0(wide, scale)),
    }
    with TemporaryDirectory() as folder:
        file = kit.write_gguf(
            Path(folder) / "m.gguf", {f"{k}.weight": (n, codes.shape, raw) for k, (n, raw, _) in kinds.items()}
        )
        found = {weight.name: weight.read() for weight in open_checkpoint(file).weights}
    for name, (_, _, values) in kinds.items():
        np.testing.assert_array_equal(found[name].dequantize(), values)
        np.testing.assert_array_equal(found[name].settle().dequantize(), values)
    np.testing.assert_array_equal(found["a"].codes, codes)
    np.testing.assert_array_equal(found["c"].codes, wide.astype(np.int16) + 128)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_blocks_are_those_of_the_gguf_package(tmp_path: Path, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    values, length = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6, length)).astype(np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0, 2) if name[3] in "1K" else (0,))
    for at in places:
        blocks[:, at : at + 2] = rng.uniform(-0.1, 0.1, (6, 1)).astype(np.float16).view(np.uint8)
    file = kit.write_gguf(tmp_path / "m.gguf", {"w.weight": (kind.value, (3, 2 * values), blocks.tobytes())})
    expected = gguf.quants.dequantize(blocks.reshape(3, -1), kind)
    np.testing.assert_array_equal(read_one(file).dequantize(), expected)


def test_blocks_of_scale_0_and_whole_minima_keep_their_values() -> None:
    codes = np.array([[3, 0, 7, 1]], np.uint8)
    numbers = {
        "scale": np.float32([[0, 0.5]]),
        "zero": np.zeros((1, 2), np.uint8),
        "minimum": np.float32([[-0.25, -1]]),
    }
    weight = WeightCodes(codes=codes, bits=4, size=2, **numbers)
    settled = weight.settle()
    assert settled.scale.all()
    np.testing.assert_array_equal(settled.dequantize(), weight.dequantize())
    whole = WeightCodes(
        codes=codes,
        bits=4,
        size=2,
        **numbers | {"scale": np.float32([[0.5, 0.5]]), "minimum": np.float32([[-1, -3.5]])},
    )
    assert whole.settle().minimum is None
    np.testing.assert_array_equal(whole.settle().zero, [[2, 7]])


def make_gptq(tmp_path: Path, config: dict[str, Any] = GPTQ, **changed: Any) -> Path:
    codes, scale, zero = draw(0, 4, 8, 64, 32)
    tensors = kit.gptq("m.fc", codes, scale, zero, np.arange(64) // 32, 4)[0] | changed
    return kit.write_safetensors(tmp_path / "m.safetensors", tensors, config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "weights of 'bitsandbytes'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "packing 'marlin'"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (GPTQ | {"group_size": 16}, None),
    ],
)
def test_other_configurations_are_refused_by_name(tmp_path: Path, config: dict[str, Any], words: str | None) -> None:
    folder = make_gptq(tmp_path, config)
    if words is None:  # the shapes say what the configuration does not
        assert read_one(folder).size == 32
        return
    with pytest.raises(CalibrationError, match=words) as caught:
        open_checkpoint(folder)
    assert caught.value.code == "Q514"


def test_zero_points_beyond_the_bits_and_uneven_groups_are_refused(tmp_path: Path) -> None:
    codes, scale, zero = draw(0, 4, 8, 64, 32)
    tensors, _ = kit.gptq("m", codes, scale, np.full_like(zero, 16), np.arange(64) // 32, 4)
    with pytest.raises(CalibrationError, match="zero point of 16"):
        read_one(kit.write_safetensors(tmp_path / "a" / "m.safetensors", tensors, GPTQ))
    tensors["m.g_idx"] = np.repeat([0, 1], [30, 34]).astype(np.int32)
    tensors["m.qzeros"] = tensors["m.qzeros"] * 0
    with pytest.raises(CalibrationError, match="not of 32 columns each"):
        read_one(kit.write_safetensors(tmp_path / "b" / "m.safetensors", tensors, GPTQ))


def test_floats_and_blocks_of_tables_are_named(tmp_path: Path) -> None:
    groups = compressed(8)
    groups["config_groups"]["g"]["weights"]["type"] = "float"
    tensors = {"m.weight": np.zeros((4, 4), np.int8), "m.weight_scale": np.ones((4, 1), np.float32)}
    assert (
        "float of 8 bits"
        in open_checkpoint(kit.write_safetensors(tmp_path / "m.safetensors", tensors, groups)).refused["m"]
    )
    file = kit.write_gguf(
        tmp_path / "m.gguf", {"a.weight": (20, (2, 32), bytes(36)), "b.weight": (0, (2, 2), bytes(16))}
    )
    assert "IQ4_NL" in open_checkpoint(file).refused["a.weight"]


@pytest.mark.parametrize("cut", [0, 4, 7, 40, 200, -40])
def test_broken_files_are_named(tmp_path: Path, cut: int) -> None:
    folder = make_gptq(tmp_path)
    file = folder / "m.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CalibrationError, match=r"m\.safetensors.*\[Q514\]"):
        open_checkpoint(folder)
    raw, _ = kit.q4_0(np.zeros((2, 64), np.uint8), np.ones((2, 2), np.float16))
    gguf = kit.write_gguf(tmp_path / "m.gguf", {"a": (2, (2, 64), raw)})
    gguf.write_bytes(gguf.read_bytes()[:cut] if cut < 100 else b"GGUF" + bytes(range(200)))
    with pytest.raises(CalibrationError, match=r"m\.gguf"):
        open_checkpoint(gguf)


DAMAGE = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4)


@given(st.sampled_from(["gptq", "awq", "packed", "gguf"]), DAMAGE)
def test_damaged_files_are_refused_and_nothing_else(kind: str, damage: list[tuple[int, int]]) -> None:
    codes, scale, zero = draw(0, 4, 8, 64, 32)
    made = {
        "gptq": lambda: (*kit.gptq("m", codes, scale, zero, np.arange(64) // 32, 4), GPTQ),
        "awq": lambda: (*kit.awq("m", codes, scale, zero, 32), AWQ),
        "packed": lambda: (*kit.packed("m", codes, scale, 4, 32, zero), compressed(4)),
    }
    with TemporaryDirectory() as name:
        file = Path(name) / ("m.gguf" if kind == "gguf" else "m.safetensors")
        if kind == "gguf":
            kit.write_gguf(file, {"w.weight": (2, (8, 64), kit.q4_0(codes, scale)[0])})
        else:
            tensors, _, config = made[kind]()
            kit.write_safetensors(file, tensors, config)
        data = bytearray(file.read_bytes())
        for place, value in damage:
            data[min(place, len(data) - 1)] = value
        file.write_bytes(data)
        with suppress(CalibrationError):
            for weight in open_checkpoint(name).weights:
                weight.read().settle().dequantize()


def test_a_folder_with_a_weight_in_two_files_is_refused(tmp_path: Path) -> None:
    raw, _ = kit.q4_0(np.zeros((2, 64), np.uint8), np.ones((2, 2), np.float16))
    for name in ("a", "b"):
        kit.write_gguf(tmp_path / f"{name}.gguf", {"w.weight": (2, (2, 64), raw)})
    with pytest.raises(CalibrationError, match="holds w in several files"):
        open_checkpoint(tmp_path)


def test_what_is_no_checkpoint_says_what_is_one(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="No such file"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CalibrationError, match="save it as safetensors"):
        open_checkpoint(tmp_path)
    folder = kit.write_safetensors(tmp_path / "f" / "m.safetensors", {"w": np.ones((2, 2), np.float32)}, {"bits": 4})
    with pytest.raises(CalibrationError, match="no quantized checkpoint of a known format: GPTQ"):
        open_checkpoint(folder)
