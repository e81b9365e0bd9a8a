"""The part of a model that ONNX Runtime has the operators of, and the rest joined to it again."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxq
from onnxq.graph import LightModel, get_index, name_nodes, strip_weights
from onnxq.graph.load import check_structure
from onnxq.runtime import Session, UnknownOperatorError, declare_types, find_front, optimize_graph
from onnxq.sites import TensorId
from tests.codes.kit import model
from tests.networks import parse_text
from tests.passes.kit import parse

TEXT = """g (float[N,4] x, float[2] unread) => (float[N,4] y, float[N,4] a, float[N,4] z) {
    a = Relu(x) m = Mul(a, w) b = Neg(m, unread) c = Abs(b) y = Add(c, w) n = Sigmoid(m) z = Exp(n)
}"""


def with_custom(text: str, *kinds: str, domain: str = "TRT") -> LightModel:
    """A model of the text in which the operators of these kinds are custom ones."""
    proto = parse_text(text, domain or "TRT", w=np.full(4, 2, np.float32))
    for node in proto.graph.node:
        if node.op_type in kinds:
            node.op_type, node.domain = f"My{node.op_type}", domain
    return strip_weights(name_nodes(proto))


def test_a_model_without_custom_operators_is_its_own_front() -> None:
    model = strip_weights(parse("g (float[4] x) => (float[4] y) { y = Relu(x) }"))
    front, rest = find_front(model)
    assert (front, rest) == (model, None)


@pytest.mark.parametrize("domain", ["TRT", ""])
def test_all_that_does_not_depend_on_the_operator_is_in_front(domain: str) -> None:
    model = with_custom(TEXT, "Neg", domain=domain)
    front, rest = find_front(model)
    assert rest.stops == {"b/MyNeg": "MyNeg"}
    assert rest.nodes == {"b/MyNeg", "c/Abs", "y/Add"}
    assert rest.outputs == ("y",)
    assert rest.reads >= {"m", "unread", "w"}
    assert [value.name for value in front.graph.input] == ["x", "unread"]
    assert [value.name for value in front.graph.output] == ["a", "z", "m"]
    # The new output is declared as onnx infers it.
    index = get_index(front)
    assert (index.find_dtype(TensorId("m")), index.find_shape(TensorId("m"))) == (TensorProto.FLOAT, ("N", 4))
    whole = rest.join(front)
    check_structure(whole.proto, "the whole")
    assert list(whole.graph.output) == list(model.graph.output)
    assert {node.name: node for node in whole.graph.node} == {node.name: node for node in model.graph.node}


def test_several_operators_are_found_one_after_another() -> None:
    _, rest = find_front(with_custom(TEXT, "Neg", "Exp"))
    assert set(rest.stops.values()) == {"MyNeg", "MyExp"}
    assert rest.outputs == ("y", "z")


def test_a_branch_with_one_is_behind_it_as_a_whole() -> None:
    text = """g (float[N,4] x, bool q) => (float[N,4] y) {
        a = Relu(x)
        y = If(q) <then_branch = one () => (float[N,4] t) { t = Mul(a, w) }, else_branch = two () => (float[N,4] e) {
            e = Neg(a) }>
    }"""
    model = with_custom(text)
    proto = model.proto
    proto.graph.node[1].attribute[1].g.node[0].op_type = "MyNeg"
    proto.graph.node[1].attribute[1].g.node[0].domain = "TRT"
    front, rest = find_front(model)
    assert rest.stops == {"y/If": "MyNeg"}
    assert [value.name for value in front.graph.output] == ["a"]
    assert rest.join(front).graph.node[1] == proto.graph.node[1]


def test_what_onnx_infers_nothing_of_has_the_type_that_onnx_runtime_tells() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { a = Neg(x) b = Neg(a) y = Abs(b) }"
    proto = with_custom(text, "Abs").proto
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "QuickGelu", "com.microsoft"
    # Of com.microsoft, and in no table of ours.
    proto.graph.node[1].op_type, proto.graph.node[1].domain = "Inverse", "com.microsoft"
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    front, rest = find_front(strip_weights(proto))
    assert rest is not None
    assert get_index(front).find_dtype(TensorId("b")) == TensorProto.FLOAT


def test_with_no_node_in_front_the_operator_is_named() -> None:
    with pytest.raises(UnknownOperatorError) as caught:
        find_front(with_custom("g (float[4] x) => (float[4] y) { a = Neg(x) y = Abs(a) }", "Neg"))
    assert caught.value.operator == ("TRT", "MyNeg")


def test_the_rest_comes_to_the_opset_of_the_front() -> None:
    from onnxq.graph import ensure_opset

    text = "g (float[N,4] x) => (float[N,1,4] y) { a = Relu(x) b = Neg(a) y = Unsqueeze <axes=[1]>(b) }"
    proto = parse_text(text, "TRT", opset=11)
    proto.graph.node[1].op_type, proto.graph.node[1].domain = "MyNeg", "TRT"
    front, rest = find_front(strip_weights(name_nodes(proto)))
    assert rest is not None
    newer = ensure_opset(front, 17)
    Session(newer, optimize=False)
    whole = rest.join(newer)
    check_structure(whole.proto, "the whole")
    assert len(whole.graph.node[-1].input) == 2
    assert next(node for node in whole.graph.node if node.op_type == "MyNeg") == rest.whole.graph.node[1]


# ---- Types of tensors in graphs that ONNX Runtime optimized.

TYPES = onnx.TensorProto


@pytest.fixture(scope="module")
def made() -> onnx.ModelProto:
    """Two convolutions quantized with int8 activations, and a branch behind them."""
    rng = np.random.default_rng(0)
    net = model(
        """g (float[N,8,9,9] x, bool c) => (float[N,16,9,9] y, float[M,K] z) {
            h = Conv <pads=[1,1,1,1]> (x, v) r = Relu(h) y = Conv <pads=[1,1,1,1]> (r, w)
            z = If (c) <then_branch = t () => (float[M,K] a) { a = Flatten(r) },
                        else_branch = e () => (float[M,K] b) { b = Flatten(y) }> }""",
        v=rng.standard_normal((16, 8, 3, 3)).astype(np.float32) / 8,
        w=rng.standard_normal((16, 16, 3, 3)).astype(np.float32) / 8,
    )
    samples = {"x": rng.standard_normal((8, 1, 8, 9, 9)).astype(np.float32), "c": np.array([True, False] * 4)}
    rules = [{"op": "Conv", "set": {"quantize": True}}]
    settings = {"effort": "fast", "latency": False, "activations.signed": True, "rules": rules}
    return onnxq.quantize(net, samples, overrides=settings).model


@pytest.mark.parametrize("layout", [True, False])
def test_every_tensor_of_an_int8_graph_has_its_type(made: onnx.ModelProto, layout: bool) -> None:
    optimized = optimize_graph(made, layout=layout)
    declare_types(optimized)
    types = {one.name: one.type.tensor_type.elem_type for one in optimized.graph.value_info}
    convs = [node for node in optimized.graph.node if node.op_type == "QLinearConv"]
    assert convs
    known = {**types, **{one.name: one.data_type for one in optimized.graph.initializer}}
    # ONNX Runtime makes uint8 of int8 activations where its kernels want it.
    assert all(known[name] in (TYPES.INT8, TYPES.UINT8) for node in convs for name in (node.input[0], *node.output))
    assert all(known[node.input[0]] == known[node.input[2]] for node in convs)


@pytest.mark.usefixtures("engines_here")
def test_prove_shows_the_types_of_kernels_with_int8_activations(made: onnx.ModelProto) -> None:
    proof = onnxq.prove(made, overrides={"engine": "ort"})
    kernels = [kernel for kernel in proof.kernels if kernel.kind == "QLinearConv"]
    assert kernels
    assert {tensor.dtype for one in kernels for tensor in (one.inputs[0], *one.outputs)} <= {"int8", "uint8"}
