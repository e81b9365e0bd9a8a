"""ONNX Runtime's optimized graph: fused nodes found again by the tensors around them."""

from __future__ import annotations

import numpy as np
import pytest

import onnxq
from onnxq.errors import ConfigError
from tests.engines import kit


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


def test_weights_in_four_bits():
    proof = onnxq.prove(kit.int4_matmul(), overrides={"engine": "ort"})
    node = proof.node("m/MatMul")
    assert node.kind == "MatMulNBits"
    assert node.type.endswith("weights, float32")


def test_a_quantized_network_with_its_plan():
    rng = np.random.default_rng(0)
    weights = {
        f"w{k}": rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 17 for k in range(3)
    } | {f"b{k}": kit.BIAS for k in range(3)}  # fmt: skip
    model = kit.graph(
        """(float[N,32,16,16] x) => (float[N,32,16,16] y) {
            a = Conv <pads=[1,1,1,1]>(x, w0, b0) r = Relu(a)
            c = Conv <pads=[1,1,1,1]>(r, w1, b1) d = Conv <pads=[1,1,1,1]>(r, w2, b2) y = Add(c, d) }""",
        **weights,
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


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"require_int8": ["Cnov"]}, "matches none of the"),
        ({"require_int8": ["/(/"]}, "is not a regular expression"),
        ({"compute_capability": "8.6"}, "builds for this machine"),
    ],
)
def test_wishes_that_fit_nothing(wish, said):
    with pytest.raises(ConfigError, match=said):
        onnxq.prove(kit.ort_residual(), overrides={"engine": "ort", **wish})


def test_an_unknown_engine():
    with pytest.raises(ConfigError, match="'openvino' is not one of tensorrt-rtx, tensorrt, ort"):
        onnxq.prove(kit.ort_residual(), overrides={"engine": "openvino"})
