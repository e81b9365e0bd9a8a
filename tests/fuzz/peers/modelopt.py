"""Written after the networks of ModelOpt's ONNX tests (integers, four bits, mixed precision, plugins), made smaller."""

import numpy as np
import onnx
from onnx import helper

from tests.fuzz.peers.build import Peer, declare_weights, fill, ints, name_like_keras, scalar, steps

_HALF = np.float16


def _norm(prefix: str, channels: int) -> dict[str, object]:
    return {f"{prefix}g": fill((channels,), 1.2), f"{prefix}b": (channels,), f"{prefix}m": (channels,),
            f"{prefix}v": fill((channels,), 0.8)}  # fmt: skip


def _pool(reshape: str) -> Peer:
    behind = "s" if reshape else "r"
    text = f"""(float[1,4,8,8] x) => (float[1,6,4,4] y) {{
        c = Conv <pads=[1,1,1,1]>(x, w0, b0) n = BatchNormalization(c, ng, nb, nm, nv) r = Relu(n)
        {reshape}
        p = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2], ceil_mode=0>({behind})
        y = Conv <pads=[1,1,1,1]>(p, w1)
    }}"""
    shape = {"dims": ints(1, 6, 8, 8)} if reshape else {}
    weights = {"w0": (6, 4, 3, 3), "b0": (6,), "w1": (6, 6, 3, 3), **_norm("n", 6), **shape}
    return Peer(text, weights, alter=name_like_keras)


def _isinf(opset: int) -> Peer:
    text = """(float[2,4,9,8] x) => (float[2,4,9,8] y) {
        c = Conv <pads=[1,1,1,1]>(x, w) d = Cast <to=11>(c) i = IsInf(d) g = Greater(c, zero) a = And(i, g)
        y = Where(a, c, great) }"""
    return Peer(text, {"w": (4, 4, 3, 3), "zero": fill((1,), 0), "great": fill((1,), 1e4)}, opset)


def _layer_norm(axis: int, *, shift: bool = True) -> Peer:
    last = "h = Mul(n, scale) y = Add(h, shift)" if shift else "y = Mul(n, scale)"
    text = f"""(float[2,3,4,5] x) => (float[2,3,4,5] y) {{
        u = ReduceMean <axes=[{axis}]>(x) d = Sub(x, u) p = Pow(d, two) v = ReduceMean <axes=[{axis}]>(p)
        e = Add(v, tiny) r = Sqrt(e) n = Div(d, r)
        {last}
    }}"""
    size = {-2: (4, 5), -1: (5,), 1: (3, 4, 5), 2: (4, 5)}[axis]
    weights = {"two": scalar(2), "tiny": scalar(1e-5), "scale": size, **({"shift": size} if shift else {})}
    return Peer(text, weights)


def _half_parts(kind: str, code: int) -> Peer:
    text = f"({kind}[2,6] x) => (float[2,4] y, {kind}[2,4] z) {{ m = MatMul(x, w) y = Cast <to=1>(m) z = Add(m, b) }}"
    return Peer(text, {"w": (6, 4), "b": (4,)}, 20, kind=_HALF if code == 10 else np.float32)


def _if(then: str, other: str, shape: str = "2,4", **weights: object) -> Peer:
    text = f"""(float[{shape}] x, bool c) => (float[A,B] y) {{
        p = Add(x, before)
        y = If (c) <
            then_branch = yes () => (float[A,B] t) {{ {then} }},
            else_branch = no () => (float[A,B] o) {{ {other} }}
        >
    }}"""
    return Peer(text, {"before": (2, 4), **weights}, 20)


def _use_plugin(domain: str) -> object:
    def alter(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Identity")
        node.op_type, node.domain, node.name = "SkipNormPluginDynamic", domain, "plugin"
        node.input.append("z")
        node.attribute.append(helper.make_attribute("plugin_version", "2"))
        if domain:
            model.opset_import.append(helper.make_opsetid(domain, 1))

    return alter


def _plugin(domain: str) -> Peer:
    text = """(float[1,4,6,6] x, float[1,4,6,6] z) => (float[1,4,6,6] y) {
        a = Conv <group=4>(x, w0) p = Identity(a) y = Conv <group=4>(p, w1) }"""
    return Peer(text, {"w0": (4, 1, 1, 1), "w1": (4, 1, 1, 1)}, 17, alter=_use_plugin(domain))


_HEADS = """q0 = MatMul(n, wq) q1 = Reshape(q0, heads) q = Transpose <perm=[0,2,1,3]>(q1)
    k0 = MatMul(n, wk) k1 = Reshape(k0, heads) k = Transpose <perm=[0,2,3,1]>(k1)
    v0 = MatMul(n, wv) v1 = Reshape(v0, heads) v = Transpose <perm=[0,2,1,3]>(v1)"""
_MHA = {"wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": (8, 8), "heads": ints(0, -1, 2, 4), "joined": ints(0, -1, 8)}

PEERS: dict[str, Peer] = {
    "bias behind a conv": Peer(
        """(float[1,3,16,16] x) => (float[1,8,8,8] y) {
            c = Conv <kernel_shape=[7,7], strides=[2,2], pads=[3,3,3,3], auto_pad="NOTSET">(x, w) y = Add(c, b) }""",
        {"w": (8, 3, 7, 7), "b": (8, 1, 1)}, alter=name_like_keras,
    ),
    "convs join": Peer(
        """(float[1,4,6,6] x) => (float[1,8,6,6] y) {
            a = Conv <pads=[1,1,1,1]>(x, w0) b = Conv <pads=[1,1,1,1]>(a, w1) c = Conv <pads=[1,1,1,1]>(b, w2)
            j = Concat <axis=1>(a, b, c) y = Conv <pads=[0,0,0,0]>(j, w3) }""",
        {"w0": (4, 4, 3, 3), "w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3), "w3": (8, 12, 1, 1)}, alter=name_like_keras,
    ),
    "transposed conv and a residual": Peer(
        """(float[2,5,4,6] x) => (float[2,4,8,12] y) {
            t = ConvTranspose <kernel_shape=[2,2], strides=[2,2]>(x, w0, b0) r = Relu(t)
            c = Conv <pads=[1,1,1,1]>(r, w1) n = BatchNormalization(c, ng, nb, nm, nv) s = Relu(n)
            d = Conv <pads=[1,1,1,1]>(s, w2) o = BatchNormalization(d, og, ob, om, ov) a = Add(r, o) y = Relu(a) }""",
        {"w0": (5, 4, 2, 2), "b0": (4,), "w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3), **_norm("n", 4), **_norm("o", 4)},
    ),
    "transposed conv of groups": Peer(
        """(float[1,6,4,4] x) => (float[1,4,9,9] y) {
            t = ConvTranspose <kernel_shape=[3,3], strides=[2,2], group=2>(x, w0) y = Conv(t, w1, b1) }""",
        {"w0": (6, 2, 3, 3), "w1": (4, 4, 1, 1), "b1": (4,)},
    ),
    "swish and a residual": Peer(
        """(float[2,4,6,8] x) => (float[2,4,6,8] y) {
            r = Relu(x) c = Conv <pads=[1,1,1,1]>(r, w) n = BatchNormalization(c, ng, nb, nm, nv) s = Sigmoid(n)
            m = Mul(s, n) a = Add(r, m) y = Relu(a) }""",
        {"w": (4, 4, 3, 3), **_norm("n", 4)}, alter=name_like_keras,
    ),
    "pool": _pool(""),
    "pool behind a reshape": _pool("s = Reshape(r, dims)"),
    "infinities are looked for": _isinf(13),
    "infinities are looked for, opset 21": _isinf(21),
    "resize to sizes, empty roi and scales": Peer(
        """(float[1,9,4,4] x) => (float[1,4,8,8] y) {
            c = Conv(x, w)
            y = Resize <coordinate_transformation_mode="asymmetric", cubic_coeff_a=-0.75, mode="nearest",
                nearest_mode="floor">(c, none, none, sizes) }""",
        {"w": (4, 9, 1, 1), "none": np.empty(0, np.float32), "sizes": ints(1, 4, 8, 8)},
    ),
    "stem with a layer norm": Peer(
        """(float[1,3,16,16] x) => (float[1,8,4,4] y) {
            c = Conv <kernel_shape=[4,4], strides=[4,4]>(x, w0, b0) t = Transpose <perm=[0,2,3,1]>(c)
            n = LayerNormalization <axis=-1, epsilon=0.000001>(t, g, s) u = Transpose <perm=[0,3,1,2]>(n)
            y = Conv(u, w1, b1) }""",
        {"w0": (8, 3, 4, 4), "b0": (8,), "g": (8,), "s": (8,), "w1": (8, 8, 1, 1), "b1": (8,)}, 17,
    ),
    "small convs of groups": Peer(
        """(float[1,6,5,7] x) => (float[1,8,10,14] y) {
            c = Conv <pads=[1,1,1,1]>(x, w0, b0) r = Relu(c)
            u = Resize <coordinate_transformation_mode="half_pixel", mode="nearest", nearest_mode="round_prefer_ceil">
                (r, roi, scales)
            d = Conv <group=8, pads=[0,0,1,1]>(u, w1) e = Conv <group=8>(u, w2, b2)
            f = Conv <group=8, pads=[0,0,1,1]>(e, w3) y = Mul(d, f) }""",
        {"w0": (8, 6, 3, 3), "b0": (8,), "roi": np.empty(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32),
         "w1": (8, 1, 2, 2), "w2": (8, 1, 1, 1), "b2": (8,), "w3": (8, 1, 2, 2)}, 17,
    ),
    "product and relu, another opset": Peer(
        "(float[1,24,24] x) => (float[1,24,16] y) { m = MatMul(x, w) y = Relu(m) }", {"w": (24, 16)}, 27,
    ),
    "narrow products": Peer(
        "(float[32,15] x) => (float[32,8] y, float[32,64] z) { y = MatMul(x, w0) z = Gemm <transB=1>(x, w1) }",
        {"w0": (15, 8), "w1": (64, 15)},
    ),
    "unet": Peer(
        """(float[1,1,8,8] x) => (float[1,1,8,8] y) {
            a0 = Conv <pads=[1,1,1,1]>(x, w0, b0) a1 = Relu(a0) a2 = Conv <pads=[1,1,1,1]>(a1, w1, b1) a = Relu(a2)
            p = MaxPool <kernel_shape=[2,2], strides=[2,2]>(a) c0 = Conv <pads=[1,1,1,1]>(p, w2, b2) c = Relu(c0)
            u = ConvTranspose <kernel_shape=[2,2], strides=[2,2]>(c, w3, b3) j = Concat <axis=1>(u, a)
            d0 = Conv <pads=[1,1,1,1]>(j, w4, b4) d = Relu(d0) y = Conv(d, w5, b5) }""",
        {"w0": (4, 1, 3, 3), "b0": (4,), "w1": (4, 4, 3, 3), "b1": (4,), "w2": (8, 4, 3, 3), "b2": (8,),
         "w3": (8, 4, 2, 2), "b3": (4,), "w4": (4, 8, 3, 3), "b4": (4,), "w5": (1, 4, 1, 1), "b5": (1,)},
    ),
    "not simplified": Peer(
        """(float[1,4,8,8] x) => (float[1,6,6,6] y) {
            w = Identity(stored) c = Conv(x, w, b) n = BatchNormalization <epsilon=0.00001>(c, ng, nb, nm, nv)
            i = Identity(n) y = Relu(i) }""",
        {"stored": (6, 4, 3, 3), "b": (6,), **_norm("n", 6)},
    ),
    "attention of heads": Peer(
        f"""(float[1,5,8] x) => (float[1,5,8] y) {{
            n = LayerNormalization(x, g, s)
            {_HEADS}
            qk = MatMul(q, k) z = Mul(qk, root) p = Softmax <axis=-1>(z) a = MatMul(p, v)
            t = Transpose <perm=[0,2,1,3]>(a) o = Reshape(t, joined) r = MatMul(o, wo) y = Add(r, x)
        }}""",
        {**_MHA, "g": (8,), "s": (8,), "root": scalar(0.5)}, 17,
    ),
    "attention of heads, casts and a mask": Peer(
        f"""(float[1,5,8] n, float[1,1,5,5] mask) => (float[1,5,8] y) {{
            {_HEADS}
            qk = MatMul(q, k) z = Div(qk, root) h = Add(z, mask) c = Cast <to=1>(h)
            p = Softmax <axis=-1>(c) a = MatMul(p, v) t = Transpose <perm=[0,2,1,3]>(a)
            o = Reshape(t, joined) y = MatMul(o, wo)
        }}""",
        {**_MHA, "root": scalar(2)}, 17,
        feeds={"mask": lambda rng: np.where(rng.random((1, 1, 5, 5)) < 0.3, -1e4, 0).astype(np.float32)},
    ),
    "turned by positions": Peer(
        """(float[1,5,8] x, int64[1,5] places) => (float[1,2,5,4] y) {
            q0 = MatMul(x, wq) q1 = Reshape(q0, heads) q = Transpose <perm=[0,2,1,3]>(q1)
            c0 = Gather(cosines, places) c = Unsqueeze(c0, one) s0 = Gather(sines, places) s = Unsqueeze(s0, one)
            a, b = Split <axis=-1>(q, halves) m = Neg(b) r = Concat <axis=-1>(m, a)
            l = Mul(q, c) e = Mul(r, s) y = Add(l, e) }""",
        {"wq": (8, 8), "heads": ints(0, -1, 2, 4), "cosines": (6, 4), "sines": (6, 4), "one": ints(1),
         "halves": ints(2, 2)},
        17,
    ),
    "products for four bits, weight an input": Peer(
        "(float[12,64] x) => (float[12,16] y) { y = MatMul(x, w) }", {"w": (64, 16)}, 11, alter=declare_weights
    ),
    "gather of float16": Peer(
        "(int64 i) => (float16[16] y) { y = Gather <axis=0>(w, i) }", {"w": (8, 16)}, 11, kind=_HALF
    ),
    "float16 and float32 go out": _half_parts("float16", 10),
    "casts there and back": Peer(
        """(float[3,4] x) => (float[3,4] y) {
            a = Cast <to=10>(x) b = Cast <to=1>(a) c = Cast <to=10>(b) d = Cast <to=1>(c)
            m = Add(d, w) e = Cast <to=1>(m) y = Cast <to=1>(e) }""",
        {"w": (3, 4)}, 20,
    ),
    "cast between stored integers and a product": Peer(
        "(float16[N,4] x) => (float16[N,4] y) { d = DequantizeLinear(q, s, z) c = Cast <to=10>(d) y = MatMul(x, c) }",
        {"q": steps(4, 4), "s": scalar(0.01), "z": scalar(0, np.int8)}, 19,
    ),
    "stored integers of rows": Peer(
        "(float[2,3,6] x) => (float[2,3,8] y) { d = DequantizeLinear <axis=0>(q, s, z) y = MatMul(x, d) }",
        {"q": steps(6, 8), "s": fill((6,), 0.02), "z": np.zeros(6, np.int8)}, 21,
    ),
    "stored integers, turned": Peer(
        """(float[2,3,6] x) => (float[2,3,8] y) {
            d = DequantizeLinear <axis=0>(q, s, z) t = Transpose <perm=[1,0]>(d) y = MatMul(x, t) }""",
        {"q": steps(8, 6), "s": fill((8,), 0.02), "z": np.zeros(8, np.int8)}, 21,
    ),
    "sums, of which all go out": Peer(
        """(float[3,4] a, float[3,4] b) => (float[3,4] p, float[3,4] q, float[3,4] r) {
            p = Add(a, w) q = Mul(b, p) r = Div(b, p) }""",
        {"w": fill((3, 4), 9)}, 20,
    ),
    "great weights": Peer(
        """(float[1,5] x) => (float[1,3] p, float[1,3] q, float[1,3] r) {
            a = MatMul(x, w0) b = MatMul(x, w1) p = Add(a, c) q = Add(b, c) r = Add(a, c) }""",
        {"w0": fill((5, 3), 1e5), "w1": fill((5, 3), 1e-9), "c": fill((1, 3), -1e5)}, 20,
    ),
    "sums of constants": Peer(
        """(float[2,3] x) => (float[2,3] y) {
            c = Constant <value_float=0.5>() d = Constant <value_floats=[0.5,1.5,2.5]>() a = Add(x, c) b = Add(x, d)
            y = Mean(a, b) }""",
        opset=20,
    ),
    "what is greater": Peer(
        "(float[4] x) => (bool[4] y) { m = Mul(x, w) y = Greater(m, limit) }", {"w": (4,), "limit": scalar(0.5)}, 20,
    ),
    "an empty part": Peer(
        "(float[2] x) => (float[2] y) { c = Concat <axis=0>(x, nothing) y = Relu(c) }",
        {"nothing": np.empty(0, np.float32)}, 20,
    ),
    "an empty input": Peer(
        "(float[2] x, float[0] e) => (float[2] y) { c = Concat <axis=0>(x, e) y = Relu(c) }",
        opset=20, feeds={"e": lambda _: np.empty(0, np.float32)},
    ),
    "shape by its size": Peer(
        """(float[A,4] x, float[8,B] z) => (float[C,4] y) {
            m = MatMul(x, w) t = Transpose(z) c = Concat <axis=0>(m, t) s = Size(c) d = Div(s, four)
            h = Concat <axis=0>(d, four) y = Reshape(c, h) }""",
        {"w": (4, 8), "four": ints(4)}, 20, {"A": 3, "B": 2},
    ),
    "resize of a sum": Peer(
        """(float[1,3,4,4] x) => (float[1,3,8,8] y) {
            a = Add(x, w) r = Resize <mode="nearest">(a, roi, scales) y = Relu(r) }""",
        {"w": (1, 3, 4, 4), "roi": np.empty(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}, 20,
    ),
    "resize by computed scales": Peer(
        """(float[1,3,4,4] x) => (float[1,3,8,8] y) { s = Cast <to=1>(whole) y = Resize <mode="nearest">(x, , s) }""",
        {"whole": ints(1, 1, 2, 2)}, 20,
    ),
    "joined twice": Peer(
        """(float[1,2,4,4] a, float[1,3,4,4] b, float[1,4,4,4] c) => (float[1,5,4,4] y, float[1,9,4,4] z) {
            j = Concat <axis=1>(a, b) z = Concat <axis=1>(j, c) y = Cast <to=1>(j) }""",
        opset=20,
    ),
    "branches of products": _if("t = Gemm(p, w0, b0)", "o = Gemm(p, w1, b1)", w0=(4, 3), b0=(3,), w1=(4, 3), b1=(3,)),
    "branches of sums": _if("a = Add(p, w0) t = Mul(a, x)", "o = Add(x, w1)", w0=(2, 4), w1=(2, 4)),
    "branches of nothing": _if("t = Identity(x)", "o = Identity(p)"),
    "branches behind branches": Peer(
        """(float[1,4] x, bool c, bool d) => (float[1,3] y) {
            m = If (c) <
                then_branch = a () => (float[1,4] t) { t = Gemm(x, w0) },
                else_branch = b () => (float[1,4] o) { o = Gemm(x, w1) }
            >
            y = If (d) <
                then_branch = e () => (float[1,3] u) { u = Gemm(m, w2) },
                else_branch = f () => (float[1,3] v) { v = Gemm(m, w3) }
            >
        }""",
        {"w0": (4, 4), "w1": (4, 4), "w2": (4, 3), "w3": (4, 3)}, 20,
    ),
    "branches that resize": Peer(
        """(float[1,3,4,4] x, bool c) => (float[1,3,8,8] y) {
            y = If (c) <
                then_branch = a () => (float[1,3,8,8] t) { t = Resize <mode="nearest">(x, none, scales) },
                else_branch = b () => (float[1,3,8,8] o) { o = Resize <mode="linear">(x, none, scales) }
            >
        }""",
        {"none": np.empty(0, np.float32), "scales": np.array([1, 1, 2, 2], np.float32)}, 20,
    ),
    "loop that adds": Peer(
        """(float[1,3] x, int64 n, bool c, float[1,3] first) => (float[1,3] y) {
            p = Mul(x, scale)
            y = Loop (n, c, first) <
                body = step (int64 i, bool ci, float[1,3] s) => (bool co, float[1,3] t) {
                    t = Add(s, p) co = Identity(ci)
                }
            >
        }""",
        {"scale": (1, 3)}, 20, feeds={"n": lambda _: scalar(3, np.int64), "c": lambda _: scalar(1, np.bool_)},
    ),
    "layer norm written out": _layer_norm(-1),
    "layer norm written out, no shift": _layer_norm(-1, shift=False),
    "norms of other axes": _layer_norm(1),
    "norms of inner axes": _layer_norm(2),
    "norms of inner axes, from behind": _layer_norm(-2),
    "root of mean squares": Peer(
        """(float[1,4,8] x) => (float[1,4,8] y) {
            p = Pow(x, two) m = ReduceMean <axes=[-1], keepdims=1>(p) a = Add(m, tiny) r = Sqrt(a) y = Div(x, r) }""",
        {"two": fill((1,), 2), "tiny": fill((1,), 1e-6)},
    ),
    "double comes in": Peer(
        "(double[2,3] x) => (double[2,3] y) { s = Add(x, c) y = Mul(s, s) }", {"c": np.ones((2, 3))}, 17,
    ),
    "no inputs": Peer(
        "() => (float16[2] y) { c = Constant <value_floats=[1.0,2.0]>() d = Cast <to=10>(c) y = Identity(d) }",
        opset=19,
    ),
    "a plugin": _plugin(""),
    "a plugin of trt.plugins": _plugin("trt.plugins"),
}  # fmt: skip
