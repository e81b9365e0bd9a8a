"""Nodes and pairs judged by lists of kernels as engines give them, and why some are not fused: nothing is built."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.annotate import WeightSums, inspect_model
from onnxq.backends import find_engine
from onnxq.backends.engine import Kernel, Tensor
from onnxq.engines.prove.judge import find_heavy_nodes, judge_model, judge_optimizer_sums, judge_sums
from onnxq.engines.prove.proof import NodeProof, SiteProof, SiteState
from onnxq.engines.prove.reasons import Reasons
from onnxq.graph import GraphIndex, infer_shapes
from onnxq.sites import LeftFloat
from tests.engines import kit


def tensor(dtype: str) -> Tensor:
    return Tensor(name="t", dtype=dtype, shape=(1, 32, 16, 16))


def kernel(name: str, kind: str, nodes: str, read: str, written: str = "float32", weight: str = "") -> Kernel:
    """A kernel that computes `nodes` (by the first parts of their names) of types; weight: of its constant."""
    named = [f"{one}/{OPS[one]}" for one in nodes.split()]
    weights = (Tensor(name="w", dtype=weight, shape=(32, 32, 3, 3)),) if weight else ()
    inputs = tuple(map(tensor, read.split()))
    return Kernel(name=name, kind=kind, nodes=tuple(named), inputs=inputs, weights=weights, outputs=(tensor(written),))


OPS = {
    "xq": "QuantizeLinear", "xd": "DequantizeLinear", "wd": "DequantizeLinear", "c": "Conv", "r": "Relu",
    "rq": "QuantizeLinear", "rd": "DequantizeLinear", "d": "Conv", "a": "Add", "y": "Relu", "q": "QuantizeLinear",
}  # fmt: skip


def judged(proto: onnx.ModelProto, *kernels: Kernel) -> tuple[dict[str, NodeProof], dict[str, SiteProof]]:
    inspection = inspect_model(infer_shapes(proto))
    index = GraphIndex(inspection.model)
    nodes, sites = judge_model(
        index, inspection, kernels, Reasons(find_engine("tensorrt-rtx"), index, inspection.pairs)
    )
    return {one.node: one for one in nodes}, {one.site: one for one in sites}


QUANTIZES = kernel("q", "kgen", "xq", "float32", "int8")
# The first convolution of `kit.residual` in int8, with its Relu and the quantization behind it.
FIRST = kernel("first", "correlation", "xd wd c r rq", "int8", "int8", weight="int8")
SECOND = kernel("second", "correlation", "rd wd d a y xd", "int8 int8", "float32", weight="int8")


def test_integers_that_reach_every_reader_are_fused() -> None:
    nodes, sites = judged(kit.residual(), QUANTIZES, FIRST, SECOND)
    assert {name: one.type for name, one in nodes.items()} == {"c/Conv": "int8", "d/Conv": "int8"}
    assert {name: (one.state, one.unfused) for name, one in sites.items()} == dict.fromkeys(
        ("x", "w", "r"), (SiteState.FUSED, ())
    )
    assert sites["x"].readers == ("c/Conv", "a/Add")
    assert set(sites["x"].kernels) == {"first", "second"}
    assert (nodes["c/Conv"].kernel, nodes["c/Conv"].kernels) == ("first", ("first",))
    assert all(one.reason == "" for one in (*nodes.values(), *sites.values()))


def test_a_reader_in_float_makes_a_pair_partly_fused() -> None:
    adds = kernel("adds", "kgen", "a y", "float32 float32")
    alone = kernel("alone", "reformat", "xd", "int8", "float32")
    second = kernel("second", "correlation", "rd wd d", "int8", "float32", weight="int8")
    _, sites = judged(kit.residual(), QUANTIZES, FIRST, second, adds, alone)
    assert (sites["x"].state, sites["x"].unfused) == (SiteState.FUSED, ())  # the Add's kernel is not known to read it
    slow = kernel("slow", "correlation", "xd wd c r rq", "float32", "int8", weight="float32")
    nodes, sites = judged(kit.residual(), QUANTIZES, slow, SECOND)
    assert nodes["c/Conv"].type == "float32"
    assert (sites["x"].state, sites["x"].unfused) == (SiteState.PARTLY, ("c/Conv",))
    assert sites["x"].reason.startswith("c/Conv runs in float32: ")
    assert (sites["w"].state, sites["w"].unfused) == (SiteState.PARTLY, ("c/Conv",))


def test_what_the_list_does_not_name_is_unseen() -> None:
    nodes, sites = judged(kit.residual(), QUANTIZES, SECOND)
    assert nodes["c/Conv"].type == "unseen"
    assert "merged with an equal one or computed away" in nodes["c/Conv"].reason
    # Of its two readers one is seen, and takes the integers.
    assert sites["x"].state is SiteState.FUSED
    assert {one.state for one in judged(kit.residual())[1].values()} == {SiteState.UNSEEN}


def test_weights_that_the_kernel_reads_in_fewer_bits_are_fused_though_it_computes_in_float() -> None:
    fusion = Kernel(
        name="k", kind="runtime_fusion", nodes=("m/MatMul", "wd/DequantizeLinear"), inputs=(tensor("float32"),),
        weights=(Tensor(name="w", dtype="int4", shape=(64, 64)),), outputs=(tensor("float32"),),
    )  # fmt: skip
    nodes, sites = judged(kit.int4_matmul(), fusion)
    assert (nodes["m/MatMul"].type, nodes["m/MatMul"].stored) == ("int4 weights, float32", "int4")
    assert sites["w"].state is SiteState.FUSED
    unpacked = replace(fusion, weights=(replace(fusion.weights[0], dtype="float32"),))
    assert judged(kit.int4_matmul(), unpacked)[1]["w"].state is SiteState.UNFUSED


@pytest.mark.parametrize(
    ("nodes", "read", "state"),
    [
        ("q", "float32", SiteState.UNFUSED),  # quantized and taken back in one kernel
        ("d", "int8", SiteState.UNFUSED),  # dequantized by itself
        ("d y", "int8", SiteState.FUSED),
        ("q d y", "int8", SiteState.UNFUSED),
    ],
)
def test_a_pair_is_fused_where_integers_go_from_kernel_to_kernel(nodes: str, read: str, state: SiteState) -> None:
    names = {"q": "q/QuantizeLinear", "d": "d/DequantizeLinear", "y": "y/Tanh"}
    one = Kernel(
        name="one", kind="kgen", nodes=tuple(names[part] for part in nodes.split()), inputs=(tensor(read),),
        outputs=(tensor("float32"),),
    )  # fmt: skip
    tanh = Kernel(
        name="tanh", kind="kgen", nodes=("y/Tanh",), inputs=(tensor("float32"),), outputs=(tensor("float32"),)
    )
    dequantizes = Kernel(name="dq", kind="kgen", nodes=("d/DequantizeLinear",), inputs=(tensor("int8"),))
    found = [one, tanh, *([dequantizes] if nodes == "q" else [])]
    assert judged(kit.round_trip(), *found)[1]["a"].state is state


def test_a_pair_in_front_of_an_output_counts_by_what_its_kernel_reads() -> None:
    pooled = Kernel(
        name="pool", kind="maxpool", nodes=("vd/DequantizeLinear", "m/MaxPool", "mq/QuantizeLinear"),
        inputs=(tensor("int8"),), outputs=(tensor("int8"),),
    )  # fmt: skip
    last = Kernel(name="last", kind="kgen", nodes=("y/DequantizeLinear",), inputs=(tensor("int8"),))
    nodes, sites = judged(kit.pools(), pooled, last)
    assert nodes["m/MaxPool"].type == "int8"
    assert (sites["y"].state, sites["y"].readers) == (SiteState.FUSED, ())
    real = replace(last, inputs=(tensor("float32"),))
    assert judged(kit.pools(), pooled, real)[1]["y"].unfused == ("the model's output",)


def test_products_and_pools_are_heavy_but_not_those_of_constants() -> None:
    proto = kit.graph(
        """(float[1,2,4,4] x) => (float[1,2,4,4] y) {
            k = MatMul(m, m) a = MaxPool<kernel_shape=[1,1]>(x) b = Relu(a) c = Conv(b, w) y = Add(c, k) }""",
        m=kit.np.ones((4, 4), kit.np.float32), w=kit.np.ones((2, 2, 1, 1), kit.np.float32),
    )  # fmt: skip
    assert [node.name for node in find_heavy_nodes(GraphIndex(proto))] == ["a/MaxPool", "c/Conv"]


ORT_CONV = Kernel(
    name="k", kind="QLinearConv", nodes=("c/Conv",), inputs=(tensor("uint8"),),
    weights=(Tensor(name="w", dtype="int8", shape=(32, 32, 3, 3)),), outputs=(tensor("uint8"),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("found", "exact"),
    [
        (None, ""),
        (ORT_CONV, ""),
        (replace(ORT_CONV, inputs=(tensor("int8"),)), "computed as int8 by int8"),
        (replace(ORT_CONV, kind="FusedConv", inputs=(tensor("float32"),)), "computed in int8 weights, float32"),
    ],
)
def test_sums_are_exact_where_the_kernel_taken_adds_otherwise(found: Kernel | None, exact: str) -> None:
    index = GraphIndex(infer_shapes(kit.ort_residual()))
    weights = {one.node: one for one in judge_sums(index, [] if found is None else [found], find_engine("ort").words)}
    assert weights["c/Conv"].exact == exact
    assert weights["d/Conv"].exact == ""
    assert weights["c/Conv"].saturates is (exact == "")


def test_weights_that_the_optimizer_rounds_itself_are_told_once() -> None:
    """The optimized graph's own integers belong to a node whose weight the file holds in float."""
    optimized = GraphIndex(infer_shapes(kit.ort_residual()))
    plain = kit.graph(
        "(float[1,32,16,16] x) => (float[1,32,16,16] y) { f = Conv<pads=[1,1,1,1]>(x, w) y = Relu(f) }",
        w=kit.WEIGHT.astype(kit.np.float32),
    )
    made = [replace(ORT_CONV, name="c/Conv", nodes=("f/Conv", "y/Relu"))]
    index = GraphIndex(plain)
    (found,) = judge_optimizer_sums(index, made, optimized, ())
    assert (found.node, found.op, found.rows) == ("f/Conv", "Conv", 32)
    known: tuple[WeightSums, ...] = (found,)
    assert judge_optimizer_sums(index, made, optimized, known) == ()


def test_a_pair_placed_for_another_node_s_sake_is_not_called_waste() -> None:
    model = kit.conv()
    pair = onnxq.inspect(model).pairs[0]
    told = {
        engine: Reasons(find_engine(engine), GraphIndex(model), ()).explain_site(pair, "matmul-qkv", ("r",), {})
        for engine in ("tensorrt", "ort")
    }
    assert "keeps the product in front of it in int8" in told["tensorrt"]
    assert "reads floats" in told["ort"]


def explained(
    proto: onnx.ModelProto, node: str, engine: str = "tensorrt-rtx", kind: str = "float32", **known: Any
) -> str:
    typed = infer_shapes(proto)
    index = GraphIndex(typed)
    return Reasons(find_engine(engine), index, onnxq.inspect(typed).pairs, **known).explain_node(
        index.find_node(node), kind, "types"
    )


OTHER = "its pairs are in place, but the engine took another kernel: types"
PAIR = "xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z)"
WHY: dict[str, tuple[onnx.ModelProto, str, str, str]] = {
    "nothing in the model shows it": (kit.conv(), "c/Conv", "tensorrt-rtx", OTHER),
    "a scale in brackets": (
        kit.conv(np.full(1, 0.05, np.float32), np.zeros(1, np.int8)), "c/Conv", "tensorrt-rtx", "shape [1]",
    ),
    "which is one for ONNX Runtime": (
        kit.conv(np.full(1, 0.05, np.float32), np.zeros(1, np.int8)), "c/Conv", "ort", "its result is not quantized",
    ),
    "no pair in front": (kit.only_weights(), "c/Conv", "tensorrt-rtx", "its input has no pair"),
    "no pair on the weight": (
        kit.graph(f"(float[1,32,16,16] x) => (float[1,32,16,16] c) {{ {PAIR} c = Conv<pads=[1,1,1,1]>(xd, k) }}",
                  s=kit.SCALE, z=kit.ZERO, k=kit.WEIGHT.astype(np.float32)),
        "c/Conv", "tensorrt-rtx", "its weight has no pair",
    ),
    "scales along the rows": (
        kit.wrong_axis(), "y/MatMul", "tensorrt-rtx", "lie along axis 0, its channels along axis 1",
    ),
    "no kernel": (kit.transposed(), "y/ConvTranspose", "tensorrt-rtx", "TensorRT has no int8 kernel for ConvTranspose"),
    "no kernel there either": (kit.transposed(), "y/ConvTranspose", "ort", "ONNX Runtime has no int8 kernel"),
    "cut up behind": (kit.sliced(), "m/MatMul", "tensorrt-rtx", "give its result a pair"),
    "an activation in between": (kit.ort_residual(zero=128), "c/Conv", "ort", "Relu between it and QuantizeLinear"),
    "nothing behind": (kit.residual(), "d/Conv", "ort", "its result is not quantized, and ONNX Runtime fuses it only"),
    "a product that writes float": (kit.ort_linear(), "m/MatMul", "ort", OTHER),
    "signed data": (
        kit.graph(f"(float[1,32,16,16] x) => (float[1,32,16,16] y) {{ {PAIR} kd = DequantizeLinear(k, s, z) "
                  "c = Conv<pads=[1,1,1,1]>(xd, kd) cq = QuantizeLinear(c, s, z) y = DequantizeLinear(cq, s, z) }",
                  s=kit.SCALE, z=kit.ZERO, k=kit.WEIGHT),
        "c/Conv", "ort", "quantize activations to uint8",
    ),
    "per channel of an activation": (
        kit.graph("(float[1,4,64] x) => (float[1,4,8] m) { xq = QuantizeLinear<axis=1>(x, s, z) "
                  "xd = DequantizeLinear<axis=1>(xq, s, z) m = MatMul(xd, xd) }",
                  s=np.full(4, 0.1, np.float32), z=np.zeros(4, np.int8)),
        "m/MatMul", "tensorrt-rtx", "its input is quantized per channel: activations need one scale",
    ),
    "sixteen bits": (
        kit.graph("(float[4,4] x) => (float[4,4] m) { xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) "
                  "m = MatMul(xd, xd) }", 21, s=kit.SCALE, z=np.int16(0)),
        "m/MatMul", "ort", "its input is int16, for which there is no kernel",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("proto", "node", "engine", "reason"), WHY.values(), ids=WHY)
def test_why_a_node_does_not_run_in_int8(proto: onnx.ModelProto, node: str, engine: str, reason: str) -> None:
    assert reason in explained(proto, node, engine)


def test_the_plans_own_reason_comes_first_and_an_older_gpu_before_the_pairs() -> None:
    left = LeftFloat("c/Conv", "it does not pay")
    assert explained(kit.only_weights(), "c/Conv", left=[left]) == "the plan left it float: it does not pay"
    assert "8.0 or more" in explained(kit.only_weights(), "c/Conv", capability=(7, 5))
    assert explained(kit.only_weights(), "c/Conv", capability=(8, 0)) == "its input has no pair"
    assert "does not name it" in explained(kit.conv(), "c/Conv", kind="unseen")
    assert explained(kit.transposed(), "y/ConvTranspose", kind="unseen").endswith("its list names no kernel for it")


def test_why_a_pair_did_not_fuse() -> None:
    index = GraphIndex(infer_shapes(kit.round_trip()))
    (pair,) = onnxq.inspect(kit.round_trip()).pairs
    reasons = Reasons(find_engine("tensorrt-rtx"), index, [pair])
    slow = NodeProof(node="n", op="Conv", type="float32", reason="why")
    assert reasons.explain_site(pair, "", ("n", "n"), {"n": slow}) == "n runs in float32: why"
    assert reasons.explain_site(pair, "", ("y/Tanh",), {}).startswith("Tanh reads floats: ")
    assert reasons.explain_site(pair, "", (), {}).startswith("no kernel in the engine's list names it")
    assert reasons.explain_site(replace(pair, dequantize=""), "", (), {}) == "nothing dequantizes it"
