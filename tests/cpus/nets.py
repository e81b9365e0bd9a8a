"""Small float networks of every heavy operator that ONNX Runtime runs in integers, and what they read.

Their weights are spread evenly, so that many are large, and what they read is mostly large and positive: as much as can
overflow does.
"""

from functools import cache
from typing import Any

import numpy as np
import onnx

import onnxq
from onnxq.runtime import Session
from tests.cpus import compare
from tests.networks import add_arrays, parse_text
from tests.pipeline.models import quantize

Array = np.ndarray[Any, Any]

# name -> (graph, shapes of its weights). The input is named x, its first dimension is free.
NETS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "conv": (
        """g (float[N,8,9,9] x) => (float[N,12,9,9] y) {
            a = Conv <pads=[1,1,1,1]>(x, w, b) r = Relu(a) y = Conv (r, v) }""",
        {"w": (16, 8, 3, 3), "b": (16,), "v": (12, 16, 1, 1)},
    ),
    "odd-conv": (
        """g (float[N,3,9,9] x) => (float[N,8,4,4] y) {
            a = Conv <strides=[2,2]>(x, w) r = Relu(a) y = Conv <pads=[1,1,1,1]>(r, v) }""",
        {"w": (7, 3, 3, 3), "v": (8, 7, 3, 3)},
    ),
    "one-channel": (
        "g (float[N,1,10,10] x) => (float[N,6,8,8] y) { a = Conv (x, w) r = Relu(a) y = Conv (r, v) }",
        {"w": (8, 1, 3, 3), "v": (6, 8, 1, 1)},
    ),
    "depthwise": (
        """g (float[N,16,8,8] x) => (float[N,8,8,8] y) {
            a = Conv <group=16, pads=[1,1,1,1]>(x, w) r = Relu(a) y = Conv (r, v) }""",
        {"w": (16, 1, 3, 3), "v": (8, 16, 1, 1)},
    ),
    "depthwise-twice": (
        """g (float[N,8,8,8] x) => (float[N,8,8,8] y) {
            a = Conv <group=8, pads=[1,1,1,1]>(x, w) r = Relu(a) y = Conv <group=2>(r, v) }""",
        {"w": (16, 1, 3, 3), "v": (8, 8, 1, 1)},
    ),
    "conv-1-D": (
        "g (float[N,6,20] x) => (float[N,8,16] y) { a = Conv (x, w) r = Relu(a) y = Conv (r, v) }",
        {"w": (16, 6, 3), "v": (8, 16, 3)},
    ),
    "matmul": (
        "g (float[N,10,48] x) => (float[N,10,24] y) { a = MatMul (x, w) c = Add (a, b) r = Relu(c) y = MatMul (r, v) }",
        {"w": (48, 33), "b": (33,), "v": (33, 24)},
    ),
    "gemm": (
        "g (float[N,47] x) => (float[N,16] y) { a = Gemm <transB=1>(x, w, b) r = Relu(a) y = Gemm (r, v, c) }",
        {"w": (64, 47), "b": (64,), "v": (64, 16), "c": (16,)},
    ),
    "two-readers": (
        """g (float[N,32] x) => (float[N,32] y, float[N,32] z) {
            a = MatMul (x, w) r = Relu(a) y = Gemm <transB=1>(r, w, b) z = MatMul (r, w) }""",
        {"w": (32, 32), "b": (32,)},
    ),
    "two-convs": (
        """g (float[N,8,8,8] x) => (float[N,8,8,8] y) {
            a = Conv <pads=[1,1,1,1]>(x, w) r = Relu(a) y = Conv <pads=[1,1,1,1]>(r, w) }""",
        {"w": (8, 8, 3, 3)},
    ),
}


def net(name: str, seed: int = 0) -> onnx.ModelProto:
    """The float network with random weights, three quarters of them positive."""
    text, weights = NETS[name]
    rng, proto = np.random.default_rng(seed), parse_text(text)
    for key, shape in weights.items():
        fan = int(np.prod(shape[1:])) if len(shape) > 2 else max(shape)
        values = rng.uniform(-0.5, 1.5, shape) / fan if len(shape) > 1 else rng.standard_normal(shape) / 8
        add_arrays(proto.graph, **{key: values.astype(np.float32)})
    for k, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type.lower()}{k}"
    onnx.checker.check_model(proto)
    return proto


def samples(proto: onnx.ModelProto, count: int = 32, seed: int = 1) -> dict[str, Array]:
    """Inputs from 0 to 1, most of them near 1."""
    dims = [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim][1:]
    return {"x": (1 - np.random.default_rng(seed).uniform(0, 1, (count, *dims)) ** 3).astype(np.float32)}


@cache
def quantized(name: str, *, effort: str = "fast", saturation: str = "avoid", **wanted: Any) -> onnxq.Result:
    """The network with every site quantized that the target takes. wanted: further overrides."""
    proto = net(name)
    skip = ("promotion",) if effort != "fast" else ()
    return quantize(proto, samples(proto), effort=effort, saturation=saturation, skip=skip, **wanted)


def answers(proto: onnx.ModelProto, feeds: dict[str, Array], *, optimize: bool) -> dict[str, Array]:
    """What ONNX Runtime computes, in one thread."""
    return dict(Session(proto, optimize=optimize, threads=1).run(feeds))


def agreement(wanted: dict[str, Array], found: dict[str, Array]) -> float:
    """The lowest signal-to-noise ratio of any output, in dB."""
    return compare.agreement(list(wanted.values()), [found[name] for name in wanted])
