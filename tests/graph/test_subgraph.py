"""Parts cut out of a model compute what they compute in it: If and Loop bodies, functions, light models included."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper, parser

from onnxq import graph
from onnxq.graph import subgraph
from onnxq.graph.load import check_structure
from onnxq.graph.scopes import list_reads, rename_reads
from onnxq.graph.values import read_declared_type
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.graph import kit
from tests.networks import add_arrays

F = np.float32
WIDTH = 64
TEXT = """<ir_version: 8, opset_import: ["": 17, "local": 1]>
main (float[N, 64] x, bool c) => (float[N, 64] y, float[N, 64] z) {
  two = Constant<value: tensor = float[1] {2}>() a = MatMul(x, w) b = Relu(a)
  d = If(c) <
    then_branch = then () => (float[N, 64] t) { s = Mul(b, two)  t = MatMul(s, v) },
    else_branch = other () => (float[N, 64] e) { e = Sub(b, half) }
  >
  trips = Constant<value: tensor = int64 {2}>() yes = Constant<value: tensor = bool {1}>()
  l, all = Loop(trips, yes, d) <
    body = step (int64 i, bool go, float[N, 64] state) => (bool on, float[N, 64] next, float[N, 64] seen)
    { on = Identity(go)  next = Add(state, b)  seen = Mul(next, half) }
  >
  f = local.shift(l, half)
  y = Add(f, a) z = Mul(f, two)
}
<domain: "local", opset_import: ["": 17, "local": 1]> shift (p, q) => (r) { u = Add(p, q)  r = local.twice(u) }
<domain: "local", opset_import: ["": 17, "local": 1]> twice (p) => (r) { r = Add(p, p) }
<domain: "local", opset_import: ["": 17, "local": 1]> unused (p) => (r) { r = Neg(p) }
"""
INNER = ("x", "a", "b", "d", "l", "all", "f", "y", "z")


@lru_cache(maxsize=1)
def network() -> ModelProto:
    proto = parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    w, v = ((rng.standard_normal((WIDTH, WIDTH)) / 8).astype(F) for _ in range(2))
    add_arrays(proto.graph, w=w, v=v, half=np.full(WIDTH, 0.5, F))
    return graph.name_nodes(proto)


@lru_cache(maxsize=2)
def values(chosen: bool) -> dict[str, np.ndarray]:
    """All inner tensors of the whole model on one sample."""
    feeds = {"x": np.random.default_rng(1).standard_normal((3, WIDTH)).astype(F), "c": np.asarray(chosen)}
    tapped = tap_tensors(graph.infer_shapes(network()), [TensorId(name) for name in INNER])
    return {**feeds, **Session(tapped.proto, optimize=False).run(feeds)}


def declare(name: str, known: dict[str, np.ndarray]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(known[name].dtype), None)


def find_needed(cutter: subgraph.Cutter[Any], wanted: set[str], given: set[str]) -> list[str]:
    """The nodes that tensors are computed from, where others are given."""
    found, waiting = set(), list(wanted)
    while waiting:
        name = cutter.find_producer(waiting.pop())
        if name is not None and name not in found:
            found.add(name)
            waiting += [tensor for tensor in list_reads(cutter.nodes[name]) if tensor not in given]
    return cutter.sort_names(found)


@pytest.mark.parametrize("light", [False, True])
@given(
    outputs=st.sets(st.sampled_from(INNER[1:]), min_size=1, max_size=3),
    between=st.sets(st.sampled_from(INNER), max_size=3),
    chosen=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_part_gives_the_same_as_in_the_whole(light: bool, outputs: set[str], between: set[str], chosen: bool) -> None:
    model: graph.ModelLike = graph.strip_weights(network()) if light else network()
    known, wanted = values(chosen), outputs - between
    cutter = subgraph.Cutter(model)
    names = find_needed(cutter, wanted, between)
    read = [name for name in cutter.list_inputs(names) if name not in wanted]
    given_inputs = dict.fromkeys((*read, *(name for name in between if name not in read)))
    part = cutter.cut(
        names, [declare(n, known) for n in given_inputs], [ValueInfoProto(name=n) for n in sorted(wanted)]
    )
    assert isinstance(part, graph.LightModel) is light
    if not wanted:
        return
    check_structure(graph.attach_weights(part), "part")
    session = Session(part, optimize=False)
    found = session.run({value.name: known[value.name] for value in session.inputs}, sorted(wanted))
    for name in wanted:
        np.testing.assert_array_equal(found[name], known[name])


def test_inputs_have_the_ranks_that_all_values_share_and_vectors_their_sizes() -> None:
    def declare_shapes(*shapes: tuple[int, ...]) -> list[int | str | None] | None:
        shape = read_declared_type(subgraph.declare_input("t", [np.zeros(shape, np.int64) for shape in shapes]))[1]
        return None if shape is None else list(shape)

    assert declare_shapes((4,), (4,)) == [4]
    assert declare_shapes((4,), (5,)) == [None]
    assert declare_shapes((1, 3, 8), (1, 3, 8)) == [None, None, None]
    assert declare_shapes((2,), (2, 1)) is None
    assert declare_shapes((), ()) == []
    assert declare_shapes((0, 3), (2, 3)) == [None, None]
    assert subgraph.declare_input("t", [np.zeros(2, np.float32)], TensorProto.FLOAT16).type.tensor_type.elem_type == 10
    sequence = subgraph.declare_input("s", [[], [np.zeros((2, 3), np.int64), np.zeros((1, 3), np.int64)]])
    expected = helper.make_tensor_type_proto(TensorProto.INT64, [None, None])
    assert sequence.type == helper.make_sequence_type_proto(expected)
    assert subgraph.declare_input("s", [[], []]).type.sequence_type.elem_type.tensor_type.elem_type == TensorProto.FLOAT


def test_only_what_is_read_goes_along() -> None:
    cutter = subgraph.Cutter(network())
    part = cutter.cut(["f/shift"], [declare("l", values(True))], [ValueInfoProto(name="f")])
    assert [f.name for f in part.functions] == ["shift", "twice"]
    assert [tensor.name for tensor in part.graph.initializer] == ["half"]
    branch = cutter.cut(["d/If"], [declare(n, values(True)) for n in ("c", "b")], [ValueInfoProto(name="d")])
    assert [tensor.name for tensor in branch.graph.initializer] == ["v", "half"]
    assert [node.op_type for node in branch.graph.node] == ["Constant", "If"]
    assert not branch.functions
    assert cutter.list_inputs(["d/If"]) == ["c", "b"]
    assert cutter.list_sources("d/If") == ["b/Relu", "b/Relu"]
    assert cutter.find_producer("two") is None


def test_nodes_that_compute_constants_go_with_their_readers() -> None:
    text = "m (float[2, 2] x) => (float[2, 2] y) { t = Transpose(w)  u = Neg(t)  a = Relu(x)  y = MatMul(a, u) }"
    proto = graph.name_nodes(kit.model(text, w=np.array([[1, 2], [3, 4]], F)))
    cutter = subgraph.Cutter(proto, computed=True)
    assert cutter.constants == {"t/Transpose", "u/Neg"}
    assert cutter.list_inputs(["y/MatMul"]) == ["a"]
    part = cutter.cut(["y/MatMul"], [proto.graph.input[0]], [proto.graph.output[0]])
    assert [node.name for node in part.graph.node] == ["t/Transpose", "u/Neg", "y/MatMul"]
    assert subgraph.Cutter(proto).list_inputs(["y/MatMul"]) == ["a", "u"]


def test_an_input_takes_the_place_of_a_stored_tensor_and_a_changed_node_of_its_own() -> None:
    proto, known = network(), values(True)
    cutter = subgraph.Cutter(proto)
    eye = np.eye(WIDTH, dtype=F)
    part = cutter.cut(["a/MatMul"], [declare("x", known), declare("w", {"w": eye})], [ValueInfoProto(name="a")])
    assert not part.graph.initializer
    np.testing.assert_allclose(Session(part).run({"x": known["x"], "w": eye})["a"], known["x"])
    node = helper.make_node("Add", ["x", "one"], ["a"], name="a/MatMul")
    one = {"one": numpy_helper.from_array(np.ones(1, F), "one")}
    made = cutter.cut(
        ["a/MatMul"], [declare("x", known)], [ValueInfoProto(name="a")], changed={node.name: node}, tensors=one
    )
    np.testing.assert_array_equal(Session(made).run({"x": known["x"]})["a"], known["x"] + 1)


def test_sparse_weights_and_declared_types_are_kept() -> None:
    proto = network()
    values_ = numpy_helper.from_array(np.asarray([1.5], F), "q")
    sparse = helper.make_sparse_tensor(values_, numpy_helper.from_array(np.asarray([1], np.int64)), [4])
    part = subgraph.assemble_model(proto, [], (), [ValueInfoProto(name="q")], {"q": sparse, "other": values_})
    assert [one.values.name for one in part.graph.sparse_initializer] == ["q"]
    typed = graph.infer_shapes(proto)
    cutter = subgraph.Cutter(typed)
    names = find_needed(cutter, {"y"}, {"d"})
    cut = cutter.cut(names, [declare(n, values(True)) for n in cutter.list_inputs(names)], [typed.graph.output[0]])
    assert {value.name for value in cut.graph.value_info} >= {"a", "b", "l"}
    assert graph.GraphIndex(cut).find_shape(TensorId("a")) == ("N", WIDTH)


def test_an_optional_input_stays_one() -> None:
    text = "[n] a = Neg(x) [g] b = OptionalGetElement(o) [s] y = Add(a, b)"
    proto = kit.model(f"g (float[2] x, float[2] o) => (float[2] y) {{ {text} }}")
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    proto.graph.input[1].type.CopyFrom(helper.make_optional_type_proto(tensor))
    ones = np.ones(2, np.float32)
    inputs = [subgraph.declare_input(name, [ones]) for name in ("o", "a")]
    part = subgraph.Cutter(proto).cut(["g", "s"], inputs, [proto.graph.output[0]])
    np.testing.assert_array_equal(Session(part).run({"o": ones, "a": ones})["y"], 2 * ones)


def test_what_no_output_needs_is_removed() -> None:
    proto = kit.copy(network())
    del proto.graph.output[:]
    proto.graph.output.append(ValueInfoProto(name="b"))
    subgraph.remove_unneeded(proto.graph)
    assert [node.name for node in proto.graph.node] == ["a/MatMul", "b/Relu"]
    assert [tensor.name for tensor in proto.graph.initializer] == ["w"]


def test_a_part_of_a_model_with_external_data_needs_no_file(tmp_path: Path) -> None:
    graph.save_model(network(), tmp_path / "m.onnx", external=True)
    loaded = graph.load_model(tmp_path / "m.onnx")
    (tmp_path / "m.onnx_data").unlink()
    part = subgraph.Cutter(loaded.proto).cut(["a/MatMul"], [declare("x", values(True))], [ValueInfoProto(name="a")])
    assert loaded.external
    assert [tensor.name for tensor in part.graph.initializer] == ["w"]
    found = Session(part, optimize=False).run({"x": values(True)["x"]})
    np.testing.assert_array_equal(found["a"], values(True)["a"])


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize(
    ("stop", "given_tensors"),
    [
        ("b/Relu", ["a"]),
        ("d/If", ["b", "a"]),
        ("l/Loop", ["a", "b", "d"]),
        ("z/Mul", ["y", "f"]),
        ("y/Add", ["a", "f", "z"]),
    ],
)
def test_a_front_joined_with_the_rest_is_the_whole(light: bool, stop: str, given_tensors: list[str]) -> None:
    model: graph.ModelLike = graph.strip_weights(network()) if light else network()
    behind = subgraph.list_behind(model, {stop})
    front = subgraph.cut_front(model, behind, {})
    assert {value.name for value in front.graph.output} == set(given_tensors)
    assert not {node.name for node in front.graph.node} & behind
    known = values(True)
    found = Session(front, optimize=False).run({name: known[name] for name in "xc"})
    for name in given_tensors:
        np.testing.assert_array_equal(found[name], known[name])
    whole = graph.attach_weights(subgraph.join_rest(front, model, behind))
    check_structure(whole, "the whole")
    assert [value.name for value in whole.graph.output] == ["y", "z"]
    old = {node.name: node for node in network().graph.node if node.name in behind}
    assert {node.name: node for node in whole.graph.node if node.name in behind} == old
    again = Session(whole, optimize=False).run({name: known[name] for name in "xc"})
    for name in "yz":
        np.testing.assert_array_equal(again[name], known[name])


def test_what_a_changed_front_calls_as_something_behind_gets_another_name() -> None:
    model = graph.strip_weights(network())
    behind = subgraph.list_behind(model, {"z/Mul"})
    front = subgraph.cut_front(model, behind, {})
    proto = kit.copy(front.proto)
    # As a pass may have done that knows the front alone: a node and a tensor of names from behind, another constant.
    next(node for node in proto.graph.node if node.name == "b/Relu").name = "z/Mul"
    for node in proto.graph.node:
        node.output[:] = ["z" if name == "b" else name for name in node.output]
    rename_reads(proto.graph, {"b": "z"})
    next(node for node in proto.graph.node if "two" in node.output).attribute[0].t.CopyFrom(
        numpy_helper.from_array(np.asarray([3], F))
    )
    whole = subgraph.join_rest(front.replace(proto), model, behind)
    check_structure(graph.attach_weights(whole), "the whole")
    assert len({node.name for node in whole.graph.node}) == len(whole.graph.node)
    known = values(False)
    again = Session(whole, optimize=False).run({name: known[name] for name in "xc"})
    # The other constant is read in a branch that does not run.
    for name in "yz":
        np.testing.assert_array_equal(again[name], known[name])
