"""Answers of all kinds that ONNX Runtime has come back from the process of an engine."""

import numpy as np
import onnx
from onnx import helper

import onnxq
from tests.backends.qnn.graphs import needs_qnn
from tests.passes.kit import parse

RNG = np.random.default_rng(0)


def make_classifier() -> onnx.ModelProto:
    """A classifier as skl2onnx writes it: a map of probabilities for each sample."""
    graph = "g (float[N, 64] x) => (float[N, 4] s) { m = MatMul(x, w) r = Relu(m) z = MatMul(r, v) s = Softmax(z) }"
    first, second = RNG.standard_normal((64, 64)), RNG.standard_normal((64, 4))
    proto = parse(graph, w=first.astype(np.float32) / 8, v=second.astype(np.float32) / 8)
    zipped = helper.make_node("ZipMap", ["s"], ["p"], name="p/ZipMap", domain="ai.onnx.ml", classlabels_int64s=range(4))
    proto.graph.node.append(zipped)
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    probability = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    entry = helper.make_map_type_proto(onnx.TensorProto.INT64, probability)
    proto.graph.output[0].CopyFrom(helper.make_value_info("p", helper.make_sequence_type_proto(entry)))
    return proto


@needs_qnn
def test_a_classifier_that_gives_maps_is_checked_in_the_emulator() -> None:
    data = {"x": RNG.standard_normal((32, 64)).astype(np.float32)}
    result = onnxq.quantize(make_classifier(), data, "qnn-int8")
    (check,) = result.report.engines
    assert check.reason == ""
    (output,) = check.outputs
    assert output.name == "p"
    assert output.agreement_db > 30
