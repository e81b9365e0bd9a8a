"""Models on which other quantizers fail without a word; each trap was measured on one of them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.config import Rule
from onnxq.errors import CalibrationError
from onnxq.runtime import Session, optimize_graph
from tests.graph.kit import model
from tests.passes.kit import random_weights
from tests.pipeline.models import BALANCED, assert_faithful, find_worst_db, images, quantize, to_bytes
from tests.pipeline.requantized import kernels

MAP, SAME = "float[N,32,8,8]", "Conv <pads=[1,1,1,1]>"
CONVS = f"g ({MAP} x) => ({MAP} y) {{ a = {SAME}(x, w) r = Relu(a) y = {SAME}(r, v) }}"
WEIGHTS = random_weights({"w": (32, 32, 3, 3), "v": (32, 32, 3, 3)})
DATA = images(8, seed=3)
VECTORS = {"x": np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)}


def convs() -> onnx.ModelProto:
    return model(CONVS, **WEIGHTS)


def test_names_that_are_taken_are_not_reused() -> None:
    """A user's own tensor called like our scale must not become the scale (elsewhere: 0.01 dB)."""
    text = f"g ({MAP} x) => ({MAP} y) {{ a = {SAME}(x, w) b = Mul(a, s) r = Relu(b) y = {SAME}(r, v) }}"
    factors = np.random.default_rng(0).uniform(0.5, 1.5, (32, 1, 1)).astype(np.float32)
    proto = model(text, s=factors, **WEIGHTS)
    proto.graph.node[1].input[1] = proto.graph.initializer[0].name = "r/scale"
    proto.graph.node[0].name = "r/QuantizeLinear"
    result = quantize(proto, DATA, BALANCED, skip=["scalars"])
    assert_faithful(result, 28)
    names = [node.name for node in result.model.graph.node]
    assert len(set(names)) == len(names)
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    np.testing.assert_array_equal(kept["r/scale"], factors)


@pytest.mark.parametrize("embeddings", ["float", "int8"])
def test_tied_embedding_quantizes_the_head(embeddings: str) -> None:
    """Gather and Gemm on one table, with a copy for the Gemm or without (elsewhere: a model that fails at run time)."""
    text = "g (int64[N] ids) => (float[N,500] y) { e = Gather(table, ids) y = Gemm <transB=1>(e, table, b) }"
    proto = model(text, **random_weights({"table": (500, 64), "b": (500,)}))
    ids = np.random.default_rng(0).integers(0, 500, 128)
    result = quantize(proto, {"ids": ids}, BALANCED, embeddings=embeddings)
    assert_faithful(result, 28)
    assert kernels(result.model)["QGemm"] == 1
    stored = {tensor.name: tensor.data_type for tensor in result.model.graph.initializer if tensor.dims == [500, 64]}
    assert stored.get("table") == (TensorProto.FLOAT if embeddings == "float" else None)
    assert stored["table/quantized"] == TensorProto.INT8


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        # MatMul reads columns, Gemm with transB rows (elsewhere 0.1 dB when optimized).
        ("y = MatMul(x, w) z = Gemm <transB=1>(x, w, b)", {"y/MatMul/in1": 1, "z/Gemm/in1": 0}),
        ("y = MatMul(x, w) r = Relu(y) z = MatMul(r, w)", {"w": 1}),
    ],
    ids=["on two axes", "on one"],
)
def test_a_weight_with_two_readers_is_stored_once_for_each_axis(text: str, axes: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    weights = random_weights({"w": (128, 128), "b": (128,)})
    weights["w"] *= np.exp(rng.uniform(-3, 3, (128, 1))).astype(np.float32)
    result = quantize(
        model(f"g (float[N,128] x) => (float[N,128] y, float[N,128] z) {{ {text} }}", **weights), VECTORS, BALANCED
    )
    assert_faithful(result, 28)
    sites = [site for site in result.plan.sites if site.role == "weight"]
    assert {str(site.site): site.spec.granularity.axis for site in sites} == axes  # type: ignore[union-attr]


def test_overflow_in_an_activation_names_tensor_and_sample() -> None:
    """Elsewhere an inf in one batch costs the model without a word."""
    proto = model(f"g ({MAP} x) => ({MAP} y) {{ e = Exp(x) y = {SAME}(e, w) }}", w=WEIGHTS["w"])
    data = {"x": DATA["x"].copy()}
    data["x"][5, 0, 0, 0] = 200.0
    with pytest.raises(CalibrationError, match=r"(?s)\be\b.*sample 5"):
        quantize(proto, data, BALANCED, holdout=1)


@pytest.mark.parametrize("target", ["ort", "trt", "virtual"])
def test_nan_in_a_weight_of_a_float_operator_is_not_blamed_on_the_samples(target: str) -> None:
    """Three layers behind it the first scale is made; the operator itself stays float."""
    text = f"""g ({MAP} x) => ({MAP} y) {{
        n = InstanceNormalization(x, scale, shift) r = Relu(n) a = {SAME}(r, w) y = {SAME}(a, v) }}"""
    proto = model(text, scale=np.full(32, np.nan, np.float32), shift=np.ones(32, np.float32), **WEIGHTS)
    said = r"^scale: is a weight of \S+ \(InstanceNormalization\) and holds 32 NaN"
    for data in (DATA, None):
        with pytest.raises(CalibrationError, match=said):
            onnxq.quantize(proto, data, overrides={"target": target})


@pytest.mark.parametrize("observer", ["minmax", "percentile", "entropy", "mse"])
def test_ragged_samples(observer: str) -> None:
    """Sequences of any length, with every observer (elsewhere entropy and percentile crash)."""
    text = "g (float[N,L,128] x) => (float[N,L,128] y) { a = MatMul(x, w) c = Add(a, b) r = Relu(c) y = MatMul(r, v) }"
    proto = model(text, **random_weights({"w": (128, 128), "v": (128, 128), "b": (128,)}))
    rng = np.random.default_rng(0)
    lengths = (3, 17, 5, 9, 17, 4, 8, 31)
    data = [{"x": rng.standard_normal((1, length, 128)).astype(np.float32)} for length in lengths]
    result = quantize(proto, data, BALANCED, **{"activations.observer": observer})
    assert_faithful(result, 18 if observer == "entropy" else 26)


FORMS = {
    "constant": ("", lambda w: w),
    "identity": ("w = Identity(stored)", lambda w: w),
    "transpose": ("w = Transpose <perm=[3,2,1,0]>(stored)", lambda w: np.ascontiguousarray(w.transpose(3, 2, 1, 0))),
    "reshape": ("w = Reshape(stored, shape)", lambda w: w.reshape(32, -1)),
    "cast": ("w = Cast <to=1>(stored)", lambda w: w.astype(np.float16)),
}


@pytest.mark.parametrize(("node", "store"), FORMS.values(), ids=FORMS)
def test_weights_that_are_no_initializers(node: str, store) -> None:
    """Elsewhere such weights are taken for activations and quantized per tensor."""
    channels = np.exp(np.random.default_rng(0).uniform(-3, 3, (32, 1, 1, 1))).astype(np.float32)
    stored = store(WEIGHTS["w"] * channels)
    arrays = {"v": WEIGHTS["v"], "stored": stored, "shape": np.array([32, 32, 3, 3])}
    read = {name: value for name, value in arrays.items() if name in f"v {node}"}
    proto = model(CONVS.replace("{", f"{{ {node}"), **read)
    if not node:
        constant = helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(stored))
        proto.graph.node.insert(0, constant)
    result = quantize(proto, DATA, BALANCED)
    assert_faithful(result, 28)
    assert kernels(result.model)["QLinearConv"] == 2
    weights = [site for site in result.plan.sites if site.role == "weight"]
    assert all(site.qparams is not None and site.qparams.scale.shape == (32,) for site in weights)


def test_leaving_one_unnamed_node_float_leaves_that_one() -> None:
    """Elsewhere all unnamed nodes go."""
    proto = convs()
    assert all(not node.name for node in proto.graph.node)
    rules = (Rule(tensor="y", set={"float": True}), *BALANCED.rules)  # type: ignore[arg-type]
    result = quantize(proto, DATA, BALANCED.model_copy(update={"rules": rules}))
    names = [node.name for node in result.model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    assert any("QuantizeLinear" in name for name in names)


def test_a_file_is_read_alone_and_its_result_is_the_same_each_time(tmp_path: Path) -> None:
    """Names that two nodes share, the name of a Relu that engines fold (elsewhere it is deleted), a dynamic batch."""
    proto = convs()
    for node, name in zip(proto.graph.node, ("same", "my_relu", "same"), strict=True):
        node.name = name
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    before = path.read_bytes()
    result = onnxq.quantize(path, DATA, BALANCED, overrides={"latency": False}, out=tmp_path / "q.onnx")
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"m.onnx", "q.onnx"}
    assert_faithful(result, 28)
    names = [node.name for node in result.model.graph.node]
    assert "my_relu" in names
    assert len(set(names)) == len(names)
    assert "Relu" not in kernels(result.model)
    assert result.model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    session = Session(result.model)
    for batch in (1, 5):
        assert session.run(images(batch))["y"].shape == (batch, 32, 8, 8)
    again = quantize(path, DATA, BALANCED)
    assert to_bytes(again) == to_bytes(result)
    assert again.plan_json() == result.plan_json()


def branches() -> onnx.ModelProto:
    """Both branches call a tensor `inner`; they are two tensors."""
    body = "{0} () => (float[A,B,C,D] {0}_y) {{ {0}_a = {1}(x, {2}) inner = Relu({0}_a) {0}_y = {1}(inner, {2}) }}"
    then, other = body.format("t", SAME, "w"), body.format("e", SAME, "v")
    text = f"g ({MAP} x, bool flag) => ({MAP} y) {{ [If] y = If(flag) <then_branch = {then}, else_branch = {other}> }}"
    return model(text, **WEIGHTS)


@pytest.mark.parametrize("both", [False, True])
def test_branches_that_the_data_reaches_are_quantized_and_others_refused(both: bool) -> None:
    data = [{"x": x[None], "flag": np.array(k % 2 == 0 or not both)} for k, x in enumerate(DATA["x"])]
    result = quantize(branches(), data, BALANCED, holdout=2)
    assert_faithful(result, 28)
    reached = {"If.then_branch", "If.else_branch"} if both else {"If.then_branch"}
    assert {site.site.scope for site in result.plan.sites} == reached
    refused = [(refusal.subject, refusal.code) for refusal in result.plan.refusals]
    assert (("If.else_branch", "R104") in refused) is not both
    (node,) = (node for node in optimize_graph(result.model).graph.node if node.op_type == "If")
    counts = {
        f"If.{attribute.name}": sum(inner.op_type == "QLinearConv" for inner in attribute.g.node)
        for attribute in node.attribute
    }
    assert counts == {scope: 2 * (scope in reached) for scope in ("If.then_branch", "If.else_branch")}


def test_float16_model_fuses_and_keeps_its_types() -> None:
    halves = {name: weight.astype(np.float16) for name, weight in WEIGHTS.items()}
    proto = model(CONVS.replace("float[", "float16["), **halves)
    result = quantize(proto, {"x": DATA["x"].astype(np.float16)}, BALANCED)
    assert_faithful(result, 28)
    assert kernels(result.model)["QLinearConv"] == 2
    ends = (*result.model.graph.input, *result.model.graph.output)
    assert {value.type.tensor_type.elem_type for value in ends} == {TensorProto.FLOAT16}


def test_adding_a_tensor_to_itself() -> None:
    proto = model(f"g ({MAP} x) => ({MAP} y) {{ a = {SAME}(x, w) d = Add(a, a) y = {SAME}(d, v) }}", **WEIGHTS)
    assert_faithful(quantize(proto, DATA, BALANCED), 28)


def test_rows_in_which_a_finite_mask_hides_everything_stay_even_on_the_npu() -> None:
    """As torch's dynamo exporter masks attention: scores vanish beside -3e38, and not beside what a scale can hold."""
    mask = "q = Unsqueeze(real, two) k = Unsqueeze(real, one) b = And(q, k) m = Where(b, zero, never)"
    attention = "h = MatMul(x, w) t = Transpose<perm=[0,2,1]>(h) s = MatMul(x, t) a = Add(s, m) p = Softmax(a)"
    text = f"g (float[1,8,16] x, bool[1,8] real) => (float[1,8,16] y) {{ {mask} {attention} y = MatMul(p, x) }}"
    axes = {"one": np.array([1]), "two": np.array([2])}
    proto = model(text, zero=0, never=np.finfo(np.float32).min, **axes, **random_weights({"w": (16, 16)}))
    rng = np.random.default_rng(0)
    samples = {"x": rng.standard_normal((8, 1, 8, 16)), "real": np.arange(8) < rng.integers(2, 8, (8, 1, 1))}
    result = quantize(proto, samples, "qnn", effort="fast")
    assert any(line.startswith("masked_rows") for line in result.report.rewrites)
    assert find_worst_db(result) > 20
