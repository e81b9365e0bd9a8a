"""Tiny networks to damage, one of each kind that onnxq treats apart; they run in under a millisecond."""

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxq
from tests.networks import add_arrays, parse_text

SAMPLES = 4

_TEXTS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "conv": (
        """g (float[N,3,8,8] x) => (float[N,5] y) {
            a = Conv <pads=[1,1,1,1]>(x, w0, b0) n = BatchNormalization(a, gamma, beta, mean, variance) r = Relu(n)
            c = Conv <pads=[1,1,1,1], group=2>(r, w1, b1) s = Add(c, r) m = GlobalAveragePool(s) f = Flatten(m)
            y = Gemm <transB=1>(f, w2, b2) }""",
        {"w0": (8, 3, 3, 3), "b0": (8,), "gamma": (8,), "beta": (8,), "mean": (8,), "variance": (8,),
         "w1": (8, 4, 3, 3), "b1": (8,), "w2": (5, 8), "b2": (5,)},
    ),
    "attention": (
        """g (float[N,6,16] x) => (float[N,6,16] y, float[N,6,16] h) {
            h = LayerNormalization(x, gamma, beta) q = MatMul(h, wq) k = MatMul(h, wk) v = MatMul(h, wv)
            t = Transpose <perm=[0,2,1]>(k) z = MatMul(q, t) p = Softmax <axis=-1>(z) o = MatMul(p, v)
            u = MatMul(o, wo) b = Add(u, bo) e = Erf(b) y = Mul(e, b) }""",
        {"gamma": (16,), "beta": (16,), "wq": (16, 16), "wk": (16, 16), "wv": (16, 16), "wo": (16, 16), "bo": (16,)},
    ),
    "branches": (
        """g (float[N,8] x, bool c) => (float[N,4] y) {
            r = Relu(x)
            h = If (c) <
                then_branch = yes () => (float[N,4] t) { t = MatMul(r, w0) },
                else_branch = no () => (float[N,4] e) { m = MatMul(r, w1)  e = Add(m, b1) }
            >
            y = MatMul(h, w2) }""",
        {"w0": (8, 4), "w1": (8, 4), "b1": (4,), "w2": (4, 4)},
    ),
    "shapes": (
        """g (float[N,4,6,6] x) => (float[N,3] y) <
            int64[2] halves = {2,2}, int64[1] first = {0}, int64[1] axis = {1}, float zero = {0}
        > {
            a, b = Split <axis=1>(x, halves) c = Concat <axis=1>(b, a)
            d = ConvTranspose <strides=[2,2], kernel_shape=[2,2]>(c, w0) l = Clip(d, zero)
            e = MaxPool <kernel_shape=[2,2], strides=[2,2]>(l) s = Shape(e) n = Gather(s, first)
            j = Concat <axis=0>(n, minus) f = Reshape(e, j) g = Slice(f, first, twenty, axis) y = Gemm(g, w1, b0) }""",
        {"w0": (4, 4, 2, 2), "w1": (20, 3), "b0": (3,)},
    ),
    "recurrent": (
        """g (float[5,N,6] x) => (float[N,3] y) <int64[1] axes = {0}> {
            l, h, c = LSTM <hidden_size=4>(x, w, r, b) s = Squeeze(h, axes) y = MatMul(s, w1) }""",
        {"w": (1, 16, 6), "r": (1, 16, 4), "b": (1, 32), "w1": (4, 3)},
    ),
}  # fmt: skip


def _parsed(name: str) -> onnx.ModelProto:
    text, weights = _TEXTS[name]
    rng, proto = np.random.default_rng(len(name)), parse_text(text)
    for key, shape in weights.items():
        scale = 1 / np.sqrt(np.prod(shape[1:]) or 1) if len(shape) > 1 else 0.25
        value = rng.standard_normal(shape) * scale
        value = np.abs(value) + 0.5 if key in ("gamma", "variance") else value
        add_arrays(proto.graph, **{key: value.astype(np.float32)})
    if name == "shapes":
        add_arrays(proto.graph, minus=np.array([-1]), twenty=np.array([20]))
    for k, node in enumerate(proto.graph.node):
        node.name = f"node_{k}"
    onnx.checker.check_model(proto)
    return proto


def _functions() -> onnx.ModelProto:
    rng = np.random.default_rng(5)
    return parse_text(
        """g (float[N,8] x) => (float[N,8] y) { a = local.layer <slope=0.1>(x, w0)  y = local.layer <slope=0.2>(a, w1) }
        <domain: "local", opset_import: ["" : 17]>
        layer <slope: float = 0.3>(v, w) => (o) { m = MatMul(v, w)  o = LeakyRelu <alpha: float = @slope>(m) }""",
        "local",
        **{name: rng.standard_normal((8, 8)).astype(np.float32) for name in ("w0", "w1")},
    )


def _constants() -> onnx.ModelProto:
    """Weights in Constant nodes, float16 and doubles among them, and one sparse."""
    rng = np.random.default_rng(6)
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.array([1, 2, 3], np.float32), "sparse"),
        numpy_helper.from_array(np.array([0, 9, 20], np.int64), "at"), [8, 4],
    )  # fmt: skip
    half = numpy_helper.from_array(rng.standard_normal((8, 8)).astype(np.float16))
    double = numpy_helper.from_array(rng.standard_normal(8))
    proto = parse_text(
        """g (float[N,8] x) => (float[N,4] y) {
            w = Cast <to=1>(h) b = Cast <to=1>(d) a = Gemm <alpha=0.5>(x, w, b) y = MatMul(a, v) }"""
    )
    for name, value in (("h", {"value": half}), ("d", {"value": double}), ("v", {"sparse_value": sparse})):
        proto.graph.node.insert(0, helper.make_node("Constant", [], [name], **value))
    return proto


def _paired() -> onnx.ModelProto:
    return onnxq.quantize(
        net("conv"), feeds(net("conv")), overrides={"effort": "fast", "latency": False, "threads": 1}
    ).model


_MADE: dict[str, Callable[[], onnx.ModelProto]] = {"functions": _functions, "constants": _constants, "pairs": _paired}
NAMES = (*_TEXTS, *_MADE)


@cache
def net(name: str) -> onnx.ModelProto:
    """A network by name; not to be changed."""
    return _MADE[name]() if name in _MADE else _parsed(name)


def copied(name: str) -> onnx.ModelProto:
    """A network by name, to be changed."""
    return onnx.ModelProto.FromString(net(name).SerializeToString())


def feeds(proto: onnx.ModelProto, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Samples for whatever inputs a model declares; symbols are 2, dims that are absurd are 1."""
    rng = np.random.default_rng(seed)
    stored = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in stored]
    return [{value.name: _sample(rng, value) for value in inputs} for _ in range(SAMPLES)]


def _sample(rng: np.random.Generator, value: onnx.ValueInfoProto) -> np.ndarray:
    tensor = value.type.tensor_type
    shape = [dim.dim_value if 0 <= dim.dim_value <= 64 and dim.HasField("dim_value") else 2 for dim in tensor.shape.dim]
    shape = shape if np.prod(shape) < 1e5 else [1] * len(shape)
    try:
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except (KeyError, TypeError, ValueError):
        dtype = np.dtype(np.float32)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < 0.5)
    return rng.integers(0, 3, shape).astype(dtype) if dtype.kind in "iu" else np.zeros(shape, np.float32).astype(dtype)
