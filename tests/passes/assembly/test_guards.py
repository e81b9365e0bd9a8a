"""Guards and bias forms keep ORT from quantizing and fusing unasked, as its optimized graph shows."""

import numpy as np
import pytest
from onnx import ModelProto

from onnxq import quantize
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex
from onnxq.numerics import limit_sums
from onnxq.passes.assembly import guard_float, keep_products
from onnxq.runtime import optimize_graph
from onnxq.sites import Edge
from tests.passes.kit import assert_same, constant, feeds_for, in_branch, infer, ops, parse, read_by

F = np.float32
RNG = np.random.default_rng(0)

W33 = "<kernel_shape = [3,3], pads = [1,1,1,1]>"
WEIGHTS = {
    "w": RNG.standard_normal((8, 8, 3, 3)).astype(F),
    "b": RNG.standard_normal(8).astype(F),
    "depth": RNG.standard_normal((8, 1, 3, 3)).astype(F),
    "up": RNG.standard_normal((8, 8, 2, 2)).astype(F),
    "m": RNG.standard_normal((6, 16)).astype(F),
    "c": RNG.standard_normal(16).astype(F),
    "shape": np.array([1, 8, 6, 6]),
}
CONV = f"v = Conv {W33} (d, w, b)"
# Nodes from d to v, what ORT makes of them by itself, and what must stay.
NODES = {
    "conv": (CONV, "QLinearConv", "Conv"),
    "depthwise": (f"v = Conv <group = 8, {W33[1:]} (d, depth)", "QLinearConv", "Conv"),
    "conv and relu": (f"e = Conv {W33} (d, w) v = Relu(e)", "QLinearConv", "Conv"),
    # Of the weights it quantized; there is no integer kernel.
    "transposed": ("v = ConvTranspose <strides = [2,2]> (d, up)", "DequantizeLinear", "ConvTranspose"),
    "matmul and bias": ("p = MatMul(d, m) v = Add(p, c)", "QGemm", "Gemm"),
    "average pool": (
        "v = AveragePool <kernel_shape = [2,2], strides = [2,2]> (d)",
        "QLinearAveragePool",
        "AveragePool",
    ),
    "softmax": ("v = Softmax(d)", "QLinearSoftmax", "Softmax"),
}
VIA = {
    "reshape": "e = Reshape(d0, shape) d = Identity(e)",
    "transpose": "d = Transpose <perm = [0,1,3,2]> (d0)",
    "max pool": "d = MaxPool <kernel_shape = [1,1]> (d0)",
}


def between_pairs(lines: str, via: str = "", opset: int = 17) -> ModelProto:
    """Pairs around these nodes; via: nodes from d0, the first pair's output, to d."""
    first = f"d0 = DequantizeLinear(q, s, z) {via}" if via else "d = DequantizeLinear(q, s, z)"
    text = f"""g (float[1,8,6,6] x) => (float[A,B,C,D] y) {{
        q = QuantizeLinear(x, s, z) {first} {lines}
        o = QuantizeLinear(v, t, zero) y = DequantizeLinear(o, t, zero) }}"""
    held = read_by(via + lines, WEIGHTS)
    zero = np.uint8(0 if "Relu" in lines else 120)
    return parse(text, opset=opset, s=0.04, z=np.uint8(110), t=0.05, zero=zero, **held)


def named(model: ModelProto, *op_types: str) -> list[str]:
    return [node.name for node in GraphIndex(model).nodes if node.op_type in op_types]


FLOAT = ("Conv", "ConvTranspose", "MatMul", "AveragePool", "Softmax")


@pytest.mark.parametrize("name", NODES)
def test_what_ort_would_quantize_stays_float(name: str) -> None:
    lines, by_itself, wanted = NODES[name]
    model = between_pairs(lines)
    alone = ops(optimize_graph(model))
    if by_itself == "DequantizeLinear":
        assert alone["DequantizeLinear"] > ops(model)["DequantizeLinear"]
    else:
        assert alone[by_itself] == 1
    guarded = guard_float(model, named(model, *FLOAT))
    assert ops(guarded)["Clip"] == ops(model)["Clip"] + 1
    left = ops(optimize_graph(guarded))
    assert left[wanted] == 1
    assert not left[by_itself] or by_itself == "DequantizeLinear"
    assert left["DequantizeLinear"] == 2
    assert_same(model, guarded, rtol=0)  # unoptimized: a Clip without bounds is nothing
    if wanted in ("Conv", "Gemm", "ConvTranspose", "Softmax"):
        feeds = feeds_for(model)
        (off,), (on,) = infer(guarded, feeds), infer(guarded, feeds, optimize=True)
        assert np.mean(on != off) < 0.002  # float rounding may tip a value over a step, quantized weights tip many
        (raw,) = infer(model, feeds, optimize=True)
        assert by_itself == "QLinearSoftmax" or np.mean(raw != off) > 0.02


@pytest.mark.parametrize(("via", "opset"), [*((via, 17) for via in VIA), *(("", opset) for opset in (13, 20, 21))])
def test_ort_reaches_through_nodes_that_pass_integers_on_in_every_opset(via: str, opset: int) -> None:
    model = between_pairs(CONV, VIA.get(via, ""), opset)
    assert ops(optimize_graph(model))["QLinearConv"] == 1
    guarded = guard_float(model, named(model, "Conv"))
    assert ops(guarded)["Clip"] == ops(model)["Clip"] + 1
    assert ops(optimize_graph(guarded))["Conv"] == 1
    assert_same(model, guarded, rtol=0)


def test_no_pair_is_moved_to_where_bodies_read() -> None:
    """ONNX Runtime 1.32 ends the process when it moves a DequantizeLinear through this Transpose."""
    model = parse(
        """g (float[2,3] x, bool c) => (float[N,M] y) {
        q = QuantizeLinear(x, s, z) d0 = DequantizeLinear(q, s, z) d = Transpose(d0)
        y = If (c) <then_branch = t () => (float[3,2] a) { a = Neg(d) },
                    else_branch = e () => (float[3,2] b) { b = Abs(d) }>
    }""",
        s=0.04,
        z=np.uint8(110),
    )
    guarded = guard_float(model, ())
    assert ops(guarded)["Clip"] == 1
    assert ops(optimize_graph(guarded))["Clip"] == 1
    assert_same(model, guarded, rtol=0)


def test_one_guard_for_the_readers_of_one_tensor() -> None:
    model = between_pairs(f"{CONV.replace('v =', 'c1 =')} {CONV.replace('v =', 'c2 =')} v = Add(c1, c2)")
    guarded = guard_float(model, named(model, "Conv"))
    assert ops(guarded)["Clip"] == 1
    assert "QLinearConv" not in ops(optimize_graph(guarded))
    assert_same(model, guarded, rtol=0)


def test_only_the_named_reader_is_guarded() -> None:
    model = between_pairs(f"{CONV} u = Neg(d)")
    model.graph.output.add().CopyFrom(model.graph.output[0])
    model.graph.output[1].name = "u"
    guarded = guard_float(model, named(model, "Conv"))
    index = GraphIndex(guarded)
    assert index.find_node("u/Neg").inputs == ("d",)
    assert index.find_node("v/Conv").inputs[0] == "d/guard"


def test_what_needs_no_guard_gets_none() -> None:
    no_pair_in_front = f"v = Conv {W33} (x, w, b) o = QuantizeLinear(v, s, z) y = DequantizeLinear(o, s, z)"
    no_pair_behind = f"q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Conv {W33} (d, w, b)"
    for lines in (no_pair_in_front, no_pair_behind):
        text = f"g (float[1,8,6,6] x) => (float[1,8,6,6] y) {{ {lines} }}"
        model = parse(text, s=0.04, z=np.uint8(110), **read_by(text, WEIGHTS))
        assert guard_float(model, named(model, "Conv")) is model
        assert "QLinearConv" not in ops(optimize_graph(model))  # and rightly so


def test_quantized_weights_are_no_reason() -> None:
    lines = "k = DequantizeLinear <axis = 0> (w, sw) v = Conv <kernel_shape = [1,1]> (x, k)"
    text = f"g (float[1,8,6,6] x) => (float[1,8,6,6] y) {{ {lines} o = QuantizeLinear(v, s, z)"
    text += " y = DequantizeLinear(o, s, z) }"
    held = {"w": np.ones((8, 8, 1, 1), np.int8), "sw": np.full(8, 0.1, F), "s": np.asarray(F(0.04)), "z": np.uint8(9)}
    model = parse(text, **held)
    assert guard_float(model, ["v/Conv"]) is model


def test_inside_a_branch() -> None:
    model = in_branch(between_pairs(CONV))
    guarded = guard_float(model, named(model, "Conv"))
    before, after = ops(optimize_graph(model)), ops(optimize_graph(guarded))
    assert before["QLinearConv"] == 1
    assert after["Conv"] == 1
    assert after["QLinearConv"] == 0
    assert_same(model, guarded, rtol=0)


def test_an_unknown_node_is_an_error() -> None:
    with pytest.raises(ModelError, match="convv"):
        guard_float(between_pairs(CONV), ["convv"])


# Integers that every CPU adds up exactly: what MatMulIntegerToFloat does with others depends on it.
WEIGHT = limit_sums(*[RNG.integers(-127, 128, (64, 48)).astype(np.int8)] * 2, [(1, 0)])
BIAS = RNG.standard_normal(48).astype(F)

# The data of both products of the test networks.
PAIRED = {Edge("m/MatMul", 0), Edge("k/MatMul", 0)}

SHAPES = {
    "2-D": "7,64",
    "2-D dynamic": "M,64",
    "3-D": "2,7,64",
    "3-D dynamic": "N,T,64",
    "4-D": "2,3,7,64",
    "1-D": "64",
}


def quantized(shape: str, add: str = "y = Add(m, b)", tail: str = "", **other: np.ndarray) -> ModelProto:
    """A MatMul behind a pair with int8 weights per channel, and its bias."""
    out = ",".join([*shape.split(",")[:-1], "48"])
    lines = f"q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear <axis = 1> (w, sw) {tail}"
    return parse(
        f"g (float[{shape}] x) => (float[{out}] y) {{ {lines} m = MatMul(d, v) {add} }}",
        w=WEIGHT,
        sw=np.full(48, 0.01, F),
        s=0.03,
        z=np.uint8(110),
        b=BIAS,
        **other,
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("flip", [False, True])
def test_the_matmul_stays_an_integer_matmul(name: str, flip: bool) -> None:
    model = quantized(SHAPES[name], "y = Add(b, m)" if flip else "y = Add(m, b)")
    if "dynamic" not in name or name.startswith("2"):
        assert "MatMulIntegerToFloat" not in ops(optimize_graph(model))  # why the rewrite is there
        assert ops(optimize_graph(model))["Gemm"] == 1
    result = keep_products(model, ["m/MatMul"], PAIRED)
    assert ops(optimize_graph(result))["MatMulIntegerToFloat"] == 1
    assert "Gemm" not in ops(optimize_graph(result))
    assert_same(model, result, rtol=0)


def test_the_forms() -> None:
    deep = keep_products(quantized(SHAPES["4-D"]), ["m/MatMul"], PAIRED)
    assert constant(deep, "y/Add", 1).shape == (1, 1, 1, 48)
    flat = keep_products(quantized(SHAPES["2-D"]), ["m/MatMul"], PAIRED)
    assert [(node.name, node.op_type) for node in flat.graph.node][-1] == ("y/Add", "Sub")
    np.testing.assert_array_equal(constant(flat, "y/Add", 1), -BIAS)


@pytest.mark.parametrize(
    ("add", "tail", "products"),
    [
        pytest.param("a = Add(m, b) y = Mul(a, b)", "", 1, id="another reader of the bias"),
        pytest.param("a = Add(m, b) y = Mul(a, c)", "k = MatMul(d, v) c = Add(k, b)", 2, id="two products"),
    ],
)
def test_others_may_read_the_bias(add: str, tail: str, products: int) -> None:
    model = quantized(SHAPES["3-D"], add, tail)
    result = keep_products(model, ["m/MatMul", "k/MatMul", "m/MatMul"] if products == 2 else ["m/MatMul"], PAIRED)
    assert ops(optimize_graph(result))["MatMulIntegerToFloat"] == products
    assert products == 2 or constant(result, "y/Mul", 1).shape == (48,)
    assert_same(model, result, rtol=0)


@pytest.mark.parametrize(
    ("name", "tail", "end"),
    [
        ("3-D", "", "r = Relu(m) y = Neg(r)"),
        ("2-D dynamic", "", "r = Clip(m) y = Neg(r)"),
        ("2-D dynamic", "k = MatMul(d, v)", "a = Add(m, k) y = Neg(a)"),
        ("2-D", "k = Neg(b)", "a = Relu(k) e = Neg(m) y = Add(e, a)"),
    ],
    ids=["relu", "clip", "products", "other readers"],
)
def test_other_readers_are_kept_apart(name: str, tail: str, end: str) -> None:
    model = quantized(SHAPES[name], end, tail)
    products = ops(model)["MatMul"]
    result = keep_products(model, ["m/MatMul", "k/MatMul"][:products], PAIRED)
    assert (result is model) == ("Relu(k)" in end)
    if result is not model:
        assert ops(optimize_graph(model))["MatMulIntegerToFloat"] < products  # why the rewrite is there
    assert ops(optimize_graph(result))["MatMulIntegerToFloat"] == products
    assert_same(model, result, rtol=1e-6)


def test_readers_behind_pairs_stay() -> None:
    model = quantized(SHAPES["2-D"], "k = Neg(m) a = Add(m, k) y = Neg(a)")
    assert keep_products(model, ["m/MatMul"], PAIRED) is model
    model = quantized(SHAPES["2-D"], "a = Add(m, k) y = Neg(a)", "k = MatMul(d, v)")
    unknown = quantized(SHAPES["2-D"], "a = Add(m, k) y = Neg(a)", "k = MatMul(d, v)")
    unknown.graph.input[0].type.tensor_type.ClearField("shape")
    unknown.graph.output[0].type.tensor_type.ClearField("shape")
    assert keep_products(unknown, ["m/MatMul"], PAIRED) is unknown
    assert keep_products(model, ["m/MatMul"], PAIRED | {Edge("a/Add", 0)}) is model
    model = quantized(SHAPES["2-D"], "r = Relu(m) y = Neg(r)")
    assert keep_products(model, ["m/MatMul"], PAIRED | {Edge("y/Neg", 0)}) is model


def test_a_pool_behind_a_float_convolution_pools_floats() -> None:
    text = """g (float[1,3,16,16] x) => (float[1,8,6,6] y) { [first] c = Conv(x, w) r = Relu(c)
        p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r) [second] y = Conv(p, v) }"""
    weights = {"w": RNG.standard_normal((8, 3, 1, 1)).astype(F), "v": RNG.standard_normal((8, 8, 3, 3)).astype(F) / 8}
    samples = [{"x": RNG.standard_normal((1, 3, 16, 16)).astype(F)} for _ in range(4)]
    rules = [{"node": "first", "set": {"float": True}}, {"node": "second", "set": {"quantize": True}}]
    model = optimize_graph(quantize(parse(text, **weights), samples, overrides={"rules": rules}).model)
    (pool,) = [node for node in model.graph.node if node.op_type == "MaxPool"]
    makers = {output: node.op_type for node in model.graph.node for output in node.output}
    assert makers[pool.input[0]] != "QuantizeLinear"
    assert ops(model)["QLinearConv"] == 1


@pytest.mark.parametrize("tail", ["y = Neg(r)", "n = Neg(r) k = Abs(r) y = Add(n, k)"])
def test_a_gemm_whose_relu_is_not_quantized_computes_in_integers(tail: str) -> None:
    text = f"g (float[T,64] x) => (float[T,64] y) {{ h = Gemm(x, w, b) r = Relu(h) {tail} }}"
    weights = {"w": RNG.standard_normal((64, 64)).astype(F) / 8, "b": RNG.standard_normal(64).astype(F)}
    samples = [{"x": RNG.standard_normal((8, 64)).astype(F)} for _ in range(4)]
    rules = [{"op": "Gemm", "set": {"quantize": True}}]
    model = quantize(parse(text, **weights), samples, overrides={"rules": rules}).model
    assert ops(optimize_graph(model)).items() >= {"QuantizeLinear": 1, "QGemm": 1, "LeakyRelu": 1, "Relu": 1}.items()


def test_twice_changes_nothing_more() -> None:
    for shape in (SHAPES["3-D"], SHAPES["2-D"]):
        once = keep_products(quantized(shape), ["m/MatMul"], PAIRED)
        assert keep_products(once, ["m/MatMul"], PAIRED) is once


def test_a_bias_inside_a_branch() -> None:
    model = in_branch(quantized(SHAPES["3-D"]))
    result = keep_products(model, ["m/MatMul"], {GraphIndex(model).find_node("m/MatMul").make_edge(0)})
    assert result is not model
    assert_same(model, result, rtol=0)


@pytest.mark.parametrize(
    ("add", "other"),
    [
        ("y = Relu(m)", {}),
        ("a = Add(m, b) r = Relu(m) y = Mul(a, r)", {}),
        ("y = Add(m, m)", {}),
        ("y = Add(m, k)", {"k": np.ones((1, 1, 48), F)}),
    ],
    ids=["no bias", "another reader", "itself", "has the form"],
)
def test_nothing_to_do_changes_nothing(add: str, other: dict[str, np.ndarray]) -> None:
    model = quantized(SHAPES["3-D"], add, **other)
    assert keep_products(model, ["m/MatMul"], PAIRED) is model


def test_an_unknown_product_is_an_error() -> None:
    with pytest.raises(ModelError, match="m/MatMull"):
        keep_products(quantized("7,64"), ["m/MatMull"], PAIRED)


def test_optimized_and_not_agree() -> None:
    """MatMulIntegerToFloat multiplies integers and scales once; only the last bits differ."""
    model = keep_products(quantized(SHAPES["3-D"]), ["m/MatMul"], PAIRED)
    feeds = {"x": RNG.standard_normal((2, 7, 64)).astype(F)}
    (off,), (on,) = infer(model, feeds), infer(model, feeds, optimize=True)
    np.testing.assert_allclose(on, off, rtol=0, atol=3e-7 * np.abs(off).max())
