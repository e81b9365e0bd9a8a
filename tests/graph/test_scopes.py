"""Scopes of bodies, what they define and read from outside, and the order nodes run in."""

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import GraphProto, helper, parser

from onnxq.errors import ModelError
from onnxq.graph import scopes
from tests.graph.kit import models, shuffled


def test_a_list_of_graphs_is_numbered():
    made = helper.make_node("Custom", ["x"], ["y"], name="n", domain="d")
    made.attribute.append(helper.make_attribute("bodies", [GraphProto(name="a"), GraphProto(name="b")]))
    assert [label for label, _ in scopes.iterate_subgraphs(made)] == ["bodies[0]", "bodies[1]"]
    assert scopes.join_scope("", "n", "bodies[1]") == "n.bodies[1]"
    assert scopes.join_scope("outer.body", "n", "bodies[1]") == "outer.body/n.bodies[1]"


def test_functions_are_graphs_with_names_of_their_own():
    model = onnx.ModelProto()
    text = """<ir_version: 8, opset_import: ["": 17]>
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
    model.graph.CopyFrom(parser.parse_model(text).graph)
    branch = model.graph.node[1]
    model.functions.append(helper.make_function("d", "f", ["a", "w", "flag", "x"], ["y"], [branch], []))
    twice = helper.make_function("d", "f", ["a"], ["y"], [], [])
    twice.overload = "two"
    model.functions.append(twice)
    assert [scope for scope, _ in scopes.walk_all_graphs(model)][5:] == [
        "d::f",
        "d::f/outer.then_branch",
        "d::f/outer.then_branch/inner.then_branch",
        "d::f/outer.then_branch/inner.else_branch",
        "d::f/outer.else_branch",
        "d::f:two",
    ]


@given(models(), st.integers(0, 1000))
def test_shuffled_nodes_are_sorted_so_that_producers_come_first(proto, seed):
    graph = shuffled(proto, seed).graph
    made = {name for one in graph.node for name in one.output if name}
    ready: set[str] = set()
    done = scopes.sort_nodes(graph)
    for one in done:
        assert not (set(scopes.list_reads(one)) & made) - ready
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
    order = scopes.sort_topologically(
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
    with pytest.raises(ModelError, match=r"(one|two): the node depends on its own output.*\[Q103\]"):
        scopes.sort_nodes(graph)


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
    assert scopes.label_node(made) == label
