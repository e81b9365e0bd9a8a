"""A model run in pieces gives the values it gives whole, at every node and with constants changed on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, infer_shapes
from onnxq.passes.rounding.layerwise import Array, Changes, LayerwiseRunner
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.graph.shape_nets import shape_nets
from tests.passes.kit import body, parse

NET = """g (float[N,4] x) => (float[N,4] y, float[N,4] z) {
    a = Mul(x, two) b = MatMul(a, w) c = Relu(b) d = Add(c, a) e = MatMul(d, w) y = Add(e, bias) z = Neg(c) }"""
HELD = {"w": np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), "two": 2.0, "bias": 1.0}
MODEL = parse(NET, **HELD)
FEEDS = [{"x": np.random.default_rng(k).standard_normal((k + 1, 4)).astype(np.float32)} for k in range(3)]


def name(made: str, proto: onnx.ModelProto = MODEL) -> str:
    """The node that makes a tensor."""
    return next(node.name for node in proto.graph.node if made in node.output)


def whole(tensors: list[str], proto: onnx.ModelProto = MODEL) -> list[dict[str, Array]]:
    tapped = tap_tensors(proto, [TensorId(one) for one in tensors], only=True).proto
    session = Session(tapped, optimize=False)
    return [dict(session.run(feeds, tensors)) for feeds in FEEDS]


def runner(changes: Changes | None = None, proto: onnx.ModelProto = MODEL, feeds: Any = FEEDS) -> LayerwiseRunner:
    return LayerwiseRunner(proto, feeds, {} if changes is None else changes)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from("bcdey"), min_size=1, max_size=5, unique=True).map(sorted))
def test_the_inputs_of_every_node_are_those_of_the_whole_model(stops):
    stops = sorted(stops, key="bcdey".index)
    at = runner()
    expected = whole([*"abcde"])
    for made in stops:
        at.advance(at.place(name(made)))
        node = next(node for node in MODEL.graph.node if node.name == name(made))
        for read in node.input:
            if read in "abcde":
                for value, wanted in zip(at.values(TensorId(read)), expected, strict=True):
                    np.testing.assert_array_equal(value, wanted[read])


def test_what_is_read_later_is_kept_and_what_is_not_goes():
    at = runner()
    at.advance(at.place(name("d")))
    # d reads a and c; b was for c alone.
    assert at.holds(TensorId("a"), name("d"))
    assert not at.holds(TensorId("b"), name("c"))
    at.advance(at.place(name("e")))
    assert not at.holds(TensorId("a"), name("d"))
    # z reads c at the end.
    assert at.holds(TensorId("c"), name("z"))
    # What is still to be made can be had.
    assert at.holds(TensorId("e"), name("y"))


def test_reaching_what_is_at_hand_runs_nothing():
    at = runner()
    at.reach(TensorId("x"), name("a"))
    at.reach(TensorId("a"), name("b"))
    np.testing.assert_array_equal(next(at.values(TensorId("a"))), 2 * FEEDS[0]["x"])
    # a is at hand for d as well, so nothing in front of d runs yet.
    at.reach(TensorId("a"), name("d"))
    assert not at.holds(TensorId("c"), name("a"))
    at.reach(TensorId("c"), name("d"))
    assert at.holds(TensorId("c"), name("a"))


def test_changed_constants_count_from_the_next_piece_on():
    changes: Changes = {}
    at = runner(changes)
    at.advance(at.place(name("c")))
    # b is computed already: a change of its weight comes too late, one of e's does not.
    changes[name("b"), 1] = np.zeros((4, 4))
    changes[name("e"), 1] = np.eye(4)
    at.advance(at.place(name("y")))
    for value, wanted in zip(at.values(TensorId("e")), whole(["d"]), strict=True):
        np.testing.assert_allclose(value, wanted["d"], rtol=1e-6)


def test_an_input_that_the_node_lacks_can_be_given():
    proto = parse("g (float[N,4] x) => (float[N,4] y) { h = Gemm(x, w) y = Neg(h) }", w=HELD["w"])
    at = runner({(name("h", proto), 2): np.full(4, 5.0)}, proto)
    at.advance(at.place(name("y", proto)))
    for value, feeds in zip(at.values(TensorId("h")), FEEDS, strict=True):
        np.testing.assert_allclose(value, feeds["x"] @ HELD["w"] + 5, rtol=1e-4, atol=1e-5)


def branching() -> onnx.ModelProto:
    """An If whose then-branch multiplies h, which is x doubled."""
    proto = parse("g (float[N,4] x, bool flag) => (float[N,4] y) { h = Mul(x, two) o = Identity(h) y = Neg(o) }",
                  two=2.0)  # fmt: skip
    node = next(node for node in proto.graph.node if node.output[0] == "o")
    node.CopyFrom(onnx.helper.make_node(
        "If", ["flag"], ["o"], name="branch",
        then_branch=body("g () => (float[N,4] t) { s = Relu(h) t = MatMul(s, w) }", w=HELD["w"]),
        else_branch=body("g () => (float[N,4] f) { f = Identity(h) }"),
    ))  # fmt: skip
    for attr in node.attribute:
        for inner in attr.g.node:
            inner.name = inner.output[0]
    return infer_shapes(proto)


def test_tensors_of_a_body_are_read_where_its_holder_runs():
    proto = branching()
    feeds = [{**FEEDS[0], "flag": np.array(True)}, {**FEEDS[1], "flag": np.array(False)}]
    at = runner(proto=proto, feeds=feeds)
    # The nodes in a body are where their holder is.
    assert at.place("t") == at.place("branch") == 1
    inner = next(node for node in GraphIndex(proto).nodes if node.name == "t")
    tensor = GraphIndex(proto).input(inner, 0)
    assert tensor is not None
    assert tensor.scope
    at.reach(tensor, "t")
    taken, not_taken = at.values(tensor)
    np.testing.assert_array_equal(taken, np.maximum(2 * FEEDS[0]["x"], 0))
    assert not_taken.size == 0


def test_a_branch_in_a_loop_is_not_looked_into():
    proto = parse("""g (float[N,4] x, bool flag) => (float[N,4] y) {
        y = Loop (three, , x) <body = steps (int64 i, bool more, float[N,4] h) => (bool on, float[N,4] o) {
            on = Identity(more)
            o = If (flag) <then_branch = t () => (float[N,4] p) { p = Neg(h) },
                           else_branch = e () => (float[N,4] f) { f = Relu(h) }>
        }>
    }""", three=np.array(3))  # fmt: skip
    inner = next(node for node in GraphIndex(infer_shapes(proto)).nodes if node.op_type == "Neg")
    at = runner(proto=infer_shapes(proto), feeds=[{**FEEDS[0], "flag": np.array(True)}])
    tensor = TensorId("p", inner.scope)
    at.reach(tensor, inner.name)
    (value,) = at.values(tensor)
    assert value.size == 0


def test_constants_of_nodes_in_a_body_are_changed_too():
    proto = branching()
    at = runner({("t", 1): np.eye(4)}, proto, [{**FEEDS[0], "flag": np.array(True)}])
    at.advance(at.place(name("y", proto)))
    np.testing.assert_allclose(next(at.values(TensorId("o"))), np.maximum(2 * FEEDS[0]["x"], 0), rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(shape_nets(), st.data())
def test_pieces_carry_sizes_ranks_and_sequences(net, data):
    proto, feeds = net.model(), net.feeds((8, 8), (6, 11))
    at = runner(proto=proto, feeds=feeds)
    places = range(1, len(proto.graph.node))
    stops = sorted(data.draw(st.sets(st.sampled_from(places), min_size=1, max_size=5)))
    for place in stops:
        at.advance(place)
    read = {name for node in proto.graph.node[stops[-1] :] for name in node.input}
    alive = [t for node in proto.graph.node[: stops[-1]] for t in node.output if t in read]
    wanted = Session(tap_tensors(proto, [TensorId(t) for t in alive]).proto, optimize=False)
    for k, sample in enumerate(feeds):
        for t, value in wanted.run(sample, alive).items():
            if not isinstance(value, list):
                np.testing.assert_array_equal([*at.values(TensorId(t))][k], value)


def test_a_value_that_holds_no_tensor_is_refused():
    proto = parse("g (float[4,4] x) => (float[4,4] y) { r = Relu(x) "
                  "o = Optional(x) h = OptionalHasElement(o) f = Cast <to: int = 1> (h) y = Add(r, f) }",
                  opset=18)  # fmt: skip
    tensor = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    proto.graph.node[1].attribute.append(onnx.helper.make_attribute("type", tensor))
    del proto.graph.node[1].input[:]
    at = runner(proto=proto, feeds=[{"x": np.ones((4, 4), np.float32)}])
    with pytest.raises(ModelError, match="o: is no tensor"):
        at.advance(at.place(name("h", proto)))


def test_without_samples_there_is_nothing():
    at = runner(feeds=[])
    assert not at.holds(TensorId("a"), name("b"))
    assert list(at.values(TensorId("x"))) == []
