"""The bias forms that ORT's MatMulAddFusion leaves alone, seen in its optimized graph."""

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.errors import ModelError
from onnxq.numerics import limit_sums
from onnxq.passes.assembly import unfuse_matmul_bias
from onnxq.runtime import optimize_graph
from tests.passes.kit import assert_same, constant, in_branch, infer, ops, parse

F = np.float32
RNG = np.random.default_rng(0)
# Integers that every CPU adds up exactly: what MatMulIntegerToFloat does with others depends on it.
WEIGHT = limit_sums(*[RNG.integers(-127, 128, (64, 48)).astype(np.int8)] * 2, [(1, 0)])
BIAS = RNG.standard_normal(48).astype(F)

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
    result = unfuse_matmul_bias(model, ["m/MatMul"])
    assert ops(optimize_graph(result))["MatMulIntegerToFloat"] == 1
    assert "Gemm" not in ops(optimize_graph(result))
    assert_same(model, result, rtol=0)


def test_the_forms() -> None:
    deep = unfuse_matmul_bias(quantized(SHAPES["4-D"]), ["m/MatMul"])
    assert constant(deep, "y/Add", 1).shape == (1, 1, 1, 48)
    flat = unfuse_matmul_bias(quantized(SHAPES["2-D"]), ["m/MatMul"])
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
    result = unfuse_matmul_bias(model, ["m/MatMul", "k/MatMul", "m/MatMul"] if products == 2 else ["m/MatMul"])
    assert ops(optimize_graph(result))["MatMulIntegerToFloat"] == products
    assert products == 2 or constant(result, "y/Mul", 1).shape == (48,)
    assert_same(model, result, rtol=0)


def test_twice_changes_nothing_more() -> None:
    for shape in (SHAPES["3-D"], SHAPES["2-D"]):
        once = unfuse_matmul_bias(quantized(shape), ["m/MatMul"])
        assert unfuse_matmul_bias(once, ["m/MatMul"]) is once


def test_inside_a_branch() -> None:
    model = in_branch(quantized(SHAPES["3-D"]))
    result = unfuse_matmul_bias(model, ["m/MatMul"])
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
    assert unfuse_matmul_bias(model, ["m/MatMul"]) is model


def test_an_unknown_node_is_an_error() -> None:
    with pytest.raises(ModelError, match="m/MatMull"):
        unfuse_matmul_bias(quantized("7,64"), ["m/MatMull"])


def test_optimized_and_not_agree() -> None:
    """MatMulIntegerToFloat multiplies integers and scales once; only the last bits differ."""
    model = unfuse_matmul_bias(quantized(SHAPES["3-D"]), ["m/MatMul"])
    feeds = {"x": RNG.standard_normal((2, 7, 64)).astype(F)}
    (off,), (on,) = infer(model, feeds), infer(model, feeds, optimize=True)
    np.testing.assert_allclose(on, off, rtol=0, atol=3e-7 * np.abs(off).max())
