"""Why nodes stay float and pairs do not fuse."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_engine
from onnxq.engines.prove.proof import NodeProof
from onnxq.engines.prove.reasons import Reasons
from onnxq.graph import GraphIndex, infer_shapes
from onnxq.sites import LeftFloat
from tests.engines import kit


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
