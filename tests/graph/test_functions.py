"""Functions inlined, and sparse weights made dense: in every place they may stand, the numbers are the same."""

import numpy as np
import pytest
from onnx import ModelProto, SparseTensorProto, helper, numpy_helper

import onnxq
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, inline_functions, name_nodes, verify_graph
from onnxq.graph.convert import store_densely
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


def test_a_model_without_functions_is_given_back() -> None:
    proto = name_nodes(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"))
    assert inline_functions(proto) is proto


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


W = np.zeros((8, 4), np.float32)
W.flat[[1, 9, 20]] = (1.0, 2.0, -3.0)


def sparse(name: str = "", *, dims: tuple[int, ...] = (8, 4), at: tuple[int, ...] = (1, 9, 20)) -> SparseTensorProto:
    values = numpy_helper.from_array(np.array([1, 2, -3], np.float32), name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.asarray(at, np.int64), "at"), list(dims))


def sparse_model() -> ModelProto:
    """A sparse initializer, a sparse Constant, and one in a branch."""
    proto = model(
        """g (float[N,8] x, bool c) => (float[N,4] y) {
        [a] a = MatMul(x, w) [b] b = MatMul(x, v) [s] s = Add(a, b)
        [i] z = If(c) <then_branch = t () => (float[N,4] q) { [m] q = MatMul(x, u) },
                       else_branch = e () => (float[N,4] q) { [r] q = Relu(s) }>
        [y] y = Add(s, z) }"""
    )
    proto.graph.sparse_initializer.append(sparse("w"))
    proto.graph.node.insert(0, helper.make_node("Constant", [], ["v"], name="k", sparse_value=sparse()))
    inner = proto.graph.node[4].attribute[0].g
    inner.node.insert(0, helper.make_node("Constant", [], ["u"], name="o", sparse_value=sparse()))
    return proto


def samples() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32), "c": np.asarray(True)}


def test_sparse_weights_become_dense_wherever_they_stand() -> None:
    proto = sparse_model()
    before = proto.SerializeToString(deterministic=True)
    dense = store_densely(proto)
    verify_graph(dense)
    assert proto.SerializeToString(deterministic=True) == before
    assert not dense.graph.sparse_initializer
    np.testing.assert_array_equal(numpy_helper.to_array(dense.graph.initializer[0]), W)
    inner = dense.graph.node[4].attribute[0].g
    for node in (dense.graph.node[0], inner.node[0]):
        assert node.attribute[0].name == "value"
        np.testing.assert_array_equal(numpy_helper.to_array(node.attribute[0].t), W)


def test_a_model_without_sparse_weights_is_handed_back() -> None:
    dense = store_densely(sparse_model())
    assert store_densely(dense) is dense


@pytest.mark.parametrize("config", ["ort-int8", "ort-int4-weights", "virtual-int8"])
def test_sparse_weights_are_quantized_like_others(config: str) -> None:
    """Also where the opset must be raised, and where the model is run piece by piece."""
    overrides = {"effort": "balanced", "latency": False, "threads": 1}
    result = onnxq.quantize(sparse_model(), samples(), config, overrides=overrides)
    assert min(check.sqnr_db[0] for check in result.report.checks) > 10
    assert any("sparse weights are stored densely" in line for line in result.report.rewrites)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (sparse("w", at=(1, 9, 32)), "its indices do not fit"),
        (sparse("w", dims=(2**40, 4)), "too large to be stored densely"),
        (sparse("w", dims=(-1, 4)), "too large to be stored densely"),
        (sparse("w", at=(1, 9)), "its indices do not fit"),
    ],
)
def test_damaged_sparse_weights_are_told(broken: SparseTensorProto, words: str) -> None:
    proto = sparse_model()
    proto.graph.sparse_initializer[0].CopyFrom(broken)
    with pytest.raises(ModelError, match=f"w: .*{words}"):
        store_densely(proto)
