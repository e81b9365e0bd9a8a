"""verify: each rule of a legal graph has a graph that breaks it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxq.errors import VerificationError
from onnxq.graph import name_nodes, verify_graph
from tests.graph.kit import model

F = np.float32
PAIR = """g (float[4,3] x) => (float[4,3] y) {
    [q] q = QuantizeLinear<axis = 1>(x, s, z)
    [d] d = DequantizeLinear<axis = 1>(q, s2, z2)
    [n] y = Relu(d)
}"""
SCALES = np.array([1, 2, 3], F)
ZEROS = np.zeros(3, np.uint8)


def pair(text: str = PAIR, **arrays: object) -> ModelProto:
    given = {"s": SCALES, "z": ZEROS, "s2": SCALES, "z2": ZEROS, **arrays}
    return model(text, **{name: value for name, value in given.items() if value is not None})


def broken(proto: ModelProto, *words: str, kept: tuple[str, ...] = ()) -> None:
    with pytest.raises(VerificationError) as caught:
        verify_graph(proto, kept=kept)
    for word in words:
        assert word in str(caught.value)


def test_a_legal_pair_passes() -> None:
    verify_graph(pair())
    verify_graph(pair(s=F(0.5), z=np.array(3, np.uint8), s2=F(0.5), z2=np.array(3, np.uint8)))


def test_unnamed_and_doubly_named_nodes() -> None:
    broken(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"), "unnamed")
    broken(model("g (float[4] x) => (float[4] y) { [n] a = Relu(x) [n] y = Neg(a) }"), "share a name")


def test_order_and_single_assignment() -> None:
    broken(model("g (float[4] x) => (float[4] y) { [b] y = Neg(a) [a] a = Relu(x) }"), "b", "'a'", "not made before")
    broken(model("g (float[4] x) => (float[4] y) { [a] y = Neg(x) [b] y = Relu(x) }"), "b", "there already")
    broken(model("g (float[4] x) => (float[4] y) { [a] b = Neg(x) }"), "y", "nothing makes")


def test_order_inside_bodies() -> None:
    text = """g (float[4] x, bool c) => (float[4] y) {
        [i] y = If(c) <then_branch = t () => (float[4] b) { [n] b = Neg(late) },
                       else_branch = e () => (float[4] b) { [m] b = Neg(x) }>
        [l] late = Relu(x) }"""
    broken(model(text), "i", "'late'")


def test_a_pair_agrees() -> None:
    broken(pair(s2=SCALES * 2), "q", "'d'", "scale")
    broken(pair(z2=ZEROS + 1), "q", "zero point")
    broken(pair(PAIR.replace("DequantizeLinear<axis = 1>", "DequantizeLinear<axis = 0>")), "q", "axis")


def test_a_zero_point_left_out_is_zero() -> None:
    verify_graph(pair(PAIR.replace("(q, s2, z2)", "(q, s2)")))
    broken(pair(PAIR.replace("(q, s2, z2)", "(q, s2)"), z=ZEROS + 1), "zero point")


def test_a_quantize_feeds_something() -> None:
    text = "g (float[4,3] x) => (float[4,3] y) { [q] q = QuantizeLinear<axis = 1>(x, s, z) [n] y = Relu(x) }"
    broken(pair(text), "q", "feeds nothing")


def test_scales_are_numbers() -> None:
    for bad in (0.0, -1.0, np.nan, np.inf):
        scales = np.array([1, bad, 3], F)
        broken(pair(s=scales, s2=scales), "q", "positive, finite")


def test_scales_fit_the_axis() -> None:
    four, zeros = np.ones(4, F), np.zeros(4, np.uint8)
    broken(pair(s=four, s2=four, z=zeros, z2=zeros), "q", "[4] scales", "axis 1", "3 entries")
    broken(pair(s=SCALES, z=zeros, s2=SCALES, z2=zeros), "different shapes")
    far = PAIR.replace("axis = 1", "axis = 5")
    broken(pair(far), "q", "axis 5", "rank 2")


def test_block_scales_fit_their_blocks() -> None:
    text = """g (float[4,3] x) => (float[4,6] y) {
        [d] d = DequantizeLinear<axis = 0, block_size = 2>(w, s, z)
        [n] y = MatMul(x, d) }"""
    blocks = np.ones((2, 6), F)
    arrays = {"w": np.zeros((3, 6), np.int8), "s": blocks, "z": np.zeros((2, 6), np.int8)}
    verify_graph(model(text, opset=21, ir=10, **arrays))
    arrays["s"], arrays["z"] = np.ones((3, 6), F), np.zeros((3, 6), np.int8)
    broken(model(text, opset=21, ir=10, **arrays), "d", "blocks need [2, 6]")


def test_an_edge_is_not_quantized_twice() -> None:
    text = """g (float[4,3] x) => (float[4,3] y) {
        [q] q = QuantizeLinear(x, s, z) [d] d = DequantizeLinear(q, s, z)
        [q2] q2 = QuantizeLinear(d, s, z) [d2] y = DequantizeLinear(q2, s, z) }"""
    proto = model(text, s=F(1), z=np.array(0, np.uint8))
    broken(proto, "q2", "quantizes again")
    verify_graph(proto, kept=("q2",))
    other = text.replace("QuantizeLinear(d, s, z)", "QuantizeLinear(d, t, z)").replace("(q2, s, z)", "(q2, t, z)")
    verify_graph(model(other, s=F(1), t=F(2), z=np.array(0, np.uint8)))


def test_kept_pairs_are_exempt() -> None:
    verify_graph(pair(s2=SCALES * 2), kept=("q",))


def test_what_onnx_itself_refuses() -> None:
    proto = pair()
    proto.graph.node[2].attribute.append(helper.make_attribute("bits", 8))
    broken(proto, "bits")


def test_rules_hold_in_bodies() -> None:
    text = """g (float[4] x, bool c) => (float[4] y) {
        [i] y = If(c) <then_branch = t () => (float[4] b) {
                           [q] q = QuantizeLinear(x, s)
                           [d] b = DequantizeLinear(q, t) },
                       else_branch = e () => (float[4] b) { [m] b = Neg(x) }> }"""
    broken(model(text, s=F(1), t=F(2)), "q", "scale")
    verify_graph(model(text, s=F(1), t=F(1)))


def test_large_weights_do_not_matter() -> None:
    proto = name_nodes(model("g (float[3] x) => (float[9000] y) { y = MatMul(x, w) }"))
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros((3, 9000), F), "w"))
    verify_graph(proto)
