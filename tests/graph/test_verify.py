"""verify: each rule of a legal graph has a graph that breaks it."""

import numpy as np
import pytest
from onnx import ModelProto

from onnxq.errors import VerificationError
from onnxq.graph import verify_graph
from tests.graph.kit import model

F = np.float32
PAIR = """g (float[4,3] x) => (float[4,3] y) {
    [q] q = QuantizeLinear<axis = 1>(x, s, z) [d] d = DequantizeLinear<axis = 1>(q, s2, z2) [n] y = Relu(d)
}"""
SCALES = np.array([1, 2, 3], F)
ZEROS = np.zeros(3, np.uint8)


def pair(text: str = PAIR, **arrays: object) -> ModelProto:
    given = {"s": SCALES, "z": ZEROS, "s2": SCALES, "z2": ZEROS, **arrays}
    return model(text, **{name: value for name, value in given.items() if value is not None})


VECTOR = "g (float[4] x) => (float[4] y)"
IN_BODY = """g (float[4] x, bool c) => (float[4] y) {
    [i] y = If(c) <then_branch = t () => (float[4] b) { [q] q = QuantizeLinear(x, s) [d] b = DequantizeLinear(q, t) },
                   else_branch = e () => (float[4] b) { [m] b = Neg(x) }> }"""
LATE = """g (float[4] x, bool c) => (float[4] y) {
    [i] y = If(c) <then_branch = t () => (float[4] b) { [n] b = Neg(late) },
                   else_branch = e () => (float[4] b) { [m] b = Neg(x) }>
    [l] late = Relu(x) }"""
TWICE = """g (float[4,3] x) => (float[4,3] y) {
    [q] q = QuantizeLinear(x, s, z) [d] d = DequantizeLinear(q, s, z)
    [q2] q2 = QuantizeLinear(d, t, z) [d2] y = DequantizeLinear(q2, t, z) }"""
UNREAD = "g (float[4,3] x) => (float[4,3] y) { [q] q = QuantizeLinear<axis = 1>(x, s, z) [n] y = Relu(x) }"
BLOCKS = """g (float[4,3] x) => (float[4,6] y) {
    [d] d = DequantizeLinear<axis = 0, block_size = 2>(w, s, z) [n] y = MatMul(x, d) }"""
NO_ZERO = PAIR.replace("(q, s2, z2)", "(q, s2)")


def twice(second: float) -> ModelProto:
    """A pair behind a pair. second: its scale, where the first has 1."""
    return model(TWICE, s=F(1), t=F(second), z=np.array(0, np.uint8))


def blocks(rows: int) -> ModelProto:
    """A weight in blocks of two of its three rows, with scales for so many blocks."""
    zeros = np.zeros((rows, 6), np.int8)
    return model(BLOCKS, opset=21, ir=10, w=np.zeros((3, 6), np.int8), s=np.ones((rows, 6), F), z=zeros)


LEGAL: dict[str, tuple[ModelProto, tuple[str, ...]]] = {
    "a pair of channels": (pair(), ()),
    "a pair of a tensor": (pair(s=F(0.5), z=np.array(3, np.uint8), s2=F(0.5), z2=np.array(3, np.uint8)), ()),
    "a zero point left out, which is zero": (pair(NO_ZERO), ()),
    "a kept pair that differs": (pair(s2=SCALES * 2), ("q",)),
    "blocks": (blocks(2), ()),
    "a kept pair behind an equal one": (twice(1), ("q2",)),
    "a pair behind another one": (twice(2), ()),
    "a pair in a body": (model(IN_BODY, s=F(1), t=F(1)), ()),
    "a large weight": (model("g (float[3] x) => (float[9] y) { [m] y = MatMul(x, w) }", w=np.zeros((3, 9000), F)), ()),
}


@pytest.mark.parametrize(("proto", "kept"), LEGAL.values(), ids=LEGAL)
def test_a_legal_graph_passes(proto: ModelProto, kept: tuple[str, ...]) -> None:
    verify_graph(proto, kept=kept)


FOUR = {"s": np.ones(4, F), "s2": np.ones(4, F), "z": np.zeros(4, np.uint8), "z2": np.zeros(4, np.uint8)}
BROKEN: dict[str, tuple[ModelProto, tuple[str, ...]]] = {
    "an unnamed node": (model(f"{VECTOR} {{ y = Relu(x) }}"), ("unnamed",)),
    "a name twice": (model(f"{VECTOR} {{ [n] a = Relu(x) [n] y = Neg(a) }}"), ("share a name",)),
    "a reader first": (model(f"{VECTOR} {{ [b] y = Neg(a) [a] a = Relu(x) }}"), ("b", "'a'", "not made before")),
    "a tensor made twice": (model(f"{VECTOR} {{ [a] y = Neg(x) [b] y = Relu(x) }}"), ("b", "there already")),
    "an output nobody makes": (model(f"{VECTOR} {{ [a] b = Neg(x) }}"), ("y", "nothing makes")),
    "a reader first in a body": (model(LATE), ("i", "'late'")),
    "other scales": (pair(s2=SCALES * 2), ("q", "'d'", "scale")),
    "other zero points": (pair(z2=ZEROS + 1), ("q", "zero point")),
    "another axis": (pair(PAIR.replace("DequantizeLinear<axis = 1>", "DequantizeLinear<axis = 0>")), ("q", "axis")),
    "a zero point that is not zero": (pair(NO_ZERO, z=ZEROS + 1), ("zero point",)),
    "a quantize node nobody reads": (pair(UNREAD), ("q", "feeds nothing")),
    **{
        f"a scale of {scale}": (
            pair(s=np.array([1, scale, 3], F), s2=np.array([1, scale, 3], F)),
            ("positive, finite",),
        )
        for scale in (0.0, -1.0, np.nan, np.inf)
    },
    "a channel too many": (pair(**FOUR), ("q", "[4] scales", "axis 1", "3 entries")),
    "zero points of other channels": (pair(z=FOUR["z"], z2=FOUR["z"]), ("different shapes",)),
    "an axis too many": (pair(PAIR.replace("axis = 1", "axis = 5")), ("q", "axis 5", "rank 2")),
    "a block too many": (blocks(3), ("d", "blocks need [2, 6]")),
    "a pair behind an equal one": (twice(1), ("q2", "quantizes again")),
    "other scales in a body": (model(IN_BODY, s=F(1), t=F(2)), ("q", "scale")),
    "an attribute that onnx refuses": (pair(PAIR.replace("Relu(d)", "Relu<bits = 8>(d)")), ("bits",)),
}


@pytest.mark.parametrize(("proto", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_graph_is_told(proto: ModelProto, words: tuple[str, ...]) -> None:
    with pytest.raises(VerificationError) as caught:
        verify_graph(proto)
    assert [word for word in words if word not in str(caught.value)] == []
