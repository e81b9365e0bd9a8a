"""Node names: unique, deterministic, and the same whatever order the nodes stand in."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto

from onnxq.graph import name_nodes
from tests.graph.kit import all_nodes, assert_same, model, models, shuffled

SIBLINGS = """g (float[4] x, bool c) => (float[4] y) {
    y = If(c) <then_branch = t () => (float[4] b) { a = Relu(x) b = Neg(a) },
               else_branch = e () => (float[4] b) { a = Relu(x) b = Abs(a) }>
}"""


def by_place(proto: ModelProto) -> Counter[tuple[str, str, str]]:
    """The owner of each name, free of order."""
    return Counter((node.name, node.op_type, ",".join(node.output)) for node in all_nodes(proto))


@settings(max_examples=60)
@given(models(named=False), st.integers(0, 99))
def test_names_are_unique_and_do_not_depend_on_order(proto: ModelProto, seed: int) -> None:
    named = name_nodes(proto)
    names = [node.name for node in all_nodes(named)]
    assert all(names)
    assert len(set(names)) == len(names)
    reordered = name_nodes(shuffled(proto, seed))
    assert by_place(reordered) == by_place(named)
    assert name_nodes(named) == named
    # Not compared with `proto` itself: ORT refuses nodes that share a name.
    assert_same(named, reordered)


@given(models(named=False))
def test_a_unique_name_is_kept(proto: ModelProto) -> None:
    counts = Counter(node.name for node in all_nodes(proto))
    for before, after in zip(all_nodes(proto), all_nodes(name_nodes(proto)), strict=True):
        if before.name and counts[before.name] == 1:
            assert after.name == before.name


def test_nodes_that_share_a_name_all_lose_it() -> None:
    proto = model("g (float[4] x) => (float[4] y) { [n] a = Relu(x) [n] y = Neg(a) }")
    assert [node.name for node in name_nodes(proto).graph.node] == ["a/Relu", "y/Neg"]


def test_sibling_bodies_with_the_same_tensors_are_told_apart_by_scope() -> None:
    names = {node.name for node in all_nodes(name_nodes(model(SIBLINGS)))}
    assert names == {
        "y/If",
        "b/Neg",
        "b/Abs",
        "y/If.then_branch/a/Relu",
        "y/If.else_branch/a/Relu",
    }


def test_a_name_that_another_node_bears_is_not_taken() -> None:
    proto = model("g (float[4] x) => (float[4] y) { a = Relu(x) y = Neg(a) }")
    proto.graph.node[0].name = "y/Neg"
    assert [node.name for node in name_nodes(proto).graph.node] == ["y/Neg", "y/Neg_1"]


def test_nodes_of_functions_are_named_too() -> None:
    proto = model(
        """g (float[4] x) => (float[4] y) { y = loc.F(x) }
        <domain: "loc", opset_import: ["": 17]> F (a) => (b) { t = Relu(a) b = Neg(t) }
        <domain: "loc", opset_import: ["": 17]> G (a) => (b) { t = Relu(a) b = Neg(t) }""".replace("loc.F", "Relu")
    )
    named = name_nodes(proto)
    assert [node.name for function in named.functions for node in function.node] == [
        "loc::F/t/Relu",
        "loc::F/b/Neg",
        "loc::G/t/Relu",
        "loc::G/b/Neg",
    ]
