"""Real engines of TensorRT for RTX, ahead of time and without a GPU: what every kind of node and pair becomes."""

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.errors import ConfigError
from tests.engines import kit
from tests.passes.kit import parse

pytestmark = kit.needs_rtx


def prove(model: onnx.ModelProto, **wish) -> onnxq.Proof:
    proof = onnxq.prove(model, overrides=wish)
    assert proof.built, proof.build.reason
    return proof


def states(proof: onnxq.Proof) -> dict[str, str]:
    return {one.site: one.state for one in proof.sites}


def test_a_convolution_between_pairs_runs_in_int8():
    proof = prove(kit.conv(), require_int8=["Conv"])
    node = proof.node("c/Conv")
    assert (node.type, node.kind, node.types) == ("int8", "correlation", "int8 x int8 -> float32")
    assert node.reason == ""
    assert states(proof) == {"x": "fused", "w": "fused"}
    assert proof.holds
    assert proof.build.version.startswith("TensorRT for RTX ")
    assert proof.build.engine_bytes > 0
    assert {name for kernel in proof.kernels for name in kernel.nodes} >= {"c/Conv", "y/Relu"}


SHAPE_1 = kit.conv(np.full(1, 0.05, np.float32), np.zeros(1, np.int8))


@pytest.mark.parametrize(
    ("model", "node", "type_", "reason", "sites"),
    [
        (SHAPE_1, "c/Conv", "float32", "shape [1]", {"x": "not fused", "w": "not fused"}),
        (kit.wrong_axis(), "y/MatMul", "int8 weights, float32", "along axis 0", {"x": "not fused", "w": "fused"}),
        (kit.sliced(), "m/MatMul", "float32", "give its result a pair", {"x": "not fused", "w": "not fused"}),
        (
            kit.transposed(), "y/ConvTranspose", "float32", "TensorRT has no int8 kernel for ConvTranspose",
            {"x": "not fused", "w": "not fused"},
        ),
    ],
    ids=["a scale of shape 1", "scales along the wrong axis", "a result cut up", "no such kernel"],
)  # fmt: skip
def test_what_is_wrong_with_pairs_is_blamed(model, node, type_, reason, sites):
    proof = prove(model, require_int8=[node])
    assert (proof.node(node).type, proof.unmet) == (type_, (node,))
    assert reason in proof.node(node).reason
    assert states(proof) == sites
    assert {site.unfused for site in proof.sites if site.state == "not fused"} == {(node,)}


def test_pairs_on_weights_alone_leave_the_convolution_float():
    proof = prove(kit.only_weights())
    assert (proof.node("c/Conv").type, proof.node("c/Conv").reason) == ("float32", "its input has no pair")
    assert states(proof) == {"w": "not fused"}
    # Kernels that only move data are counted apart.
    assert [kernel.name.split("_")[3] for kernel in proof.moving] == ["Move", "Tran"]


def test_float16_is_required_and_float32_forbidden():
    half = prove(kit.attention(False, "float16"), require=[("float16", "MatMul")], forbid=["float32"])
    assert half.holds
    assert half.nodes[0].kernel == half.nodes[1].kernel
    single = prove(kit.attention(False), require=[("float16", "MatMul")], forbid=["float32", "int8"])
    assert [(one.dtype, one.forbidden, len(one.unmet)) for one in single.requirements] == [
        ("float16", False, 2), ("float32", True, 2), ("int8", True, 0),
    ]  # fmt: skip
    assert not single.holds
    assert [one.type for one in single.nodes] == ["float32", "float32"]


def test_products_of_matrices():
    assert prove(kit.matmul()).node("m/MatMul").type == "int8"
    four = prove(kit.int4_matmul(), require=[("int4", "m/*"), ("float32", "m/*"), ("int8", "m/*")])
    assert [one.unmet for one in four.requirements] == [(), (), ("m/MatMul",)]
    assert four.node("m/MatMul").type == "int4 weights, float32"
    assert states(four) == {"w": "fused"}  # the weights' integers are what the kernel reads


def test_attention_becomes_one_int8_kernel_only_with_all_its_pairs():
    proof = prove(kit.attention(True))
    assert [one.type for one in proof.nodes] == ["int8", "int8"]
    assert proof.nodes[0].kernel == proof.nodes[1].kernel
    assert set(states(proof).values()) == {"fused"}


def test_a_mask_is_no_operand_and_equal_pairs_pass_bytes_on():
    proof = prove(kit.masked_attention(), require_int8=["MatMul"])
    assert proof.holds
    assert proof.nodes[0].kernel == proof.nodes[1].kernel
    assert proof.nodes[0].types.startswith("int8 x int8 x int8 -> ")
    assert set(states(proof).values()) == {"fused"}


def test_one_pair_for_convolution_and_skip_costs_no_kernel():
    proof = prove(kit.residual(), require_int8=["Conv"])
    assert proof.moving == ()
    assert proof.holds
    assert set(states(proof).values()) == {"fused"}
    assert proof.site("x").readers == ("c/Conv", "a/Add")
    assert proof.by_kind() == {"correlation": 2, "kgen": 3}


def test_pools():
    proof = prove(kit.pools())
    assert proof.node("a/AveragePool").type == "float32"
    assert proof.node("m/MaxPool").type == "int8"
    assert states(proof) == {"u": "not fused", "v": "fused", "y": "fused"}


def test_a_pair_between_float_functions_is_a_round_trip():
    proof = prove(kit.round_trip())
    assert states(proof) == {"a": "not fused"}
    assert "Tanh reads floats" in proof.site("a").reason


def test_an_older_gpu_has_no_int8_convolution_and_an_unknown_one_is_refused():
    proof = prove(kit.conv(), compute_capability="7.5")
    assert proof.node("c/Conv").type == "float32"
    assert "8.0 or more" in proof.node("c/Conv").reason
    assert proof.build.capability == "7.5"
    with pytest.raises(ConfigError, match=r"7\.5, 8\.0, 8\.6"):
        onnxq.prove(kit.conv(), overrides={"compute_capability": "9.9"})


def test_a_batch_of_no_fixed_size_is_guessed_or_given():
    model = kit.conv(batch="N")
    guessed = prove(model)
    assert guessed.build.shapes == {"x": ((1, 32, 16, 16),) * 3}
    assert "x 1x32x16x16" in guessed.warnings[-1]
    sizes = ((1, 32, 16, 16), (4, 32, 16, 16), (8, 32, 16, 16))
    given = prove(model, shapes="x:1x32x16x16,4x32x16x16,8x32x16x16")
    assert given.build.shapes == {"x": sizes}
    assert given.warnings == ()
    assert given.node("c/Conv").type == "int8"


def test_what_the_parser_refuses_is_a_proof_that_names_the_node():
    proof = onnxq.prove(kit.conv(zero=np.int8(3)), overrides={"require_int8": ["Conv"]})
    assert (proof.build.state, proof.build.node) == ("refused", "xq/QuantizeLinear")
    assert "Non-zero zero point is not supported" in proof.build.reason
    assert proof.unmet == ("c/Conv",)
    assert not proof.holds
    assert any("Non-zero" in line for line in proof.build.log)


def test_operators_that_the_parser_never_takes_are_named():
    model = parse("g (float[4,8] x) => (uint8[4,8] q, float s, uint8 z) { q, s, z = DynamicQuantizeLinear (x) }")
    proof = onnxq.prove(model, overrides={"engine": "tensorrt-rtx"})
    assert proof.build.reason == "it does not take the operator DynamicQuantizeLinear"


def test_a_crash_is_a_proof_and_its_smallest_part_is_found(tmp_path):
    proof = onnxq.prove(kit.computed_scale(), overrides={"reduce": True}, out=tmp_path)
    assert proof.build.state == "crashed"
    assert "SIGSEGV" in proof.build.reason
    assert proof.build.version.startswith("TensorRT for RTX 1.")
    assert proof.build.log
    reduced = proof.build.reduced
    assert set(reduced.ops) <= {"QuantizeLinear", "DequantizeLinear", "Conv", "Mul"}
    assert "c/Conv" in reduced.nodes
    part = tmp_path / "reduced.onnx"
    assert reduced.path == str(part)
    assert onnxq.prove(part).build.state == "crashed"


def test_a_build_that_takes_too_long_is_stopped():
    proof = onnxq.prove(kit.conv(), overrides={"timeout": 0.05})
    assert proof.build.state == "timed out"
    assert "0.05 s" in proof.build.reason


def test_own_pairs_come_with_the_rule_that_placed_them():
    rng = np.random.default_rng(3)
    model = kit.graph(
        """(float[1,32,8,8] x) => (float[1,32,8,8] y) {
            c = Conv <pads=[1,1,1,1]>(x, w, b) r = Relu(c) y = Conv <pads=[1,1,1,1]>(r, w, b) }""",
        w=rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 17,
        b=kit.BIAS,
    )
    data = {"x": rng.standard_normal((4, 32, 8, 8)).astype(np.float32)}
    quantized = onnxq.quantize(model, data, "trt-int8", overrides={"latency": False}).model
    proof = prove(quantized, require_int8=["Conv"])
    assert proof.holds
    assert proof.sites
    assert {one.rule for one in proof.sites} == {"conv"}
    assert {one.state for one in proof.sites} == {"fused"}


def test_float8_runs_where_the_hardware_has_it():
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    model = kit.graph("(float[2,8,64] x) => (float[2,8,64] y) { y = MatMul(x, w) }", 19, w=weight)
    data = {"x": rng.standard_normal((4, 2, 8, 64)).astype(np.float32)}
    quantized = onnxq.quantize(model, data, "trt-fp8", overrides={"latency": False}).model
    (node,) = prove(quantized, compute_capability="8.9").nodes
    assert (node.type, node.types) == ("float8", "float8 x float8 -> float16")
    older = onnxq.prove(quantized, overrides={"compute_capability": "8.6"})
    assert older.build.state == "failed"
    assert "fp8_e4m3" in older.build.reason


def test_pools_may_add_up_in_float32():
    weight = np.random.default_rng(0).standard_normal((8, 8, 1, 1)).astype(np.float16)
    body = "(float16[1,8,6,6] x) => (float16[1,8,1,1] y) { a = Conv(x, w) b = Relu(a) y = GlobalAveragePool(b) }"
    proof = prove(kit.graph(body, 19, w=weight), forbid=["float32"])
    (forbidden,) = proof.requirements
    assert (len(proof.nodes), len(forbidden.nodes), forbidden.unmet) == (2, 1, ())
