"""Quantizable operators: which nodes they are, the activation that goes with each, and the tensors they read."""

import onnx
import pytest

from onnxq.backends import find_target
from onnxq.graph import GraphIndex
from onnxq.planner.problem import QuantizableOps, find_quantizable_ops
from onnxq.sites import Edge, Role, TensorId
from tests.planner.kit import MAP, POINT, network


def found(proto: onnx.ModelProto, target: str = "ort", **options: object) -> QuantizableOps:
    return find_quantizable_ops(GraphIndex(proto), find_target(target), {}, **options)  # type: ignore[arg-type]


CLIPS = f"g ({MAP} x, float given) => ({MAP} y) <{{}}> {{{{ a = Conv(x, w) y = {{}} }}}}"


@pytest.mark.parametrize(
    ("constants", "node", "bound"),
    [
        ("", "Relu(a)", (0.0, None)),
        ("", "Clip(a)", (None, None)),
        ("float low = {0.0}, float high = {6.0}", "Clip(a, low, high)", (0.0, 6.0)),
        ("float low = {-1.0}", "Clip(a, low)", (-1.0, None)),
        ("float[1] high = {1.0}", "Clip(a, , high)", (None, 1.0)),
        ("float high = {0.0}", "Clip(a, , high)", (None, 0.0)),
        # Asymmetric ranges hold 0, so these cannot be expressed.
        ("float low = {0.5}", "Clip(a, low)", None),
        ("float high = {-0.5}", "Clip(a, , high)", None),
        # Known at run time only.
        ("", "Clip(a, given)", None),
        ("float low = {0.0}", "Clip(a, low, given)", None),
    ],
)
def test_bounds_of_activations(constants: str, node: str, bound: object) -> None:
    op = found(network(CLIPS.format(constants, node).replace(" <>", ""), w=POINT)).by_name["a"]
    assert (op.activation is None, op.bound) == ((True, (None, None)) if bound is None else (False, bound))


def test_bounds_of_old_opsets_are_attributes() -> None:
    old = network(CLIPS.format("", "Clip<min=-1.0, max=2.0>(a)").replace(" <>", ""), opset=10, w=POINT)
    assert found(old).by_name["a"].bound == (-1.0, 2.0)


@pytest.mark.parametrize(
    ("behind", "activation", "out"),
    [
        ("y = Relu(a)", "y", "y"),
        ("y = Clip(a)", "y", "y"),
        ("y = LeakyRelu(a)", None, "a"),  # an operator of its own
        ("y = Sigmoid(a)", None, "a"),
        ("r = Relu(a) y = Add(r, a)", None, "a"),  # somebody else reads it in front of the Relu
        ("y = Clip(a, low)", None, "a"),
        ("y = PRelu(x, a)", None, "a"),
    ],
)
def test_the_activation_that_a_kernel_computes(behind: str, activation: str | None, out: str) -> None:
    proto = network(f"g ({MAP} x) => ({MAP} y) <float low = {{0.5}}> {{ a = Conv(x, w) {behind} }}", w=POINT)
    ops = found(proto)
    op = ops.by_name["a"]
    assert (None if op.activation is None else op.activation.name, op.out) == (activation, TensorId(out))
    assert ops.by_out[op.out] is op


def test_an_output_of_the_model_and_a_reader_in_a_body_end_an_operator() -> None:
    text = f"g ({MAP} x) => ({MAP} y, {MAP} a) {{ a = Conv(x, w) y = Relu(a) }}"
    assert found(network(text, w=POINT)).by_name["a"].activation is None
    body = f"""g ({MAP} x, bool c) => ({MAP} y) {{
        a = Conv(x, w)
        y = If (c) <then_branch = t () => ({MAP} p) {{ p = Relu(a) }},
                    else_branch = e () => ({MAP} q) {{ q = Identity(x) }}>
    }}"""
    assert found(network(body, w=POINT)).by_name["a"].activation is None


def test_weights_biases_and_data_are_named_by_their_edges() -> None:
    text = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w, b) s = Add(a, x) y = Conv(s, w) }}"
    ops = found(network(text, w=POINT, b=(8,)))
    first, add, last = ops
    assert (first.weight, first.bias, last.bias) == (Edge("a", 1), Edge("a", 2), None)
    assert add.data == ((Edge("s", 0), TensorId("a")), (Edge("s", 1), TensorId("x")))
    assert (add.weight, add.bias) == (None, None)
    assert ops.list_roles(first) == [(Role.ACTIVATION, TensorId("x")), (Role.WEIGHT, TensorId("w"))]
    assert ops.list_roles(add) == [(Role.ACTIVATION, TensorId("a")), (Role.ACTIVATION, TensorId("x"))]
    # x is data of the first and of the Add; w is nobody's activation.
    consumers = [(edge.node, op and op.name) for edge, op in ops.list_consumers(TensorId("x"))]
    assert consumers == [("a", "a"), ("s", "s")]
    assert [op for _, op in ops.list_consumers(TensorId("w"))] == [None, None]


def test_rules_may_choose_the_inputs_and_the_end() -> None:
    skip = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) r = Relu(a) c = Conv(r, w) s = Add(c, r) y = Conv(s, w) }}"
    assert found(network(skip, w=POINT), "trt").by_name["s"].data == ((Edge("s", 1), TensorId("r")),)
    concat = f"g ({MAP} x, {MAP} z) => (float[1,16,6,6] y) {{ y = Concat<axis=1>(x, z) }}"
    assert [edge for edge, _ in found(network(concat)).by_name["y"].data] == [Edge("y", 0), Edge("y", 1)]


def test_closed_nodes_and_those_at_pairs_that_cannot_be_shared_are_left_alone() -> None:
    text = f"g ({MAP} x) => ({MAP} y) {{ a = Conv(x, w) b = Conv(a, w) y = Conv(b, w) }}"
    proto = network(text, w=POINT)
    assert list(found(proto, closed=lambda node: node.name == "b").by_name) == ["a", "y"]
    # The scale is computed, so nobody else can read this pair: its neighbours are somebody's work.
    own = f"""g ({MAP} x, float s) => ({MAP} y) <uint8 z = {{0}}> {{
        a = Conv(x, w) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) b = Conv(d, w) y = Conv(b, w)
    }}"""
    assert list(found(network(own, w=POINT)).by_name) == ["y"]


def test_nodes_that_no_rule_takes_come_back_with_the_reason() -> None:
    text = f"g ({MAP} x, float[8,8,1,1] k) => ({MAP} y) {{ a = Conv(x, k) b = ConvTranspose(a, w) y = Conv(b, w) }}"
    ops = found(network(text, w=POINT))
    assert list(ops.by_name) == ["y"]
    assert [(one.subject, one.reason) for one in ops.reasons] == [
        ("a", "its weight is computed at run time: no quantized kernel takes it")
    ]
