"""Samples and answers go to the process of an engine and come back as they are, of all kinds that ONNX Runtime has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

import onnxq
from onnxq.backends.serving import _read_values, _write_values
from tests.backends.qnn.graphs import needs_qnn
from tests.passes.kit import parse

RNG = np.random.default_rng(0)


def test_sequences_maps_and_text_come_back(tmp_path: Path) -> None:
    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    given: dict[str, Any] = {
        # An argument of numpy.savez, and a path: both are names of tensors.
        "file": floats,
        "a/b": [floats, np.zeros((0, 2), np.int8)],
        "probabilities": [{0: 0.25, 1: np.float32(0.5)}, {"cat": 1.0, "dog": float("inf")}],
        "label": np.array(["cat", "a longer one"], object),
        "nothing": None,
    }
    _write_values(tmp_path / "values.npz", given)
    found = _read_values(tmp_path / "values.npz")
    assert list(found) == list(given)
    np.testing.assert_array_equal(found["file"], floats)
    for mine, other in zip(found["a/b"], given["a/b"], strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
    assert found["probabilities"] == given["probabilities"]
    assert found["label"].tolist() == ["cat", "a longer one"]
    assert found["nothing"] is None


def make_classifier() -> onnx.ModelProto:
    """A classifier as skl2onnx writes it: a map of probabilities for each sample."""
    graph = "g (float[N, 64] x) => (float[N, 4] s) { m = MatMul(x, w) r = Relu(m) z = MatMul(r, v) s = Softmax(z) }"
    proto = parse(
        graph,
        w=RNG.standard_normal((64, 64)).astype(np.float32) / 8,
        v=RNG.standard_normal((64, 4)).astype(np.float32) / 8,
    )
    zipped = helper.make_node("ZipMap", ["s"], ["p"], name="p/ZipMap", domain="ai.onnx.ml", classlabels_int64s=range(4))
    proto.graph.node.append(zipped)
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    entry = helper.make_map_type_proto(
        onnx.TensorProto.INT64, helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    )
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
