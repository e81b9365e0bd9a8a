"""A part of a model as a model."""

from __future__ import annotations

import numpy as np
import onnx

from onnxq.engines.diff.cut import Parts
from onnxq.graph import GraphIndex, infer_shapes, name_nodes
from onnxq.runtime import Session
from tests.engines.diff.models import chain, pairs, samples


def test_a_part_is_a_model_that_computes_the_same() -> None:
    proto = infer_shapes(name_nodes(pairs(chain())))
    feeds = {"x": samples(3)["x"]}
    names = ["r", "r/quantized", "r/dequantized", "b", "s"]
    tapped = onnx.ModelProto()
    tapped.CopyFrom(proto)
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = Session(tapped, optimize=False, threads=1).run(feeds)
    asked: list[str] = []

    def given(wanted):  # type: ignore[no-untyped-def]
        asked.extend(wanted)
        return {name: values[name] for name in wanted}

    parts = Parts(GraphIndex(proto), given)
    inside = {"r/DequantizeLinear", "w1/DequantizeLinear", "node_b"}
    model, inputs = parts.cut_fed(inside, "b")
    onnx.checker.check_model(model)
    assert list(inputs) == ["r/quantized"]
    assert set(asked) == {"r/quantized", "b"}
    np.testing.assert_array_equal(Session(model, optimize=False, threads=1).run(inputs)["b"], values["b"])
    assert parts.list_needed(["b"], {*inside, "node_y"}) == parts.sort_names(inside)
    assert parts.list_inputs(inside) == ["r/quantized"]
