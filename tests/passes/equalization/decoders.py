"""Decoders of one layer in the forms that exporters write: norms, attention, cache, tied tables."""

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.graph import fold_constants, infer_shapes, name_nodes
from tests.networks import add_arrays, parse_text

# Width of the stream, of the vocabulary, of the feed-forward; heads of queries and of values, channels of each.
D, V, F, H, KV, HD = 24, 40, 32, 4, 2, 8

# y of x, with scale g and, where there is one, shift b.
NORMS = {
    "div": "{y}q = Pow({x}, two) {y}m = ReduceMean<axes=[-1]>({y}q) {y}e = Add({y}m, eps) {y}r = Sqrt({y}e)"
    " {y}d = Div({x}, {y}r) {y} = Mul({y}d, {y}g)",
    "reciprocal": "{y}q = Mul({x}, {x}) {y}m = ReduceMean<axes=[-1]>({y}q) {y}e = Add(eps, {y}m) {y}r = Sqrt({y}e)"
    " {y}i = Reciprocal({y}r) {y}d = Mul({y}i, {x}) {y} = Mul({y}g, {y}d)",
    "rms": "{y} = RMSNormalization<axis=-1, epsilon=0.00001>({x}, {y}g)",
    "simplified": "{y} = SimplifiedLayerNormalization<axis=-1, epsilon=0.00001>({x}, {y}g)",
    "layernorm": "{y} = LayerNormalization<axis=-1, epsilon=0.00001>({x}, {y}g, {y}b)",
    "written-out": "{y}u = ReduceMean<axes=[-1]>({x}) {y}c = Sub({x}, {y}u) {y}q = Mul({y}c, {y}c)"
    " {y}m = ReduceMean<axes=[-1]>({y}q) {y}e = Add({y}m, eps) {y}r = Sqrt({y}e) {y}d = Div({y}c, {y}r)"
    " {y}f = Mul({y}d, {y}g) {y} = Add({y}f, {y}b)",
}
# The sum of two tensors beside the norm of it.
SKIPS = {
    "simplified": "{y}, {y}n1, {y}n2, {x} = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.00001>"
    "({x0}, {o}, {y}g)",
    "layernorm": "{y}, {y}n1, {y}n2, {x} = com.microsoft.SkipLayerNormalization<epsilon=0.00001>"
    "({x0}, {o}, {y}g, {y}b)",
}
ATTENTION = {
    "written-out": "q4 = Reshape(q, toq) qt = Transpose<perm=[0,2,1,3]>(q4)"
    " k4 = Reshape(k, tok) kt = Transpose<perm=[0,2,1,3]>(k4) kh = Tanh(kt) ku = Unsqueeze(kh, two_i)"
    " ke = Expand(ku, groups) km = Reshape(ke, tom) kx = Transpose<perm=[0,1,3,2]>(km) s = MatMul(qt, kx)"
    " p = Softmax<axis=-1>(s) v4 = Reshape(v, tok) vt = Transpose<perm=[0,2,1,3]>(v4) vu = Unsqueeze(vt, two_i)"
    " ve = Expand(vu, groups) vm = Reshape(ve, tom) pv = MatMul(p, vm) at = Transpose<perm=[0,2,1,3]>(pv)"
    " a = Reshape(at, toa)",
    "one node": "a = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v)",
    "genai": "a, present_k, present_v = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>"
    "(q, k, v, , , lengths, total)",
}


def make_decoder(
    norm: str = "div", attention: str = "written-out", skip: bool = False, tied: bool = False, more: str = "",
    opset: int = 17, outputs: str = "", **arrays: NDArray[Any],
) -> onnx.ModelProto:  # fmt: skip
    """A decoder of one layer. more: nodes behind all others; outputs: more of them; arrays: in place of random ones."""

    def write_norm(y: str, x: str, x0: str = "", o: str = "") -> str:
        if skip and o:
            return SKIPS[norm].format(y=y, x=x, x0=x0, o=o)
        added = f"{x} = Add({x0}, {o}) " if o else ""
        return added + NORMS[norm].format(x=x, y=y)

    head = "et = Transpose<perm=[1,0]>(E) logits = MatMul(n2, et)" if tied else "logits = MatMul(n2, wh)"
    extra = ", int32[N] lengths, int32[1] total" if attention == "genai" else ""
    text = f"""g (int64[N,T] ids{extra}) => (float[N,T,{V}] logits{outputs}) {{
        x0 = Gather(E, ids) {write_norm("n0", "x0")}
        q = MatMul(n0, wq) k = MatMul(n0, wk) v0 = MatMul(n0, wv) v = Add(v0, bv)
        {ATTENTION[attention]}
        o = MatMul(a, wo) {write_norm("n1", "x1", "x0", "o")}
        h = MatMul(n1, wg) s1 = Sigmoid(h) u = MatMul(n1, wu) t = Mul(s1, u) f = MatMul(t, wd) d = Add(f, bd)
        {write_norm("n2", "x2", "x1", "d")} {head} {more}
    }}"""
    rng = np.random.default_rng(0)
    shapes = {
        "E": (V, D), "wq": (D, H * HD), "wk": (D, KV * HD), "wv": (D, KV * HD), "bv": (KV * HD,), "wo": (H * HD, D),
        "wg": (D, F), "wu": (D, F), "wd": (F, D), "bd": (D,), "wh": (D, V),
        **{f"n{k}{part}": (D,) for k in range(3) for part in "gb"},
    }  # fmt: skip
    held: dict[str, Any] = {name: rng.standard_normal(shape) / shape[0] ** 0.5 for name, shape in shapes.items()}
    held |= {name: np.exp(value * 3) for name, value in held.items() if name.endswith("g") and value.ndim == 1}
    held |= {"two": np.array(2.0), "eps": np.array(1e-5)} | arrays
    held = {name: np.asarray(value, np.float32) for name, value in held.items()}
    held |= {"toq": np.array([0, 0, H, HD]), "tok": np.array([0, 0, KV, HD]), "two_i": np.array([2])}
    held |= {
        "groups": np.array([1, 1, H // KV, 1, 1]),
        "tom": np.array([0, H, -1, HD]),
        "toa": np.array([0, 0, H * HD]),
    }
    proto = parse_text(text, "com.microsoft", opset=opset)
    read = {name for node in proto.graph.node for name in node.input}
    add_arrays(proto.graph, **{name: value for name, value in held.items() if name in read})
    # As preparation leaves it: the transpose of a table is a constant of its own.
    return infer_shapes(fold_constants(name_nodes(proto)) if tied else name_nodes(proto))


def make_feeds(genai: bool = False, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Two lines of seven tokens."""
    ids = np.random.default_rng(seed).integers(0, V, (2, 7))
    return {"ids": ids} | ({"lengths": np.full(2, 6, np.int32), "total": np.array([7], np.int32)} if genai else {})
