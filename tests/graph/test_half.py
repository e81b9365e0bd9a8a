"""float16 models: same answers computed in float32, same interface, and no growth of what stays float."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from onnxq.graph import name_nodes
from onnxq.graph.half import computes_in_half, restore_half, widen_half


def half_model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((64, 64)).astype(np.float16),
        "small": rng.standard_normal((64,)).astype(np.float16),
    }
    then = helper.make_graph(
        [helper.make_node("Add", ["h", "small"], ["t"], name="add")], "then", [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT16, None)],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Identity", ["h"], ["e"], name="same")], "else", [],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT16, None)],
    )  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="mm"),
        helper.make_node("If", ["flag"], ["y"], name="if", then_branch=then, else_branch=other),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["N", 64]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["N", 64])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return name_nodes(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]))


def run(model: onnx.ModelProto, flag: bool) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float16)
    found: np.ndarray = session.run(None, {"x": x, "flag": np.array(flag)})[0]
    return found


def test_widened_model_keeps_interface_and_answers() -> None:
    model = half_model()
    before = model.SerializeToString(deterministic=True)
    wide = widen_half(model)
    onnx.checker.check_model(wide, full_check=True)
    assert model.SerializeToString(deterministic=True) == before
    assert [v.name for v in wide.graph.input] == ["x", "flag"]
    assert wide.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    assert wide.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    for flag in (True, False):
        got, want = run(wide, flag), run(model, flag)
        assert got.dtype == np.float16
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=4e-3, atol=4e-2)


def test_only_models_that_compute_in_half_are_meant() -> None:
    model = half_model()
    assert computes_in_half(model)
    assert not computes_in_half(name_nodes(widen_half(model)))


def test_what_stays_float_goes_back_to_half() -> None:
    model = half_model()
    wide = widen_half(model)
    back = restore_half(wide, model)
    onnx.checker.check_model(back, full_check=True)
    assert back.ByteSize() < wide.ByteSize() * 0.6
    types = {t.name: t.data_type for t in back.graph.initializer}
    assert types["w/float16"] == TensorProto.FLOAT16
    assert types["small"] == TensorProto.FLOAT, "a Cast would cost more than it saves"
    np.testing.assert_array_equal(run(back, True), run(wide, True))


def test_changed_weights_stay_as_they_are() -> None:
    model = half_model()
    wide = widen_half(model)
    weight = next(t for t in wide.graph.initializer if t.name == "w")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.0001), "w"))
    assert restore_half(wide, model).SerializeToString() == wide.SerializeToString()
