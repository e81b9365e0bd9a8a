"""Weights of checkpoints put into float exports: code for code, found by values or names, answers of ONNX Runtime."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxq
from onnxq.errors import CalibrationError, PlanError
from onnxq.graph.nbits import unpack_bits
from onnxq.interop.checkpoints import open_checkpoint
from onnxq.plan import from_json, to_json
from tests.codes.kit import model
from tests.interop import checkpoints as kit
from tests.interop.test_checkpoints import AWQ, GPTQ, compressed, draw

K, N = 64, 32
QUICK = {"latency": False}


def make_net(weights: dict[str, Any], *, shape: str = "B,T,64") -> onnx.ModelProto:
    """y = x · w for each weight [N, K], stored transposed, summed up in one output."""
    lines = "".join(f"{name}_y = MatMul(x, {name}) " for name in weights)
    total = f"y = Sum({', '.join(f'{name}_y' for name in weights)})"
    stored = {name: np.ascontiguousarray(value.T) for name, value in weights.items()}
    proto = model(f"g (float[{shape}] x) => (float[B,T,{N}] y) {{ {lines} {total} }}", **stored)
    for node in proto.graph.node:
        node.name = f"/net/{node.output[0]}"
    return proto


def run(model: onnx.ModelProto, **feeds: Any) -> Any:
    options = onnxruntime.SessionOptions()
    # ONNX Runtime rounds the data of pairs in blocks to int8 unless it is told not to.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def read_codes(model: onnx.ModelProto) -> Any:
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    bits = next(entry.i for entry in node.attribute if entry.name == "bits")
    codes = next(numpy_helper.to_array(one) for one in model.graph.initializer if one.name == node.input[1])
    return unpack_bits(codes.reshape(len(codes), -1), bits, K)


def make_checkpoint(kind: str, folder: Path, seed: int = 0) -> tuple[Path, Any, Any]:
    """A checkpoint of one weight of 4 bits, its codes as they are packed, and its values."""
    codes, scale, zero = draw(seed, 4, N, K, 32)
    groups = np.random.default_rng(seed).permutation(np.arange(K) // 32)
    if kind == "gguf":
        raw, values = kit.q4_0(codes, scale)
        folder.mkdir(exist_ok=True)
        return kit.write_gguf(folder / "m.gguf", {"blk.0.fc.weight": (2, (N, K), raw)}), codes, values
    if kind == "q4_1":
        raw, values = kit.q4_1(codes, scale, -scale / 3)
        folder.mkdir(exist_ok=True)
        return kit.write_gguf(folder / "m.gguf", {"blk.0.fc.weight": (3, (N, K), raw)}), codes, values
    tensors, values, config = {
        "gptq": lambda: (*kit.gptq("m.fc", codes, scale, zero, np.arange(K) // 32, 4), GPTQ),
        "act-order": lambda: (*kit.gptq("m.fc", codes, scale, zero, groups, 4), GPTQ | {"desc_act": True}),
        "awq": lambda: (*kit.awq("m.fc", codes, scale, zero, 32), AWQ),
        "packed": lambda: (*kit.packed("m.fc", codes, scale, 4, 32), compressed(4)),
        "uneven": lambda: (*kit.packed("m.fc", codes, scale, 4, 32, zero), compressed(4)),
    }[kind]()
    codes = codes[:, np.argsort(groups, kind="stable")] if kind == "act-order" else codes
    return kit.write_safetensors(folder / "m.safetensors", tensors, config), codes, values


@pytest.mark.parametrize("kind", ["gptq", "act-order", "awq", "packed", "uneven", "gguf", "q4_1"])
def test_codes_arrive_bit_for_bit_and_answers_are_those_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    folder, codes, values = make_checkpoint(kind, tmp_path / "c")
    model = make_net({"w": values})
    found = onnxq.import_weights(model, folder, overrides=QUICK)
    assert [(row.tensor, row.by) for row in found.placed] == [("w", "values")]
    np.testing.assert_array_equal(read_codes(found.model), codes)
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    expected = x.astype(np.float64) @ values.T.astype(np.float64)
    np.testing.assert_allclose(run(found.model, x=x), expected, atol=2e-5 * np.abs(expected).max())
    assert [node.op_type for node in found.model.graph.node].count("Gather") == (kind == "act-order")
    # The plan alone makes the same file of another export.
    again = onnxq.apply(model, from_json(to_json(found.plan)), overrides=QUICK)
    assert again.model.SerializeToString() == found.model.SerializeToString()
    if kind == "q4_1":
        with pytest.raises(PlanError, match="begin at floats"):
            onnxq.apply(model, replace(found.plan, nbits=None), overrides=QUICK)
        with pytest.raises(CalibrationError, match=r"blk\.0\.fc: Q4_1: 4 bits.* a minimum: its blocks begin at floats"):
            onnxq.import_weights(model, folder, overrides=QUICK | {"emit": "qdq"})
        return
    pairs = onnxq.import_weights(model, folder, overrides=QUICK | {"emit": "qdq"}).model
    assert "MatMulNBits" not in {node.op_type for node in pairs.graph.node}
    np.testing.assert_allclose(run(pairs, x=x), expected, atol=2e-5 * np.abs(expected).max())


def test_layers_of_one_input_and_order_share_its_gather(tmp_path: Path) -> None:
    groups, tensors, values = np.random.default_rng(0).permutation(np.arange(K) // 32), {}, {}
    for k, name in enumerate("abc"):
        codes, scale, zero = draw(k, 4, N, K, 32)
        more, values[name] = kit.gptq(f"m.{name}", codes, scale, zero, groups if name != "c" else groups[::-1], 4)
        tensors |= more
    folder = kit.write_safetensors(tmp_path / "m.safetensors", tensors, GPTQ | {"desc_act": True})
    model = onnxq.import_weights(make_net(values), folder, overrides=QUICK).model
    assert [node.op_type for node in model.graph.node].count("Gather") == 2
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    np.testing.assert_allclose(run(model, x=x), x @ sum(values.values()).T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [np.float16, "bfloat16"])
def test_values_rounded_by_the_export_are_found(kind: Any, tmp_path: Path) -> None:
    folder, codes, values = make_checkpoint("gptq", tmp_path)
    rounded = values.astype(kind).astype(np.float32)
    assert (rounded != values).any()
    found = onnxq.import_weights(make_net({"w": rounded}), folder, overrides=QUICK)
    np.testing.assert_array_equal(read_codes(found.model), codes)


def test_weights_joined_in_any_order_are_found_and_stay_one(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    values = {}
    for k, name in enumerate("qkv"):
        codes, scale, zero = draw(k, 4, 32, K, 32)
        more, values[name] = kit.gptq(f"layers.0.{name}", codes, scale, zero, np.arange(K) // 32, 4)
        tensors |= more
    folder = kit.write_safetensors(tmp_path / "m.safetensors", tensors, GPTQ)
    joined = np.concatenate([values[name] for name in "vqk"])[np.random.default_rng(0).permutation(96)]
    text = "g (float[B,64] x) => (float[B,96] y, float[B,32] z) { y = MatMul(x, w) t = Transpose(q) z = MatMul(x, t) }"
    proto = model(text, w=np.ascontiguousarray(joined.T), q=values["q"])
    found = onnxq.import_weights(proto, folder, overrides=QUICK)
    assert {row.names for row in found.placed} == {("layers.0.q", "layers.0.k", "layers.0.v"), ("layers.0.q",)}
    x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
    np.testing.assert_allclose(run(found.model, x=x), x @ joined.T, rtol=1e-4, atol=1e-4)
    assert [node.op_type for node in found.model.graph.node] == ["MatMulNBits"] * 2


def test_names_find_weights_of_the_original_network(tmp_path: Path) -> None:
    folder, codes, values = make_checkpoint("gptq", tmp_path / "c")
    rng = np.random.default_rng(0)
    original = values + rng.uniform(-0.02, 0.02, values.shape).astype(np.float32)
    places = (("m.fc.weight", "n", ""), ("val_7", "/m/fc/MatMul", ""), ("val_7", "n", "'', 'm.fc', 'linear'"))
    for name, node, scopes in places:
        model = make_net({"w": original})
        model.graph.initializer[0].name = model.graph.node[0].input[1] = name
        model.graph.node[0].name = node
        model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value=f"[{scopes}]")
        found = onnxq.import_weights(model, folder, overrides=QUICK)
        assert [row.by for row in found.placed] == ["names"]
        np.testing.assert_array_equal(read_codes(found.model), codes)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.roll(original.T, 1, 1), name))
    with pytest.raises(CalibrationError, match="has its name and other values"):
        onnxq.import_weights(model, folder, overrides=QUICK)


def test_a_name_of_one_part_is_found_in_the_module_that_an_export_wraps_around(tmp_path: Path) -> None:
    tensors, values = kit.gptq("lm_head", *draw(0, 4, N, K, 32), np.arange(K) // 32, 4)
    folder = kit.write_safetensors(tmp_path / "m.safetensors", tensors, GPTQ)
    net = make_net({"w": values + np.float32(0.01)})
    net.graph.node[0].name = "wrapper/lm_head/MatMul"
    assert [row.by for row in onnxq.import_weights(net, folder, overrides=QUICK).placed] == ["names"]


def test_weights_without_a_place_are_an_error_or_are_skipped(tmp_path: Path) -> None:
    _, _, values = make_checkpoint("gptq", tmp_path / "a")
    folder, *_ = make_checkpoint("awq", tmp_path / "b", seed=5)
    model = make_net({"other": values})
    with pytest.raises(CalibrationError, match=r"1 of 1 weights have no place.*m\.fc: the model has not") as caught:
        onnxq.import_weights(model, folder, overrides=QUICK)
    assert caught.value.code == "Q515"
    found = onnxq.import_weights(model, folder, overrides=QUICK | {"allow_missing": True})
    assert [row.name for row in found.skipped] == ["m.fc"]
    assert not found.plan.sites
    assert "skipped" in onnxq.summarize(found)


@pytest.mark.parametrize("kind", ["gptq", "gguf"])
def test_no_output_takes_the_place_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    folder, _, values = make_checkpoint(kind, tmp_path)
    file = folder if kind == "gguf" else folder / "m.safetensors"
    before = file.read_bytes()
    for name in ("out", "plan_out"):
        where: dict[str, Any] = {"out": file} if name == "out" else {"overrides": QUICK | {name: file}}
        with pytest.raises(onnxq.OnnxqError, match="Q602"):
            onnxq.import_weights(make_net({"w": values}), folder, force=True, **where)
    assert file.read_bytes() == before


def test_parts_of_other_forms_and_channels_of_nobody_are_said(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    values = []
    for k, size in enumerate((32, 16)):
        codes, scale, zero = draw(k, 4, 32, K, size)
        more, value = kit.gptq(f"m.{k}", codes, scale, zero, np.arange(K) // size, 4)
        tensors |= more
        values.append(value)
    folder = kit.write_safetensors(tmp_path / "m.safetensors", tensors, GPTQ)
    whole = np.concatenate(values)
    text = "g (float[B,64] x) => (float[B,64] y) { y = MatMul(x, w) }"
    net = model(text, w=np.ascontiguousarray(whole.T))
    with pytest.raises(CalibrationError, match=r"m\.0 \(4 bits, blocks of 32\) and m\.1 \(4 bits, blocks of 16\)"):
        onnxq.import_weights(net, folder, overrides=QUICK)
    row, _ = onnxq.import_weights(net, folder, overrides=QUICK | {"allow_missing": True}).skipped
    assert row.exact
    whole[3] += 1
    with pytest.raises(CalibrationError, match=r"31 of its channels stand in w, and 1 there are"):
        onnxq.import_weights(model(text, w=np.ascontiguousarray(whole.T)), folder, overrides=QUICK)


@pytest.mark.parametrize("differs", [False, True])
def test_static_data_gets_the_scales_of_the_checkpoint(differs: bool, tmp_path: Path) -> None:
    rng, tensors, values = np.random.default_rng(0), {}, {}
    for k, name in enumerate("ab"):
        codes = rng.integers(-60, 61, (N, K)).astype(np.int8)
        scale = rng.uniform(0.01, 0.1, (N, 1)).astype(np.float32)
        inputs = {"input_scale": np.float32([0.03 + 0.01 * k * differs]), "input_zero_point": np.int8([-5])}
        tensors |= {
            f"m.{name}.{key}": value for key, value in (inputs | {"weight": codes, "weight_scale": scale}).items()
        }
        values[name] = (codes * scale).astype(np.float32)
    config = compressed(8, input_activations={"num_bits": 8, "type": "int", "dynamic": False})
    folder = kit.write_safetensors(tmp_path / "m.safetensors", tensors, config)
    found = onnxq.import_weights(make_net(values), folder, overrides=QUICK)
    x = rng.standard_normal((2, 3, K)).astype(np.float32)
    expected = 0
    for k, name in enumerate("ab"):
        step, zero = np.float32(0.03 + 0.01 * k * differs), -5
        rounded = (np.clip(np.rint(x / step) + zero, -128, 127) - zero) * step
        expected = expected + rounded.astype(np.float64) @ values[name].T
    np.testing.assert_allclose(run(found.model, x=x), expected, atol=1e-4)
    ops = [node.op_type for node in found.model.graph.node]
    assert ops.count("QuantizeLinear") == 1 + differs
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in found.model.graph.initializer}
    np.testing.assert_array_equal(stored["a/quantized"], tensors["m.a.weight"].T)
    again = onnxq.apply(make_net(values), from_json(to_json(found.plan)), overrides=QUICK)
    assert again.model.SerializeToString() == found.model.SerializeToString()


def make_dynamic(folder: Path, strategy: str = "token", **layer: Any) -> tuple[onnx.ModelProto, Path]:
    """A network, and its checkpoint of int8 weights whose layers quantize their data at each run."""
    rng = np.random.default_rng(0)
    # Two products of larger ones overflow the 16-bit sums of CPUs without VNNI.
    codes = rng.integers(-63, 64, (N, K)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (N, 1)).astype(np.float32)
    config = compressed(8, input_activations={"num_bits": 8, "type": "int", "dynamic": True, "strategy": strategy})
    tensors = {"m.weight": codes, "m.weight_scale": scale}
    net = make_net({"w": codes * scale}) if not layer else model(layer["text"], layer["opset"], w=codes * scale, b=BIAS)
    return net, kit.write_safetensors(folder / "m.safetensors", tensors, config)


BIAS = np.linspace(-3, 3, N, dtype=np.float32)
GEMM = f"g (float[B,{K}] x) => (float[B,{N}] y) {{ h = Relu(x) y = Gemm<transB = 1>(h, w, b) }}"


def round_tokens(x: Any) -> Any:
    """As compressed-tensors rounds data: by token, the largest magnitude at 127.5."""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), 2**-14) / np.float32(127.5)
    return np.clip(np.rint(x / scale), -128, 127) * scale


def draw_tokens(*shape: int) -> Any:
    """Tokens of very different sizes, one of them 0."""
    sizes = (10.0 ** np.arange(-2, 4)).astype(np.float32).reshape(*shape, 1)
    x = np.random.default_rng(1).standard_normal((*shape, K)).astype(np.float32) * sizes
    x[:1] = 0
    return x


@pytest.mark.parametrize("opset", [13, 18, 21])
def test_each_token_has_a_scale_as_in_the_checkpoint(tmp_path: Path, opset: int) -> None:
    net, folder = make_dynamic(tmp_path, text=GEMM, opset=opset)
    found = onnxq.import_weights(net, folder, overrides=QUICK)
    x = draw_tokens(6)
    weight = open_checkpoint(folder).weights[0].read().dequantize()
    expected = round_tokens(np.maximum(x, 0)) @ weight.T + BIAS
    assert (np.abs(run(found.model, x=x) - expected).max(-1) < 1e-5 * np.abs(expected).max(-1)).all()
    assert "W139" not in {warning.code for warning in found.report.warnings}
    again = onnxq.apply(net, from_json(to_json(found.plan)), overrides=QUICK)
    assert again.model.SerializeToString() == found.model.SerializeToString()


def test_data_of_each_run_is_quantized_at_each_run(tmp_path: Path) -> None:
    net, folder = make_dynamic(tmp_path)
    weight = open_checkpoint(folder).weights[0].read()
    found = onnxq.import_weights(net, folder, overrides=QUICK)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in found.model.graph.initializer}
    (codes,) = (value for value in stored.values() if value.dtype == np.int8 and value.ndim == 2)
    np.testing.assert_array_equal(codes.T.astype(np.int16) + 128, weight.codes)
    x = draw_tokens(2, 3)
    expected = round_tokens(x) @ weight.dequantize().T
    np.testing.assert_allclose(run(found.model, x=x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    modes = ("weight-only", "dynamic")
    alone, one_scale = (onnxq.import_weights(net, folder, overrides=QUICK | {"mode": mode}) for mode in modes)
    x = np.random.default_rng(1).standard_normal((2, 3, K)).astype(np.float32)
    expected = x @ weight.dequantize().T
    np.testing.assert_allclose(run(alone.model, x=x), expected, rtol=1e-4, atol=1e-3)
    assert 0 < np.abs(run(one_scale.model, x=x) - expected).max() < 0.05 * np.abs(expected).max()
    assert all("W139" in {warning.code for warning in each.report.warnings} for each in (alone, one_scale))


def test_weights_in_blocks_leave_data_float_and_say_so(tmp_path: Path) -> None:
    codes, scale, _ = draw(0, 4, N, K, 32)
    tensors, values = kit.packed("m.w", codes, scale, 4, 32)
    config = compressed(4, input_activations={"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"})
    folder = kit.write_safetensors(tmp_path / "m.safetensors", tensors, config)
    found = onnxq.import_weights(make_net({"w": values}), folder, overrides=QUICK)
    np.testing.assert_array_equal(read_codes(found.model), codes)
    assert "W139" in {warning.code for warning in found.report.warnings}


def test_data_with_one_scale_a_run_has_one(tmp_path: Path) -> None:
    found = onnxq.import_weights(*make_dynamic(tmp_path, "tensor"), overrides=QUICK)
    assert [node.op_type for node in found.model.graph.node][:2] == ["DynamicQuantizeLinear", "MatMulInteger"]


def test_tokens_in_half_precision_keep_their_answers(tmp_path: Path) -> None:
    _, folder = make_dynamic(tmp_path)
    values = open_checkpoint(folder).weights[0].read().dequantize().T
    half = model(f"g (float16[B,{K}] x) => (float16[B,{N}] y) {{ y = MatMul(x, w) }}", w=values.astype(np.float16))
    found = onnxq.import_weights(half, folder, overrides=QUICK)
    x = (draw_tokens(6) / 1000).astype(np.float16)
    got, expected = run(found.model, x=x), round_tokens(x.astype(np.float32)) @ values
    assert got.dtype == np.float16
    scale = np.abs(expected).max(-1, keepdims=True) + 1e-3
    assert (np.abs(got - expected) / scale).max() < 0.01


def test_a_table_keeps_its_rows_and_a_gemm_in_blocks_its_floats(tmp_path: Path) -> None:
    codes, scale, _ = draw(0, 4, 128, K, 32)
    raw, values = kit.q4_0(codes, scale)
    wide, head = kit.q8_0(codes.astype(np.int8), scale)
    tensors = {"token_embd.weight": (2, (128, K), raw), "output.weight": (8, (128, K), wide)}
    file = kit.write_gguf(tmp_path / "m.gguf", tensors)
    text = "g (int64[T] ids) => (float[T,128] y) { h = Gather(w, ids) y = Gemm<transB = 1>(h, v, b) }"
    net = model(text, w=values, v=head, b=np.ones(128, np.float32))
    found = onnxq.import_weights(net, file, overrides=QUICK)
    ids = np.array([0, 5, 127])
    np.testing.assert_allclose(run(found.model, ids=ids), values[ids] @ head.T + 1, rtol=1e-4, atol=1e-4)
    assert [row.tensor for row in found.placed] == ["w"]
    assert [(row.name, row.exact) for row in found.skipped] == [("output", True)]
    assert [node.op_type for node in found.model.graph.node] == ["GatherBlockQuantized", "Gemm"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_an_export_by_torch(tmp_path: Path) -> None:
    """A small decoder of torch: embeddings tied to the output, fused q, k and v, a gated layer."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    sizes = dict.fromkeys("qkvo", (K, K)) | dict.fromkeys(("embd", "gate", "up"), (96, K)) | {"down": (K, 96)}
    values, tensors = {}, {}
    for seed, (name, (rows, columns)) in enumerate(sizes.items()):
        codes, scale, _ = draw(seed, 4, rows, columns, 32)
        raw, values[name] = kit.q4_0(codes, (scale / 8).astype(np.float16))
        tensors[f"blk.0.{name}.weight"] = (2, (rows, columns), raw)
    file = kit.write_gguf(tmp_path / "m.gguf", tensors)
    parts = {name: torch.from_numpy(value) for name, value in values.items()}

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(96, K)
            self.qkv, self.o = torch.nn.Linear(K, 3 * K, bias=False), torch.nn.Linear(K, K, bias=False)
            self.gate_up, self.down = torch.nn.Linear(K, 192, bias=False), torch.nn.Linear(96, K, bias=False)
            self.head = torch.nn.Linear(K, 96, bias=False)
            weights = {
                self.embed: parts["embd"], self.qkv: torch.cat([parts[name] for name in "qkv"]), self.o: parts["o"],
                self.gate_up: torch.cat([parts["gate"], parts["up"]]), self.down: parts["down"],
            }  # fmt: skip
            for module, weight in weights.items():
                module.weight = torch.nn.Parameter(weight)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            h = self.embed(ids)
            q, k, v = self.qkv(torch.nn.functional.normalize(h, dim=-1)).split(K, -1)
            h = h + self.o((q @ k.transpose(1, 2)).softmax(-1) @ v)
            gate, up = self.gate_up(torch.nn.functional.normalize(h, dim=-1)).chunk(2, -1)
            return self.head(h + self.down(torch.nn.functional.silu(gate) * up))

    net, path = Net().eval(), tmp_path / "net.onnx"
    ids = torch.arange(12).reshape(2, 6)
    torch.onnx.export(net, (ids,), path, input_names=["ids"], dynamo=True, external_data=False, verbose=False)
    found = onnxq.import_weights(path, file, overrides=QUICK)
    assert sorted(len(row.names) for row in found.placed) == [1, 1, 1, 1, 2, 3]
    assert not found.skipped
    ops = [node.op_type for node in found.model.graph.node]
    assert ops.count("MatMulNBits") == 5
    assert ops.count("GatherBlockQuantized") == 1
    expected = net(ids).detach().numpy()
    np.testing.assert_allclose(run(found.model, ids=ids.numpy()), expected, atol=1e-4 * np.abs(expected).max())
