"""Small Q/DQ graphs whose kernels are known, built as people's tools write them."""

import re
from importlib.util import find_spec

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxq.graph import name_nodes
from tests.networks import parse_text

needs_rtx = [pytest.mark.trt, pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="no tensorrt-rtx")]

_RNG = np.random.default_rng(0)
ZERO, SCALE = np.int8(0), np.float32(0.05)
BIAS = _RNG.standard_normal(32).astype(np.float32)
WEIGHT = _RNG.integers(-127, 127, (32, 32, 3, 3)).astype(np.int8)
MATRIX = _RNG.integers(-127, 127, (64, 64)).astype(np.int8)


def graph(text: str, opset: int = 17, **arrays: object) -> onnx.ModelProto:
    """A model from ONNX text; arrays become initializers, nodes are named after their outputs (`conv c` -> c/Conv).

    `pair(x, s, z)` stands for a pair on x, which makes xq and then xd.
    """
    text = re.sub(r"pair\((\w+), (.+?)\)", r"\1q = QuantizeLinear(\1, \2) \1d = DequantizeLinear(\1q, \2)", text)
    return name_nodes(parse_text(f"g {text}", opset=opset, ir=10 if opset > 20 else 8, **arrays))


_CONV = """(float[1,32,16,16] x) => (float[1,32,16,16] y) {
    pair(x, s, z) wd = DequantizeLinear <axis=0>(w, ws, wz)
    c = Conv <pads=[1,1,1,1]>(xd, wd, b) y = Relu(c) }"""


def _weights(weight: np.ndarray = WEIGHT, channels: int = 32) -> dict[str, np.ndarray]:
    return {"w": weight, "ws": np.full(channels, 0.01, np.float32), "wz": np.zeros(channels, np.int8)}


def conv(scale: object = SCALE, zero: object = ZERO, batch: str = "1") -> onnx.ModelProto:
    """A convolution with pairs on input and weight; the scale's shape and the zero point are what tests vary."""
    return graph(_CONV.replace("float[1,", f"float[{batch},"), s=scale, z=zero, b=BIAS, **_weights())


def only_weights() -> onnx.ModelProto:
    """A pair on the weight alone."""
    return graph(_CONV.replace("pair(x, s, z)", "xd = Identity(x)"), b=BIAS, **_weights())


def wrong_axis() -> onnx.ModelProto:
    """A MatMul whose weight has its scales along the rows."""
    text = """(float[1,8,64] x) => (float[1,8,64] y) {
        pair(x, s, z) wd = DequantizeLinear <axis=0>(w, ws, wz) y = MatMul(xd, wd) }"""
    return graph(text, s=SCALE, z=ZERO, **_weights(MATRIX, 64))


def matmul() -> onnx.ModelProto:
    """A MatMul and its bias."""
    text = """(float[1,8,64] x) => (float[1,8,64] y) {
        pair(x, s, z) wd = DequantizeLinear <axis=1>(w, ws, wz) m = MatMul(xd, wd) y = Add(m, b) }"""
    return graph(text, s=SCALE, z=ZERO, b=np.ones(64, np.float32), **_weights(MATRIX, 64))


# A MatMul of float data with a weight in blocks.
BLOCKS = """(float[1,8,64] x) => (float[1,8,64] m) {
    wd = DequantizeLinear <axis=0, block_size=32>(w, ws) m = MatMul(x, wd) }"""


def int4_matmul(dtype: int = TensorProto.INT4) -> onnx.ModelProto:
    """A MatMul with weights of 4 bits in blocks and float data."""
    lowest = 0 if dtype == TensorProto.UINT4 else -7
    weight = helper.make_tensor("w", dtype, (64, 64), _RNG.integers(lowest, 7, 4096))
    return graph(BLOCKS, 21, w=weight, ws=np.full((2, 64), 0.01, np.float32))


def attention(pairs: bool, kind: str = "float") -> onnx.ModelProto:
    """QKᵀ, Softmax, PV: with pairs on all four operands and the result, or with none in a type of floats."""
    quantized = """(float[1,4,16,32] q, float[1,4,32,16] k, float[1,4,16,32] v) => (float[1,4,16,32] y) {
        pair(q, s, z) pair(k, s, z) pair(v, s, z) t = MatMul(qd, kd) p = Softmax <axis=-1>(t)
        pair(p, ps, z) o = MatMul(pd, vd) oq = QuantizeLinear(o, s, z) y = DequantizeLinear(oq, s, z) }"""
    plain = f"""({kind}[1,4,16,32] q, {kind}[1,4,32,16] k, {kind}[1,4,16,32] v) => ({kind}[1,4,16,32] o) {{
        t = MatMul(q, k) p = Softmax <axis=-1>(t) o = MatMul(p, v) }}"""
    return graph(quantized, s=SCALE, z=ZERO, ps=np.float32(1 / 127)) if pairs else graph(plain)


def masked_attention() -> onnx.ModelProto:
    """Attention with a mask, its result moved to a linear layer with an equal pair in front."""
    text = """(float[1,4,16,32] q, float[1,4,32,16] k, float[1,4,16,32] v, bool[1,1,16,16] mask) => (float[1,16,64] y) {
        pair(q, s, z) pair(k, s, z) pair(v, s, z)
        t = MatMul(qd, kd) u = Where(mask, t, low) p = Softmax <axis=-1>(u)
        pair(p, ps, z) o = MatMul(pd, vd) pair(o, s, z)
        m = Transpose <perm=[0,2,1,3]>(od) r = Reshape(m, shape)
        pair(r, s, z) wd = DequantizeLinear <axis=1>(w, ws, wz) y = MatMul(rd, wd) }"""
    weights = _weights(np.concatenate([MATRIX, MATRIX]), 64)
    values = {"s": SCALE, "z": ZERO, "ps": np.float32(1 / 127), "low": np.float32(-1e4)}
    return graph(text, **values, shape=np.array([1, 16, 128]), **weights)


def sliced() -> onnx.ModelProto:
    """One MatMul for query, key and value, cut up behind it for an attention in float."""
    text = """(float[1,16,64] x) => (float[1,4,16,16] y) {
        pair(x, s, z) wd = DequantizeLinear <axis=1>(w, ws, wz) m = MatMul(xd, wd) a = Add(m, b)
        r = Reshape(a, shape) t = Transpose <perm=[2,0,3,1,4]>(r)
        q0 = Slice(t, n0, n1, n0) q = Squeeze(q0, n0) k0 = Slice(t, n1, n2, n0) k = Squeeze(k0, n0)
        v0 = Slice(t, n2, n3, n0) v = Squeeze(v0, n0)
        kt = Transpose <perm=[0,1,3,2]>(k) o = MatMul(q, kt) p = Softmax <axis=-1>(o) y = MatMul(p, v) }"""
    values = {f"n{k}": np.array([k]) for k in range(4)} | _weights(np.concatenate([MATRIX] * 3, axis=1), 192)
    shape = np.array([1, 16, 3, 4, 16])
    return graph(text, s=SCALE, z=ZERO, b=np.ones(192, np.float32), shape=shape, **values)


def residual() -> onnx.ModelProto:
    """Two convolutions and an Add that reads the first one's dequantized input: one pair serves both."""
    text = """(float[1,32,16,16] x) => (float[1,32,16,16] y) {
        pair(x, s, z) wd = DequantizeLinear <axis=0>(w, ws, wz) c = Conv <pads=[1,1,1,1]>(xd, wd, b) r = Relu(c)
        pair(r, s, z) d = Conv <pads=[1,1,1,1]>(rd, wd, b) a = Add(d, xd) y = Relu(a) }"""
    return graph(text, s=SCALE, z=ZERO, b=BIAS, **_weights())


def transposed() -> onnx.ModelProto:
    """A transposed convolution with pairs, which TensorRT runs in float all the same."""
    text = """(float[1,32,16,16] x) => (float[1,32,18,18] y) {
        pair(x, s, z) wd = DequantizeLinear <axis=1>(w, ws, wz) y = ConvTranspose(xd, wd, b) }"""
    return graph(text, s=SCALE, z=ZERO, b=BIAS, **_weights())


def pools() -> onnx.ModelProto:
    """A pair in front of AveragePool, and one on both sides of MaxPool."""
    text = """(float[1,32,16,16] x) => (float[1,32,8,8] a, float[1,32,8,8] y) {
        u = Abs(x) pair(u, s, z)
        a = AveragePool <kernel_shape=[2,2], strides=[2,2]>(ud)
        v = Neg(x) pair(v, s, z)
        m = MaxPool <kernel_shape=[2,2], strides=[2,2]>(vd)
        mq = QuantizeLinear(m, s, z) y = DequantizeLinear(mq, s, z) }"""
    return graph(text, s=SCALE, z=ZERO)


def round_trip() -> onnx.ModelProto:
    """A pair between two functions that compute in float."""
    text = """(float[1,32,16,16] x) => (float[1,32,16,16] y) {
        a = Sigmoid(x) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) y = Tanh(d) }"""
    return graph(text, s=SCALE, z=ZERO)


def computed_scale() -> onnx.ModelProto:
    """A scale computed at run time, which crashes TensorRT-RTX 1.7; the functions at both ends do not matter."""
    text = """(float[1,32,16,16] x) => (float[1,32,16,16] y) {
        t = Tanh(x) largest = ReduceMax <keepdims=0>(t) s = Mul(largest, k)
        pair(t, s, z) wd = DequantizeLinear <axis=0>(w, ws, wz) c = Conv <pads=[1,1,1,1]>(td, wd, b)
        y = Relu(c) }"""
    return graph(text, k=np.float32(0.01), z=ZERO, b=BIAS, **_weights())


def ort_residual(zero: int = 0) -> onnx.ModelProto:
    """Pairs as ONNX Runtime fuses them, on every input and result; zero: of the tensors behind Relu."""
    text = """(float[1,32,16,16] x) => (float[1,32,16,16] y) {
        pair(x, s, z) wd = DequantizeLinear <axis=0>(w, ws, wz)
        c = Conv <pads=[1,1,1,1]>(xd, wd, b) r = Relu(c)
        pair(r, s, zr) d = Conv <pads=[1,1,1,1]>(rd, wd, b) pair(d, s, z)
        a = Add(dd, xd) aq = QuantizeLinear(a, s, z) y = DequantizeLinear(aq, s, z) }"""
    return graph(text, s=SCALE, z=np.uint8(128), zr=np.uint8(zero), b=BIAS, **_weights())


def ort_linear() -> onnx.ModelProto:
    """A MatMul as ONNX Runtime fuses it, and another behind moved data: there, tensors get new names."""
    text = """(float[2,8,64] x) => (float[2,64,8] y) {
        pair(x, s, z) wd = DequantizeLinear <axis=1>(w, ws, wz) m = MatMul(xd, wd)
        a = MatMul(m, k) t = Transpose <perm=[0,2,1]>(a)
        pair(t, s, z) vd = DequantizeLinear <axis=1>(v, vs, vz) n = MatMul(td, vd) y = Softmax(n) }"""
    float_weight = _RNG.standard_normal((2, 64, 64)).astype(np.float32)
    last = {"v": MATRIX[:8, :8].copy(), "vs": np.full(8, 0.01, np.float32), "vz": np.zeros(8, np.int8)}
    return graph(text, s=SCALE, z=np.uint8(128), k=float_weight, **_weights(MATRIX, 64), **last)
