"""Variants: every file runs, every figure of the table is true, and who reads the record can make the files again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.commands.results import write_json
from onnxq.commands.variants import make as make_variants
from onnxq.commands.variants.result import VariantState
from onnxq.errors import ConfigError, ModelError, OutputError
from onnxq.graph import save
from tests.codes.kit import model
from tests.networks import open_session
from tests.pipeline.models import HEADLESS, images, residual

FAST = {"effort": "fast", "latency": False}
# int8 pays for none of these small operators.
FORCED = "rules: [{op: '*', set: {quantize: true}}]\n"
SUFFIXES = {"fp32": "", "fp16": "_fp16", "int8": "_int8", "q8": "_quantized", "q4": "_q4", "q4f16": "_q4f16"}
TRANSFORMER = """g (int64[N,T] ids) => (float[N,T,64] y) {
    e = Gather(table, ids) n = LayerNormalization(e, one, zero) q = MatMul(n, wq) k = MatMul(n, wk)
    v = MatMul(n, wv) t = Transpose <perm=[0,2,1]>(k) s = MatMul(q, t) a = Softmax(s) c = MatMul(a, v) r = Add(c, n)
    u = MatMul(r, wu) h = Relu(u) d = MatMul(h, wd) y = Add(d, r)
}"""


def build(body: str, **tensors: Any) -> onnx.ModelProto:
    return model(body, **{name: np.asarray(value, np.float32) for name, value in tensors.items()})


def transformer() -> onnx.ModelProto:
    """One block behind a table of embeddings, which is most of the file."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((64, 64)) / 8 for name in ("wq", "wk", "wv")}
    weights |= {"wu": rng.standard_normal((64, 128)) / 8, "wd": rng.standard_normal((128, 64)) / 11}
    table = rng.standard_normal((512, 64))
    return build(TRANSFORMER, table=table, one=np.ones(64), zero=np.zeros(64), **weights)


def run_file(path: Path, feeds: dict[str, np.ndarray], *, optimize: bool = True) -> np.ndarray:
    return np.asarray(open_session(path, optimize=optimize).run(None, feeds)[0], np.float64)


def sqnr(path: Path, original: Path, feeds: dict[str, np.ndarray], *, optimize: bool) -> float:
    want = run_file(original, feeds)
    error = run_file(path, feeds, optimize=optimize) - want
    return float(10 * np.log10(np.sum(want**2) / np.sum(error**2)))


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "forced.yaml"
    path.write_text(FORCED)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, forced: Path) -> tuple[onnxq.Variants, Path, dict[str, np.ndarray]]:
    """Of the transformer, timed; the sample."""
    folder = tmp_path_factory.mktemp("variants")
    onnx.save(transformer(), folder / "model.onnx")
    feeds = {"ids": np.random.default_rng(1).integers(0, 512, (1, 8))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_variants, "_TIMING_SECONDS", 0.05)
        found = onnxq.variants(folder / "model.onnx", [feeds], forced, overrides={"effort": "fast"}, out=folder / "hub")
    return found, folder, feeds


def test_the_files_are_named_as_transformers_js_looks_for_them(made: Any) -> None:
    found, folder, _ = made
    names = {one.dtype: Path(one.file).name for one in (found.original, *found.variants)}
    assert names == {dtype: f"model{suffix}.onnx" for dtype, suffix in SUFFIXES.items()}
    there = {path.name for path in (folder / "hub" / "onnx").iterdir()}
    assert there == {*names.values(), "model_quantize_config.json"}
    assert found.usable == found.variants


@pytest.mark.parametrize("dtype", SUFFIXES)
def test_every_row_of_the_table_is_true(made: Any, dtype: str) -> None:
    found, folder, feeds = made
    one = next(one for one in (found.original, *found.variants) if one.dtype == dtype)
    path, original = Path(one.file), folder / "model.onnx"
    assert one.size_bytes == path.stat().st_size
    assert one.latency is not None
    assert found.speedup(one) > 0
    assert run_file(path, feeds).shape == (1, 8, 64)
    if dtype == "fp32":
        assert onnx.load(path).graph == onnx.load(original).graph
        return
    assert one.size_bytes < original.stat().st_size
    assert one.sqnr_db[1] == pytest.approx(sqnr(path, original, feeds, optimize=True), abs=0.2)
    # ONNX Runtime has few float16 kernels here, so that only an emulation says what such a file says.
    if "16" not in dtype:
        assert one.sqnr_db[0] == pytest.approx(sqnr(path, original, feeds, optimize=False), abs=0.2)
    assert one.worst_db == min(one.sqnr_db)


def test_files_of_the_same_bytes_are_timed_as_one(forced: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_variants, "_TIMING_SECONDS", 0.05)
    weights = np.random.default_rng(0).standard_normal((32, 32, 3, 3))
    # There is no MatMul to be dynamic, and q8 is what int8 is, but for the target in its notes.
    proto = build("g (float[N,32,8,8] x) => (float[N,32,6,6] y) { y = Conv(x, w) }", w=weights)
    found = onnxq.variants(
        proto, images(8), forced, overrides={"effort": "fast", "only": ["int8", "q8"], "notes": "none"}
    )
    one, other = found.variants
    assert (one.same_as, other.same_as) == ("", "int8")
    assert one.latency is not None
    assert other.latency is not None
    assert one.latency.times_ms == other.latency.times_ms
    assert found.shapes == {"x": (1, 32, 8, 8)}


def test_each_is_of_its_kind(made: Any) -> None:
    found, _, _ = made
    ops = {one.dtype: {node.op_type for node in onnx.load(one.file).graph.node} for one in found.variants}
    types = {
        one.dtype: {tensor.data_type for tensor in onnx.load(one.file).graph.initializer} for one in found.variants
    }
    assert "DynamicQuantizeLinear" in ops["q8"]
    assert "QuantizeLinear" in ops["int8"]
    assert "QuantizeLinear" not in ops["q4"] | ops["fp16"]
    halves = {dtype for dtype, held in types.items() if onnx.TensorProto.FLOAT16 in held}
    assert halves == {"fp16", "q4f16"}
    assert {dtype for dtype, held in types.items() if onnx.TensorProto.UINT4 in held} == {"q4", "q4f16"}
    # Programs feed all of them alike.
    for one in found.variants:
        (output,) = onnx.load(one.file).graph.output
        assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.recent_ort
def test_the_record_is_what_was_found_and_makes_the_files_again(tmp_path: Path) -> None:
    onnx.save(residual(), tmp_path / "cnn.onnx")
    found = onnxq.variants(tmp_path / "cnn.onnx", images(8), overrides={**FAST, "seed": 3}, out=tmp_path / "hub")
    record = (tmp_path / "hub" / "onnx" / "cnn_quantize_config.json").read_text()
    assert record == write_json(found)
    document = json.loads(record)
    assert (document["seed"], document["versions"]["onnxq"]) == (3, onnxq.__version__)
    entries = {key: one for key, one in document["variants"].items() if one["preset"] and one["file"]}
    presets = {"fp16": "ort-int8", "int8": "ort-int8", "q8": "web-int8"}
    presets |= dict.fromkeys(("q4", "q4f16"), "ort-int4-weights")
    assert {key: one["preset"] for key, one in entries.items()} == presets
    for one in entries.values():
        options = {**document["options"], **one["settings"]}
        again = onnxq.quantize(tmp_path / "cnn.onnx", images(8), one["preset"], overrides=options)
        again.save(tmp_path / "again.onnx", force=True)
        assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "hub" / "onnx" / one["file"]).read_bytes()


def test_weights_too_large_for_one_file_lie_where_transformers_js_looks(tmp_path: Path) -> None:
    onnx.save(transformer(), tmp_path / "model.onnx")
    feeds = {"ids": np.random.default_rng(1).integers(0, 512, (1, 8))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "ONE_MESSAGE", 20_000)
        options = {**FAST, "only": "fp16,q4"}
        found = onnxq.variants(tmp_path / "model.onnx", overrides=options, out=tmp_path / "hub")
    names = ["model.onnx", "model_fp16.onnx", "model_q4.onnx"]
    there = {path.name for path in (tmp_path / "hub" / "onnx").iterdir()}
    assert there == {*names, *(f"{name}_data" for name in names), "model_quantize_config.json"}
    for one in (found.original, *found.variants):
        path = Path(one.file)
        assert one.size_bytes == path.stat().st_size + path.with_name(f"{path.name}_data").stat().st_size
        assert path.stat().st_size < 50_000
        assert run_file(path, feeds).shape == (1, 8, 64)


def test_operators_without_a_kernel_in_webgpu_are_named(forced: Path) -> None:
    found = onnxq.variants(transformer(), None, forced, overrides={**FAST, "only": "fp16,q8,q4"})
    lacking = {one.dtype: one.lacking["WebGPU"] for one in found.variants}
    assert "DynamicQuantizeLinear" in lacking["q8"]
    # Blocks of 4 bits are computed there.
    assert not lacking["fp16"]
    assert not lacking["q4"]
    assert "kernel in q8: DynamicQuantizeLinear" in onnxq.summarize(found)


def test_without_samples_the_rest_is_made() -> None:
    found = onnxq.variants(residual(text=HEADLESS), overrides=FAST)
    assert {one.dtype: (one.state, one.preset) for one in found.variants} == {
        "fp16": (VariantState.MADE, "ort-int8"),
        "int8": (VariantState.NO_SAMPLES, "ort-int8"),
        # Nothing in it can be dynamic, nor in blocks of 4 bits.
        "q8": (VariantState.MADE, "web-int8-weights"),
        "q4": (VariantState.NOTHING, "ort-int4-weights"),
        "q4f16": (VariantState.NOTHING, "ort-int4-weights"),
    }
    assert found.synthetic
    assert not any(one.file for one in found.variants)


def test_lost_answers_are_marked_and_left_out(tmp_path: Path) -> None:
    # A large weight in every block, beside which 4 bits hold no other; samples do not meet it.
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((64, 64)), rng.standard_normal((8, 1, 64)).astype(np.float32)
    weight[::32], x[:, :, ::32] = 60, 0
    proto, samples = build("g (float[N,64] x) => (float[N,64] y) { h = MatMul(x, w) y = Relu(h) }", w=weight), {"x": x}
    options = {**FAST, "only": "fp16,q4,q4f16"}
    found = onnxq.variants(proto, samples, overrides=options, out=tmp_path)
    assert [one.state for one in found.variants] == [VariantState.MADE, VariantState.LOST, VariantState.LOST]
    assert all(one.worst_db < 10 and one.file == "" for one in found.variants[1:])
    there = sorted(path.name for path in (tmp_path / "onnx").iterdir())
    assert there == ["model.onnx", "model_fp16.onnx", "model_quantize_config.json"]
    found = onnxq.variants(proto, samples, overrides={**options, "keep_broken": True}, out=tmp_path, force=True)
    assert [one.state for one in found.variants] == [VariantState.MADE, VariantState.LOST, VariantState.LOST]
    assert all(Path(one.file).is_file() for one in found.variants)


def test_a_metric_is_measured_on_every_file_and_can_say_that_answers_are_lost() -> None:
    def count_floats(model: Any) -> float:
        return -sum(node.op_type == "DequantizeLinear" for node in onnx.load(model.path).graph.node)

    options = {**FAST, "only": "fp16,q8", "metric": count_floats}
    found = onnxq.variants(residual(), overrides=options)
    assert (found.metric, found.original.metric) == ("count_floats", 0)
    assert [one.metric for one in found.variants] == [0, -4]
    assert [one.state for one in found.variants] == [VariantState.MADE, VariantState.MADE]
    found = onnxq.variants(residual(), overrides={**options, "max_drop": 3})
    assert [one.state for one in found.variants] == [VariantState.MADE, VariantState.LOST]


@pytest.mark.recent_ort
def test_samples_from_a_generator_serve_all() -> None:
    samples = ({"x": one[None]} for one in images(8)["x"])
    found = onnxq.variants(residual(), samples, overrides={**FAST, "only": "int8,q8"})
    assert [one.state for one in found.variants] == [VariantState.MADE, VariantState.MADE]
    assert [one.preset for one in found.variants] == ["ort-int8", "web-int8"]
    assert found.checked == 1


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, forced: Path) -> None:
    body = "g (float[N,64] x) => (float[N,64] y) { l = Log(x) y = MatMul(l, w) }"
    proto = build(body, w=np.random.default_rng(0).standard_normal((64, 64)))
    samples = {"x": np.random.default_rng(0).standard_normal((8, 1, 64)).astype(np.float32)}
    found = onnxq.variants(proto, samples, forced, overrides={**FAST, "only": "int8,q4"})
    assert found.variants[0].state is VariantState.FAILED
    assert "NaN" in found.variants[0].reason
    with pytest.raises(onnxq.OnnxqError, match="NaN"):
        onnxq.variants(proto, samples, forced, overrides={**FAST, "only": "int8"}, out=tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    path = tmp_path / "onnx" / "model.onnx"
    onnx.save(residual(), path)
    before = path.read_bytes()
    options = {**FAST, "only": "fp16"}
    # In the place where it belongs the float model stays as it is.
    found = onnxq.variants(path, overrides=options, out=tmp_path)
    assert found.original.file == str(path)
    made = Path(found.variants[0].file).stat().st_mtime_ns
    with pytest.raises(OutputError, match=r"model_fp16\.onnx: exists"):
        onnxq.variants(path, overrides=options, out=tmp_path)
    assert Path(found.variants[0].file).stat().st_mtime_ns == made
    onnxq.variants(path, overrides=options, out=tmp_path, force=True)
    assert path.read_bytes() == before
    # Under another name there is nothing to overwrite.
    found = onnxq.variants(path, overrides={**options, "name": "decoder_model"}, out=tmp_path)
    assert Path(found.variants[0].file).name == "decoder_model_fp16.onnx"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights.bits": 4}, "option: weights.bits: each variant has its own"),
        ({"mode": "float"}, "option: mode: each variant has its own"),
        ({"max_drop": 1}, "max_drop: says nothing without a metric"),
        ({"name": "a/b"}, "name 'a/b': is no name of a file"),
        ({"only": "q5"}, "'q5' is not one of"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        onnxq.variants(residual(), overrides=options, out=tmp_path / "hub")
    assert list(tmp_path.iterdir()) == []


def test_other_targets_and_models_that_are_not_there_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is for 'trt', and hubs hold files for ONNX Runtime"):
        onnxq.variants(residual(), config="trt-int8")
    with pytest.raises(ModelError, match="no such file"):
        onnxq.variants(tmp_path / "m.onnx", out=tmp_path / "hub")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("smaller", "preset"), [(0.8, "web-int8"), (0.5, "web-int8-weights")])
def test_a_file_that_is_not_small_enough_gives_way(
    monkeypatch: pytest.MonkeyPatch, smaller: float, preset: str
) -> None:
    """Most products of a network may be faster in float in browsers, and then most of its weights are, too."""
    monkeypatch.setattr(make_variants, "_SMALLER", smaller)
    draw = np.random.default_rng(0).standard_normal
    weights = {"u": draw((56, 8, 1, 1)), "w": draw((56, 1, 3, 3)), "v": draw((64, 56, 1, 1))}
    body = """g (float[1,8,7,7] x) => (float[1,64,7,7] y) {
        a = Conv(x, u) b = Conv<group=56, pads=[1,1,1,1]>(a, w) y = Conv(b, v)
    }"""
    samples = {"x": draw((8, 8, 7, 7)).astype(np.float32)}
    (q8,) = onnxq.variants(build(body, **weights), samples, overrides={**FAST, "only": "q8"}).variants
    assert q8.preset == preset
