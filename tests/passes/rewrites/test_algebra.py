"""Scalar arithmetic read as formulas: polynomials in front of an anchor, tails behind one."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.graph import infer_shapes
from onnxq.passes.rewrites.activations import Tail, Used, is_close, list_bases, list_tails, read_polynomial
from onnxq.passes.view import View
from onnxq.sites import TensorId
from tests.passes.kit import infer, parse

X, Y = TensorId("x"), TensorId("y")
NUMBERS = {"one": 1.0, "two": 2.0, "three": 3.0, "four": 4.0, "half": 0.5, "none": 0.0}


def model(nodes: str, head: str = "(float[N,4] x) => (float[N,4] y)", **arrays: Any) -> onnx.ModelProto:
    return infer_shapes(parse(f"g {head} {{ {nodes} }}", **NUMBERS, **arrays))


def read(nodes: str, **arrays: Any) -> tuple[dict[int, float] | None, Used]:
    """y as a polynomial in x."""
    used = Used("")
    return read_polynomial(View(model(nodes, **arrays)), Y, X, used), used


@pytest.mark.parametrize(
    ("nodes", "poly"),
    [
        pytest.param("y = Add(x, three)", {0: 3.0, 1: 1.0}, id="x + 3"),
        pytest.param("y = Sub(x, three)", {0: -3.0, 1: 1.0}, id="x - 3"),
        pytest.param("y = Sub(three, x)", {0: 3.0, 1: -1.0}, id="3 - x"),
        pytest.param("y = Mul(three, x)", {1: 3.0}, id="3 x"),
        pytest.param("y = Div(x, four)", {1: 0.25}, id="x / 4"),
        pytest.param("y = Neg(x)", {1: -1.0}, id="-x"),
        pytest.param("y = Mul(x, x)", {2: 1.0}, id="x x"),
        pytest.param("y = Pow(x, two)", {2: 1.0}, id="x ^ 2"),
        pytest.param("y = Pow(x, one)", {1: 1.0}, id="x ^ 1"),
        pytest.param("a = Add(x, one) y = Pow(a, three)", {0: 1.0, 1: 3.0, 2: 3.0, 3: 1.0}, id="(x + 1) ^ 3"),
        pytest.param("a = Pow(x, three) b = Mul(a, half) y = Add(x, b)", {1: 1.0, 3: 0.5}, id="x + x ^ 3 / 2"),
        pytest.param("a = Sub(x, x) y = Add(a, one)", {0: 1.0, 1: 0.0}, id="x - x + 1"),
    ],
)
def test_arithmetic_is_a_polynomial(nodes, poly):
    found, used = read(nodes)
    assert found is not None
    assert is_close(found, poly, 1e-12)
    assert set(found) == set(poly)
    # All nodes between x and y are part of the formula.
    assert len(used.nodes) == len(used.tensors) == nodes.count("=")


@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param("y = Relu(x)", id="another operator"),
        pytest.param("y = Div(one, x)", id="1 / x"),
        pytest.param("y = Div(x, none)", id="x / 0"),
        pytest.param("y = Pow(two, x)", id="2 ^ x"),
        pytest.param("y = Pow(x, half)", id="a root"),
        pytest.param("y = Pow(x, four)", id="x ^ 4 in one node"),
        pytest.param("a = Mul(x, x) y = Mul(a, a)", id="x ^ 4"),
        pytest.param("y = Mul(x, k)", id="one number for each channel"),
        pytest.param("y = Mul(x, inf)", id="inf"),
        pytest.param("a = Exp(x) y = Add(x, a)", id="a part that is no arithmetic"),
        pytest.param("a = Relu(x) y = Add(a, one)", id="of another tensor"),
    ],
)
def test_other_arithmetic_is_none(nodes):
    assert read(nodes, k=np.ones(4, np.float32), inf=float("inf"))[0] is None


def test_constants_alone_are_no_formula_of_x():
    proto = model("a = Add(one, two) y = Mul(x, a)")
    assert read_polynomial(View(proto), TensorId("a"), X, Used("")) is None


def test_formulas_are_read_to_a_depth_that_activations_need():
    nodes = " ".join(f"t{k + 1} = Add(t{k}, one)" for k in range(20))
    view = View(model(f"t0 = Identity(x) {nodes} y = Identity(t20)"))
    start = TensorId("t0")
    assert read_polynomial(view, TensorId("t9"), start, Used("")) == {0: 9.0, 1: 1.0}
    assert read_polynomial(view, TensorId("t15"), start, Used("")) is None


def test_the_largest_rank_of_a_constant_is_kept():
    _, used = read("a = Mul(x, k) y = Add(a, two)", k=np.full((1, 1), 3, np.float32))
    assert used.rank == 2


STEPS = st.sampled_from(
    ["Add({}, two)", "Sub({}, half)", "Sub(three, {})", "Mul({}, half)", "Div({}, four)", "Neg({})", "Mul({}, x)",
     "Add({}, x)", "Sub(x, {})", "Pow({}, two)"]
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=6))
def test_a_polynomial_is_what_the_graph_computes(steps):
    nodes = " ".join(f"t{k + 1} = {step.format(f't{k}' if k else 'x')}" for k, step in enumerate(steps))
    proto = model(f"{nodes} y = Identity(t{len(steps)})")
    found = read_polynomial(View(proto), TensorId(f"t{len(steps)}"), X, Used(""))
    if found is None:
        # Only more than a cube is too much.
        assert sum("Pow" in step or ("({}, x)" in step and "Mul" in step) for step in steps) > 1
        return
    x = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
    wanted = sum(value * x.astype(np.float64) ** power for power, value in found.items())
    np.testing.assert_allclose(infer(proto, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("poly", "tol", "same"),
    [
        ({0: 3.0, 1: 1.0}, 1e-6, True),
        ({0: 3.0000001, 1: 1.0}, 1e-6, True),
        ({0: 3.1, 1: 1.0}, 1e-3, False),
        ({0: 3.1, 1: 1.0}, 0.05, True),
        ({0: 3.0}, 1e-6, False),
        ({0: 3.0, 1: 1.0, 2: 0.0}, 1e-6, True),
        ({0: 3.0, 1: 1.0, 2: 1e-3}, 1e-6, False),
    ],
)
def test_polynomials_are_close_by_each_coefficient(poly, tol, same):
    assert is_close(poly, {0: 3.0, 1: 1.0}, tol) == same


def test_bases_go_back_through_scalar_arithmetic_nearest_first():
    view = View(model("a = Relu(x) b = Mul(a, two) c = Sub(one, b) y = Identity(c)"))
    assert [tensor.name for tensor in list_bases(view, TensorId("c"), "")] == ["c", "b", "a"]
    # A product of two tensors ends it.
    view = View(model("a = Relu(x) b = Mul(a, x) y = Add(b, one)"))
    assert [tensor.name for tensor in list_bases(view, Y, "")] == ["y", "b"]
    assert list_bases(view, Y, "another scope") == [Y]


def tails(nodes: str, anchor: str = "Sigmoid", **arrays: Any) -> list[Tail]:
    """All behind the anchor, which reads `p`."""
    view = View(model(nodes, **arrays))
    node = next(node for node in view.index.nodes if node.op_type == anchor)
    inner = view.tensor(node, 0)
    assert inner is not None
    return list_tails(view, node, inner, Used("", {node.name}, {node.result}))


@pytest.mark.parametrize(
    ("behind", "scale", "shift"),
    [
        pytest.param("y = Mul(s, two)", 2.0, 0.0, id="2 s"),
        pytest.param("y = Div(s, four)", 0.25, 0.0, id="s / 4"),
        pytest.param("y = Add(one, s)", 1.0, 1.0, id="1 + s"),
        pytest.param("y = Sub(s, half)", 1.0, -0.5, id="s - 1/2"),
        pytest.param("y = Sub(half, s)", -1.0, 0.5, id="1/2 - s"),
        pytest.param("a = Add(s, one) y = Mul(a, half)", 0.5, 0.5, id="(s + 1) / 2"),
        pytest.param("a = Sub(two, s) b = Mul(a, three) y = Sub(one, b)", 3.0, -5.0, id="1 - 3 (2 - s)"),
    ],
)
def test_arithmetic_behind_an_anchor_is_scale_and_shift(behind, scale, shift):
    *_, last = tails(f"s = Sigmoid(x) {behind}")
    assert (last.scale, last.shift, last.factor, last.poly) == (scale, shift, None, {1: 1.0})
    assert last.last.result == Y
    assert len(last.used.nodes) == 1 + behind.count("=")


@pytest.mark.parametrize(
    ("nodes", "scale", "shift", "factor", "poly"),
    [
        pytest.param("s = Sigmoid(x) y = Mul(x, s)", 1.0, 0.0, "x", {1: 1.0}, id="x s(x)"),
        pytest.param("p = Mul(x, two) s = Sigmoid(p) y = Mul(s, x)", 1.0, 0.0, "x", {1: 2.0}, id="x s(2 x)"),
        pytest.param("p = Mul(x, two) s = Sigmoid(x) y = Mul(s, p)", 2.0, 0.0, "x", {1: 1.0}, id="2 x s(x)"),
        pytest.param("p = Add(x, three) s = Sigmoid(p) a = Mul(x, s) y = Div(a, four)", 0.25, 0.0, "x",
                     {0: 3.0, 1: 1.0}, id="x s(x + 3) / 4"),
        pytest.param("s = Sigmoid(x) a = Add(s, one) b = Mul(x, a) y = Mul(b, half)", 0.5, 0.5, "x", {1: 1.0},
                     id="x (s + 1) / 2"),
    ],
)  # fmt: skip
def test_a_product_with_x_is_found_in_any_order(nodes, scale, shift, factor, poly):
    *_, last = tails(nodes)
    assert (last.scale, last.shift, last.factor) == (scale, shift, TensorId(factor))
    assert is_close(last.poly, poly, 1e-12)


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        pytest.param("s = Sigmoid(x) y = Relu(s)", 1, id="another operator"),
        pytest.param("s = Sigmoid(x) a = Mul(s, two) b = Relu(a) y = Add(a, b)", 2, id="up to a second reader"),
        pytest.param("s = Sigmoid(x) a = Mul(s, two) y = Div(one, a)", 2, id="up to a reciprocal"),
        pytest.param("s = Sigmoid(x) a = Mul(s, x) y = Add(a, one)", 2, id="a shift behind the product is no shift"),
        pytest.param("s = Sigmoid(x) a = Mul(s, x) y = Mul(a, x)", 2, id="a second product"),
        pytest.param("r = Relu(x) s = Sigmoid(r) y = Mul(s, x)", 1, id="a product with another tensor"),
        pytest.param("p = Add(x, one) s = Sigmoid(x) y = Mul(s, p)", 1, id="a product with x and a shift"),
        pytest.param("s = Sigmoid(x) y = Mul(s, huge)", 1, id="a scale that is not finite"),
        pytest.param("s = Sigmoid(x) y = Mul(s, k)", 1, id="one factor for each channel"),
    ],
)
def test_a_tail_ends_at(nodes, count):
    found = tails(nodes, k=np.ones(4, np.float32), huge=float("inf"))
    assert len(found) == count
    # Shortest first: the anchor alone, as it is.
    assert (found[0].last.op_type, found[0].scale, found[0].shift) == ("Sigmoid", 1.0, 0.0)


def test_a_shorter_tail_holds_its_own_nodes_only():
    found = tails("s = Sigmoid(x) a = Mul(s, two) y = Add(a, one)")
    assert [len(tail.used.nodes) for tail in found] == [1, 2, 3]


def test_formulas_of_one_pattern_are_counted_together():
    one, other = Used("", {"a"}, {X}, 1), Used("", {"b"}, {Y}, 3)
    one.merge(other)
    assert (one.nodes, one.tensors, one.rank) == ({"a", "b"}, {X, Y}, 3)
