"""Tensors of a quantized model and those of the float one that they stand for."""

import numpy as np

from onnxq.engines.diff.layers import find_losses, find_source, match_tensors
from onnxq.graph import GraphIndex, name_nodes
from tests.engines.diff.models import CHAIN, PAIRS, indexed, quantized_cnn
from tests.engines.kit import graph
from tests.pipeline.models import residual


def test_an_output_quantized_last_is_the_float_models_tensor() -> None:
    made = {row.reference: row for row in match_tensors(GraphIndex(name_nodes(residual())), indexed(quantized_cnn()))}
    assert made["y"].node.op_type == "Gemm"
    assert made["t"].step > 0


def test_weights_computed_first_are_no_rows() -> None:
    body = "(float[N,4] x) => (float[N,4] y) { v = Cast<to=1>(w) u = Transpose(v) a = MatMul(x, u) y = Relu(a) }"
    index = indexed(graph(body, w=np.ones((4, 4), np.float16)))
    assert [row.name for row in match_tensors(index, index)] == ["a", "y"]


def test_a_relu_that_a_tool_took_out_is_compared_behind_the_quantizer() -> None:
    """As onnxruntime.quantization does where the range of the pair begins at 0."""
    body = """(float[N,4] x) => (float[N,4] y) <float s = {0.1}, uint8 z = {0}> {
        h = Neg(x) q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z) y = Abs(d) }"""
    plain = graph("(float[N,4] x) => (float[N,4] y) { g = Neg(x) h = Relu(g) y = Abs(h) }")
    rows = {row.reference: row for row in match_tensors(indexed(plain), indexed(graph(body)))}
    assert [one.tensor for one in rows["h"].counterparts] == ["q"]
    assert [one.tensor for one in rows["y"].counterparts] == ["y"]


def test_pairs_lead_back_to_their_source() -> None:
    index = indexed(PAIRS)
    assert find_source(index, "r/dequantized") == find_source(index, "r/quantized") == find_source(index, "r") == "r"


def test_losses_are_counted_from_the_worst_input() -> None:
    index = indexed(PAIRS)
    found = find_losses(
        index, match_tensors(GraphIndex(CHAIN), index), {"a": 40.0, "r": 41.0, "s": 20.0, "y": float("-inf")}
    )
    assert found["a"] == (60.0, 40.0)
    assert found["b"] == (41.0, 41.0)  # Not measured: as good as what it is computed from.
    assert found["s"] == (41.0, 20.0)
    assert found["y"] == (20.0, -60.0)
