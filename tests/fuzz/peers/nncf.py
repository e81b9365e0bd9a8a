"""Written after the synthetic models of NNCF's ONNX tests, and those of its weight compression, made smaller."""

import numpy as np
import onnx
from onnx import numpy_helper

from tests.fuzz.peers.build import Peer, count, fill, ints, scalar


def _keep_in_nodes(*names: str) -> object:
    """Put these weights into Constant nodes."""

    def alter(model: onnx.ModelProto) -> None:
        for tensor in [tensor for tensor in model.graph.initializer if tensor.name in names]:
            model.graph.initializer.remove(tensor)
            model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))

    return alter


def _store_twice(model: onnx.ModelProto) -> None:
    """Store the first weight under another name for the last reader."""
    first = model.graph.initializer[0]
    model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(first), "copy"))
    last = [node for node in model.graph.node if first.name in node.input][-1]
    last.input[:] = ["copy" if name == first.name else name for name in last.input]


def _positive(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 1, shape).astype(np.float32)


def _sequence(turned: bool, gemm: bool) -> Peer:
    """Products of one size, each an input's shape apart, of which weights grow."""
    first = "t = Transpose <perm=[1,0]>(x)" if turned else "t = Identity(x)"
    product = "Gemm" if gemm else "MatMul"
    nodes = "".join(f"s{k} = {product}({f's{k - 1}' if k else 't'}, w{k}) " for k in range(4))
    text = f"(float[4,4] x) => (float[4,4] y) {{ {first} {nodes} y = Identity(s3) }}"
    return Peer(text, {f"w{k}": count(4, 4) * 10.0**-k for k in range(4)}, 21)


def _blocks(gated: bool, stacked: bool) -> Peer:
    """Blocks of products with an activation between them, or with two whose results multiply."""
    middle = "p{k} = MatMul({x}, a{k}) q{k} = MatMul({x}, b{k}) g{k} = Mul(p{k}, q{k})"
    plain = "p{k} = MatMul({x}, a{k}) g{k} = Relu(p{k})"
    nodes, before = "", "x"
    for k in range(2):
        nodes += (middle if gated else plain).format(k=k, x=before) + f" y{k} = MatMul(g{k}, c{k}) "
        before = f"y{k}"
    shape = (2, 8, 8) if stacked else (8, 8)
    weights = {f"{name}{k}": shape for name in ("abc" if gated else "ac") for k in range(2)}
    return Peer(f"(float[A,B,8] x) => (float[A,B,8] y1) {{ {nodes} }}", weights, 21, {"A": 2, "B": 3})


_CONV = {"w": _positive(1, 6, 3, 1, 1), "b": _positive(2, 6)}

PEERS: dict[str, Peer] = {
    "inputs and outputs": Peer(
        """(float[1,6,3,3] a, float[2,6,3,3] b, float[3,6,3,3] c) => (float[6,6,3,3] y, float[2,6,3,3] z) {
            [Concat1] y = Concat <axis=0>(a, b, c) [Add1] z = Add(a, b) }""",
    ),
    "parallel edges of products": Peer(
        """(float[1,6,3,3] x) => (float[1,3,3,3] y, float[1,3,3,3] z) {
            a, b = Split <axis=1>(x) y = MatMul(a, b) z = MatMul(a, b) }""",
    ),
    "integers inside": Peer("(float[1,6,3,3] x) => (float[1,6,3,3] y) { s = Shape(x) y = ConstantOfShape(s) }"),
    "conv, the bias behind an identity": Peer(
        "(float[1,3,10,10] x) => (float[1,6,10,10] y) { i = Identity(b) y = Conv <kernel_shape=[1,1]>(x, w, i) }",
        _CONV,
    ),
    "weight behind a reshape": Peer(
        "(float[1,10] x) => (float[1,5] y) { w = Reshape(stored, dims) a = Add(x, z) g = Gemm(a, w) y = Softmax(g) }",
        {"stored": _positive(1, 1, 1, 10, 5), "dims": ints(10, 5), "z": _positive(2, 1, 10)},
    ),
    "weight shared": Peer(
        """(float[1,1,5,5] x) => (float[1,5,5,5] y) {
            r = Relu(x) a = Conv <pads=[1,1,1,1]>(r, w) b = Conv <pads=[1,1,1,1]>(r, w) y = Add(a, b) }""",
        {"w": _positive(1, 5, 1, 3, 3)},
    ),
    "weight stored twice": Peer(
        """(float[1,1,5,5] x) => (float[1,5,5,5] y) {
            a = Conv <pads=[1,1,1,1]>(x, w) b = Conv <pads=[1,1,1,1]>(x, w) y = Add(a, b) }""",
        {"w": (5, 1, 3, 3)}, alter=_store_twice,
    ),
    "one of two ports": Peer("(float[1,1,5,5] x) => (float[1,1,5,5] y) { r = Relu(x) s = Softmax(r) y = Mul(r, s) }"),
    "both ports": Peer(
        """(float[1,1,5,5] x) => (float[1,1,5,5] y, float[1,1,5,5] z) {
            r = Relu(x) i = Identity(x) z = Softmax(i) y = Mul(r, i) }""",
    ),
    "input is output": Peer("(float[1,3,3,3] x) => (float[1,3,3,3] y) { y = Identity(x) }"),
    "shape of a map": Peer(
        """(float[1,3,8,8] x) => (float[1,5,1,1] y) {
            c = Conv(x, w0, b0) r = Relu(c) s = Shape(r) g = Gather <axis=0>(s, all) f = Cast <to=1>(g) q = Sqrt(f)
            h = Cast <to=7>(q) k = Mul(h, h) t = Reshape(r, dims) p = GlobalAveragePool(t) e = Conv(p, w1, b1)
            z = Cast <to=1>(k) m = ReduceMean <keepdims=0>(z) y = Mul(e, m) }""",
        {"w0": (4, 3, 3, 3), "b0": (4,), "all": ints(0, 1, 2, 3), "dims": ints(0, 0, -1, 1), "w1": (5, 4, 1, 1),
         "b1": (5,)},
    ),
    "shape computed twice": Peer(
        """(float[1,3,10,10] x) => (float[1,5] y) {
            c = Conv(x, w0, b0) r = Relu(c) s = Shape(r) t = Shape(r) a = Gather(s, zero) b = Gather(t, one)
            d = Unsqueeze(a, axes) e = Unsqueeze(b, axes) f = Concat <axis=0>(d, e)
            p = GlobalAveragePool(r) q = Reshape(p, f) g = Gemm(q, w1) y = Relu(g) }""",
        {"w0": (8, 3, 3, 3), "b0": (8,), "zero": scalar(0, np.int64), "one": scalar(1, np.int64), "axes": ints(0),
         "w1": (8, 5)},
    ),
    "float64 comes in": Peer(
        "(double[1,3,8,8] x) => (float[1,6,6,6] y) { r = Reciprocal(x) c = Cast <to=1>(r) y = Conv(c, w, b) }",
        {"w": (6, 3, 3, 3), "b": (6,)}, feeds={"x": lambda rng: rng.uniform(1, 2, (1, 3, 8, 8))},
    ),
    "attention as an operator": Peer(
        """(float[1,8,16] q, float[1,8,16] k, float[1,8,16] v) => (float[1,8,16] y) {
            y = Attention <q_num_heads=2, kv_num_heads=2>(q, k, v) }""",
        opset=23,
    ),
    "weights behind identities": Peer(
        "(float[1,10] x) => (float[1,10] y) { i = Identity(w) j = Identity(i) m = MatMul(x, j) y = MatMul(m, v) }",
        {"w": _positive(1, 10, 5), "v": _positive(2, 5, 10)}, alter=_keep_in_nodes("v"),
    ),
    "weights behind chains": Peer(
        """(float[1,1,9,9] x) => (float[1,1,9,9] y) {
            a = Reshape(w0, dims) b = Transpose <perm=[0,1,3,2]>(a) c = Identity(b) d = Conv <pads=[1,1,1,1]>(x, c)
            e = Reshape(w1, dims) f = Identity(e) g = Conv <pads=[1,1,1,1]>(d, f) y = Conv <pads=[1,1,1,1]>(g, w2) }""",
        {"w0": (1, 1, 3, 3), "w1": (1, 1, 3, 3), "w2": (1, 1, 3, 3), "dims": ints(1, 1, 3, 3)},
        alter=_keep_in_nodes("w1", "w2"),
    ),
    "embedding": Peer(
        """(int64[1,10] ids) => (float[10,10] y) {
            i = Identity(table) e = Gather <axis=0>(i, ids) g = Gather <axis=0>(e, zero) y = MatMul(g, w) }""",
        {"table": _positive(1, 10, 20), "zero": scalar(0, np.int64), "w": _positive(2, 20, 10)},
    ),
    "embedding beside a product": Peer(
        """(float[1,3] x) => (float[1,6,5] y) {
            c = Cast <to=7>(x) e = Gather <axis=0>(table, c) m = MatMul(x, w0) r = Reshape(m, dims)
            j = Concat <axis=1>(e, r) y = MatMul(j, w1) }""",
        {"table": _positive(1, 4, 5), "w0": _positive(2, 3, 15), "dims": ints(1, 3, 5), "w1": _positive(3, 5, 5)},
        feeds={"x": lambda rng: rng.uniform(0, 3, (1, 3)).astype(np.float32)},
    ),
    "positions": Peer(
        """(int64[1,10] ids) => (float[1,5,10] s, float[1,5,10] c) {
            u = Unsqueeze(ids, axes) f = Cast <to=1>(u) r = Reshape(waves, dims) m = MatMul(f, r)
            t = Transpose <perm=[0,2,1]>(m) j = Concat <axis=-1>(t) s = Sin(j) c = Cos(j) }""",
        {"axes": ints(2), "waves": _positive(1, 5), "dims": ints(1, 5)},
        feeds={"ids": lambda rng: rng.integers(0, 10, (1, 10))},
    ),
    "positions of points": Peer(
        """(float[A,B,C,2] x) => (float[A,B,C,16] y) {
            m = MatMul(x, w) n = Mul(m, turn) s = Sin(n) c = Cos(n) y = Concat <axis=-1>(s, c) }""",
        {"w": (2, 8), "turn": fill((1,), 2 * np.pi)}, 21,
    ),
    "products behind each other": _sequence(False, False),
    "products behind each other, turned": _sequence(True, False),
    "gemms behind each other": _sequence(False, True),
    "gemm of a turned input": Peer(
        "(float[3,2] x) => (float[2,3] y) { r = Relu(x) y = Gemm <transA=1, transB=1>(r, w, b) }",
        {"w": count(3, 3), "b": (3,)},
    ),
    "products of a stack": Peer(
        "(float[2,3,4] x) => (float[2,4,5] y) { r = Relu(x) t = Transpose <perm=[0,2,1]>(r) y = MatMul(t, w) }",
        {"w": (2, 3, 5)}, 21,
    ),
    "squeezed and turned": Peer(
        """(float[1,8,4] x) => (float[4,8] y, float[8,6] z) {
            s = Squeeze(x) y = Transpose <perm=[1,0]>(s) z = Gemm <transA=1>(y, w) }""",
        {"w": count(4, 6)},
    ),
    "blocks": _blocks(False, False),
    "blocks of gates": _blocks(True, False),
    "blocks of stacks": _blocks(False, True),
    "blocks of gated stacks": _blocks(True, True),
    "layers with selu": Peer(
        """(float[2,8,8] x) => (float[2,8,8] y) {
            m = MatMul(x, w0) a = MatMul(m, w1) r = Relu(a) b = MatMul(m, w2) s = Selu(b) g = Mul(r, s)
            y = MatMul(g, w3) }""",
        {f"w{k}": (8, 8) for k in range(4)}, 21,
    ),
    "sizes that differ": Peer(
        "(float[1,4,4] x) => (float[A,B,C] y) { a = MatMul(x, w0) b = MatMul(a, w1) y = MatMul(b, w2) }",
        {"w0": (4, 16), "w1": (16, 3), "w2": (3, 8)}, 21,
    ),
    "shape of a batch": Peer(
        """(float[batch,3,4,5] x) => (float[batch,1,10] y) {
            s = Shape(x) g = Gather(s, zero) u = Unsqueeze(g, axes) d = Concat <axis=0>(u, rest)
            e = Concat <axis=0>(d, ten) r = Reshape(x, e) y = MatMul(r, w) }""",
        {"zero": scalar(0, np.int64), "axes": ints(0), "rest": ints(-1), "ten": ints(60), "w": (60, 10)},
        sizes={"batch": 3},
    ),
    "parts of a batch": Peer(
        "(float[batch,2,2] x) => (float[batch,1,2] y) { a, b = Split <axis=1, num_outputs=2>(x) y = Add(a, b) }",
        opset=18,
    ),
    "sums behind products": Peer(
        "(float[2,3] x) => (float[2,3] y) { m = MatMul(x, w0) a = Add(m, one) n = MatMul(a, w1) y = Add(n, two) }",
        {"w0": (3, 3), "one": fill((3,), 1), "w1": (3, 3), "two": fill((3,), 2)},
    ),
    "gru": Peer(
        """(float[5,1,4] x) => (float[5,1,3] z) {
            y, h = GRU <hidden_size=6>(x, w, r, b) s = Squeeze(y, axes) z = MatMul(s, v) }""",
        {"w": (1, 18, 4), "r": (1, 18, 6), "b": (1, 36), "axes": ints(1), "v": (6, 3)},
    ),
    "dropout in a chain": Peer(
        """(float[2,4] x) => (float[2,3] y) {
            d = Dropout(x) i = Identity(d) m = MatMul(i, w) e, mask = Dropout(m) y = Identity(e) }""",
        {"w": (4, 3)},
    ),
    "constants that fold": Peer(
        "(float[2,4] x) => (float[2,3] y) { a = Add(w, w) b = Mul(a, half) c = Transpose(b) y = MatMul(x, c) }",
        {"w": (3, 4), "half": scalar(0.5)},
    ),
    "scales unified by concat": Peer(
        """(float[1,3,6,6] x, float[1,3,6,6] z) => (float[1,4,6,6] y) {
            a = Conv(x, w0) b = Sigmoid(z) c = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1]>(x)
            d = Concat <axis=1>(a, b, c) y = Conv(d, w1) }""",
        {"w0": (4, 3, 1, 1), "w1": (4, 10, 1, 1)},
    ),
    "quantized already": Peer(
        """(float[1,3,6,6] x) => (float[1,4,6,6] y) {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear <axis=0>(stored, ws, wz)
            a = Conv(d, e) b = Conv(a, w) y = Relu(b) }""",
        {"s": scalar(0.03), "z": scalar(0, np.int8), "stored": np.ones((4, 3, 1, 1), np.int8), "ws": fill((4,), 0.2),
         "wz": np.zeros(4, np.int8), "w": (4, 4, 1, 1)},
    ),
}  # fmt: skip
