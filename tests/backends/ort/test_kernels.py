"""ONNX Runtime's optimized graph: fused nodes found again by the tensors around them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import onnxq
from onnxq.errors import ConfigError
from tests.engines import kit

pytestmark = pytest.mark.usefixtures("engines_here")


def test_integer_kernels_are_found_by_the_nodes_they_carry_out():
    proof = onnxq.prove(kit.ort_residual(), overrides={"engine": "ort", "require_int8": ["Conv"]})
    assert proof.holds
    assert {one.kind for one in proof.nodes} == {"QLinearConv"}
    add = next(kernel for kernel in proof.kernels if kernel.kind == "QLinearAdd")
    assert set(add.nodes) == {"dd/DequantizeLinear", "a/Add", "aq/QuantizeLinear", "xd/DequantizeLinear"}
    first = proof.node("c/Conv").kernel
    kernel = next(kernel for kernel in proof.kernels if kernel.name == first)
    assert {"c/Conv", "r/Relu", "rq/QuantizeLinear", "wd/DequantizeLinear"} <= set(kernel.nodes)
    assert "d/Conv" not in kernel.nodes
    assert {one.state for one in proof.sites} == {"fused"}
    assert proof.build.version.startswith("ONNX Runtime ")


def test_a_relu_that_the_zero_point_does_not_stand_for_keeps_the_convolution_float():
    proof = onnxq.prove(kit.ort_residual(zero=128), overrides={"engine": "ort", "require_int8": ["c/*", "d/*"]})
    assert proof.unmet == ("c/Conv",)
    assert "Relu between it and QuantizeLinear" in proof.node("c/Conv").reason
    assert proof.node("d/Conv").type == "int8"
    assert proof.site("x").state == "partly"
    assert proof.site("x").unfused == ("c/Conv",)


def test_pairs_as_tensorrt_wants_them_are_unfused_here():
    proof = onnxq.prove(kit.residual(), overrides={"engine": "ort"})
    assert {one.type for one in proof.nodes} == {"float32"}
    assert "Relu between it" in proof.node("c/Conv").reason
    assert proof.node("d/Conv").reason == "its result is not quantized, and ONNX Runtime fuses it only then"


def test_products_keep_their_nodes_when_quantization_moves_over_a_transpose():
    proof = onnxq.prove(kit.ort_linear(), overrides={"engine": "ort"})
    assert (proof.node("m/MatMul").type, proof.node("m/MatMul").kind) == ("int8", "MatMulIntegerToFloat")
    assert (proof.node("n/MatMul").type, proof.node("n/MatMul").kind) == ("int8", "MatMulIntegerToFloat")
    assert proof.node("a/MatMul").type == "float32"
    assert {one.state for one in proof.sites} == {"fused"}


@pytest.mark.parametrize("dtype", [TensorProto.INT4, TensorProto.UINT4])
def test_weights_alone_in_four_bits(dtype: int):
    proof = onnxq.prove(kit.int4_matmul(dtype), overrides={"engine": "ort", "require": [("int4", "MatMul")]})
    node = proof.node("m/MatMul")
    # ONNX Runtime's operator holds unsigned integers, whatever the file has.
    assert (node.kind, node.type, node.types) == ("MatMulNBits", "uint4 weights, float32", "float32 x uint4 -> float32")
    assert proof.site("w").state == "fused"
    assert node.reason == ""
    assert proof.holds


@pytest.mark.recent_ort
def test_what_reads_its_weight_in_another_width_does_not_run_in_four_bits():
    proof = onnxq.prove(blocks(), overrides={"engine": "ort", "require": [("int4", "MatMul")]})
    assert (proof.node("m/MatMul").type, proof.site("w").state) == ("uint8 weights, float32", "fused")
    assert proof.unmet == ("m/MatMul",)


def blocks(before: str = "", after: str = "") -> onnx.ModelProto:
    text = kit.BLOCKS.replace(before, after) if before else kit.BLOCKS
    return kit.graph(text, 21, w=kit.MATRIX, ws=np.full((2, 64), 0.01, np.float32))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            blocks("m = MatMul(x, wd)", "h = MatMul(x, wd) r = Relu(h) m = Tanh(r)"),
            "MatMulNBits with Relu right behind",
        ),
        (blocks("m) {", "m, float[64,64] wd) {"), "and dequantized in each run"),
        (kit.only_weights(), "in MatMul and Gemm alone"),
    ],
)
def test_weights_alone_that_are_dequantized_in_each_run_say_why(model: onnx.ModelProto, why: str):
    proof = onnxq.prove(model, overrides={"engine": "ort"})
    (node,) = proof.nodes
    assert why in node.reason
    assert proof.site("w").state == "not fused"


def test_weights_are_required_of_products_that_have_one():
    proof = onnxq.prove(
        blocks("m = MatMul(x, wd)", "h = MatMul(x, wd) t = Transpose<perm=[0,2,1]>(h) m = MatMul(x, t)"),
        overrides={"engine": "ort", "require": [("uint4", "MatMul")]},
    )
    assert [one.nodes for one in proof.requirements] == [("h/MatMul",)]


def test_operators_on_blocks_are_fused_as_pairs_are():
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    model = kit.graph("(float[8,64] x) => (float[8,64] y) { y = MatMul(x, w) }", 17, w=weight)
    made = onnxq.quantize(model, config="ort-int4-weights", overrides={"emit": "nbits", "projection_bits": 4}).model
    proof = onnxq.prove(made, overrides={"engine": "ort", "require": [("int4", "MatMul")]})
    assert {one.kind for one in proof.nodes} == {"MatMulNBits"}
    assert proof.holds


def test_a_quantized_network_with_its_plan():
    rng = np.random.default_rng(0)
    model = kit.graph(
        """(float[N,32,16,16] x) => (float[N,32,16,16] y) {
            a = Conv <pads=[1,1,1,1]>(x, w0, b0) r = Relu(a)
            c = Conv <pads=[1,1,1,1]>(r, w1, b0) d = Conv <pads=[1,1,1,1]>(r, w2, b0) y = Add(c, d) }""",
        b0=kit.BIAS,
        **{f"w{k}": rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 17 for k in range(3)},
    )
    data = {"x": rng.standard_normal((4, 32, 16, 16)).astype(np.float32)}
    result = onnxq.quantize(model, data, overrides={"latency": False})
    proof = onnxq.prove(result.model, overrides={"engine": "ort"})
    refused = {one.subject for one in (*result.plan.refusals, *result.plan.left_float)}
    for node in proof.nodes:
        if node.node in refused:
            assert node.reason.startswith("the plan left it float: ")
        else:
            assert (node.type, node.reason) == ("int8", "")
    assert {one.rule for one in proof.sites} >= {"conv"}
    assert all(one.rule for one in proof.sites)


def test_a_model_that_ort_refuses_is_a_proof():
    model = kit.ort_residual()
    model.opset_import.add(domain="my.ops", version=1)
    model.graph.node.add(op_type="Mine", domain="my.ops", name="mine", input=["aq"], output=["other"])
    proof = onnxq.prove(model, overrides={"engine": "ort", "require_int8": ["Conv"]})
    assert proof.build.state == "refused"
    assert "my.ops" in proof.build.reason
    assert proof.unmet == ("c/Conv", "d/Conv")
    assert not proof.sites


def test_a_wish_that_is_no_regular_expression_is_named():
    with pytest.raises(ConfigError, match="is not a regular expression"):
        onnxq.prove(kit.ort_residual(), overrides={"engine": "ort", "require_int8": ["/(/"]})
