"""Scopes of bodies, what they define and read from outside, and the order nodes run in."""

from __future__ import annotations

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, NodeProto, helper, parser

from onnxq.errors import ModelError
from onnxq.graph import index
from tests.graph.kit import models, shuffled

NESTED = """<ir_version: 8, opset_import: ["": 17]>
g (bool flag, float[N] x) => (float[N] y) <float[1] w = {2.0}> {
    a = Relu(x)
    [outer] y = If (flag) <
        then_branch = t () => (float[N] p) {
            b = Mul(a, w)
            [inner] p = If (flag) <
                then_branch = tt () => (float[N] q) { a2 = Neg(b) q = Add(a2, x) },
                else_branch = te () => (float[N] b) { }
            >
        },
        else_branch = e () => (float[N] a3) { a3 = Identity(a) }
    >
}"""


@pytest.fixture
def graph() -> GraphProto:
    return parser.parse_model(NESTED).graph


def node(graph: GraphProto, name: str) -> NodeProto:
    """A node of any scope."""
    return next(one for _, inner in index.walk_graphs(graph) for one in inner.node if one.name == name)


def body(graph: GraphProto, scope: str) -> GraphProto:
    return next(inner for found, inner in index.walk_graphs(graph) if found == scope)


def test_scopes_name_the_way_in_from_the_outside(graph):
    assert [scope for scope, _ in index.walk_graphs(graph)] == [
        "",
        "outer.then_branch",
        "outer.then_branch/inner.then_branch",
        "outer.then_branch/inner.else_branch",
        "outer.else_branch",
    ]


def test_a_list_of_graphs_is_numbered():
    made = helper.make_node("Custom", ["x"], ["y"], name="n", domain="d")
    made.attribute.append(helper.make_attribute("bodies", [GraphProto(name="a"), GraphProto(name="b")]))
    assert [label for label, _ in index.iterate_subgraphs(made)] == ["bodies[0]", "bodies[1]"]
    assert index.join_scope("", "n", "bodies[1]") == "n.bodies[1]"
    assert index.join_scope("outer.body", "n", "bodies[1]") == "outer.body/n.bodies[1]"


@pytest.mark.parametrize(
    ("scope", "defined", "captured"),
    [
        ("", {"flag", "x", "w", "a", "y"}, []),
        # flag is read by the inner If, x by its branch.
        ("outer.then_branch", {"b", "p"}, ["a", "w", "flag", "x"]),
        ("outer.then_branch/inner.then_branch", {"a2", "q"}, ["b", "x"]),
        # A branch that only hands out a tensor of outside.
        ("outer.then_branch/inner.else_branch", set(), ["b"]),
        ("outer.else_branch", {"a3"}, ["a"]),
    ],
)
def test_what_a_scope_defines_and_captures(graph, scope, defined, captured):
    found = body(graph, scope)
    assert index.list_defined(found) == defined
    assert index.list_captures(found) == captured


def test_a_node_reads_what_its_bodies_capture(graph):
    assert index.list_reads(node(graph, "outer")) == ["flag", "a", "w", "flag", "x", "a"]
    plain = helper.make_node("Clip", ["x", "", "high"], ["y"])
    assert index.list_reads(plain) == ["x", "high"]


def test_names_that_anybody_reads_include_outputs(graph):
    # Of every scope, whatever is captured: nobody reads w2, were it there.
    assert index.collect_reads(graph) == {"x", "flag", "a", "w", "b", "a2", "y", "p", "q", "a3"}


def test_renaming_reaches_bodies_but_not_tensors_they_define_themselves(graph):
    shadow = body(graph, "outer.else_branch")
    shadow.node.insert(0, helper.make_node("Neg", ["a"], ["x"], name="shadow"))
    shadow.node.append(helper.make_node("Neg", ["x"], ["unused"], name="own"))
    index.rename_reads(graph, {"x": "x_new", "b": "never: another scope's", "a": "a_new"})
    inner = body(graph, "outer.then_branch/inner.then_branch")
    assert list(inner.node[1].input) == ["a2", "x_new"]
    assert list(node(graph, "shadow").input) == ["a_new"]
    # x is the branch's own there, and so is b in the other one.
    assert list(node(graph, "own").input) == ["x"]
    assert list(inner.node[0].input) == ["b"]
    assert [value.name for value in body(graph, "outer.then_branch/inner.else_branch").output] == ["b"]


def test_an_output_that_a_branch_hands_out_is_renamed(graph):
    handed = body(graph, "outer.else_branch")
    handed.output[0].name = "a"
    index.rename_reads(graph, {"a": "other"})
    assert handed.output[0].name == "other"
    # The graph's own outputs stay: they are its interface.
    index.rename_reads(graph, {"y": "z"})
    assert graph.output[0].name == "y"


def test_functions_are_graphs_with_names_of_their_own():
    model = onnx.ModelProto()
    model.graph.CopyFrom(parser.parse_model(NESTED).graph)
    branch = model.graph.node[1]
    model.functions.append(helper.make_function("d", "f", ["a", "w", "flag", "x"], ["y"], [branch], []))
    twice = helper.make_function("d", "f", ["a"], ["y"], [], [])
    twice.overload = "two"
    model.functions.append(twice)
    found = [scope for scope, _ in index.walk_all_graphs(model)]
    assert found[5:] == [
        "d::f",
        "d::f/outer.then_branch",
        "d::f/outer.then_branch/inner.then_branch",
        "d::f/outer.then_branch/inner.else_branch",
        "d::f/outer.else_branch",
        "d::f:two",
    ]


def test_items_are_replaced_by_some_of_their_own():
    graph = GraphProto()
    graph.node.extend(helper.make_node("Relu", ["x"], [name], name=name) for name in "abc")
    index.replace_items(graph.node, (one for one in reversed(list(graph.node)) if one.name != "b"))
    assert [one.name for one in graph.node] == ["c", "a"]


@given(models(), st.integers(0, 1000))
def test_shuffled_nodes_are_sorted_so_that_producers_come_first(proto, seed):
    graph = shuffled(proto, seed).graph
    made = {name for one in graph.node for name in one.output if name}
    ready: set[str] = set()
    done = index.sort_nodes(graph)
    for one in done:
        assert not (set(index.list_reads(one)) & made) - ready
        ready.update(one.output)
    assert sorted(one.name for one in done) == sorted(one.name for one in graph.node)


@pytest.mark.parametrize(
    ("given_order", "found"),
    [
        # d reads b and c, both read a. A list that runs already comes back as it is.
        ("abcd", "abcd"),
        ("acbd", "acbd"),
        # Producers are drawn forward to the first node that needs them, in the order of its inputs.
        ("dcba", "abcd"),
        ("bdca", "abcd"),
    ],
)
def test_a_list_keeps_its_order_as_far_as_it_can(given_order, found):
    needs = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
    order = index.sort_topologically(
        list(given_order), [needs[one] for one in given_order], [[one] for one in given_order], list(given_order)
    )
    assert "".join(order) == found


def test_a_cycle_names_a_node_on_it():
    graph = GraphProto()
    graph.node.extend([
        helper.make_node("Relu", ["x"], ["a"], name="outside"),
        helper.make_node("Add", ["a", "c"], ["b"], name="one"),
        helper.make_node("Relu", ["b"], ["c"], name="two"),
    ])  # fmt: skip
    with pytest.raises(ModelError, match=r"(one|two): the node depends on its own output") as caught:
        index.sort_nodes(graph)
    assert caught.value.code == "Q103"


@pytest.mark.parametrize(
    ("made", "label"),
    [
        (helper.make_node("Relu", ["x"], ["y"], name="n"), "n"),
        (helper.make_node("Relu", ["x"], ["y"]), "Relu producing 'y'"),
        (helper.make_node("Split", ["x"], ["", "y"]), "Split producing 'y'"),
        (helper.make_node("Relu", ["x"], []), "an unnamed Relu"),
    ],
)
def test_every_node_has_a_label_for_messages(made, label):
    assert index.label_node(made) == label
