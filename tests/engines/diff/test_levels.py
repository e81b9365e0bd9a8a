"""The real values of integers in a file, and in the graph that ORT makes of it."""

import numpy as np

from onnxq.engines.diff.measure import Level, find_level
from onnxq.runtime import optimize_graph
from onnxq.sites import TensorId
from tests.engines.diff.models import indexed, quantized_cnn
from tests.engines.kit import graph


def test_integers_mean_the_same_before_and_after_fusion() -> None:
    before, after = indexed(quantized_cnn()), indexed(optimize_graph(quantized_cnn(), layout=False))
    quantized = {node.outputs[0] for node in before.nodes if node.op_type == "QuantizeLinear"}
    survivors = quantized & {name for node in after.nodes for name in node.outputs}
    assert len(survivors) >= 5
    assert {after.find_producer(TensorId(name)).op_type for name in survivors} > {"QuantizeLinear"}  # type: ignore[union-attr]
    for name in survivors:
        assert find_level(before, name) is not None
        assert find_level(after, name) == find_level(before, name)


def test_levels_follow_what_moves_integers_and_stop_at_what_computes() -> None:
    body = """(float[4] x) => (float[4] y) { q = QuantizeLinear(x, s, z) r = Reshape(q, shape) t = Identity(r)
        d = DequantizeLinear(t, s, z) y = Relu(d) }"""
    index = indexed(graph(body, s=np.float32(0.5), z=np.uint8(3), shape=np.array([4])))
    assert find_level(index, "t") == find_level(index, "q") == Level(0.5, 3)
    assert find_level(index, "y") is None
    assert find_level(index, "x") is None
    np.testing.assert_array_equal(Level(0.5, 3).to_real(np.array([3, 5], np.uint8)), [0.0, 1.0])
    np.testing.assert_array_equal(Level(0.5, 3).to_real(np.array([1.25], np.float32)), [1.25])
    # Scales of channels have no single level.
    body = "(float[2,3] x) => (float[2,3] y) { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"
    assert find_level(indexed(graph(body, s=np.ones(3, np.float32), z=np.zeros(3, np.uint8))), "q") is None
