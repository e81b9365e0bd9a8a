"""The emitter writes legal graphs whose numbers are the numpy reference's, for every spec; notes may be left out."""

import json
from collections import Counter
from typing import Any, Literal

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxq.config import Config, Rule
from onnxq.emit import BITS_KEY, PLAN_KEY, leave_out_notes
from onnxq.emit.model import emit_pairs, write_matrices
from onnxq.errors import PlanError
from onnxq.graph import infer_shapes, name_nodes
from onnxq.graph.light import attach_weights, strip_weights
from onnxq.graph.values import read_declared_type
from onnxq.numerics import fake_quant
from onnxq.runtime import Session, optimize_graph
from tests.engines import kit
from tests.networks import add_arrays, parse_text
from tests.passes.kit import random_weights, read_by
from tests.pipeline.models import images, quantize, residual


def config(**raw: object) -> Config:
    return Config.model_validate({**raw, "rules": (Rule(op="*", set={"quantize": True}),)})  # type: ignore[arg-type]


def initializers(model: onnx.ModelProto) -> dict[str, TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def test_pairs_and_their_metadata_are_named_after_their_sites() -> None:
    model = quantize(residual(), images()).model
    names = {node.name: node for node in model.graph.node}
    q, dq = names["r/QuantizeLinear"], names["r/DequantizeLinear"]
    assert list(q.input) == ["r", "r/scale", "r/zero_point"]
    assert list(q.output) == ["r/quantized"]
    assert list(dq.input) == ["r/quantized", "r/scale", "r/zero_point"]
    assert list(dq.output) == ["r/dequantized"]
    assert {entry.key: entry.value for entry in q.metadata_props}["onnxq.bits"] == "8"
    held = initializers(model)
    assert list(held["r/scale"].dims) == []
    assert held["w1/quantized"].data_type == TensorProto.INT8
    assert list(held["w1/scale"].dims) == [32]
    assert held["b1/quantized"].data_type == TensorProto.INT32
    bits = json.loads({entry.key: entry.value for entry in model.metadata_props}["onnxq.bits"])
    assert set(bits) == {n.name for n in model.graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")}
    assert bits["r/QuantizeLinear"]["site"] == "r"
    assert bits["r/QuantizeLinear"]["bits"] == 8


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_narrow_activations_are_enforced_by_a_clip(bits: int) -> None:
    """Not only noted: a value beyond the narrow range saturates at it; what that costs is said."""
    asked = config(activations={"bits": bits, "scheme": "asymmetric"})
    result = quantize(residual(), images(), asked)
    site = next(s for s in result.plan.sites if str(s.site) == "x")
    assert site.qparams is not None
    model = onnx.ModelProto.FromString(result.model.SerializeToString())
    model.graph.output.append(onnx.helper.make_tensor_value_info("x/dequantized", TensorProto.FLOAT, None))
    x = images(seed=9)["x"] * 3
    got = Session(model, optimize=False).run({"x": x})["x/dequantized"]
    np.testing.assert_array_equal(got, fake_quant(x, site.qparams, site.spec))
    assert len(np.unique(got)) <= 2**bits
    assert any("below 8 bits" in warning for warning in result.report.warnings)


@pytest.mark.parametrize(("preset", "maker"), [("ort-int8", "QuantizeLinear"), ("trt-int8", "Relu")])
def test_narrow_activations_keep_the_integer_kernels(preset: str, maker: str) -> None:
    """ONNX Runtime fuses no Conv in front of a float Clip; TensorRT's Clip takes no integers."""
    changes = {"activations": {"bits": 4}, "rules": [{"op": "*", "set": {"quantize": True}}]}
    model = quantize(residual(), images(), preset, **changes).model
    makers = {output: node.op_type for node in model.graph.node for output in node.output}
    assert maker in {makers.get(node.input[0]) for node in model.graph.node if node.op_type == "Clip"}
    if preset == "ort-int8":
        assert Counter(node.op_type for node in optimize_graph(model).graph.node)["QLinearConv"] == 3


def test_narrow_activations_of_a_matmul_still_fuse() -> None:
    result = quantize(linear(), TOKENS, config(activations={"bits": 6, "scheme": "asymmetric"}))
    assert Counter(n.op_type for n in optimize_graph(result.model).graph.node)["MatMulIntegerToFloat"] == 2


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_narrow_weights_use_only_their_levels(bits: int) -> None:
    result = quantize(residual(), images(), config(weights={"bits": bits, "granularity": "channel"}))
    stored = numpy_helper.to_array(initializers(result.model)["w1/quantized"])
    assert stored.dtype == np.int8
    assert stored.min() >= -(2 ** (bits - 1))
    assert stored.max() <= 2 ** (bits - 1) - 1


def test_packed_weights_are_half_as_large_and_compute_the_same() -> None:
    """int4 in the file, int8 in the kernel: the Cast between them is gone once ONNX Runtime has loaded the file."""
    wide, packed = (
        quantize(residual(), images(), config(weights=wish))
        for wish in ({"bits": 4, "granularity": "channel"}, {"bits": 4, "storage": "int4", "granularity": "channel"})
    )
    held = initializers(packed.model)
    assert held["w1/packed"].data_type == TensorProto.INT4
    assert held["w1/zero_point"].data_type == TensorProto.INT8
    assert len(held["w1/packed"].raw_data) == -(-len(initializers(wide.model)["w1/quantized"].raw_data) // 2)
    for optimize in (False, True):
        one, other = (Session(r.model, optimize=optimize).run(images()) for r in (wide, packed))
        assert all(np.array_equal(value, other[name]) for name, value in one.items())
    ops = [Counter(node.op_type for node in optimize_graph(r.model).graph.node) for r in (wide, packed)]
    assert ops[0] == ops[1]
    assert ops[1]["QLinearConv"] > 0
    assert "Cast" not in ops[1]


def test_narrow_range_and_symmetric_activations() -> None:
    asked = config(
        activations={"bits": 8, "scheme": "symmetric", "signed": True, "narrow_range": True},
        weights={"bits": 8, "granularity": "channel", "narrow_range": True},
    )
    result = quantize(residual(), images(), asked)
    assert min(result.report.checks[0].sqnr_db) > 25
    assert numpy_helper.to_array(initializers(result.model)["w1/quantized"]).min() >= -127
    zero = numpy_helper.to_array(initializers(result.model)["x/zero_point"])
    assert zero.dtype == np.int8
    assert zero == 0


def test_per_tensor_weights() -> None:
    result = quantize(residual(), images(), config(weights={"granularity": "tensor"}))
    assert list(initializers(result.model)["w1/scale"].dims) == []
    assert min(result.report.checks[0].sqnr_db) > 25


LINEAR = "g (float[N,L,128] x) => (float[N,L,128] y) { a = MatMul(x, w) c = Add(a, b) r = Relu(c) y = MatMul(r, v) }"


def linear() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"w": (128, 128), "v": (128, 128), "b": (128,)}
    weights = {name: (rng.standard_normal(shape) / 11).astype(np.float32) for name, shape in shapes.items()}
    return parse_text(LINEAR, **weights)


TOKENS = {"x": np.random.default_rng(2).standard_normal((8, 6, 128)).astype(np.float32)}


@pytest.mark.recent_ort
@pytest.mark.parametrize(("wish", "dtype", "scale_shape", "least"), [
    ({"bits": 4, "storage": "int4", "granularity": "block", "block_size": 32}, TensorProto.INT4, [4, 128], 16),
    (
        {"bits": 4, "storage": "uint4", "scheme": "asymmetric", "granularity": "block", "block_size": 32},
        TensorProto.UINT4, [4, 128], 17,
    ),
    ({"bits": 4, "storage": "int4", "granularity": "channel"}, TensorProto.INT4, [128], 14),
    ({"bits": 8, "granularity": "block", "block_size": 64}, TensorProto.INT8, [2, 128], 38),
    ({"bits": 8, "granularity": "channel"}, TensorProto.INT8, [128], 36),
])  # fmt: skip
def test_weight_only(wish: dict[str, object], dtype: int, scale_shape: list[int], least: float) -> None:
    result = quantize(linear(), TOKENS, Config.model_validate({"mode": "weight-only", "weights": wish}))
    held = initializers(result.model)
    assert held["w/quantized"].data_type == dtype
    assert list(held["w/scale"].dims) == scale_shape
    assert result.report.checks[0].sqnr_db[0] > least
    assert not any(node.op_type == "QuantizeLinear" for node in result.model.graph.node)
    ops = Counter(node.op_type for node in optimize_graph(result.model).graph.node)
    assert ops["MatMulNBits"] == 2, ops


# With the bias in a Gemm, the Relu behind it would be in there too, and the weight dequantized at every run.
APART = {"MatMulNBits": 1, "Sub": 1, "Relu": 1, "Neg": 1}
IN_FRONT = {"MatMulNBits": 1, "LeakyRelu": 1, "Relu": 1, "Neg": 1}


@pytest.mark.recent_ort
@pytest.mark.parametrize(
    ("nodes", "kernels"),
    [
        ("y = Gemm<alpha=1.0, beta=1.0, transB=1>(x, w, b)", {"MatMulNBits": 1, "Sub": 1}),
        ("y = Gemm(x, w)", {"MatMulNBits": 1}),
        ("h = Gemm(x, w, b) r = Relu(h) y = Neg(r)", APART),
        ("m = MatMul(x, w) h = Add(b, m) r = Relu(h) y = Neg(r)", APART),
        # ONNX Runtime looks for int8 products in front of these.
        ("m = MatMul(x, w) r = Relu(m) y = Neg(r)", IN_FRONT),
        ("m = Gemm(x, w) r = Relu(m) y = Neg(r)", IN_FRONT),
        (
            "m = MatMul(x, w) n = MatMul(x, v) a = Add(m, n) y = Relu(a)",
            {"MatMulNBits": 2, "LeakyRelu": 2, "Add": 1, "Relu": 1},
        ),
        ("y = Gemm<beta=0.5>(x, w, b)", {"MatMulNBits": 1, "Sub": 1}),
        ("y = Gemm<alpha=0.5>(x, w)", {"MatMulNBits": 1}),
        # One bias for several layers.
        (
            "h = Gemm<transB=1>(x, w, b) r = Relu(h) y = Gemm<transB=1>(r, v, b)",
            {"MatMulNBits": 2, "Sub": 2, "Relu": 1},
        ),
    ],
)
def test_the_weight_of_a_gemm_has_the_kernel_of_a_matmul(nodes: str, kernels: dict[str, int]) -> None:
    weights = read_by(nodes, random_weights({"w": (64, 64), "b": (64,), "v": (64, 64)}))
    model = parse_text(f"g (float[8,64] x) => (float[8,64] y) {{ {nodes} }}", **weights)
    result = quantize(model, random_weights({"x": (2, 8, 64)}), "ort-int4-weights")
    assert Counter(node.op_type for node in optimize_graph(result.model).graph.node) == kernels
    # A weight that computes an output has 8 bits, behind a bias too.
    assert result.report.checks[0].sqnr_db[0] > (14 if "Relu" in kernels else 30)


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_matrix_of_several_gemms_is_stored_once(transposed: int) -> None:
    """As of the steps of a cell that an exporter wrote one behind the other."""
    nodes = f"h = Gemm<transB={transposed}>(x, w) r = Relu(h) m = Gemm<transB={transposed}>(r, w) y = Neg(m)"
    model = parse_text(f"g (float[8,64] x) => (float[8,64] y) {{ {nodes} }}", **random_weights({"w": (64, 64)}))
    result = quantize(model, random_weights({"x": (2, 8, 64)}), "ort-int8-weights")
    assert [tensor.dims for tensor in result.model.graph.initializer].count([64, 64]) == 1


def test_bias_overflow_is_prevented_by_the_weight_scale() -> None:
    """A dead channel has no weights but a bias: its scale is floored so that the int32 bias holds it."""
    proto = residual()
    weight = next(t for t in proto.graph.initializer if t.name == "w1")
    values = numpy_helper.to_array(weight).copy()
    values[3] = 0
    values[4] = 1e-30
    weight.CopyFrom(numpy_helper.from_array(values, "w1"))
    result = quantize(proto, images())
    assert min(result.report.checks[0].sqnr_db) > 28
    assert result.report.checks[0].agreement_db > 35


@pytest.mark.parametrize("given_out", [False, True], ids=["inside", "output"])
@pytest.mark.parametrize("taken", [False, True], ids=["else", "then"])
def test_a_branch_quantizes_for_itself_what_it_captures(given_out: bool, taken: bool) -> None:
    """The tensor has one pair where it is made, for all other readers, and one in the branch for a Conv there."""
    outputs = "(float[N,32,8,8] y, float[N,32,8,8] r)" if given_out else "(float[N,32,8,8] y)"
    stored = initializers(residual())
    proto = parse_text(
        f"""g (float[N,32,8,8] x, bool c) => {outputs} {{
            a = Conv <pads=[1,1,1,1]>(x, w0, b0) r = Relu(a)
            h = If (c) <then_branch = t () => (float[N,32,8,8] q) {{ q = Conv <pads=[1,1,1,1]>(r, w1, b1) }},
                        else_branch = e () => (float[N,32,8,8] q) {{ q = Relu(r) }}>
            d = Conv <pads=[1,1,1,1]>(r, w2, b2) y = Add(d, h)
        }}""",
        **{f"{name}{k}": stored[f"{name}{k}"] for name in "wb" for k in range(3)},
    )
    # Both branches must be calibrated; what is compared is one of them.
    feeds = [{"x": images(2, k)["x"], "c": np.asarray(bool(k % 2))} for k in range(4)]
    result = quantize(proto, feeds)
    sites = {str(site.site) for site in result.plan.sites}
    assert {"r", "h/If.then_branch::q/Conv/in0"} <= sites
    x = {"x": images(2, 9)["x"], "c": np.asarray(taken)}
    before, after = (Session(model, optimize=False).run(x) for model in (proto, result.model))
    for name, value in before.items():
        assert float(((after[name] - value) ** 2).sum() / (value**2).sum()) < 1e-3


_SINGLE = """(float[B,6,7,7] x) => (float[B,6,4,4] y, float[B,6,4,4] z, float[B,6,4,4] c) {
    a = Conv <group=6, strides=[2,2], pads=[1,1,1,1]>(x, w, b) r = Clip(a, low, high)
    y = Conv <group=6, auto_pad="SAME_UPPER">(r, v) c = Conv <group=6, dilations=[2,2], pads=[2,2,2,2]>(y, w, b)
    z = Relu(c) }"""


@pytest.mark.parametrize(("batch", "count"), [("1", 1), ("2", 2), ("n", 1), ("n", 3)])
def test_convolutions_of_single_channels_are_products_by_matrices(batch: str, count: int) -> None:
    """With an activation behind, none, and one whose input is an output; what makes the matrices is folded."""
    draw = np.random.default_rng(0).standard_normal
    arrays = {"w": draw((6, 1, 3, 3)), "v": draw((6, 1, 2, 2)), "b": draw(6), "low": 0.0, "high": 0.5}
    floats = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    model = name_nodes(kit.graph(_SINGLE.replace("B", batch), 13, **floats))
    made = onnx.ModelProto.FromString(write_matrices(model, lambda *_: True).SerializeToString())
    feeds = {"x": draw((count, 6, 7, 7)).astype(np.float32)}
    answers = Session(made, optimize=False).run(feeds)
    for name, value in Session(model, optimize=False).run(feeds).items():
        np.testing.assert_allclose(answers[name], value, atol=1e-5)
    products = [node for node in optimize_graph(made).graph.node if node.op_type in ("Conv", "FusedConv")]
    assert [node.name for node in products] == ["a/Conv", "y/Conv", "c/Conv"]
    assert all(list(attr.ints) == [1, 1] for node in products for attr in node.attribute if attr.name == "kernel_shape")


def test_results_of_products_by_matrices_keep_their_sizes_and_are_declared_once() -> None:
    """No engine sees the batch of what lies behind a Reshape."""
    text = "(float[n,6,4,4] x) => (float[n,6,4,4] y) { a = Conv <group=6>(x, w) b = Relu(a) y = Relu(b) }"
    model = name_nodes(kit.graph(text, 13, w=np.ones((6, 1, 1, 1), np.float32)))
    plain, typed = (write_matrices(one, lambda *_: True).graph.value_info for one in (model, infer_shapes(model)))
    assert {value.name: read_declared_type(value)[1] for value in plain} == {"b": ("n", 6, 4, 4)}
    names = [value.name for value in typed]
    assert sorted(names) == sorted(set(names))
    assert "b" in names


def test_other_convolutions_are_left() -> None:
    """Those that the target does not want, those of several channels, and where the batch is not known."""
    weights = {"w": np.zeros((6, 1, 3, 3), np.float32), "k": np.zeros((6, 6, 1, 1), np.float32)}
    text = "(float[B,6,7,7] x) => (float[B,6,5,5] y) { a = Conv <group=6>(x, w) y = Conv(a, k) }"
    for batch, wanted in (("1", False), ("?", True)):
        model = name_nodes(kit.graph(text.replace("B", batch), 13, **weights))
        kept = write_matrices(model, lambda *_, wanted=wanted: wanted)
        assert [node.op_type for node in kept.graph.node] == ["Conv", "Conv"]


@pytest.mark.parametrize(("domain", "own"), [("", "is of opset 12"), ("ai.onnx.ml", "imports none of ONNX's own")])
def test_a_plan_of_a_later_opset_says_what_the_model_has(domain: str, own: str) -> None:
    made = quantize(residual(), images())
    model = name_nodes(residual(opset=12))
    model.opset_import[0].domain = domain
    with pytest.raises(PlanError, match=own) as caught:
        emit_pairs(model, made.plan)
    assert (caught.value.code, bool(caught.value.fix)) == ("Q404", True)


MODEL = """<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g (float[1,64] x, bool c) => (float[1,64] y) {
    [scale] s = local.Scale(x) [quantize] q = QuantizeLinear(s, step) [dequantize] d = DequantizeLinear(q, step)
    [choice] b = If (c) <
        then_branch = t () => (float[1,64] u) { [inner] u = MatMul(d, w) },
        else_branch = e () => (float[1,64] v) { v = Identity(d) }
    >
    y = Neg(b)
}
<domain: "local", opset_import: ["" : 21]>
Scale (a) => (o) { [double] o = Add(a, a) }"""
RECORD = {"site": "s", "bits": 7, "scheme": "symmetric", "granularity": "tensor", "role": "activation", "rule": "x"}


def model() -> onnx.ModelProto:
    """A network with texts of an exporter and of onnxq in all places that may hold some."""
    proto = parser.parse_model(MODEL)
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    add_arrays(proto.graph, w=weight, step=0.02)
    proto.graph.value_info.append(helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, [1, 64]))
    bits = dict.fromkeys(("quantize", "dequantize"), RECORD)
    helper.set_model_props(proto, {"names": "cat", PLAN_KEY: "{}", BITS_KEY: json.dumps(bits)})
    branch = proto.graph.node[3].attribute[0]
    graphs = (proto.graph, branch.g)
    nodes = (node for graph in (*graphs, *proto.functions) for node in graph.node)
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info, *proto.graph.initializer)
    for noted in (*graphs, *proto.functions, *nodes, *values):
        noted.doc_string = "File train.py, line 3"
        noted.metadata_props.add(key="stack_trace", value="File train.py, line 3")
    proto.doc_string = branch.doc_string = "File train.py, line 3"
    return proto


def list_names(proto: onnx.ModelProto) -> list[str]:
    inner = proto.graph.node[3].attribute[0].g.node
    return [node.name for node in (*proto.graph.node, *inner, *proto.functions[0].node)]


def run(proto: Any) -> np.ndarray:
    feeds = {"x": np.linspace(-1, 1, 64, dtype=np.float32)[None], "c": np.array(True)}
    return Session(proto).run(feeds)["y"]


@pytest.mark.parametrize("level", ["names", "none"])
@pytest.mark.parametrize("light", [False, True])
def test_no_text_is_left_and_the_answers_stay(level: Literal["names", "none"], light: bool) -> None:
    whole = model()
    before = whole.SerializeToString()
    bare = leave_out_notes(strip_weights(whole) if light else whole, level)
    proto = attach_weights(bare)
    assert whole.SerializeToString() == before
    assert b"train.py" not in proto.SerializeToString()
    onnx.checker.check_model(proto)
    np.testing.assert_array_equal(run(bare), run(whole))
    assert [value.name for value in proto.graph.value_info] == ["s"]


def test_names_keep_the_bits_once_for_each_pair() -> None:
    proto = leave_out_notes(model(), "names")
    assert list_names(proto) == list_names(model())
    held = {entry.key: entry.value for entry in proto.metadata_props}
    assert held == {"names": "cat", BITS_KEY: '{"dequantize":{"bits":7}}'}


def test_none_keeps_what_is_not_onnxqs() -> None:
    proto = leave_out_notes(model(), "none")
    assert set(list_names(proto)) == {""}
    assert {entry.key: entry.value for entry in proto.metadata_props} == {"names": "cat"}


@pytest.mark.parametrize("text", ["{}", '{"dequantize": {"site": "s"}}'])
def test_records_without_bits_leave_none(text: str) -> None:
    proto = model()
    helper.set_model_props(proto, {BITS_KEY: text})
    assert not leave_out_notes(proto, "names").metadata_props
