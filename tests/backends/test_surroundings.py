"""Residual blocks and attention, found in the graph around a node; what only looks like them is none."""

import numpy as np
import onnx
import pytest

from onnxq.backends import surroundings
from onnxq.backends.base import Candidate
from onnxq.backends.surroundings import find_attention, find_attention_cut, list_computed_inputs, measure_distances
from onnxq.graph import GraphIndex
from onnxq.sites import TensorId
from tests.codes.kit import model
from tests.networks import add_arrays

MAP = "float[1,8,6,6]"
BLOCK = """g ({0} x, {0} z) => ({0} y) <float[8,8,1,1] w, float[8] c, float low = {{0.0}}> {{
    s = Conv(x, w) {1} y = Add({2})
}}"""


def index(text: str) -> GraphIndex:
    proto = model(text)
    for value in proto.graph.value_info:
        if value.name in ("w", "c"):
            dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            add_arrays(proto.graph, **{value.name: np.zeros(dims, np.float32)})
    return GraphIndex(onnx.shape_inference.infer_shapes(proto))


def block(body: str, operands: str) -> GraphIndex:
    return index(BLOCK.format(MAP, body, operands))


@pytest.mark.parametrize(
    ("body", "tensor", "conv"),
    [
        ("a = Relu(s)", "a", "s"),
        ("a = Clip(s, low) b = Identity(a) d = Reshape(b, shape)", "d", "s"),
        ("a = Sigmoid(s) b = Mul(s, a)", "b", "s"),  # x * sigmoid(x), both ways round
        ("a = HardSigmoid(s) b = Mul(a, s)", "b", "s"),
        ("a = Mul(s, c)", "a", "s"),
        ("a = ConvTranspose(s, w)", "a", "a"),
        ("a = Sigmoid(s) b = Relu(s) d = Mul(a, b)", "d", None),  # a gate of another branch
        ("a = Relu(s) b = Add(a, s)", "b", None),
        ("a = Softmax(s)", "a", None),
        ("a = Relu(x)", "a", None),
        ("a = GlobalAveragePool(s)", "a", None),
    ],
)
def test_the_convolution_behind_a_tensor(body: str, tensor: str, conv: str | None) -> None:
    shaped = body.replace("shape)", "k)")
    text = BLOCK.replace("float low", "int64[4] k = {{1, 8, 6, 6}}, float low").format(MAP, shaped, "s, z")
    assert surroundings.find_backbone(index(text), TensorId(tensor)) == conv


@pytest.mark.parametrize(
    ("body", "operands", "skip"),
    [
        # The block's own input.
        ("a = Conv(s, w) r = Relu(a) b = Conv(r, w)", "b, s", 1),
        ("a = Conv(s, w) r = Relu(a) b = Conv(r, w)", "s, b", 0),
        # Two convolutions meet: the one farther from the fork takes the sum in.
        ("a = Conv(s, w) r = Relu(a) b = Conv(r, w) p = Conv(s, w)", "b, p", 1),
        ("a = Conv(s, w) r = Relu(a) b = Conv(r, w) p = Conv(s, w)", "p, b", 0),
        ("a = Conv(s, w) b = Conv(s, w)", "a, b", 0),
        # Activated behind the convolution, then added.
        ("a = Conv(s, w) r = Relu(a) p = LeakyRelu(s)", "r, p", 1),
        # Nothing is skipped.
        ("a = Relu(s) b = Sigmoid(s)", "a, b", None),
        ("r = Relu(s)", "r, r", None),
        ("r = Relu(s)", "r, c", None),
        ("a = Conv(s, w)", "a, z", None),  # an input of the model has no pair to share
        ("a = Softmax(s) b = Tanh(a) d = Exp(a)", "b, d", None),
        # The convolution stands in front of both branches.
        ("a = Softmax(s)", "a, s", None),
    ],
)
def test_the_skip_branch_of_a_residual_block(body: str, operands: str, skip: int | None) -> None:
    found = block(body, operands)
    residual = surroundings.find_residual(Candidate(found.find_node("y"), found, {}))
    assert (None if residual is None else residual[0]) == skip


def test_distances_count_the_nodes_between() -> None:
    found = block("a = Relu(s) b = Conv(a, w) d = Add(b, s)", "d, a")
    distances = {tensor.name: steps for tensor, steps in measure_distances(found, TensorId("y")).items()}
    assert distances == {"y": 0, "d": 1, "a": 1, "b": 2, "s": 2, "x": 3}
    assert measure_distances(found, TensorId("x")) == {TensorId("x"): 0}


def test_constants_are_no_inputs() -> None:
    found = block("a = Clip(s, low) b = Mul(c, a)", "b, s")
    assert [t.name for t in list_computed_inputs(found, found.find_node("b"))] == ["a"]
    assert [t.name for t in list_computed_inputs(found, found.find_node("y"))] == ["b", "s"]


ATTENTION = """g (float[1,4,8] q, float[1,8,4] k, float[1,4,8] v, float[1,1,4] mask) => (float[1,4,8] y)
    <float two = {{2.0}}, bool[1,4,4] keep = {{0}}, float low = {{-9.0}}> {{ s = MatMul(q, k) {} y = MatMul({}) }}"""


@pytest.mark.parametrize(
    ("between", "operands", "found"),
    [
        ("p = Softmax(s)", "p, v", True),
        ("a = Div(s, two) b = Add(a, mask) p = Softmax(b) d = Dropout(p)", "d, v", True),
        ("a = Add(mask, s) p = Softmax(a)", "p, v", True),
        ("a = Cast<to=1>(s) b = Max(a, low) p = Softmax(b)", "p, v", True),
        ("p = Softmax(s)", "v, p", False),  # the softmax is the left operand
        ("p = Relu(s)", "p, v", False),
        ("a = Relu(s) p = Softmax(a)", "p, v", False),
        ("a = Softmax(mask) p = Add(a, s)", "p, v", False),
    ],
)
def test_the_two_products_of_attention(between: str, operands: str, found: bool) -> None:
    text = ATTENTION.format(between, operands)
    if operands == "v, p":
        text = text.replace("float[1,4,8] v", "float[1,8,4] v").replace("float[1,4,8] y", "float[1,8,4] y")
    graph = index(text)
    wanted = ("s", "y") if found else None
    # Looked at from either of them.
    assert [find_attention(graph, graph.find_node(name)) for name in ("s", "y")] == [wanted, wanted]


@pytest.mark.parametrize(("op", "both"), [("MatMul(x, x)", True), ("MatMul(x, w)", False), ("Mul(x, x)", False)])
def test_products_of_two_activations(op: str, both: bool) -> None:
    graph = index(f"g (float[8,8] x) => (float[8,8] y) <float[8,8] w> {{ y = {op} }}")
    assert surroundings.multiplies_activations(graph, graph.find_node("y")) is both
    assert find_attention(graph, graph.find_node("y")) is None


CUT = """g (float[1,4,8] x) => (float[1,4,8] y) <float[8,8] w, float[8] c, int64[2] ones = {{1, 1}}> {{
    h = MatMul(x, w) {} t = Transpose<perm=[0,2,1]>(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v)
}}"""


@pytest.mark.parametrize(
    ("between", "at"),
    [
        ("q, k, v = Split<axis=2>(h)", "h"),
        ("b = Add(h, c) q, k, v = Split<axis=2>(b)", "b"),
        ("b = Add(c, h) i = Identity(b) q, k, v = Split<axis=2>(i)", "b"),
        # Cut by three readers.
        ("q = Slice(h, s0, s1) k = Slice(h, s0, s1) v = Slice(h, s0, s1)", "h"),
        ("q, k, v = Split<axis=2>(h) z = Relu(v)", "h"),
        # Not cut, or cut behind something else.
        ("q = Relu(h) k = Relu(h) v = Relu(h)", None),
        ("b = Tanh(h) q, k, v = Split<axis=2>(b)", None),
    ],
)
def test_the_result_that_is_cut_into_query_key_and_value(between: str, at: str | None) -> None:
    text = CUT.replace("int64[2] ones = {{1, 1}}", "int64[1] s0 = {{0}}, int64[1] s1 = {{8}}").format(between)
    graph = index(text)
    assert find_attention_cut(Candidate(graph.find_node("h"), graph, {})) == (None if at is None else TensorId(at))


def test_a_cut_that_does_not_reach_attention_is_none() -> None:
    text = """g (float[1,4,8] x) => (float[1,4,4] y) <float[8,8] w> {
        h = MatMul(x, w) a, b = Split<axis=2>(h) y = Add(a, b) }"""
    graph = index(text)
    assert find_attention_cut(Candidate(graph.find_node("h"), graph, {})) is None
