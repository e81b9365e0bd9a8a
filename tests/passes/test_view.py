"""What patterns ask of a graph, on one small graph for each question."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from onnxq.graph import infer_shapes
from onnxq.passes.view import View, is_float, tolerance
from onnxq.sites import Edge, TensorId
from tests.passes.kit import in_branch, parse


def view(nodes: str, head: str = "", *, shapes: bool = True, **arrays: Any) -> View:
    proto = parse(f"g {head or '(float[N,4,5,5] x) => (float[N,4,5,5] y)'} {{ {nodes} }}", **arrays)
    return View(infer_shapes(proto) if shapes else proto)


def t(name: str, scope: str = "") -> TensorId:
    return TensorId(name, scope)


def test_producers_are_standard_operators_of_the_types_asked_for():
    seen = view("a = Relu(x) b = com.microsoft.Gelu(a) y = Add(b, a)")
    assert seen.producer(t("a")) is not None
    assert seen.producer(t("a"), "Sigmoid", "Relu") is not None
    assert seen.producer(t("a"), "Sigmoid") is None
    # Of another domain, an input, nothing.
    assert [seen.producer(one) for one in (t("b"), t("x"), None)] == [None, None, None]


@pytest.mark.parametrize(
    ("value", "scalar", "small"),
    [
        pytest.param(np.float32(2.5), (2.5, 0), [2.5], id="a scalar"),
        pytest.param(np.full((1, 1), 2.5, np.float32), (2.5, 2), [2.5], id="one element of two axes"),
        pytest.param(np.float16(0.5), (0.5, 0), [0.5], id="float16"),
        pytest.param(np.array([1, 2], np.float32), None, None, id="two elements"),
        pytest.param(np.float32(np.inf), None, [np.inf], id="inf is a constant but no number of a formula"),
        pytest.param(np.float32(np.nan), None, [np.nan], id="NaN too"),
    ],
)
def test_scalars_are_finite_constants_of_one_element(value, scalar, small):
    seen = view("c = Cast<to=1>(k) y = Add(x, c)", "(float[1,2] x) => (float[1,2] y)", k=value)
    cast = next(node for node in seen.index.nodes if node.op_type == "Cast")
    assert seen.scalar(cast, 0) == scalar
    found = seen.small_constant(cast, 0)
    assert (found is None) == (small is None)
    if found is not None:
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found.ravel(), small)


def test_integers_and_values_of_the_graph_are_no_scalars():
    seen = view("s = Shape(x) r = Reshape(x, k) c = Mul(r, x) y = Reshape(c, s)", k=np.array([-1], np.int64))
    by_out = {node.result.name: node for node in seen.index.nodes}
    assert seen.scalar(by_out["r"], 1) is None
    assert seen.scalar(by_out["c"], 1) is None
    assert seen.scalar(by_out["c"], 7) is None
    assert seen.is_constant(by_out["r"], 1)
    assert not seen.is_constant(by_out["c"], 1)
    assert not seen.is_constant(by_out["c"], 7)


def test_a_limit_lets_larger_constants_pass():
    seen = view("y = Mul(x, k)", k=np.ones((4, 1, 1), np.float32))
    (node,) = seen.index.nodes
    assert seen.small_constant(node, 1, limit=3) is None
    held = seen.small_constant(node, 1, limit=4)
    assert held is not None
    assert held.shape == (4, 1, 1)


@pytest.mark.parametrize(
    ("nodes", "tensor", "reader"),
    [
        pytest.param("a = Relu(x) y = Neg(a)", "a", ("Neg", 0), id="one reader"),
        pytest.param("a = Relu(x) y = Sub(x, a)", "a", ("Sub", 1), id="one reader, as its second input"),
        pytest.param("a = Relu(x) y = Add(a, a)", "a", None, id="one node that reads it twice"),
        pytest.param("a = Relu(x) b = Neg(a) y = Add(a, b)", "a", None, id="two readers"),
        pytest.param("y = Relu(x)", "y", None, id="an output"),
        pytest.param("a = Relu(x) b = Neg(a) y = Relu(x)", "b", None, id="nobody"),
    ],
)
def test_sole_readers(nodes, tensor, reader):
    found = view(nodes).sole_reader(t(tensor))
    assert (None if found is None else (found[0].op_type, found[1])) == reader


def test_an_output_with_one_reader_has_no_sole_reader():
    seen = view("a = Relu(x) y = Neg(a)", "(float[4] x) => (float[4] y, float[4] a)")
    assert seen.sole_reader(t("a")) is None
    assert seen.kept(t("a"))
    assert not seen.kept(t("x"))


def test_a_tensor_that_a_body_reads_is_kept():
    proto = in_branch(parse("g (float[2,4] x) => (float[2,4] y) { a = Relu(x) y = Neg(a) }"))
    seen = View(infer_shapes(proto))
    (branch,) = {node.scope for node in seen.index.nodes if node.op_type == "Neg"}
    assert seen.kept(t("x"))
    assert seen.sole_reader(t("x")) is None
    # Inside of the body the tensors are as in any graph.
    assert not seen.kept(t("a", branch))
    reader = seen.sole_reader(t("a", branch))
    assert reader is not None
    assert reader[0].op_type == "Neg"


def test_private_tensors_are_read_by_the_given_nodes_only():
    seen = view("a = Relu(x) b = Neg(a) c = Abs(a) y = Add(b, c)")
    names = {node.result.name: node.name for node in seen.index.nodes}
    assert seen.private([t("a")], {names["b"], names["c"]})
    assert seen.private([t("a"), t("b")], {names["b"], names["c"], names["y"]})
    assert not seen.private([t("a")], {names["b"]})
    assert not seen.private([t("y")], set(names.values()))
    assert seen.private([], set())


@pytest.mark.parametrize(
    ("nodes", "tensor", "owned"),
    [
        pytest.param("y = Mul(x, k)", "k", True, id="one reader"),
        pytest.param("a = Mul(x, k) y = Mul(a, k)", "k", False, id="two readers"),
        pytest.param("y = Mul(k, k)", "k", False, id="one node that reads it twice"),
        pytest.param("c = Constant<value_float=2.0>() y = Mul(x, c)", "c", False, id="written by a node"),
        pytest.param("c = Mul(x, k) y = Relu(c)", "c", False, id="a tensor of the graph"),
    ],
)
def test_a_constant_that_one_input_reads_may_take_another_value(nodes, tensor, owned):
    assert view(nodes, k=2.0).owned(t(tensor)) == owned


def test_ranks_without_shapes_are_those_an_operator_needs_at_least():
    text = "c = Conv(x, w) f = Flatten(c) r = Relu(f) y = Reshape(r, s)"
    seen = view(text, shapes=False, w=np.ones((4, 4, 1, 1), np.float32), s=np.array([-1, 4, 5, 5], np.int64))
    assert [seen.rank(t(name)) for name in "xcfr"] == [4, None, None, None]
    assert [seen.least_rank(t(name)) for name in "xcfr"] == [4, 3, 2, 0]
    full = view(text, w=np.ones((4, 4, 1, 1), np.float32), s=np.array([-1, 4, 5, 5], np.int64))
    assert [full.rank(t(name)) for name in "xcfr"] == [4, 4, 2, 2]
    assert [full.least_rank(t(name)) for name in "xcfr"] == [4, 4, 2, 2]


def test_an_edge_names_node_input_and_scope():
    seen = view("y = Relu(x)")
    (node,) = seen.index.nodes
    assert seen.edge(node, 0) == Edge(node.name, 0, "")


@pytest.mark.parametrize(
    ("dtype", "floats"),
    [(np.float16, True), (np.float32, True), (np.float64, True), (ml_dtypes.bfloat16, True), (np.int64, False),
     (np.bool_, False)],
)  # fmt: skip
def test_floats_are_those_of_any_width(dtype, floats):
    assert is_float(np.zeros(2, dtype)) == floats


def test_half_precision_may_stand_further_off():
    assert tolerance(TensorProto.FLOAT16) == 1e-3
    assert tolerance(TensorProto.FLOAT) == tolerance(0) == 1e-6
