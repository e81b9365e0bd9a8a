"""Functions inlined: in every scope, names unique, weights and metadata kept, numbers the same."""

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, inline_functions, name_nodes, verify_graph
from tests.graph.kit import all_nodes, assert_same, model

F = np.float32


def calling() -> ModelProto:
    """Calls in the main graph and in bodies, a function that calls another, names that invite collisions."""
    proto = model(
        """g (float[4] x, float[4] z, bool c) => (float[4] y) {
        [t__1] t__1 = Neg(x) [f1] a = loc.F(t__1, big) [f2] b = loc.F(a, z)
        [if] y = If(c) <then_branch = t () => (float[4] q) { [f3] q = loc.F(b, z) },
                        else_branch = e () => (float[4] q) { [n] q = Relu(b) }>
        }
        <domain: "loc", opset_import: ["": 17, "loc": 1]> F (p, q) => (r) {
            [n] t = Mul(p, q) [k] k = Constant<value = float[1] {2.0}>() [m] r = loc.G(t) }
        <domain: "loc", opset_import: ["": 17]> G (p) => (r) { [n] r = Abs(p) }""",
        big=np.full(4, 3, F),
    )
    proto.graph.initializer[0].metadata_props.add(key="k", value="v")
    proto.graph.node[0].metadata_props.add(key="n", value="v")
    return proto


def test_calls_in_every_scope_are_inlined() -> None:
    proto = calling()
    result = inline_functions(proto)
    verify_graph(result)
    assert not result.functions
    index = GraphIndex(result)
    assert {node.domain for node in index.nodes} == {""}
    assert [node.op_type for node in index.nodes if node.scope == "if.then_branch"] == ["Mul", "Constant", "Abs"]
    assert result.graph.node[0].metadata_props == proto.graph.node[0].metadata_props
    assert result.graph.initializer[0] == proto.graph.initializer[0]
    assert_same(proto, result)


def test_a_model_without_functions_is_copied() -> None:
    proto = name_nodes(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"))
    result = inline_functions(proto)
    assert result == proto
    assert result is not proto


SQUEEZE = """g (float[1,4] x) => (float[4] y) { [f] y = loc.F(x) }
<domain: "loc", opset_import: ["": 11]> F (a) => (b) { b = Squeeze<axes = [0]>(a) }"""
# onnx's inliner puts constants beside it into the graph twice where it converts a function.
CONSTANT = """g (float[N,4] x) => (float[N,4] y) {
    [c] w = Constant <value: tensor = float[1] {2.0}> () [f] y = loc.F(x, w) }
<domain: "loc", opset_import: ["": 13]> F (p, q) => (r) { [m] m = Mul(p, q) [n] r = Relu(m) }"""
# It wants the types of weights, and of other calls' results, to convert a function.
WEIGHTS = """g (float[N,4] x) => (float[N,4] y) { [f] a = loc.F(x, w) [g] y = loc.F(a, v) }
<domain: "loc", opset_import: ["": 13]> F (p, q) => (r) { [m] m = MatMul(p, q) [n] r = Relu(m) }"""


@pytest.mark.parametrize(
    ("text", "opset", "names", "ops"),
    [
        (SQUEEZE, 13, "", ["Constant", "Squeeze"]),
        (CONSTANT, 17, "", ["Constant", "Mul", "Relu"]),
        (WEIGHTS, 17, "wv", ["MatMul", "Relu", "MatMul", "Relu"]),
    ],
    ids=["an operator that changed", "a constant beside it", "weights that it reads"],
)
def test_functions_of_another_opset_are_converted(text: str, opset: int, names: str, ops: list[str]) -> None:
    result = inline_functions(model(text, opset, **{name: np.full((4, 4), 0.5, F) for name in names}))
    verify_graph(result)
    assert [node.op_type for node in result.graph.node] == ops
    assert not result.graph.value_info


def test_large_weights_come_back() -> None:
    proto = calling()
    weight = np.random.default_rng(0).standard_normal(4000).astype(F)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "large"))
    constant = helper.make_node("Constant", [], ["kept"], "kept", value=numpy_helper.from_array(weight))
    proto.functions[0].node.insert(0, constant)
    result = inline_functions(proto)
    assert result.graph.initializer[1] == proto.graph.initializer[1]
    held = [n for n in all_nodes(result) if n.op_type == "Constant" and len(n.attribute[0].t.raw_data) == 16000]
    assert len(held) == 3


def test_recursion_is_told() -> None:
    proto = calling()
    inner = proto.functions[1].node[0]
    inner.domain, inner.op_type = "loc", "G"
    with pytest.raises(ModelError, match=r"cannot be inlined.*\[Q108\]"):
        inline_functions(proto)


def test_defaults_of_attributes_hold() -> None:
    """A call that leaves an attribute out takes the function's default, in bodies and in other functions too."""
    proto = model(
        """g (float[4] x, float[4] z, bool c) => (float[4] y) {
        [f] a = loc.F(x)
        [g] y = If(c) <then_branch = t () => (float[4] q) { [h] q = loc.G(a) },
                       else_branch = e () => (float[4] q) { [k] q = Abs(z) }>
        }
        <domain: "loc", opset_import: ["": 17]> F <slope: float = 0.3> (p) => (r) {
            [n] r = LeakyRelu<alpha: float = @slope>(p) }
        <domain: "loc", opset_import: ["": 17, "loc": 1]> G (p) => (r) { [n] r = loc.F(p) }"""
    )
    result = inline_functions(proto)
    slopes = [round(node.attribute[0].f, 3) for node in all_nodes(result) if node.op_type == "LeakyRelu"]
    assert slopes == [0.3, 0.3]
    assert_same(proto, result)
