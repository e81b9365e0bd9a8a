"""A model run in pieces gives the values it gives whole, at every node and with constants changed on the way."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, infer_shapes
from onnxq.passes.rounding import layerwise
from onnxq.passes.rounding.layerwise import Array, Changes, LayerwiseRunner, PairedRunner
from onnxq.passes.rounding.operators import Geometry
from onnxq.passes.rounding.statistics import MomentsRequest
from onnxq.runtime import Session, tap_tensors
from onnxq.sites import TensorId
from tests.graph.shape_nets import shape_nets
from tests.passes.kit import parse

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


def test_what_is_read_later_is_kept_and_reaching_it_runs_nothing():
    at = runner()
    at.reach(TensorId("a"), name("b"))
    np.testing.assert_array_equal(next(at.values(TensorId("a"))), 2 * FEEDS[0]["x"])
    # a is at hand for d as well, so nothing in front of d runs yet.
    at.reach(TensorId("a"), name("d"))
    assert not at.holds(TensorId("c"), name("a"))
    at.reach(TensorId("c"), name("d"))
    # d reads a and c; b was for c alone.
    assert at.holds(TensorId("a"), name("d"))
    assert not at.holds(TensorId("b"), name("c"))
    at.advance(at.place(name("e")))
    assert not at.holds(TensorId("a"), name("d"))
    # z reads c at the end, and what is still to be made can be had.
    assert at.holds(TensorId("c"), name("z"))
    assert at.holds(TensorId("e"), name("y"))


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


def request(data: str, reader: str, paired: str | None) -> MomentsRequest:
    other = None if paired is None else TensorId(paired)
    return MomentsRequest(name(reader), TensorId(data), other, Geometry(), (1, 4), second=True, halves=False)


def test_two_models_are_at_the_same_node_with_their_own_values():
    both = PairedRunner(FEEDS, runner(), runner({(name("b"), 1): np.eye(4)}))
    # Without a partner the float model alone goes on.
    assert list(both.iterate_tensors(request("a", "b", None))) == []
    c = TensorId("c")
    assert both.has_tensors(c, c, name("d"))
    assert not both.has_tensors(c, None, name("d"))
    found = list(both.iterate_tensors(request("c", "d", "c")))
    for (feeds, real, quantized), wanted in zip(found, whole(["c"]), strict=True):
        np.testing.assert_array_equal(real, wanted["c"])
        np.testing.assert_allclose(quantized, np.maximum(2 * feeds["x"], 0), rtol=1e-6)
    # Both have gone past the node that reads b.
    assert not both.has_tensors(TensorId("b"), c, name("c"))
    assert not both.has_tensors(c, TensorId("b"), name("c"))
    assert list(PairedRunner([], runner(feeds=[]), runner(feeds=[])).iterate_tensors(request("c", "d", "c"))) == []


def branching() -> onnx.ModelProto:
    """An If whose then-branch multiplies h, which is x doubled."""
    text = """g (float[N,4] x, bool flag) => (float[N,4] y) {
        h = Mul(x, two)
        [branch] o = If (flag) <then_branch = t () => (float[N,4] t) { [s] s = Relu(h) [t] t = MatMul(s, w) },
                                else_branch = e () => (float[N,4] f) { f = Identity(h) }>
        y = Neg(o)
    }"""
    return infer_shapes(parse(text, two=2.0, w=HELD["w"]))


def test_tensors_of_a_body_are_read_where_its_holder_runs():
    proto = branching()
    feeds = [{**FEEDS[0], "flag": np.array(True)}, {**FEEDS[1], "flag": np.array(False)}]
    at = runner(proto=proto, feeds=feeds)
    # The nodes in a body are where their holder is.
    assert at.place("t") == at.place("branch") == 1
    inner = next(node for node in GraphIndex(proto).nodes if node.name == "t")
    tensor = GraphIndex(proto).find_input(inner, 0)
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
                # ONNX Runtime optimizes each piece, which adds up in another order.
                np.testing.assert_allclose([*at.values(TensorId(t))][k], value, rtol=1e-5, atol=1e-5)


def test_sizes_of_samples_are_not_held_against_a_branch_that_they_never_take():
    """As of a net for two sample rates, whose other branch wants another length."""
    proto = parse(
        """g (float[N,M] x, bool c) => (float[N,K] y, float z) {
        d = Mul(x, two)
        y = If (c) <then_branch = t () => (float[N,K] r) { h = Relu(d) r = MatMul(h, w) },
                    else_branch = e () => (float[N,K] s) { o = Squeeze(d, one) u = Unsqueeze(o, one)
                                                           s = MatMul(u, v) }>
        z = ReduceSum(y) }""",
        w=HELD["w"], v=np.ones((1, 4), np.float32), two=2.0, one=np.asarray([1], np.int64),
    )  # fmt: skip
    feeds = [{**one, "c": np.asarray(True)} for one in FEEDS]
    at = runner(proto=proto, feeds=feeds)
    at.advance(at.place(name("y", proto)))
    scope = next(node.scope for node in GraphIndex(proto).nodes if "h" in node.outputs)
    for value, one in zip(at.values(TensorId("h", scope)), feeds, strict=True):
        np.testing.assert_array_equal(value, np.maximum(one["x"] * 2, 0))


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


def test_each_sample_lets_go_of_its_tensors_before_all_have_run(monkeypatch):
    """Their inputs of a piece and its outputs are not held side by side, nor in the arena of its session."""
    events = []
    opened = Mock(side_effect=Session)
    monkeypatch.setattr(layerwise, "Session", opened)
    monkeypatch.setattr(LayerwiseRunner, "_release_value", lambda *_: events.append("release"))
    at = runner()
    evaluate = at._evaluate_piece
    at._evaluate_piece = lambda *piece: (events.append("run") or values for values in evaluate(*piece))
    for made in ("b", "c", "d"):
        at.advance(at.place(name(made)))
    assert events == [*["run"] * 6, *["run", "release"] * 3]
    assert [call.kwargs["arena"] for call in opened.call_args_list] == [False] * 3


def test_without_samples_there_is_nothing():
    at = runner(feeds=[])
    assert not at.holds(TensorId("a"), name("b"))
    assert list(at.values(TensorId("x"))) == []
