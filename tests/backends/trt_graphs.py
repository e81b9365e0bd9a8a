"""A float graph for each placement rule of the trt target: which tensors get a pair, and what TensorRT makes of it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

C3 = "<pads=[1,1,1,1], kernel_shape=[3,3]>"
W3 = (32, 32, 3, 3)
X = "float[N,32,14,14] x"
Y = "float[N,32,14,14] y"


@dataclass(frozen=True)
class Case:
    """pairs: activation tensors with a pair. int8, floats: heavy kernels of each kind in the engine.

    refused: node -> part of the reason. groups: sets of tensors that share one scale.
    """

    text: str
    weights: dict[str, Any]
    pairs: frozenset[str]
    int8: int
    floats: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    groups: tuple[frozenset[str], ...] = ()


def _case(body: str, pairs: str, int8: int, y: str = Y, weights: dict[str, Any] | None = None,
          **more: Any) -> Case:  # fmt: skip
    """A graph of a map; its weights are `w` and `v` of 3x3 kernels where no others are given."""
    found = weights or {"w": W3, "v": W3}
    return Case(f"g ({X}) => ({y}) {{ {body} }}", found, frozenset(pairs.split()), int8, **more)


def _activated(body: str, end: str = "r") -> Case:
    """conv -> activation -> conv: pairs in front of the two convolutions (at `end`), none in between."""
    weights = {"w": W3, "b": (32,), "v": W3}
    return _case(f"a = Conv {C3}(x, w, b) {body} y = Conv {C3}(r, v)", f"x {end}", 2, weights=weights)


POINT = (32, 32, 1, 1)
CASES: dict[str, Case] = {
    "conv-relu": _activated("r = Relu(a)"),
    "conv-leaky-relu": _activated("r = LeakyRelu <alpha=0.1>(a)"),
    "conv-silu": _activated("s = Sigmoid(a) r = Mul(a, s)"),
    "conv-hard-swish": _activated("r = HardSwish(a)"),
    "conv-gelu": _activated(
        "h = Constant <value_float=1.4142135>() o = Constant <value_float=1.0>() c = Constant <value_float=0.5>() "
        "d = Div(a, h) e = Erf(d) f = Add(e, o) m = Mul(a, f) r = Mul(m, c)",
        end="m",  # the factor 0.5 goes into the weights behind
    ),
    "conv-bn-relu": _case(
        f"a = Conv {C3}(x, w) n = BatchNormalization(a, s, t, m, p) r = Relu(n) y = Conv {C3}(r, v)", "x r", 2,
        weights={"w": W3, "v": W3, "s": (32,), "t": (32,), "m": (32,), "p": np.full(32, 0.5, np.float32)},
    ),
    "depthwise": _case(
        "a = Conv <pads=[1,1,1,1], group=32>(x, w, b) r = Relu(a) y = Conv(r, v)", "x r", 2,
        weights={"w": (32, 1, 3, 3), "b": (32,), "v": POINT},
    ),
    "conv-1d": Case(
        "g (float[N,32,64] x) => (float[N,32,60] y) { a = Conv(x, w) r = Relu(a) y = Conv(r, v) }",
        {"w": (32, 32, 3), "v": (32, 32, 3)}, frozenset({"x", "r"}), 2,
    ),
    # The skip is the block's input: its pair is the first convolution's too.
    "residual-identity": _case(
        f"s = Conv {C3}(x, w) i = Relu(s) a = Conv {C3}(i, w) r = Relu(a) c = Conv {C3}(r, v) "
        f"d = Add(c, i) e = Relu(d) y = Conv {C3}(e, v)", "x i r e", 4,
    ),
    # Two convolutions meet: the one farther from the fork takes the sum in, the other one's result gets the pair.
    "residual-downsample": _case(
        f"s = Conv {C3}(x, w) i = Relu(s) a = Conv {C3}(i, w) r = Relu(a) c = Conv {C3}(r, v) "
        f"p = Conv(i, z) d = Add(p, c) e = Relu(d) y = Conv {C3}(e, v)", "x i r p e", 5,
        weights={"w": W3, "v": W3, "z": POINT},
    ),
    # A linear bottleneck: what is added is the sum before.
    "residual-linear": _case(
        f"i = Conv {C3}(x, w) a = Conv(i, z) r = Clip(a, lo, hi) c = Conv(r, u) d = Add(i, c) "
        "b = Conv(d, z) k = Clip(b, lo, hi) f = Conv(k, u) h = Add(d, f) y = Conv(h, u)", "x i r d k h", 6,
        weights={"w": W3, "z": POINT, "u": POINT, "lo": np.float32(0), "hi": np.float32(6)},
    ),
    # Both sides are results of one convolution: nothing to take in.
    "no-residual": _case(f"a = Conv {C3}(x, w) r = Relu(a) s = Sigmoid(a) d = Add(r, s) y = Conv {C3}(d, v)", "x d", 2),
    "concat": _case(
        f"a = Conv {C3}(x, w) r = Relu(a) c = Conv {C3}(r, v) s = Relu(c) d = Concat <axis=1>(r, s) "
        f"y = Conv {C3}(d, z)", "x r d", 3, weights={"w": W3, "v": W3, "z": (32, 64, 3, 3)},
        groups=(frozenset({"r", "d"}),),
    ),
    "concat-alone": _case(
        f"a = Conv {C3}(x, w) c = Conv {C3}(x, v) d = Concat <axis=1>(a, c) y = Conv {C3}(d, z)", "x d", 3,
        weights={"w": W3, "v": W3, "z": (32, 64, 3, 3)},
    ),
    "max-pool": _case(
        f"a = Conv {C3}(x, w) m = MaxPool <kernel_shape=[2,2], strides=[2,2]>(a) y = Conv {C3}(m, v)", "x m", 2,
        y="float[N,32,7,7] y",
    ),
    "max-pool-shared": _case(
        f"a = Conv {C3}(x, w) m = MaxPool <kernel_shape=[2,2], strides=[2,2]>(a) y = Conv {C3}(m, v) "
        f"z = Conv {C3}(a, v)", "x a m", 3, y="float[N,32,7,7] y, float[N,32,14,14] z",
        groups=(frozenset({"a", "m"}),),
    ),
    "average-pool": _case(
        f"a = Conv {C3}(x, w) m = AveragePool <kernel_shape=[2,2], strides=[2,2]>(a) y = Conv {C3}(m, v)", "x m", 2,
        y="float[N,32,7,7] y", refused={"averagepool1": "averages in float"},
    ),
    "conv-transpose": _case(
        f"a = Conv {C3}(x, w) t = ConvTranspose <strides=[2,2], kernel_shape=[2,2]>(a, z) y = Conv {C3}(t, v)", "x t",
        2, y="float[N,32,28,28] y", weights={"w": W3, "v": W3, "z": (32, 32, 2, 2)}, floats=1,
        refused={"convtranspose1": "transposed convolutions in float"},
    ),
    "squeeze-excite": _case(
        f"a = Conv {C3}(x, w) m = GlobalAveragePool(a) p = Conv(m, u) q = Relu(p) s = Conv(q, z) h = Sigmoid(s) "
        f"t = Mul(a, h) y = Conv {C3}(t, v)", "x m q t", 4,
        weights={"w": W3, "v": W3, "u": (16, 32, 1, 1), "z": (32, 16, 1, 1)},
    ),
    "resize": Case(
        f"g ({X}) => (float[N,32,28,28] y) <float[4] k = {{1.0, 1.0, 2.0, 2.0}}> {{ a = Conv {C3}(x, w) "
        f'm = Resize <mode="nearest">(a, , k) y = Conv {C3}(m, v) }}', {"w": W3, "v": W3}, frozenset({"x", "m"}), 2,
    ),
    "gemm-last-layer": Case(
        f"g (float[8,32,14,14] x) => (float[8,10] y) {{ a = Conv {C3}(x, w) m = GlobalAveragePool(a) "
        "f = Flatten(m) y = Gemm <transB=1>(f, v, b) }",
        {"w": W3, "v": (10, 32), "b": (10,)}, frozenset({"x", "f"}), 2,
    ),
    "gemm-one-column": Case(
        "g (float[8,64] x) => (float[8,1] y) { a = Gemm <transB=1>(x, w, b) r = Relu(a) y = Gemm(r, v) }",
        {"w": (64, 64), "b": (64,), "v": (64, 1)}, frozenset({"x"}), 1, refused={"gemm2": "one column"},
    ),
    "gemm-one-row": _case(
        f"a = Conv {C3}(x, w) m = GlobalAveragePool(a) f = Flatten(m) y = Gemm <transB=1>(f, v, b)", "x", 1,
        y="float[N,10] y", weights={"w": W3, "v": (10, 32), "b": (10,)}, floats=1, refused={"gemm3": "one row"},
    ),
    # Query, key and value share one pair; LayerNorm and the residual stream have none.
    "layer-norm": Case(
        "g (float[N,16,64] x) => (float[N,16,64] y) { n = LayerNormalization(x, s, t) q = MatMul(n, w) "
        "k = MatMul(n, v) d = Add(q, k) e = Add(d, x) m = LayerNormalization(e, s, t) y = MatMul(m, z) }",
        {"w": (64, 64), "v": (64, 64), "z": (64, 64), "s": (64,), "t": (64,)}, frozenset({"n", "m"}),
        2,  # the two that read one pair are one kernel
    ),
}  # fmt: skip

ATTENTION = """g (float[N,16,64] x, float[N,1,1,16] mask) => (float[N,16,64] y)
    <int64[4] heads = {0, 16, 4, 16}, int64[3] whole = {0, 16, 64}, float scale = {0.25}> {
    q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv) q1 = Reshape(q0, heads) k1 = Reshape(k0, heads)
    v1 = Reshape(v0, heads) q = Transpose <perm=[0,2,1,3]>(q1) k = Transpose <perm=[0,2,3,1]>(k1)
    v = Transpose <perm=[0,2,1,3]>(v1) s0 = MatMul(q, k) s1 = Mul(s0, scale) s2 = Add(s1, mask)
    p = Softmax <axis=-1>(s2) o0 = MatMul(p, v) o1 = Transpose <perm=[0,2,1,3]>(o0) o = Reshape(o1, whole)
    y = MatMul(o, wo)
}"""
ATTENTION_WEIGHTS = dict.fromkeys(("wq", "wk", "wv", "wo"), (64, 64))

# One weight for query, key and value, cut up behind it.
QKV = """g (float[N,16,64] x) => (float[N,16,64] y)
    <int64[5] parts = {0, 16, 3, 4, 16}, int64[3] whole = {0, 16, 64}, int64[3] ones = {1, 1, 1},
     int64[1] first = {0}, float scale = {0.25}> {
    h = MatMul(x, w) i = Add(h, b) r = Reshape(i, parts) t = Transpose <perm=[2,0,3,1,4]>(r)
    q0, k0, v0 = Split <axis=0>(t, ones) q1 = Squeeze(q0, first) k1 = Squeeze(k0, first) v = Squeeze(v0, first)
    q = Mul(q1, scale) k = Transpose <perm=[0,1,3,2]>(k1) s = MatMul(q, k) p = Softmax <axis=-1>(s)
    o0 = MatMul(p, v) o1 = Transpose <perm=[0,2,1,3]>(o0) o = Reshape(o1, whole) y = MatMul(o, wo)
}"""
QKV_WEIGHTS = {"w": (64, 192), "b": (192,), "wo": (64, 64)}
# The same as a Gemm on rows, as GPT-2 has it.
QKV_ROWS = """g (float[16,64] x) => (float[16,64] y)
    <int64[3] tokens = {1, 16, 192}, int64[4] heads = {1, 16, 4, 16}, int64[2] whole = {16, 64},
     int64[3] each = {64, 64, 64}, float scale = {0.25}> {
    i = Gemm(x, w, b) r = Reshape(i, tokens) q0, k0, v0 = Split <axis=2>(r, each) q1 = Reshape(q0, heads)
    k1 = Reshape(k0, heads) v1 = Reshape(v0, heads) q = Transpose <perm=[0,2,1,3]>(q1)
    k = Transpose <perm=[0,2,3,1]>(k1) v = Transpose <perm=[0,2,1,3]>(v1) s = MatMul(q, k) t = Mul(s, scale)
    p = Softmax <axis=-1>(t) o0 = MatMul(p, v) o1 = Transpose <perm=[0,2,1,3]>(o0) o = Reshape(o1, whole)
    y = MatMul(o, wo)
}"""
