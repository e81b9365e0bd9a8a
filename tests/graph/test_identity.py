"""Names of nodes and structural identity: the same for every export of one network, different for every other."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, helper, numpy_helper

from onnxq.graph import GraphIndex, compute_fingerprint, compute_structural_ids, name_nodes
from onnxq.sites import TensorId
from tests.graph.kit import all_nodes, assert_same, copy, model, models, respelled, shuffled

F = np.float32

ATTENTION = """g (float[N,8] x) => (float[N,8] y) {
    q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) qb = Add(q, bq) kb = Add(k, bk) vb = Add(v, bv)
    kt = Transpose(kb) s = MatMul(qb, kt) p = Softmax(s) y = MatMul(p, vb) }"""


def attention(seed: int = 0) -> ModelProto:
    """Three parallel linears of one shape: only what becomes of them tells them apart."""
    rng = np.random.default_rng(seed)
    arrays = {f"w{n}": rng.standard_normal((8, 8)).astype(F) for n in "qkv"}
    arrays |= {f"b{n}": rng.standard_normal(8).astype(F) for n in "qkv"}
    return name_nodes(model(ATTENTION, **arrays))


@settings(max_examples=60)
@given(models(named=False), st.integers(0, 99))
def test_another_export_has_the_same_ids(proto: ModelProto, seed: int) -> None:
    other = respelled(shuffled(proto, seed))
    assert compute_fingerprint(name_nodes(other)) == compute_fingerprint(name_nodes(proto))
    ours, theirs = compute_structural_ids(name_nodes(proto)), compute_structural_ids(name_nodes(other))
    assert Counter(ours.values()) == Counter(theirs.values())
    kept = {"x", "z", "c", "y0", "y1"}
    for t, colour in ours.items():
        if not t.scope:
            renamed = t.name if t.name in kept else f"other/{t.name[::-1]}"
            assert theirs[TensorId(renamed)] == colour


def test_parallel_branches_are_told_apart() -> None:
    ids = compute_structural_ids(attention())
    assert len(set(ids.values())) == len(ids)


def test_initializers_and_constant_nodes_are_the_same() -> None:
    proto = attention()
    moved = copy(proto)
    tensor = moved.graph.initializer.pop()
    moved.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], "c", value=tensor))
    assert compute_structural_ids(moved) == compute_structural_ids(proto)
    assert compute_fingerprint(moved).weights == compute_fingerprint(proto).weights


def test_other_weights_change_the_weights_alone() -> None:
    a, b = compute_fingerprint(attention(0)), compute_fingerprint(attention(1))
    assert a.topology == b.topology
    assert a.weights != b.weights
    assert compute_structural_ids(attention(0)) == compute_structural_ids(attention(1))


def test_swapped_weights_are_noticed() -> None:
    proto = attention()
    for tensor in proto.graph.initializer:
        tensor.name = {"wq": "wk", "wk": "wq"}.get(tensor.name, tensor.name)
    assert compute_fingerprint(proto).weights != compute_fingerprint(attention()).weights


def test_the_form_of_the_bytes_does_not_matter() -> None:
    proto = attention()
    tensor = proto.graph.initializer[0]
    values = numpy_helper.to_array(tensor)
    tensor.ClearField("raw_data")
    tensor.float_data.extend(values.ravel().tolist())
    assert compute_fingerprint(proto) == compute_fingerprint(attention())


def test_structure_changes_the_topology() -> None:
    base = compute_fingerprint(attention()).topology
    for old, new in (
        ("Softmax(s)", "Softmax<axis = 0>(s)"),
        ("Softmax(s)", "Sigmoid(s)"),
        ("MatMul(qb, kt)", "MatMul(vb, kt)"),
        ("float[N,8] x", "float16[N,8] x"),
    ):
        text = ATTENTION.replace(old, new)
        assert text != ATTENTION
        arrays = {t.name: numpy_helper.to_array(t) for t in attention().graph.initializer}
        assert compute_fingerprint(name_nodes(model(text, **arrays))).topology != base


def test_integer_constants_are_structure() -> None:
    text = "g (float[2,3] x) => (float[A,B] y) { y = Reshape(x, s) }"
    a = compute_fingerprint(name_nodes(model(text, s=np.array([3, 2]))))
    b = compute_fingerprint(name_nodes(model(text, s=np.array([6, 1]))))
    assert a.topology != b.topology


def test_loop_bodies_have_ids() -> None:
    text = """g (float[4] x, int64 n, bool c) => (float[4] y) {
        [l] y = Loop(n, c, x) <body = b (int64 i, bool keep, float[4] a) => (bool k, float[4] o)
            { [m] k = Identity(keep) [p] o = Add(a, x) }> }"""
    ids = compute_structural_ids(model(text))
    index = GraphIndex(model(text))
    assert {t.name for t in ids if t.scope} == {"i", "keep", "a", "k", "o"} - {"i"}
    assert len(set(ids.values())) == len(ids)
    assert index.scope_inputs("l.body") == ("i", "keep", "a")


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
    text = """g (float[4] x, bool c) => (float[4] y) {
        y = If(c) <then_branch = t () => (float[4] b) { a = Relu(x) b = Neg(a) },
                   else_branch = e () => (float[4] b) { a = Relu(x) b = Abs(a) }>
    }"""
    names = {node.name for node in all_nodes(name_nodes(model(text)))}
    assert names == {"y/If", "b/Neg", "b/Abs", "y/If.then_branch/a/Relu", "y/If.else_branch/a/Relu"}


def test_a_name_that_another_node_bears_is_not_taken() -> None:
    proto = model("g (float[4] x) => (float[4] y) { a = Relu(x) y = Neg(a) }")
    proto.graph.node[0].name = "y/Neg"
    assert [node.name for node in name_nodes(proto).graph.node] == ["y/Neg", "y/Neg_1"]


def test_nodes_of_functions_are_named_too() -> None:
    proto = model(
        """g (float[4] x) => (float[4] y) { y = loc.F(x) }
        <domain: "loc", opset_import: ["": 17]> F (a) => (b) { t = Relu(a) b = Neg(t) }
        <domain: "loc", opset_import: ["": 17]> G (a) => (b) { t = Relu(a) b = Neg(t) }"""
    )
    names = [node.name for function in name_nodes(proto).functions for node in function.node]
    assert names == ["loc::F/t/Relu", "loc::F/b/Neg", "loc::G/t/Relu", "loc::G/b/Neg"]
