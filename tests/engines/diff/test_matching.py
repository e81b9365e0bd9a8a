"""Tensors of a quantized model and those of the float one that they stand for."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

import onnxq
from onnxq.engines.diff.layers import find_losses, find_source, match_tensors
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from tests.engines.diff.models import chain, pairs
from tests.pipeline.models import EVERYTHING, images, residual


def indexed(proto: onnx.ModelProto) -> GraphIndex:
    return GraphIndex(infer_shapes(name_nodes(proto)))


def test_an_output_quantized_last_is_the_float_models_tensor() -> None:
    quantized_cnn = onnxq.quantize(residual(), images(), EVERYTHING, overrides={"latency": False}).model
    made = {row.reference: row for row in match_tensors(GraphIndex(name_nodes(residual())), indexed(quantized_cnn))}
    assert made["y"].node.op_type == "Gemm"
    assert made["t"].step > 0


def test_weights_computed_first_are_no_rows() -> None:
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[N,4] x) => (float[N,4] y) { v = Cast<to=1>(w) u = Transpose(v) a = MatMul(x, u) y = Relu(a) }"
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float16), "w"))
    index = indexed(proto)
    assert [row.name for row in match_tensors(index, index)] == ["a", "y"]


def test_a_relu_that_a_tool_took_out_is_compared_behind_the_quantizer() -> None:
    """As onnxruntime.quantization does where the range of the pair begins at 0."""
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[N,4] x) => (float[N,4] y) <float s = {0.1}, uint8 z = {0}> {\n"
        "h = Neg(x) q = QuantizeLinear(h, s, z) d = DequantizeLinear(q, s, z) y = Abs(d) }"
    )
    float_model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>\n'
        "g (float[N,4] x) => (float[N,4] y) { g = Neg(x) h = Relu(g) y = Abs(h) }"
    )
    rows = {row.reference: row for row in match_tensors(indexed(float_model), indexed(proto))}
    assert [one.tensor for one in rows["h"].counterparts] == ["q"]
    assert [one.tensor for one in rows["y"].counterparts] == ["y"]


def test_pairs_lead_back_to_their_source() -> None:
    index = indexed(pairs(chain()))
    assert find_source(index, "r/dequantized") == find_source(index, "r/quantized") == find_source(index, "r") == "r"


def test_losses_are_counted_from_the_worst_input() -> None:
    index = indexed(pairs(chain()))
    made = match_tensors(GraphIndex(chain()), index)
    found = find_losses(index, made, {"a": 40.0, "r": 41.0, "s": 20.0, "y": float("-inf")})
    assert found["a"] == (60.0, 40.0)
    assert found["b"] == (41.0, 41.0)  # Not measured: as good as what it is computed from.
    assert found["s"] == (41.0, 20.0)
    assert found["y"] == (20.0, -60.0)
