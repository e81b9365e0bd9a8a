"""float16 models: the same network in float32, types remembered, and no growth of what stays float."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnxq.graph import name_nodes
from onnxq.graph.precision.narrow import write_types
from onnxq.graph.precision.widen import read_types, restore_stored, widen_model
from onnxq.runtime import Session
from tests.passes.kit import parse


def half_model() -> onnx.ModelProto:
    text = """g (float16[N,64] x, bool flag) => (float16[N,64] y) {
        [mm] h = MatMul(x, w)
        [if] y = If(flag) <then_branch = then () => (float16[A,B] t) { [add] t = Add(h, small) },
                           else_branch = other () => (float16[A,B] e) { [same] e = Identity(h) }> }"""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((64, 64)), "small": rng.standard_normal(64)}
    return parse(text, **{name: value.astype(np.float16) for name, value in weights.items()})


def run(model: onnx.ModelProto, flag: bool, dtype: type = np.float32) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float16).astype(dtype)
    return Session(model).run({"x": x, "flag": np.array(flag)})["y"]


def test_widened_model_gives_the_same_answers() -> None:
    model = half_model()
    before = model.SerializeToString(deterministic=True)
    wide = widen_model(model)
    onnx.checker.check_model(wide, full_check=True)
    assert model.SerializeToString(deterministic=True) == before
    assert wide.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    for flag in (True, False):
        got, want = run(wide, flag), run(model, flag, np.float16)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want.astype(np.float32), rtol=4e-3, atol=4e-2)


def test_types_are_remembered_and_given_back() -> None:
    model = half_model()
    types = read_types(model)
    assert types.computes == TensorProto.FLOAT16
    assert types.interface == {"x": TensorProto.FLOAT16, "y": TensorProto.FLOAT16}
    back = write_types(widen_model(model), types.computes, None, interface=types.interface)
    assert back.graph.input == model.graph.input
    assert back.graph.output == model.graph.output
    assert [node.name for node in back.graph.node if node.op_type == "Cast"] == ["x/Cast", "y/Cast"]
    for flag in (True, False):
        assert run(back, flag, np.float16).dtype == np.float16


def test_what_stays_float_goes_back_to_half() -> None:
    model = half_model()
    wide = widen_model(model)
    back = restore_stored(wide, read_types(model).stored)
    onnx.checker.check_model(back, full_check=True)
    assert back.ByteSize() < wide.ByteSize() * 0.6
    types = {t.name: t.data_type for t in back.graph.initializer}
    assert types["w/float16"] == TensorProto.FLOAT16
    assert types["small"] == TensorProto.FLOAT, "a Cast would cost more than it saves"
    np.testing.assert_array_equal(run(back, True), run(wide, True))


def test_constants_of_bodies_are_not_taken_for_tensors_of_the_same_name() -> None:
    """Two bodies may use one name, and one of them may be inlined later."""
    text = """g (bool flag) => (float[2] y) { y = If(flag) <
        then_branch = then () => (float[2] t) { w = Constant <value = float16[2] {1, 2}> () t = Cast <to = 1> (w) },
        else_branch = other () => (float[2] e) { w = Constant <value = float[2] {1, 2}> () e = Identity(w) }> }"""
    assert not read_types(parse(text)).stored


def scale_weight(factor: float) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    model = half_model()
    wide = widen_model(model)
    weight = next(t for t in wide.graph.initializer if t.name == "w")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(factor), "w"))
    return wide, restore_stored(wide, read_types(model).stored)


def test_weights_that_a_pass_scaled_are_rounded_to_half() -> None:
    wide, back = scale_weight(1.0001)
    assert back.ByteSize() < wide.ByteSize() * 0.6
    np.testing.assert_allclose(run(back, True), run(wide, True), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("factor", [1e8, 1e-8])
def test_weights_out_of_the_reach_of_half_stay_as_they_are(factor: float) -> None:
    wide, back = scale_weight(factor)
    assert back.SerializeToString() == wide.SerializeToString()


def test_operators_of_other_domains_keep_their_types() -> None:
    """A custom operator may know float16 alone: it reads and writes that, whatever is around it."""
    text = """<ir_version: 9, opset_import: ["" : 19, "mine" : 1]>
    g (float16[2,2] x) => (float16[2,2] y) <float16[2,2] h> {
        a = MatMul(x, x) h = mine.Swell(a) y = MatMul(h, h) }"""
    wide = widen_model(name_nodes(onnx.parser.parse_model(text)))
    nodes = {node.name: node for node in wide.graph.node}
    assert [node.op_type for node in wide.graph.node] == ["MatMul", "Cast", "Swell", "Cast", "MatMul"]
    assert nodes["h/Swell"].input[0] == "h/Swell/in0/float16"
    assert nodes["y/MatMul"].input[0] == "h"
