"""`convert`: quantized files of any tool, for another engine, with their own numbers."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper
from onnxruntime.quantization import QuantType, quantize_static

import onnxq
from onnxq.annotate import inspect_model
from onnxq.errors import ConfigError, ModelError
from onnxq.numerics import dequantize, quantize
from onnxq.pipeline.retarget import Kept, _fit_scale
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.spec import PerChannel, QParams, QuantSpec
from tests.cli.kit import read, run
from tests.codes.kit import model
from tests.networks import add_arrays, open_session
from tests.pipeline.models import EVERYTHING, Reader, images, residual

pytestmark = pytest.mark.usefixtures("engines_here")
QUICK = {"latency": False, "kernels": False}
EVERYTHING_IN_TRT = onnxq.load_config("trt-int8", {"rules": [{"op": "*", "set": {"quantize": True}}]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("convert")
    onnx.save(residual(), path / "m.onnx")
    for name, how in (("ort", {"per_channel": True}), ("uint8", {"weight_type": QuantType.QUInt8})):
        reader = Reader(images()["x"])
        quantize_static(path / "m.onnx", path / f"{name}.onnx", reader, activation_type=QuantType.QUInt8, **how)
    onnxq.quantize(path / "m.onnx", images(), EVERYTHING, overrides={"latency": False}, out=path / "q.onnx")
    return path


def list_weights(model: onnx.ModelProto) -> list[np.ndarray]:
    """The integers of the weights, in the order of the file."""
    constants = (numpy_helper.to_array(one) for one in model.graph.initializer)
    return [value for value in constants if value.dtype == np.int8 and value.ndim > 1]


def answer(path: Path | onnx.ModelProto) -> np.ndarray:
    return np.asarray(open_session(path).run(None, images(4))[0])


def measure_db(exact: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(np.square(exact).sum() / np.square(exact - other).sum()))


@pytest.mark.recent_ort
@pytest.mark.parametrize("to", ["trt", "ort", "openvino", "web"])
def test_integers_stay_and_answers_with_them(folder: Path, to: str) -> None:
    done = onnxq.convert(folder / "ort.onnx", to, overrides=QUICK)
    how = Counter(site.how for site in done.sites)
    assert how[Kept.INTEGERS] >= 3
    assert not how[Kept.ROUNDED]
    stored = [codes.tobytes() for codes in list_weights(onnx.load(folder / "ort.onnx"))]
    assert all(codes.tobytes() in stored for codes in list_weights(done.result.model))
    # Rounded in fewer places than the file was, or in others: no further from float.
    float_answers = answer(folder / "m.onnx")
    before = measure_db(float_answers, answer(folder / "ort.onnx"))
    assert measure_db(float_answers, answer(done.result.model)) > before - 1


def test_symmetric_numbers_stay_in_an_asymmetric_type(folder: Path) -> None:
    signed = {"latency": False, "activations.signed": True}
    symmetric = {**signed, "activations.scheme": "symmetric"}
    made = onnxq.quantize(folder / "m.onnx", images(), overrides=symmetric)
    done = onnxq.convert(made.model, "ort", config="ort-int8", overrides={**QUICK, **signed})
    assert {site.how for site in done.sites if site.role == "activation"} == {Kept.NUMBERS}


def test_a_relu_that_a_range_stood_for_comes_back(folder: Path) -> None:
    """onnxruntime's quantizer drops it in front of a QuantizeLinear whose zero point is the lowest integer."""
    assert "Relu" not in {node.op_type for node in onnx.load(folder / "ort.onnx").graph.node}
    done = onnxq.convert(folder / "ort.onnx", "float", out=folder / "f.onnx")
    ops = Counter(node.op_type for node in onnx.load(folder / "f.onnx").graph.node)
    assert ops["Relu"] == 2
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(ops)
    assert done.report.output == str(folder / "f.onnx")
    assert measure_db(answer(folder / "m.onnx"), answer(folder / "f.onnx")) > 35


def test_a_clip_that_a_range_stood_for_comes_back(tmp_path: Path) -> None:
    proto = residual()
    add_arrays(proto.graph, low=0, high=6)
    relu = next(node for node in proto.graph.node if node.output[0] == "r")
    relu.op_type = "Clip"
    relu.input.extend(["low", "high"])
    # Far enough for values beyond the bound.
    weight = next(one for one in proto.graph.initializer if one.name == "w0")
    weight.CopyFrom(numpy_helper.from_array(4 * numpy_helper.to_array(weight), "w0"))
    onnx.save(proto, tmp_path / "m.onnx")
    quantize_static(tmp_path / "m.onnx", tmp_path / "q.onnx", Reader(images()["x"]), activation_type=QuantType.QUInt8)
    assert "Clip" not in {node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node}
    floats = onnxq.convert(tmp_path / "q.onnx", "float").result.model
    assert {node.op_type for node in floats.graph.node} >= {"Clip", "Relu"}
    assert measure_db(answer(tmp_path / "m.onnx"), answer(floats)) > 30


@pytest.mark.recent_ort
@pytest.mark.parametrize(("attrs", "shape"), [("", ()), ("<axis=0>", (256,)), ("<axis=1,block_size=32>", (256, 8))])
def test_integers_behind_a_transpose_stay(attrs: str, shape: tuple[int, ...]) -> None:
    """As torch writes a linear layer on rows of tokens."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-8, 8, (256, 256)).astype(np.int8)
    # Ranges of their own, or weights alone.
    pair = "" if "block" in attrs else "q = QuantizeLinear(x, sx, zx) d = DequantizeLinear(q, sx, zx)"
    net = model(
        f"""g (float[N,16,256] x) => (float[N,16,256] y) {{ {pair} f = DequantizeLinear{attrs}(w, sw)
            t = Transpose<perm=[1,0]>(f) y = MatMul({"d" if pair else "x"}, t) }}""",
        w=codes, sw=rng.uniform(0.01, 0.1, shape).astype(np.float32), sx=np.float32(0.03), zx=np.uint8(128),
        opset=21, ir=10,
    )  # fmt: skip
    done = onnxq.convert(net, "ort", overrides={**QUICK, **({} if pair else {"weights.scheme": "symmetric"})})
    assert [site.how for site in done.sites if site.role == "weight"] == [Kept.INTEGERS]


def test_a_file_whose_pairs_the_engine_does_not_take_says_why() -> None:
    net = model(
        """g (float[1,4] x) => (float[1,4] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
           f = DequantizeLinear(w, s) y = MatMul(d, f) }""",
        w=np.ones((4, 4), np.int8), s=np.float32(0.1), z=np.uint8(128),
    )  # fmt: skip
    done = onnxq.convert(net, "ort", overrides=QUICK)
    assert not done.sites
    assert done.applied is not None
    assert [left.subject for left in done.applied.left_float] == ["y"]


@pytest.mark.recent_ort
@pytest.mark.parametrize("activation", ["Relu(c)", "Clip(c, low, high)"])
def test_an_activation_on_integers_comes_back(activation: str) -> None:
    rng = np.random.default_rng(0)
    w, v = rng.standard_normal((32, 32, 3, 3)) / 17, rng.standard_normal((64, 32, 1, 1)) / 6
    bounds = {} if "Relu" in activation else {"low": np.float32(0), "high": np.float32(1)}
    net = model(
        f"""g (float[N,32,24,24] x) => (float[N,64,24,24] y) {{
            c = Conv<pads=[1,1,1,1]>(x, w) r = {activation} y = Conv(r, v) }}""",
        w=w.astype(np.float32), v=v.astype(np.float32), **bounds,
    )  # fmt: skip
    x = {"x": rng.standard_normal((4, 32, 24, 24)).astype(np.float32)}
    quantized = onnxq.quantize(net, x, "web-int8", overrides={"latency": False, "effort": "fast"}).model
    assert "Max" in {node.op_type for node in quantized.graph.node}
    floats = onnxq.convert(quantized, "float").result.model
    assert activation.partition("(")[0] in {node.op_type for node in floats.graph.node}
    assert measure_db(Session(net).run(x)["y"], Session(floats).run(x)["y"]) > 35


def test_unsigned_weights_become_signed_ones(folder: Path) -> None:
    done = onnxq.convert(folder / "uint8.onnx", "trt", overrides=QUICK)
    rounded = [site for site in done.sites if site.role == "weight"]
    # Around a zero point that is not 128 there are integers that no int8 holds.
    assert {site.how for site in rounded} <= {Kept.INTEGERS, Kept.ROUNDED}
    assert all(site.error_db is not None and site.error_db > 30 for site in rounded if site.how is Kept.ROUNDED)
    assert all(pair.storage == "int8" for pair in inspect_model(done.result.model).pairs)


def test_without_a_range_an_operator_stays_float_or_is_calibrated(folder: Path) -> None:
    # The sum has no pair in a file for TensorRT: for ONNX Runtime it needs one behind it.
    source = onnxq.convert(folder / "q.onnx", "trt", overrides=QUICK).result.model
    bare = onnxq.convert(source, "ort", config=EVERYTHING, overrides=QUICK)
    assert any(refusal.code == "R106" for refusal in bare.report.refusals)
    full = onnxq.convert(source, "ort", images(), EVERYTHING, overrides=QUICK)
    assert not full.report.refusals
    assert Kept.SAMPLES in {site.how for site in full.sites}


def test_what_was_float_stays_float(folder: Path, tmp_path: Path) -> None:
    rules = EVERYTHING.model_copy(
        update={"rules": (onnxq.config.Rule(op="Gemm", set={"float": True}), *EVERYTHING.rules)}  # type: ignore[attr-defined]
    )
    onnxq.quantize(folder / "m.onnx", images(), rules, overrides={"latency": False}, out=tmp_path / "q.onnx")
    done = onnxq.convert(tmp_path / "q.onnx", "ort", config=EVERYTHING, overrides=QUICK)
    assert any("float in the file" in left.reason for left in done.report.left_float)
    # Nothing of it comes from made-up inputs, and the summary says so of the answers alone.
    assert not done.report.synthetic
    complete = {**QUICK, "convert.complete": True}
    whole = onnxq.convert(tmp_path / "q.onnx", "ort", images(), EVERYTHING, overrides=complete)
    assert not any("float in the file" in left.reason for left in whole.report.left_float)
    (rounded,) = (site for site in whole.sites if site.how is Kept.ROUNDED)
    assert rounded.error_db is not None
    assert rounded.error_db > 30
    with pytest.raises(ConfigError, match="there are none"):
        onnxq.convert(tmp_path / "q.onnx", "ort", config=EVERYTHING, overrides=complete)


@pytest.mark.parametrize(
    ("name", "to", "config", "said"),
    [
        ("m.onnx", "trt", None, "no quantize/dequantize pair, and no operator on integers"),
        ("q.onnx", "ortt", None, "no preset or file"),
        ("q.onnx", "trt", "ort-int8", "the configuration is for 'ort'"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, name: str, to: str, config: str | None, said: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=said):
        onnxq.convert(folder / name, to, config=config)


def test_the_command_says_where_numbers_come_from(folder: Path) -> None:
    out = folder / "converted.onnx"
    words = ["convert", folder / "q.onnx", "--to", "trt", "--no-latency", "--no-kernels", "-o", out]
    values = read(*words)
    assert values["to"] == "trt"
    assert {site["how"] for site in values["sites"]} <= {kind.value for kind in Kept}
    assert values["applied"]["output"] == str(out)
    text = run(*words, "--force").stdout
    assert "integers kept" in text
    assert "against the file that it came from" in text


@given(
    codes=st.lists(st.integers(-127, 127), min_size=8, max_size=8),
    scale=st.floats(1e-3, 10),
    shared=st.booleans(),
    unsigned=st.booleans(),
)
def test_stored_integers_survive_another_form(codes: list[int], scale: float, shared: bool, unsigned: bool) -> None:
    scales = np.float32(scale) * np.ones(() if shared else 4, np.float32)
    shift = 128 if unsigned else 0
    value = np.asarray(codes, np.float32).reshape(4, 2) * np.float32(scale)
    old = QParams(scales, np.full(scales.shape, shift, np.int32), "file")
    spec = QuantSpec(bits=8, signed=True, symmetric=True, granularity=PerChannel(0))
    form = QuantSpec(bits=8, signed=not unsigned, symmetric=not unsigned)
    fitted = _fit_scale(old, form, spec, value, signed=False)
    assert fitted is not None
    assert quantize(value, fitted, spec).tolist() == np.asarray(codes).reshape(4, 2).tolist()
    assert dequantize(quantize(value, fitted, spec), fitted, spec).tobytes() == value.tobytes()


@pytest.mark.parametrize(("to", "bits", "least_db"), [("qnn", 16, 80), ("ort", 8, 35), ("trt", 8, 35)])
def test_activations_keep_16_bits_where_the_engine_computes_on_them(
    folder: Path, tmp_path: Path, to: str, bits: int, least_db: float
) -> None:
    wide = tmp_path / "wide.onnx"
    types = {"activation_type": QuantType.QUInt16, "weight_type": QuantType.QInt8}
    quantize_static(folder / "m.onnx", wide, Reader(images()["x"]), per_channel=True, **types)
    done = onnxq.convert(wide, to, images(), overrides=QUICK)
    assert {site.spec.bits for site in done.result.plan.sites if site.role is Role.ACTIVATION} == {bits}
    assert {site.how for site in done.sites if site.role == "weight"} == {Kept.INTEGERS}
    assert done.answers is not None
    assert done.answers.after > least_db
