"""Written after the networks of ONNX Runtime's quantization tests of more than an operator, made smaller.

Those of calibration, formats, overrides, fusions, preprocessing, integer biases, subgraphs and quantized inputs.
"""

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.peers.build import Peer, count, declare_weights, fill, forget_shapes, ints, reverse_nodes, scalar, steps

_MS = {"com.microsoft": 1}


def _fixed(*rows: object) -> dict[str, object]:
    """The only sample, as a suite gives it."""
    return {"feeds": {"x": lambda _: np.array(rows, np.float32)}, "counts": (1,)}


def _calibration(outputs: str, opset: int = 13, alter: object = None) -> Peer:
    text = f"""(float[1,3,1,3] x) => ({outputs}) {{
        [relu1] x1 = Relu(x) [conv1] x2 = Conv(x1, w1, b1) [relu2] x3 = Relu(x2) [conv2] x4 = Conv(x3, w3, b3)
        [conv3] x5 = Conv(x1, w5, b5) [add] x6 = Add(x4, x5)
    }}"""
    weights = {f"w{k}": (3, 3, 1, 1) for k in (1, 3, 5)} | {f"b{k}": (3,) for k in (1, 3, 5)}
    return Peer(text, weights, opset, counts=(4,), alter=alter)


def _one_sign(low: float, high: float) -> Peer:
    """A convolution whose activations and weights lie on one side of zero, or at it."""
    text = "(float[1,2,9] x) => (float[1,3,7] y) { m = Conv(x, w) y = Identity(m) }"
    weight = np.linspace(low, high, 18, dtype=np.float32).reshape(3, 2, 3)
    values = np.linspace(low, high, 18, dtype=np.float32).reshape(1, 2, 9)
    return Peer(text, {"w": weight}, counts=(1, 2), feeds={"x": lambda _: values})


def _gelu(nodes: str, **weights: object) -> Peer:
    text = f"(float[1,4,8] x) => (float[1,4,8] y) {{ m = MatMul(x, w) {nodes} }}"
    return Peer(text, {"w": (8, 8), **weights}, 18)


_GELU = {"two": scalar(2**0.5), "one": scalar(1), "half": scalar(0.5)}
_TANH = {"half": scalar(0.5), "one": scalar(1), "cube": scalar(3), "root": scalar(0.7978845), "small": scalar(0.044715)}


def _layer_norm(opset: int) -> Peer:
    mean = "ReduceMean({}, axes)" if opset >= 18 else "ReduceMean <axes=[-1]>({})"
    text = f"""(float[1,4,8] x) => (float[1,4,8] y) {{
        u = {mean.format("x")}
        d = Sub(x, u) s = Pow(d, two)
        v = {mean.format("s")}
        e = Add(v, tiny) r = Sqrt(e) n = Div(d, r) g = Mul(n, scale) h = Add(g, shift) y = MatMul(h, w)
    }}"""
    axes = {"axes": ints(-1)} if opset >= 18 else {}
    weights = {"two": scalar(2), "tiny": scalar(1e-5), "scale": (8,), "shift": (8,), "w": (8, 8), **axes}
    return Peer(text, weights, opset)


def _small_scale(spread: float, bias: float) -> Peer:
    """A bias far beyond the integers that input and weight scale give it."""
    weight = fill((3, 2, 3), spread)
    weight[0] *= 0.5
    text = "(float[1,2,6] x) => (float[1,3,4] y) { y = Conv(x, w, b) }"
    return Peer(text, {"w": weight, "b": np.array([bias, -bias, 0.0], np.float32)}, 21, counts=(1, 3))


def _after_weights(model: onnx.ModelProto) -> None:
    """Put weights into Constant nodes, one of which nobody reads."""
    tensors = [*model.graph.initializer]
    del model.graph.initializer[:]
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
    spare = helper.make_node("Constant", [], ["spare"], value=tensors[0])
    for node in (spare, *reversed(nodes)):
        model.graph.node.insert(0, node)


PEERS: dict[str, Peer] = {
    "calibration, conv clip product": Peer(
        """(float[1,1,5,5] a, float[1,1,3,3] b, float[1,1,5,1] e) => (float[1,1,5,1] f) {
            [conv] c = Conv <kernel_shape=[3,3], pads=[1,1,1,1]>(a, b) [clip] d = Clip(c) [product] f = MatMul(d, e)
        }""",
    ),
    "calibration, two convs of inputs": Peer(
        """(float[1,1,5,5] g, float[1,1,3,3] h, float[1,1,3,3] j) => (float[1,1,5,5] k) {
            i = Conv <kernel_shape=[3,3], pads=[1,1,1,1]>(g, h) k = Conv <kernel_shape=[3,3], pads=[1,1,1,1]>(i, j)
        }""",
    ),
    "calibration, a branch meets a product": Peer(
        """(float[1,1,5,5] l, float[1,1,3,3] n) => (float[1,1,5,5] q) {
            m = Relu(l) o = Conv <kernel_shape=[3,3], pads=[1,1,1,1]>(m, n) p = Clip(o) q = MatMul(p, m) }""",
    ),
    "calibration, all tensors are outputs": _calibration(", ".join(f"float[1,3,1,3] x{k}" for k in range(1, 7))),
    "calibration": _calibration("float[1,3,1,3] x6"),
    "calibration, opset 18": _calibration("float[1,3,1,3] x6", 18),
    "calibration, weights are inputs": _calibration("float[1,3,1,3] x6", 8, declare_weights),
    "calibration, nodes unsorted": _calibration("float[1,3,1,3] x6", 13, reverse_nodes),
    "calibration, an identity": Peer("(float[1,2] x) => (float[1,2] y) { y = Identity(x) }"),
    "calibration, opsets apart": Peer(
        "(float[1,4] x) => (float[1,4] y) { m = com.microsoft.FusedMatMul <alpha=0.5, transB=1>(x, w) y = Add(m, b) }",
        {"w": (4, 4), "b": (4,)}, imports={**_MS, "ai.onnx.ml": 3},
    ),
    "calibration, flags and numbers": Peer(
        """(float[N,4] x, int64[N,1] ids) => (float[N,4] y, bool[N,4] z) {
            g = GatherElements <axis=1>(x, ids) e = Mul(x, g) y = MatMul(e, w) z = Greater(y, limit) }""",
        {"w": (4, 4), "limit": scalar(0)}, sizes={"N": 3},
    ),
    "format, conv clip reshape": Peer(
        """(float[1,4,9,9] x) => (float[294] y) {
            [conv_node] c = Conv(x, w) [clip_node] d = Clip(c, low, high) [reshape_node] y = Reshape(d, flat) }""",
        {"w": (6, 4, 3, 3), "low": scalar(-1), "high": scalar(1), "flat": ints(-1)},
    ),
    "format, sums about a mean": Peer(
        """(float[5,5] x) => (float[5,5] y) {
            [Add1] p = Add(x, m) [Mean] q = ReduceMean <keepdims=1>(p) [Add2] y = Add(q, n) }""",
        {"m": (5, 5), "n": (5, 5)},
    ),
    "format, one sum and three products": Peer(
        """(float[5,5] x) => (float[5,5] y0, float[5,5] y1, float[5,5] y2) {
            t = Add(x, p) y0 = MatMul(t, q) y1 = MatMul(t, r) y2 = MatMul(t, s) }""",
        {"p": (5, 5), "q": (5, 5), "r": (5, 5), "s": (5, 5)},
    ),
    "format, a bias of two convs": Peer(
        """(float[1,2,5,5] x) => (float[1,3,5,5] y) {
            a = Conv(x, w0, b) c = Conv(x, w1, b) s = Add(a, c) y = Mul(s, b3) }""",
        {"w0": (3, 2, 1, 1), "w1": (3, 2, 1, 1), "b": (3,), "b3": (3, 1, 1)},
    ),
    "format, a bias that is computed": Peer(
        "(float[1,2,5,5] x) => (float[1,3,5,5] y) { c = Add(b0, b1) y = Conv(x, w, c) }",
        {"w": (3, 2, 1, 1), "b0": (3,), "b1": (3,)},
    ),
    "format, a bias that is an input": Peer(
        "(float[1,2,5,5] x, float[3] b) => (float[1,3,5,5] y) { y = Conv(x, w, b) }", {"w": (3, 2, 1, 1)}
    ),
    "format, stored weights quantized": Peer(
        """(float[1,2,6] x) => (float[1,3,4] y) {
            w = DequantizeLinear <axis=0>(q, ws, wz) b = DequantizeLinear <axis=0>(p, bs, bz) c = Conv(x, w, b)
            y = Sigmoid(c) }""",
        {"q": steps(3, 2, 3), "ws": fill((3,), 0.01), "wz": np.zeros(3, np.int8), "p": np.array([4, -5, 6], np.int32),
         "bs": fill((3,), 0.001), "bz": np.zeros(3, np.int32)}, 21,
    ),
    "format, the input quantized": Peer(
        """(float[1,2,6] x) => (float[1,3,4] y) {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Conv(d, w, b) }""",
        {"s": scalar(0.02), "z": scalar(128, np.uint8), "w": (3, 2, 3), "b": (3,)},
    ),
    "format, integers come in": Peer(
        "(uint8[1,2,6] x) => (float[1,3,4] y) { d = DequantizeLinear(x, s, z) y = Conv(d, w, b) }",
        {"s": scalar(0.02), "z": scalar(128, np.uint8), "w": (3, 2, 3), "b": (3,)},
    ),
    "format, integers go out": Peer(
        "(float[1,2,6] x) => (uint8[1,3,4] y) { c = Conv(x, w, b) r = Relu(c) y = QuantizeLinear(r, s, z) }",
        {"s": scalar(0.02), "z": scalar(0, np.uint8), "w": (3, 2, 3), "b": (3,)},
    ),
    "format, images of bytes": Peer(
        """(uint8[1,3,8,8] x) => (float[1,5] y) {
            f = Cast <to=1>(x) n = Mul(f, share) c = Conv(n, w, b) m = Mul(c, gain) p = GlobalAveragePool(m)
            l = Flatten(p) y = Gemm(l, v, u) }""",
        {"share": scalar(1 / 255), "w": (4, 3, 3, 3), "b": (4,), "gain": (4, 1, 1), "v": (4, 5), "u": (5,)},
        feeds={"x": lambda rng: rng.integers(0, 255, (1, 3, 8, 8)).astype(np.uint8)}, counts=(10,),
    ),
    "format, wide activations": Peer(
        """(float[1,2,6] x) => (float[1,3,4] y) {
            s = Sigmoid(x) c = Conv(s, w, b) n = LayerNormalization(c, scale) y = Softmax(n) }""",
        {"w": (3, 2, 3), "b": (3,), "scale": (4,)}, 21,
    ),
    "format, transposed conv of few bits": Peer(
        "(float[1,2,5,5] x) => (float[1,3,11,11] y) { s = Sigmoid(x) y = ConvTranspose <strides=[2,2]>(s, w, b) }",
        {"w": (2, 3, 3, 3), "b": (3,)}, 21,
    ),
    "overrides": Peer(
        "(float[1,2,3] x) => (float[A,B,C] y) { s = Sigmoid(x) y = Conv(s, w, b) }",
        {"w": np.array([[[-1, -2], [1, 2]], [[-0.5, -1.5], [0.5, 1.5]]], np.float32),
         "b": np.array([0, 1], np.float32)},
        **_fixed([[1, 2, 3], [4, 5, 6]]),
    ),
    "overrides, sums of two kinds": Peer(
        """(float[1,2,3] x) => (float[1,2,3] y, float[1,2,3] z) {
            a = Add(x, x) b = Sigmoid(a) y = Mul(a, b) z = Add(b, c) }""",
        {"c": (1, 2, 3)}, 18,
    ),
    "overrides, mixed": Peer(
        """(float[1,2,3] a, float[1,2,3] b) => (float[1,2,3] x, float[1,2,3] y, float[1,2,3] z) {
            [op1] o1 = Sigmoid(a) [op2] o2 = Cos(b) [op3] o3 = Sin(o1) [op4] o4 = Tanh(o2) [op5] o5 = Mul(o3, o4)
            [op6] x = Relu(o5) [op7] y = Cos(o2) [op8] z = Sigmoid(o2) }""",
        opset=18,
    ),
    "sign, above zero": _one_sign(0.5, 2),
    "sign, below zero": _one_sign(-2, -0.5),
    "sign, both": _one_sign(-1, 3),
    "sign, zeros alone": _one_sign(0, 0),
    "range, no values but one": Peer(
        "(float[1,2,6] x) => (float[1,3,4] y) { s = Sigmoid(x) y = Conv(s, w, b) }",
        {"w": fill((3, 2, 3), 0.25), "b": fill((3,), 0)}, feeds={"x": lambda _: fill((1, 2, 6), 1e-5)},
    ),
    "bias, small scales": _small_scale(1e-9, 1e2),
    "bias, great values": _small_scale(0.5, 1e6),
    "bias, no weight but zero": _small_scale(0, 1),
    "bias of a product, small scales": Peer(
        "(float[3,4] x) => (float[3,5] y) { y = Gemm(x, w, b) }", {"w": fill((4, 5), 1e-8), "b": fill((5,), 30)}, 21
    ),
    "fusion, gelu by tanh": _gelu(
        """p = Pow(m, cube) s = Mul(p, small) q = Add(m, s) r = Mul(q, root) t = Tanh(r) a = Add(t, one)
        h = Mul(m, half) y = Mul(h, a)""",
        **_TANH,
    ),
    "fusion, layer norm": _layer_norm(13),
    "fusion, layer norm, opset 18": _layer_norm(18),
    "fusion, lengths and means": Peer(
        """(float[1,2,3] x) => (float[1,2,3] y) {
            h = Mul(x, half) d = Div(x, root) e = Erf(d) a = Add(e, one) g = Mul(a, h)
            l = ReduceL2 <keepdims=1>(g, axes) c = Clip(l, tiny) w = Expand(c, shape) n = Div(g, w)
            u = ReduceMean(n, axes) z = Sub(n, u) p = Pow(z, two) v = ReduceMean(p, axes)
            t = Add(v, tiny) r = Sqrt(t) o = Div(z, r) q = Mul(o, scale) y = Add(q, shift) }""",
        {**_GELU, "root": scalar(2**0.5), "axes": ints(-1), "tiny": scalar(1e-12), "shape": ints(1, 2, 3),
         "scale": fill((3,), 2), "shift": fill((3,), 1), "two": scalar(2)}, 18,
    ),
    "fusion, inputs and outputs in turn": Peer(
        """(float[1,2,3] a, float[1,2,3] b) => (float[1,2,3] x, float[1,2,3] y) {
            s = Add(a, b) x = Abs(s) y = Mul(x, b) }""",
        opset=18,
    ),
    "shapes, behind another domain": Peer(
        """(float[1,4] x) => (float[1,4] y) {
            a = MatMul(x, w0) b = com.microsoft.FusedMatMul(a, w1) c = MatMul(b, w2) y = MatMul(c, w3) }""",
        {f"w{k}": (4, 4) for k in range(4)}, 18, imports=_MS,
    ),
    "shapes, names for all": Peer(
        """(float[A,B,C,D] x) => (float[A,E,F,G] y) {
            c = Conv(x, w) b = BatchNormalization(c, scale, shift, mean, spread) r = Relu(b)
            y = MaxPool <kernel_shape=[2,2]>(r) }""",
        {"w": (4, 3, 3, 3), "scale": fill((4,), 1.5), "shift": (4,), "mean": (4,), "spread": fill((4,), 0.7)},
        sizes={"A": 2, "B": 3, "C": 8, "D": 8}, alter=forget_shapes,
    ),
    "large network": Peer(
        """(float[N,40] x) => (float[N,8] y) {
            a = MatMul(x, w0) r = Relu(a) b = MatMul(r, w1) s = Relu(b) y = MatMul(s, w2) }""",
        {"w0": (40, 60), "w1": (60, 60), "w2": (60, 8)}, 18, {"N": 1}, counts=(3, 20),
    ),
    "weights in Constant nodes": Peer(
        "(float[3,4] x) => (float[3,5] y) { a = Gemm(x, w, b) y = Relu(a) }",
        {"w": (4, 5), "b": (5,)}, alter=_after_weights,
    ),
    "quantized already, two convs": Peer(
        """(float[1,3,8,8] x) => (float[1,4,8,8] y) {
            m = MaxPool <kernel_shape=[1,1]>(x) q0 = QuantizeLinear(m, s0, z0) d0 = DequantizeLinear(q0, s0, z0)
            c0 = Conv(d0, w0, b0) q1 = QuantizeLinear(m, s1, z1) d1 = DequantizeLinear(q1, s1, z1)
            c1 = Conv(d1, w1, b1) y = Add(c0, c1) }""",
        {"s0": scalar(0.03), "z0": scalar(165, np.uint8), "s1": scalar(0.02), "z1": scalar(132, np.uint8),
         "w0": (4, 3, 1, 1), "b0": (4,), "w1": (4, 3, 1, 1), "b1": (4,)},
    ),
    "quantized already, a product": Peer(
        """(float[A] x) => (float[8] y) {
            a = Add(x, b) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }""",
        {"b": (8,), "s": scalar(0.02), "z": scalar(0, np.int8), "w": (8, 8)}, sizes={"A": 8},
    ),
    "quantized already, weights in blocks": Peer(
        """(float[N,32] x) => (float[N,16] y) {
            a = com.microsoft.MatMulNBits <K=32, N=24, bits=4, block_size=16>(x, packed, scales) r = Relu(a)
            y = MatMul(r, w) }""",
        {"packed": steps(24, 2, 8, kind=np.uint8), "scales": fill((48,), 0.02), "w": (24, 16)}, 21, imports=_MS,
    ),
    "branches, an embedding in each": Peer(
        """(int64[1,N] ids, bool again) => (float[1,N,6] y) {
            y = If (again) <
                then_branch = first () => (float[1,N,6] t) {
                    e = Gather(shared, ids) tr = Transpose(shared) p = MatMul(e, w0) t = MatMul(p, v)
                },
                else_branch = later () => (float[1,N,6] o) {
                    g = Gather(shared, ids) k = MatMul(g, w1) o = MatMul(k, v)
                }
            >
        }""",
        {"shared": (2, 8), "w0": (8, 8), "w1": (8, 8), "v": (8, 6)}, 16, counts=(2, 8),
        feeds={"again": lambda rng: rng.integers(0, 2, ()).astype(bool)},
    ),
    "loop around a product": Peer(
        """(float[2,4] x, int64 n) => (float[2,4] y) {
            a = MatMul(x, w0)
            y = Loop (n, on, a) <
                body = step (int64 i, bool c, float[2,4] s) => (bool d, float[2,4] t) {
                    d = Identity(c) m = MatMul(s, w1) t = Tanh(m)
                }
            >
        }""",
        {"w0": (4, 4), "w1": (4, 4), "on": scalar(1, np.bool_)}, 16, feeds={"n": lambda _: scalar(3, np.int64)},
    ),
    "counted weights": Peer(
        "(float[1,4] x) => (float[1,4] y) { m = MatMul(x, w) r = Relu(m) y = MatMul(r, w) }",
        {"w": count(4, 4)}, counts=(1, 8),
    ),
    "outputs that are inputs": Peer(
        "(float[1,4] x) => (float[1,4] x, float[1,4] y) { y = MatMul(x, w) }", {"w": (4, 4)},
    ),
}  # fmt: skip
