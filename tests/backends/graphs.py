"""A float graph for each ORT placement rule, in ONNX's text form, with the operator ORT must make of it."""

import re
from typing import Any

import numpy as np
import onnx

from onnxq.backends import Candidate, Target
from onnxq.graph import GraphIndex
from tests.networks import add_arrays, parse_text


def model(text: str, *, weights: dict[str, Any], seed: int = 0) -> onnx.ModelProto:
    """Parse a graph and give it seeded random float32 initializers of the shapes named, and the arrays named."""
    rng, proto = np.random.default_rng(seed), parse_text(text)
    for name, value in weights.items():
        if isinstance(value, tuple):
            fan = max(1, int(np.prod(value[1:])) if len(value) > 1 else 4)
            value = (rng.standard_normal(value) / np.sqrt(fan)).astype(np.float32)
        add_arrays(proto.graph, **{name: value})
    for k, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type.lower()}{k}"
    onnx.checker.check_model(proto)
    return proto


CONV = "<pads=[1,1,1,1], kernel_shape=[3,3]>"

# Weights of convolutions of maps; a graph has those that its text names.
MAP, KERNEL = "float[N,32,14,14]", (32, 32, 3, 3)
Weights = dict[str, tuple[int, ...]]


def _between(
    middle: str, op: str, count: int, y: str = MAP, **weights: tuple[int, ...]
) -> tuple[str, Weights, str, int]:
    """a = Conv(x, w), and what makes y of it."""
    text = f"g ({MAP} x) => ({y} y) {{ a = Conv {CONV}(x, w) {middle} }}"
    return text, {"w": KERNEL, **(weights or {"v": KERNEL})}, op, count


_BIASED = {"w": KERNEL, "b": (32,), "v": KERNEL, "c": (32,)}
_LINEAR = "g (float[{0},128] x) => (float[{0},256] y) {{ a = MatMul(x, w) y = Add(a, b) }}"
_LINEAR_WEIGHTS = {"w": (128, 256), "b": (256,)}
# rule -> (graph text, weight shapes, operator in ORT's optimized graph, how many)
GRAPHS: dict[str, tuple[str, Weights, str, int]] = {
    "conv": (
        f"g ({MAP} x) => ({MAP} y) {{ a = Conv {CONV}(x, w, b) r = Relu(a) y = Conv {CONV}(r, v, c) }}",
        _BIASED, "QLinearConv", 2,
    ),
    "conv-clip": (
        f"""g ({MAP} x) => ({MAP} y) <float low = {{0.0}}, float high = {{0.5}}> {{
            a = Conv {CONV}(x, w, b) r = Clip(a, low, high) y = Conv {CONV}(r, v, c) }}""",
        _BIASED, "QLinearConv", 2,
    ),
    "gemm": (
        "g (float[N,256] x) => (float[N,256] y) { y = Gemm <transB=1>(x, w, b) }",
        {"w": (256, 256), "b": (256,)}, "QGemm", 1,
    ),
    "gemm-chain": (
        "g (float[N,256] x) => (float[N,64] y) { a = Gemm <transB=1>(x, w, b) r = Relu(a) y = Gemm(r, v, c) }",
        {"w": (256, 256), "b": (256,), "v": (256, 64), "c": (64,)}, "QGemm", 2,
    ),
    "matmul": (_LINEAR.format("N,16"), _LINEAR_WEIGHTS, "MatMulIntegerToFloat", 1),
    "matmul-static": (_LINEAR.format("1,16"), _LINEAR_WEIGHTS, "MatMulIntegerToFloat", 1),
    "matmul-2d": (_LINEAR.format("16"), _LINEAR_WEIGHTS, "MatMulIntegerToFloat", 1),
    "residual-add": _between(
        f"r = Relu(a) s = Conv {CONV}(r, v) t = Add(s, r) u = Relu(t) y = Conv {CONV}(u, z)", "QLinearAdd", 1,
        v=KERNEL, z=KERNEL,
    ),
    "gate-mul": (
        f"""g (float[N,64,14,14] x) => (float[N,64,14,14] y) {{ a = Conv {CONV}(x, w) m = GlobalAveragePool(a)
            p = Conv(m, v) s = Conv(p, z) t = Mul(a, s) y = Conv {CONV}(t, w) }}""",
        {"w": (64, 64, 3, 3), "v": (64, 64, 1, 1), "z": (64, 64, 1, 1)}, "QLinearMul", 1,
    ),
    "concat": _between(
        f"c = Conv {CONV}(a, v) d = Concat <axis=1>(a, c) y = Conv {CONV}(d, z)", "QLinearConcat", 1,
        v=KERNEL, z=(32, 64, 3, 3),
    ),
    "global-average-pool": _between(
        "m = GlobalAveragePool(a) f = Flatten(m) y = Gemm <transB=1>(f, v, b)", "QLinearGlobalAveragePool", 1,
        "float[N,64]", v=(64, 32), b=(64,),
    ),
    "max-pool": _between(
        f"m = MaxPool <kernel_shape=[2,2], strides=[2,2]>(a) y = Conv {CONV}(m, v)", "QLinearConv", 2,
        "float[N,32,7,7]",
    ),
    "leaky-relu": _between(f"m = LeakyRelu <alpha=0.1>(a) y = Conv {CONV}(m, v)", "QLinearLeakyRelu", 1),
    "move": _between(f"m = Transpose <perm=[0,1,3,2]>(a) y = Conv {CONV}(m, v)", "QLinearConv", 2),
    "lstm": (
        "g (float[8,1,64] x) => (float[8,1,1,64] y) { y = LSTM <hidden_size=64>(x, w, r) }",
        {"w": (1, 256, 64), "r": (1, 256, 64)}, "DynamicQuantizeLSTM", 1,
    ),
    "resize-nearest": (
        f"""g (float[1,32,14,14] x) => (float[1,32,28,28] y) <float[4] sizes = {{1.0, 1.0, 2.0, 2.0}}> {{
            a = Conv {CONV}(x, w) m = Resize <mode="nearest">(a, , sizes) y = Conv {CONV}(m, v) }}""",
        {"w": KERNEL, "v": KERNEL}, "QLinearConv", 2,
    ),
}  # fmt: skip


# Weights that the text of a node may name.
CONSTANTS = {"w": (8, 8, 1, 1), "m": (8, 8), "b": (8,), "s": (2, 3, 4), "one": (1,), "f": (4,), "column": (8, 1)}


def judge(target: Target, text: str, node: str = "n") -> tuple[str | None, str]:
    """The rule of the target that takes a node of a graph, and the reason why none does, "" without one."""
    words = set(re.findall(r"\w+", text.partition("{")[2]))
    proto = model(text, weights={name: shape for name, shape in CONSTANTS.items() if name in words})
    index = GraphIndex(onnx.shape_inference.infer_shapes(proto))
    rule, reason = target.rule_for(Candidate(index.find_node(node), index, {}))
    return None if rule is None else rule.name, "" if reason is None else reason.reason
