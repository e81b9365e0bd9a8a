"""Models that ONNX Runtime loads and onnx.checker does not: no shapes, no types, IR version 3 read as 4."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, load_model
from tests.graph.kit import compute, model

W = np.linspace(-1, 1, 2000, dtype=np.float32).reshape(4, 500)
TEXT = "g (float[n,4] x) => (float[n,500] y) { [m] y = MatMul(x, w) }"
FEEDS = {"x": np.ones((2, 4), np.float32)}


def loads_as_it_runs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model as loaded, whose answers in ONNX Runtime are those of the original."""
    loaded = load_model(proto).proto
    np.testing.assert_array_equal(compute(loaded, FEEDS)[0], compute(proto, FEEDS)[0])
    return loaded


@pytest.mark.parametrize("where", ["input", "output", "both"])
def test_a_tensor_without_a_shape_is_loaded_and_stays_without(where: str) -> None:
    proto = model(TEXT, w=W)
    values = {"input": proto.graph.input, "output": proto.graph.output}
    for name, declared in values.items():
        if where in (name, "both"):
            declared[0].type.tensor_type.ClearField("shape")
    loaded = loads_as_it_runs(proto)
    assert loaded.graph == proto.graph
    index = GraphIndex(loaded)
    assert (index.inputs[0].shape is None) == (where != "output")


def test_a_sequence_of_tensors_without_a_shape_is_loaded() -> None:
    proto = model(TEXT, w=W)
    proto.graph.node.append(helper.make_node("SequenceConstruct", ["y", "y"], ["s"], name="s"))
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    proto.graph.output.append(helper.make_value_info("s", helper.make_sequence_type_proto(tensor)))
    loads_as_it_runs(proto)


@pytest.mark.parametrize("half", ["type", "elem_type"])
def test_an_input_without_a_type_is_named(half: str) -> None:
    proto = model(TEXT, w=W)
    declared = proto.graph.input[0]
    declared.ClearField("type") if half == "type" else declared.type.tensor_type.ClearField("elem_type")
    with pytest.raises(ModelError, match="input 'x': has no type"):
        load_model(proto)


def test_an_input_with_a_default_value_becomes_a_constant_and_is_named() -> None:
    text = "g (float[n,4] x, float[500] b) => (float[n,500] y) { [m] h = MatMul(x, w) [a] y = Add(h, b) }"
    proto = model(text, ir=8, w=W, b=np.ones(500, np.float32))
    loaded = load_model(proto)
    assert [value.name for value in loaded.proto.graph.input] == ["x"]
    assert loaded.notes == ("inputs with a default value are constants now, and can no longer be fed: b",)
    np.testing.assert_array_equal(compute(loaded.proto, FEEDS)[0], compute(proto, FEEDS)[0])


def test_what_is_wrong_besides_is_still_told() -> None:
    proto = model(TEXT, w=W)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    proto.graph.node[0].input[1] = "nobody"
    with pytest.raises(ModelError, match="nobody"):
        load_model(proto)
