"""Shape inference: every scope, any size, never a failure."""

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.graph.scopes import walk_graphs
from onnxq.sites import TensorId
from tests.graph.kit import model

F = np.float32
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def test_shapes_go_through_computed_reshapes() -> None:
    text = """g (float[N,3,4] x) => (float[A,B] y) {
        s = Shape<start = 0, end = 1>(x) t = Concat<axis = 0>(s, k) y = Reshape(x, t) n = Relu(y) z = Neg(n) }"""
    index = GraphIndex(infer_shapes(name_nodes(model(text, k=np.array([12])))))
    assert index.find_shape(TensorId("n"))[1] == 12  # type: ignore[index]


def test_bodies_are_inferred() -> None:
    proto = model("""g (float[4] x, bool c) => (float[4] y) {
        [i] y = If(c) <then_branch = t () => (float[M] b) { [n] a = Relu(x) [m] b = Neg(a) },
                       else_branch = e () => (float[M] b) { [o] b = Neg(x) }> }""")
    index = GraphIndex(infer_shapes(proto))
    assert index.find_shape(TensorId("a", "i.then_branch")) == (4,)
    assert index.find_shape(TensorId("b", "i.then_branch")) == (4,)


def test_no_shape_is_taken_from_what_branches_declare_of_their_results() -> None:
    """torch's older exporter declares that an Identity in place of a Squeeze has one axis."""
    text = """g (float[R,C] x, bool c) => (float y) {
        [i] z = If(c) <then_branch = t () => (float a) { [n] a = Squeeze(x) },
                       else_branch = e () => (float[d] b) { [m] b = Identity(x) }>
        [j] y = If(c) <then_branch = u () => (float[M] k) { [o] k = Reshape(z, flat) },
                       else_branch = v () => (float[M] k) { [p] k = Identity(z) }> }"""
    index = GraphIndex(infer_shapes(model(text, flat=np.array([-1]))))
    tensors = TensorId("b", "i.else_branch"), TensorId("z"), TensorId("k", "j.else_branch")
    assert [index.find_shape(tensor) for tensor in tensors] == [("R", "C"), None, None]


def test_bodies_are_inferred_by_constants_around_them() -> None:
    proto = model(
        """g (float[1,4,1] x, bool c) => (float[M] y) {
            [i] y = If(c) <then_branch = t () => (float[M] b) {
                [j] a = If(c) <then_branch = u () => (float[M] d) { [n] d = Squeeze(x, axes) },
                               else_branch = v () => (float[M] d) { [m] d = Relu(x) }>
                [k] b = Relu(a) },
                           else_branch = e () => (float[M] b) { [o] b = Squeeze(x, axes) }> }""",
        axes=np.array([0, 2]),
    )
    result = infer_shapes(proto)
    index = GraphIndex(result)
    assert index.find_shape(TensorId("b", "i.else_branch")) == (4,)
    assert index.find_shape(TensorId("d", "i.then_branch/j.then_branch")) == (4,)
    assert [tensor.name for tensor in result.graph.initializer] == ["axes"]
    assert not any(graph.initializer for scope, graph in walk_graphs(result.graph) if scope)


def test_bodies_that_declare_no_types_of_what_they_carry_are_inferred() -> None:
    """torch exports counters so, whose integers look like floats of unknown type otherwise."""
    proto = model(
        """g (float[4] x, int64[1] start) => (float[4] y, int64[1] end) {
            [l] y, end = Loop(trips, , x, start) <body = b (int64 i, bool go, state, count) => (bool on, next, more) {
                on = Identity(go) next = Relu(state) more = Add(count, count) }> }""",
        trips=np.array(3),
    )
    index = GraphIndex(infer_shapes(name_nodes(proto)))
    types = {name: index.find_dtype(TensorId(name, "l.body")) for name in ("state", "count", "next", "more")}
    assert types == {"state": FLOAT, "count": INT64, "next": FLOAT, "more": INT64}


def test_the_interface_and_the_weights_stay() -> None:
    text = "g (float[N,4] x) => (float[A,B] y) { a = MatMul(x, w) y = Relu(a) }"
    proto = name_nodes(model(text, w=np.ones((4, 2000), F)))
    result = infer_shapes(proto)
    assert GraphIndex(result).find_shape(TensorId("a")) == ("N", 2000)
    del result.graph.value_info[:]
    assert result == proto


def test_nothing_makes_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = name_nodes(model("g (float[4] x) => (float[5] y) { a = com.microsoft.Odd(x) y = Neg(x) }"))
    assert infer_shapes(proto).graph.node == proto.graph.node

    def broken(*_: object, **__: object) -> ModelProto:
        raise RuntimeError("an operator's inference failed")

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", broken)
    assert infer_shapes(proto) == proto


def test_over_two_gigabytes_without_their_bytes() -> None:
    """Only dims count: the tensor claims 4 GB, and no tool is given them."""
    proto = name_nodes(model("g (float[N,4] x) => (float[A,B] y) { a = MatMul(x, w) y = Relu(a) }"))
    tensor = proto.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4, 2**28])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="elsewhere")
    assert GraphIndex(infer_shapes(proto)).find_shape(TensorId("a")) == ("N", 2**28)


def test_spectra_are_of_half_the_frequencies_by_default() -> None:
    text = "g (float[1,512,1] x) => (float[A,B,C,D] y) { a = STFT(x, step, window) y = Neg(a) }"
    proto = name_nodes(model(text, step=np.array(64), window=np.ones(128, F)))
    assert GraphIndex(infer_shapes(proto)).find_shape(TensorId("a")) == (1, 7, 65, 2)


def test_helper_types_do_not_disturb() -> None:
    proto = name_nodes(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"))
    proto.graph.value_info.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [4]))
    proto.graph.node.append(helper.make_node("SequenceConstruct", ["x"], ["s"], "s"))
    index = GraphIndex(infer_shapes(proto))
    assert index.find_dtype(TensorId("s")) == 0
    assert index.find_shape(TensorId("s")) is None


def test_words_are_known_to_be_text() -> None:
    """Scores of text (skl2onnx) stand behind a Flatten of words, and those are no numbers to calibrate on."""
    proto = model("g (string[1,1] x) => (string[A,B] y) { [words] words = Tokenizer(x) [flat] y = Flatten(words) }")
    proto.graph.node[0].domain = "com.microsoft"
    assert GraphIndex(infer_shapes(name_nodes(proto))).find_dtype(TensorId("words")) == TensorProto.STRING
