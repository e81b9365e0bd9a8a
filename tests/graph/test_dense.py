"""Sparse weights made dense: the same numbers, in every place they may stand; damage is told."""

import numpy as np
import pytest
from onnx import ModelProto, SparseTensorProto, helper, numpy_helper

import onnxq
from onnxq.errors import ModelError
from onnxq.graph import store_densely, verify_graph
from tests.graph.kit import model

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
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((8, 8)).astype(np.float32), "c": np.asarray(True)}


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
    result = onnxq.quantize(
        sparse_model(), samples(), config, overrides={"effort": "balanced", "latency": False, "threads": 1}
    )
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
