"""GraphIndex: identity by name and scope, constants, types, order; and a graph that breaks each rule of `verify`."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxq.errors import ModelError, VerificationError
from onnxq.graph import GraphIndex, infer_shapes, name_nodes, verify_graph
from onnxq.graph.values import encode_tensor
from onnxq.sites import Edge, TensorId
from tests.graph.kit import model, models


@pytest.fixture
def nested() -> GraphIndex:
    text = """g (float[4] x, bool c) => (float[4] y) {
        [up] a = Relu(x) [if] i = If(c) <then_branch = t () => (float[4] b) {
                            [deep] d = If(c) <then_branch = tt () => (float[4] q) { [n1] q = Neg(a) },
                                              else_branch = te () => (float[4] a) { }>
                            [n2] b = Add(d, a) },
                        else_branch = e () => (float[4] b) { [n3] b = Abs(x) }> [end] y = Add(i, a)
    }"""
    return GraphIndex(model(text))


def test_a_name_means_the_nearest_definition(nested: GraphIndex) -> None:
    assert nested.scopes == ("", "if.then_branch", "if.then_branch/deep.then_branch", "if.then_branch/deep.else_branch",
                             "if.else_branch")  # fmt: skip
    assert nested.resolve_tensor("b", "if.then_branch") == TensorId("b", "if.then_branch")
    assert nested.resolve_tensor("b", "if.else_branch") == TensorId("b", "if.else_branch")
    assert nested.resolve_tensor("b", "") is None
    assert nested.resolve_tensor("a", "if.then_branch/deep.then_branch") == TensorId("a")
    assert nested.resolve_tensor("", "") is None


def test_captures_count_as_consumers(nested: GraphIndex) -> None:
    assert nested.list_consumers(TensorId("a")) == (
        Edge("n1", 0, "if.then_branch/deep.then_branch"),
        Edge("n2", 1, "if.then_branch"),
        Edge("end", 1),
    )
    assert nested.captured(TensorId("a"))
    assert not nested.captured(TensorId("i"))
    assert nested.find_sole_reader(TensorId("i")) == Edge("end", 0)
    assert nested.is_output(TensorId("b", "if.then_branch"))
    assert not nested.is_output(TensorId("a"))


def test_what_a_body_gives_out_has_no_sole_reader() -> None:
    index = GraphIndex(
        model(
            """g (float[4] x, bool c) => (float[4] y) {
            [up] a = Relu(x) [down] d = Neg(a)
            [if] i = If(c) <then_branch = t () => (float[4] a) { },
                            else_branch = e () => (float[4] b) { [n] b = Abs(x) }>
            [end] y = Add(i, d) }"""
        )
    )
    assert index.list_consumers(TensorId("a")) == (Edge("down", 0),)
    assert index.find_sole_reader(TensorId("a")) is None
    assert index.find_reader(TensorId("d"), "Add") == (index.find_node("end"), 1)
    assert index.find_reader(TensorId("d"), "Mul") is None


def test_bodies_come_before_their_holder_and_after_what_they_read(nested: GraphIndex) -> None:
    assert [node.name for node in nested.nodes] == ["up", "n1", "deep", "n2", "n3", "if", "end"]
    assert [node.order for node in nested.nodes] == list(range(7))
    assert nested.parent("if.then_branch/deep.then_branch").name == "deep"
    assert nested.subgraphs("deep") == (
        ("else_branch", "if.then_branch/deep.else_branch"),
        ("then_branch", "if.then_branch/deep.then_branch"),
    )
    assert nested.scope_outputs("if.else_branch") == ("b",)


@given(models())
def test_every_read_is_listed_once(proto: ModelProto) -> None:
    index = GraphIndex(proto)
    found = [
        edge
        for node in index.nodes
        for name in {*node.outputs}
        for edge in index.list_consumers(TensorId(name, node.scope))
    ]
    outside = {v.name for v in index.inputs} | {w.name for w in proto.graph.initializer}
    found += [edge for name in outside for edge in index.list_consumers(TensorId(name))]
    reads = [Edge(node.name, k, node.scope) for node in index.nodes for k, name in enumerate(node.inputs) if name]
    assert sorted(found) == sorted(reads)
    for edge in found:
        node = index.find_node(edge.node)
        producer = index.find_producer(index.resolve_tensor(node.inputs[edge.index], node.scope))  # type: ignore[arg-type]
        assert producer is None or producer.order < node.order


def test_unnamed_nodes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"\[Q117\]\n.*name_nodes"):
        GraphIndex(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"))


def test_an_unknown_node_is_an_error_with_the_nearest_name(nested: GraphIndex) -> None:
    with pytest.raises(ModelError, match="did you mean 'deep'"):
        nested.find_node("depp")


def test_constants_of_every_kind() -> None:
    proto = name_nodes(
        model(
            """g (float[4] x) => (float[4] y) {
            a = Constant<value_floats = [1.0, 2.0]>() b = Constant<value_int = 7>()
            s = Constant<value_string = "no">() i = Identity(w) j = Identity(i) y = Relu(x) }""",
            w=np.ones((2, 3)),
        )
    )
    indices = numpy_helper.from_array(np.array([[0, 1], [1, 0]]))
    values = numpy_helper.from_array(np.array([5.0, 6.0], np.float32), "sparse")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 2]))
    index = GraphIndex(proto)
    np.testing.assert_array_equal(index.find_constant(TensorId("a")), np.array([1, 2], np.float32))
    assert index.find_constant(TensorId("b")) == 7
    assert index.find_dtype(TensorId("b")) == TensorProto.INT64
    assert index.find_constant(TensorId("s")) == b"no"
    assert index.find_constant(TensorId("j")) is index.find_constant(TensorId("w"))
    np.testing.assert_array_equal(index.find_constant(TensorId("sparse")), [[0, 5], [6, 0]])
    assert not index.is_constant(TensorId("y"))
    assert index.find_constant(TensorId("y")) is None
    assert index.find_shape(TensorId("a")) == (2,)


def test_constants_cannot_be_written_to() -> None:
    index = GraphIndex(name_nodes(model("g (float[4] x) => (float[4] y) { y = Add(x, w) }", w=np.ones(4))))
    with pytest.raises(ValueError, match="read-only"):
        index.find_constant(TensorId("w"))[0] = 2


def test_an_overridable_initializer_is_no_constant() -> None:
    proto = name_nodes(model("g (float[4] x, float[4] w) => (float[4] y) { y = Add(x, w) }", w=np.ones(4)))
    index = GraphIndex(proto)
    assert not index.is_constant(TensorId("w"))
    assert [value.name for value in index.inputs] == ["x"]


@pytest.mark.parametrize(
    ("dtype", "numpy_type"),
    [
        (TensorProto.INT4, ml_dtypes.int4),
        (TensorProto.UINT4, ml_dtypes.uint4),
        (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
        (TensorProto.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn),
        (TensorProto.FLOAT8E5M2, ml_dtypes.float8_e5m2),
    ],
)
def test_narrow_types_are_encoded_and_decoded(dtype: int, numpy_type: type) -> None:
    values = np.array([0, 1, 7, 3, 2], np.int8)
    text = "g (float[4] x) => (float[4] y) { y = Relu(x) }"
    array = GraphIndex(name_nodes(model(text, w=encode_tensor("w", values, dtype)))).find_constant(TensorId("w"))
    assert array.dtype == numpy_type
    np.testing.assert_array_equal(array.astype(np.int8), values)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="do not fit int4"):
        encode_tensor("w", np.array([9], np.int8), TensorProto.INT4)


def test_shapes_and_symbols() -> None:
    proto = infer_shapes(name_nodes(model("g (float[N,3,?,8] x) => (float[N,3,M,8] y) { a = Relu(x) y = Neg(a) }")))
    index = GraphIndex(proto)
    assert index.find_shape(TensorId("a"))[:2] == ("N", 3)  # type: ignore[index]
    assert index.inputs[0].shape == ("N", 3, None, 8)
    assert index.find_dtype(TensorId("nobody")) == 0
    assert index.find_shape(TensorId("nobody")) is None


def test_a_negative_size_is_an_unknown_one() -> None:
    proto = name_nodes(model("g (float[N,3] x) => (float[N,3] y) { y = Neg(x) }"))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    assert GraphIndex(proto).inputs[0].shape == (None, 3)


def test_attributes_are_decoded_and_bodies_left_out(nested: GraphIndex) -> None:
    assert dict(nested.find_node("if").attrs) == {}
    proto = name_nodes(model("g (float[4] x) => (float[4] y) { y = LeakyRelu<alpha = 0.5>(x) }"))
    assert GraphIndex(proto).nodes[0].attrs["alpha"] == 0.5
    node = helper.make_node("Op", ["x"], ["q"], "custom", domain="d", s="text", many=[1, 2], t=proto.graph.node[0].name)
    node.attribute.append(helper.make_attribute("tensor", numpy_helper.from_array(np.arange(3))))
    proto.graph.node.append(node)
    attrs = GraphIndex(proto).find_node("custom").attrs
    assert (attrs["s"], attrs["many"]) == ("text", (1, 2))
    np.testing.assert_array_equal(attrs["tensor"], np.arange(3))


def test_a_deep_chain_does_not_exhaust_the_stack() -> None:
    proto = model("g (float[4] x) => (float[4] y) { y = Relu(x) }")
    length = 5000
    del proto.graph.node[:]
    proto.graph.node.extend(
        helper.make_node("Relu", ["x" if k == 0 else f"t{k}"], ["y" if k == length - 1 else f"t{k + 1}"], name=f"n{k}")
        for k in reversed(range(length))
    )
    assert [node.name for node in GraphIndex(proto).nodes] == [f"n{k}" for k in range(length)]


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
                   else_branch = e () => (float[4] b) { [m] b = Neg(x) }> [l] late = Relu(x) }"""
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
        f"a scale of {scale}": (pair(**dict.fromkeys(("s", "s2"), np.array([1, scale, 3], F))), ("positive, finite",))
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
