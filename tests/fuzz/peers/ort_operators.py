"""Written after the models of ONNX Runtime's quantization tests of one operator each (`test_op_*.py`), made smaller."""

import numpy as np

from tests.fuzz.peers.build import Peer, forget_imports, forget_shapes, ints, negate_dims, scalar

_MS = {"com.microsoft": 1}
_CLIP = {"low": scalar(-1), "high": scalar(1)}
_CONV = {"w": (4, 3, 3, 3)}


def _behind_conv(nodes: str, *, result: str = "float[N,M,K,L] y", opset: int = 13, **weights: object) -> Peer:
    """A convolution whose result is an output by an Identity, too; `c` is what the nodes read."""
    text = f"""(float[1,3,9,11] x) => (float[1,4,7,9] also, {result}) {{
        [conv] c = Conv(x, w) [same] also = Identity(c)
        {nodes}
    }}"""
    return Peer(text, {**_CONV, **weights}, opset, trits=True, counts=(1, 3, 8))


def _between_gemms(nodes: str, *, opset: int = 13, **weights: object) -> Peer:
    text = f"""(float[N,10] x) => (float[N,10] y) {{
        a = Gemm <alpha=1.0, beta=1.0, transB=1>(x, w0, b0)
        {nodes}
        y = Gemm <alpha=1.0, beta=1.0, transB=1>(c, w1, b1)
    }}"""
    both = {"w0": (30, 10), "b0": (30,), "w1": (10, 30), "b1": (10,), **weights}
    return Peer(text, both, opset, {"N": 5}, alter=negate_dims)


def _between_products(nodes: str, *, opset: int = 18, kind: type = np.float32, **weights: object) -> Peer:
    name = "float" if kind is np.float32 else "float16"
    text = f"({name}[N,10] x) => ({name}[N,10] y) {{ a = MatMul(x, w0) {nodes} y = MatMul(c, w1) }}"
    return Peer(text, {"w0": (10, 30), "w1": (30, 10), **weights}, opset, {"N": 5}, trits=True, kind=kind)


def _pad(mode: str, extra: str = "", **weights: object) -> Peer:
    nodes = f'[pad] y = Pad <mode="{mode}">(c, pads{extra})'
    return _behind_conv(nodes, pads=ints(0, 0, 1, 2, 0, 0, 3, 4), **weights)


def _resize(attributes: str, inputs: str, **weights: object) -> Peer:
    return _behind_conv(f"[resize] y = Resize <{attributes}>(c, {inputs})", **weights)


def _attention(text: str) -> Peer:
    weights = {"wqkv": (10, 30), "bqkv": (30,), "w": (10, 10)}
    return Peer(text, weights, imports=_MS, sizes={"S": 5}, alter=forget_imports)


def _only(text: str, **weights: object) -> Peer:
    return Peer(text, weights, trits=True)


def _lstm(attributes: str, inputs: str, outputs: str, ways: int, opset: int) -> Peer:
    result = {"h": f"float[L,{ways},N,5] h", "h, s": f"float[L,{ways},N,5] h, float[{ways},N,5] s"}[outputs]
    text = f"(float[L,N,4] x) => ({result}) {{ [lstm] {outputs} = LSTM <hidden_size=5{attributes}>(x, w, r{inputs}) }}"
    weights = {"w": (ways, 20, 4), "r": (ways, 20, 5)}
    more = {"b": (ways, 40), "first": (ways, 2, 5)}
    used = {name: shape for name, shape in more.items() if name in inputs}
    return Peer(text, {**weights, **used}, opset, {"L": 6, "N": 2})


def _squeezes(opset: int) -> Peer:
    given, attribute = ("(c0, axes)", "") if opset >= 13 else ("(c0)", "<axes=[0]>")
    second, third = given.replace("c0", "c1"), given.replace("c0", "a")
    text = f"""(float[1,2,12,14] x) => (float[1,3,10,12] y) {{
        c0 = Conv(x, w0) c1 = Conv(x, w1) c2 = Conv(x, w2)
        s0 = Squeeze {attribute}{given}
        s1 = Squeeze {attribute}{second}
        a = Add(s0, s1)
        u = Unsqueeze {attribute}{third}
        y = Add(u, c2)
    }}"""
    axes = {"axes": ints(0)} if opset >= 13 else {}
    return Peer(text, {"w0": (3, 2, 3, 3), "w1": (3, 2, 3, 3), "w2": (3, 2, 3, 3), **axes}, opset, trits=True)


_EMBED = """(int32[1,3] ids, int32[1,3] segments) => (float[1,3,4] y, int32[1] lengths{more}) {{
    {name}, lengths = com.microsoft.EmbedLayerNormalization
        <epsilon=0.001>(ids, segments, words, places, kinds, scale, shift)
    {rest}
}}"""
_TABLES = {"words": (2, 4), "places": (4, 4), "kinds": (2, 4), "scale": (4,), "shift": (4,)}

PEERS: dict[str, Peer] = {
    "argmax": _behind_conv("[arg] y = ArgMax <axis=0, keepdims=1>(c)", result="int64[N,M,K,L] y"),
    "argmax of channels": _behind_conv("y = ArgMax <axis=1, keepdims=0>(c)", result="int64[N,K,L] y"),
    "argmax of last maxima": Peer(
        """(float[1,6,8] x) => (int64[1,6] y) {
            c = MatMul(x, w) a = Add(c, b) y = ArgMax <axis=-1, keepdims=0, select_last_index=1>(a) }""",
        {"w": (8, 12), "b": (12,)},
    ),
    "attention": _attention(
        """(float[1,S,10] x) => (float[1,S,10] y) {
            a = com.microsoft.Attention <num_heads=5>(x, wqkv, bqkv) y = MatMul(a, w) }"""
    ),
    "attention with a mask": Peer(
        """(float[1,S,10] x, int32[1,S] mask) => (float[1,S,10] y) {
            a = com.microsoft.Attention <num_heads=5>(x, wqkv, bqkv, mask) y = MatMul(a, w) }""",
        {"wqkv": (10, 30), "bqkv": (30,), "w": (10, 10)}, imports=_MS, sizes={"S": 5},
        feeds={"mask": lambda _: np.array([[1, 1, 1, 1, 0]], np.int32)},
    ),
    "concat": Peer(
        """(float[1,3,8,10] x) => (float[1,9,6,8] y, float[1,13,6,8] both) {
            a = Conv(x, w0) ra = Relu(a) b = Conv(x, w1) c = Conv(x, w2) y = Concat <axis=1>(ra, b, c)
            both = Concat <axis=1>(y, ra) }""",
        {"w0": (4, 3, 3, 3), "w1": (2, 3, 3, 3), "w2": (3, 3, 3, 3)}, trits=True,
    ),
    "conv of a line": Peer("(float[1,4,9] x) => (float[1,6,7] y) { y = Conv(x, w, b) }", {"w": (6, 4, 3), "b": (6,)}),
    "conv of a box": Peer("(float[1,2,5,5,5] x) => (float[1,3,3,3,3] y) { y = Conv(x, w) }", {"w": (3, 2, 3, 3, 3)}),
    "conv transposed": Peer(
        "(float[1,1,7,7] x) => (float[1,1,9,9] y) { [turned] y = ConvTranspose <kernel_shape=[3,3]>(x, w) }",
        {"w": (1, 1, 3, 3)}, trits=True,
    ),
    "conv transposed float16": Peer(
        "(float16[1,1,7,7] x) => (float16[1,1,9,9] y) { y = ConvTranspose <kernel_shape=[3,3]>(x, w) }",
        {"w": (1, 1, 3, 3)}, 19, kind=np.float16,
    ),
    "embed layer norm and gelu": Peer(
        _EMBED.format(name="e", more="", rest="m = MatMul(e, w) y = com.microsoft.BiasGelu(m, b)"),
        {**_TABLES, "w": (4, 4), "b": (4,)}, imports=_MS,
    ),
    "flatten": _behind_conv("y = Flatten <axis=1>(c)", result="float[N,K] y"),
    "gather elements": Peer(
        """(float[5,10] x) => (float[5,10] y) {
            a = MatMul(x, w0) c = GatherElements <axis=1>(a, ids) y = MatMul(c, w1) }""",
        {"w0": (10, 30), "ids": np.arange(150).reshape(5, 30) % 30, "w1": (30, 10)}, 16,
    ),
    "average pool of all": Peer(
        """(float[1,3,8,8] x) => (float[N,3] y) {
            c = Conv(x, w0) p = GlobalAveragePool(c) r = Reshape(p, shape) z = Expand(r, grown)
            y = Gemm <transB=1>(z, w1, b1) }""",
        {"w0": (4, 3, 3, 3), "shape": ints(1, 4), "grown": ints(2, 4), "w1": (3, 4), "b1": (3,)},
    ),
    "gemm and clip": _between_gemms("c = Clip(a, low, high)", **_CLIP),
    "gemm and old clip": _between_gemms("c = Clip <min=-1.0, max=1.0>(a)", opset=9),
    "gemm and leaky relu": _between_gemms("c = LeakyRelu <alpha=0.2>(a)"),
    "gemm and sigmoid": _between_gemms("c = Sigmoid(a)"),
    "gemm of parts": Peer(
        """(float[10,N] x) => (float[N,6] y, float[N,6] z) {
            y = Gemm <alpha=0.5, beta=2.0, transA=1>(x, w, b) z = Gemm <transA=1>(x, w) }""",
        {"w": (10, 6), "b": (1, 6)}, 11, {"N": 5},
    ),
    "gemm with a scalar": Peer(
        "(float[N,4] x) => (float[N,6] y) { y = Gemm(x, w, b) }", {"w": (4, 6), "b": scalar(0.5)}, sizes={"N": 5}
    ),
    "instance norm": Peer(
        """(float[1,2,5,5] x) => (float[1,2,5,5] y) {
            c = Conv(x, w) y = InstanceNormalization <epsilon=0.01>(c, scale, shift) }""",
        {"w": (2, 2, 1, 1), "scale": (2,), "shift": (2,)},
    ),
    "instance norm alone": _only(
        "(float[1,2,5,5] x) => (float[1,2,5,5] y) { y = InstanceNormalization(x, scale, shift) }",
        scale=(2,), shift=(2,),
    ),
    "lstm": _lstm("", ", b", "h", 1, 11),
    "lstm both ways": _lstm(', direction="bidirectional"', ", b", "h, s", 2, 13),
    "lstm without bias": _lstm("", "", "h", 1, 7),
    "lstm from a state": _lstm("", ", b, , first", "h, s", 1, 14),
    "products of float16": _between_products("c = Identity(a)", opset=19, kind=np.float16),
    "products and clip of float16": _between_products(
        "c = Clip(a, low, high)", opset=19, kind=np.float16, low=scalar(-1, np.float16), high=scalar(1, np.float16)
    ),
    "product of two inputs": _only("(float[5,10] x, float[10,3] z) => (float[5,3] y) { y = MatMul(x, z) }"),
    "products in blocks": Peer(
        "(float[N,32] x) => (float[N,16] y) { a = MatMul(x, w0) c = Add(a, b) y = MatMul(c, w1) }",
        {"w0": (32, 48), "b": (48,), "w1": (48, 16)}, 21,
    ),
    "pad by a value": _pad("constant", ", value", value=scalar(3.75)),
    "pad by zeros": _pad("constant"),
    "pad by edges": _pad("edge"),
    "pad by reflection": _pad("reflect"),
    "pad of float inputs": Peer(
        '(float[1,3,6,6] x) => (float[1,3,10,12] y) { [pad] y = Pad <mode="constant">(x, pads) }',
        {"pads": ints(0, 0, 1, 2, 0, 0, 3, 4)}, trits=True,
    ),
    "pad alone, float16": Peer(
        "(float16[1,3,6,6] x) => (float16[1,3,10,12] y) { y = Pad(x, pads) }",
        {"pads": ints(0, 0, 1, 2, 0, 0, 3, 4)}, 19, kind=np.float16,
    ),
    "average pool": _behind_conv("[pool] y = AveragePool <kernel_shape=[3,3]>(c)"),
    "average pool, old": _behind_conv(
        "y = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(c)", opset=10
    ),
    "reshape": Peer(
        "(float[3,7] x) => (float[K,L] y) { [mm] m = MatMul(x, w) [shape] y = Reshape(m, dims) }",
        {"w": (7, 3), "dims": ints(1, 9)}, trits=True,
    ),
    "resize by scales": _resize('mode="nearest"', "roi, scales", roi=np.empty(0, np.float32),
                                scales=np.array([1, 1, 2, 2], np.float32)),
    "skip layer norm": Peer(
        """(float[1,3,4] x, float[1,3,4] z) => (float[1,3,4] y) {
            m = MatMul(x, w) y = com.microsoft.SkipLayerNormalization <epsilon=0.001>(m, z, scale, shift, b) }""",
        {"w": (4, 4), "scale": (4,), "shift": (4,), "b": (4,)}, imports=_MS,
    ),
    "slice": _behind_conv("[slice] y = Slice(c, from, to, axes)", **{"from": ints(0, 1), "to": ints(5, 6)},
                          axes=ints(2, 3)),
    "softmax, old": _behind_conv("y = Softmax <axis=1>(c)", opset=11),
    "split": Peer(
        """(float[6,3,1] x) => (float[1,12] y0, float[1,12] y1, float[1,12] y2) {
            [conv] c = Conv(x, w) [shape] r = Reshape(c, dims) [split] y0, y1, y2 = Split <axis=0>(r, parts) }""",
        {"w": (6, 3, 1), "dims": ints(3, 12), "parts": ints(1, 1, 1)}, trits=True,
    ),
    "split, old": _behind_conv(
        "y, z = Split <axis=1, split=[1,3]>(c)", result="float[N,M,K,L] y, float[N,O,K,L] z", opset=11
    ),
    "squeeze": _squeezes(13),
    "squeeze, old": _squeezes(11),
    "top of a map": _behind_conv(
        "[top] y, places = TopK <axis=-1, largest=1, sorted=1>(c, k)",
        result="float[N,M,K,L] y, int64[N,M,K,L] places", k=ints(5),
    ),
    "where": Peer(
        "(bool[5,6] condition, float[5,6] x) => (float[K,L] y) { y = Where(condition, x, other) }",
        {"other": (5, 6)}, 16,
    ),
    "inputs of no shape": Peer(
        "(float[N,6] x) => (float[N,4] y) { a = MatMul(x, w) y = Softmax(a) }", {"w": (6, 4)}, alter=forget_shapes,
    ),
    **{
        f"{op.lower()} of two inputs": Peer(
            f"(float[2,3,4] x, float[2,3,4] z) => (float[2,3,4] y) {{ [it] y = {op}(x, z) }}", trits=True
        )
        for op in ("Add", "Mul", "Sub", "Min", "Max", "Mean", "Sum")
    },
    **{
        f"{op.lower()} of a product": Peer(
            f"(float[5,6] x) => (float[5,4] y) {{ m = MatMul(x, w) [it] y = {op}(m{rest}) }}",
            {"w": (6, 4), "c": (4,)}, opset=20,
        )
        for op, rest in (("Add", ", c"), ("Mul", ", c"), ("Div", ", c"), ("Sub", ", c"), ("Relu", ""), ("Gelu", ""),
                         ("Clip", ""), ("Elu", ""), ("HardSwish", ""), ("Tanh", ""), ("Abs", ""), ("Neg", ""))
    },
}  # fmt: skip
