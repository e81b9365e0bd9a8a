"""Float types: written into float32 models and emulated, and taken out of float16 models, remembered and given back."""

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnxq.graph import GraphIndex, name_nodes, verify_graph
from onnxq.graph.precision.narrow import bind_types, holds_scale, write_types
from onnxq.graph.precision.widen import emulate_types, read_types, restore_stored, widen_model
from onnxq.runtime import Session
from tests.passes.kit import body, parse

F16, BF16, F32 = int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16), int(TensorProto.FLOAT)


def casts(model: onnx.ModelProto) -> list[str]:
    return [node.name for node in model.graph.node if node.op_type == "Cast"]


def kinds(model: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def run(model: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    found: np.ndarray = next(iter(Session(model, optimize=False).run(feeds).values()))
    return found


CHAIN = "g (float[N,4] x) => (float[N,4] y) { a = MatMul(x, w) b = Relu(a) c = Add(b, k) y = Mul(c, b) }"


def chain(**changes: np.ndarray) -> onnx.ModelProto:
    values = {"w": np.eye(4, dtype=np.float32), "k": np.float32(1.5), **changes}
    return parse(CHAIN, opset=19, **values)


def test_one_cast_serves_all_readers_and_none_is_between_alike_nodes() -> None:
    whole = write_types(chain(), F16, set())
    assert casts(whole) == ["x/Cast", "y/Cast"]
    assert kinds(whole) == {"w": F16, "k": F16}
    part = write_types(chain(), F16, {"c/Add", "y/Mul"})
    assert casts(part) == ["x/Cast", "b/Cast"]
    assert kinds(part) == {"w": F16, "k": F32}
    for model in (whole, part):
        onnx.checker.check_model(model, full_check=True)
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        np.testing.assert_allclose(run(emulate_types(name_nodes(model)), x=x), run(chain(), x=x), rtol=1e-3)


def test_constants_read_in_both_types() -> None:
    """A small one is there twice, a large one once, behind a Cast."""
    text = "g (float[N,40] x) => (float[N,40] y) { a = MatMul(x, w) b = Add(a, k) c = MatMul(b, w) y = Add(c, k) }"
    w, k = np.eye(40, dtype=np.float32), np.ones(40, np.float32)
    model = write_types(parse(text, opset=19, w=w, k=k), F16, {"a/MatMul", "b/Add"})
    assert kinds(model) == {"w": F32, "k": F32, "k/float16": F16}
    assert casts(model) == ["b/Cast", "w/Cast", "y/Cast"]


def test_operators_with_types_of_their_own() -> None:
    text = """g (float[1,1,4,4] x, int64[2] n) => (float[1,1,8,8] y, int64[1,1,1,4] i, float[1,1] s) {
        y = Resize <mode = "linear"> (x, , scales) i = ArgMax <axis = 2> (x) z = ConstantOfShape(n)
        d = Range(zero, four, one) p = ReduceSum(d) q = ReduceSum(z) s = Add(p, q) }"""
    scales = np.array([1, 1, 2, 2], np.float32)
    model = parse(text, opset=19, scales=scales, zero=0.0, four=4.0, one=1.0)
    index = GraphIndex(onnx.shape_inference.infer_shapes(model))
    assert not bind_types(index, index.find_node("d/Range"), F16, 19).able
    assert bind_types(index, index.find_node("i/ArgMax"), F16, 19).inputs == (None,)
    made = write_types(model, F16, set())
    onnx.checker.check_model(made, full_check=True)
    # ONNX has no Range in float16, and scales of a Resize are float32.
    assert kinds(made) == {"scales": F32, "zero": F32, "four": F32, "one": F32}
    assert casts(made) == ["x/Cast", "d/Cast", "y/Cast", "s/Cast"]


def test_bodies_read_and_give_float32() -> None:
    text = "g (float[N,4] x, bool flag) => (float[N,4] y) { a = MatMul(x, w) }"
    model = parse(text.replace("y) {", "y) { y = Identity(x)"), opset=19, w=np.eye(4, dtype=np.float32))
    then = body("then () => (float[N,4] t) { t = MatMul(a, v) }", v=np.eye(4, dtype=np.float32))
    # Some exporters declare again what a body captures, in the type that it had.
    then.value_info.append(onnx.helper.make_tensor_value_info("a", F32, ["N", 4]))
    other = body("other () => (float[N,4] e) { e = Identity(x) }")
    del model.graph.node[:1]
    choice = onnx.helper.make_node("If", ["flag"], ["y"], name="if", then_branch=then, else_branch=other)
    model.graph.node.append(choice)
    model = name_nodes(model)
    # Outside it says the type of what a node there makes.
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", F32, ["N", 4]))
    made = write_types(model, F16, set())
    assert [value.type.tensor_type.elem_type for value in made.graph.value_info] == [F16]
    onnx.checker.check_model(made, full_check=True)
    for flag in (True, False):
        feeds = {"x": np.ones((2, 4), np.float32), "flag": np.array(flag)}
        np.testing.assert_array_equal(run(made, **feeds), run(model, **feeds))
    inner = next(one.g for one in made.graph.node[-1].attribute if one.name == "then_branch")
    assert [tensor.data_type for tensor in inner.initializer] == [F16]


def paired(scale: float = 0.01) -> onnx.ModelProto:
    weight = np.arange(64, dtype=np.int8).reshape(8, 8)
    text = """g (float[N,8] x) => (float[N,8] y) {
        r = Relu(x) q = QuantizeLinear(r, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(i, t, z)
        a = MatMul(d, v) y = Add(a, d)
    }"""
    return parse(text, opset=19, s=np.float32(scale), t=np.float32(0.003), z=np.int8(0), i=weight)


def test_pairs_come_in_the_types_they_are_read_in() -> None:
    """No Cast parts a pair from its operator: the pair gives both types, with one scale."""
    made = write_types(paired(), F16, {"y/Add"})
    verify_graph(name_nodes(made))
    assert casts(made) == ["x/Cast", "a/Cast"]
    twice = [node for node in made.graph.node if node.op_type == "DequantizeLinear" and node.input[0] == "q"]
    assert [node.name for node in twice] == ["d/DequantizeLinear", "d/DequantizeLinear/float16"]
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    assert float(values["s"]) == float(values["s/float16"]) == float(np.float16(0.01))


def test_pairs_keep_scales_that_the_type_does_not_hold() -> None:
    """As far as it is right, whatever the plan says: the pair in float32, a Cast behind."""
    made = write_types(paired(1e-7), F16, set())
    verify_graph(name_nodes(made))
    assert kinds(made)["s"] == F32
    x = np.linspace(0, 1.2e-5, 16, dtype=np.float32).reshape(2, 8)
    assert Counter(casts(made))["r/Cast"] == 1
    np.testing.assert_allclose(run(emulate_types(name_nodes(made)), x=x), run(paired(1e-7), x=x), rtol=0.1, atol=2e-7)


@pytest.mark.recent_ort
@pytest.mark.parametrize("scale", [0.01, 1e-6])
def test_pairs_one_behind_the_other(scale: float) -> None:
    """As between operators of 8 and of 16 bits."""
    text = """g (float[N,4] x) => (float[N,4] y) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        p = QuantizeLinear(d, t, z) e = DequantizeLinear(p, t, z) r = Relu(d) v = Add(r, e) y = Mul(v, v)
    }"""
    zero = np.array(0, np.uint8)
    model = parse(text, opset=19, s=np.array(0.01, np.float32), t=np.array(scale, np.float32), z=zero)
    written = write_types(model, F16, set())
    onnx.checker.check_model(written, full_check=True)
    assert kinds(written)["t"] == (F16 if scale == 0.01 else F32)
    x = np.arange(8, dtype=np.float32).reshape(2, 4) / 100
    np.testing.assert_allclose(run(written, x=x), run(model, x=x), rtol=2e-3, atol=1e-6)


def test_scales_that_a_type_holds() -> None:
    assert holds_scale(np.float32(0.01), F16, weight=False)
    assert not holds_scale(np.float32(2e-5), F16, weight=False)
    assert holds_scale(np.float32(2e-5), F16, weight=True)
    assert not holds_scale(np.float32(1e-7), F16, weight=True)
    # Channels that hold next to nothing do not count.
    assert holds_scale(np.array([1e-2, 1e-7], np.float32), F16, weight=True)
    assert not holds_scale(np.array([1e-2, 1e-9], np.float32), F16, weight=True)
    assert holds_scale(np.float32(1e-7), BF16, weight=False)
    assert not holds_scale(np.float32(1e5), F16, weight=True)


SQUARES = "g (float[4] x) => (float[4] y) { a = Add(x, x) \n b = Mul(a, a) \n y = Sqrt(b) }"

NUMPY = [(TensorProto.FLOAT16, np.float16), (TensorProto.BFLOAT16, ml_dtypes.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), NUMPY)
def test_rounds_and_overflows_as_the_type_does(kind: int, dtype: type) -> None:
    narrow = name_nodes(write_types(parse(SQUARES, opset=22), kind, set()))
    x = np.array([1.0001, 300, 1e-4, 20.03], np.float32)
    got = Session(emulate_types(narrow), optimize=False).run({"x": x})["y"]
    with np.errstate(over="ignore"):
        a = (2 * x.astype(dtype).astype(np.float32)).astype(dtype).astype(np.float32)
        b = (a * a).astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(got, np.sqrt(b).astype(dtype).astype(np.float32))


@pytest.mark.recent_ort
def test_ort_hides_what_overflows() -> None:
    """Why there is an emulation: (2 · 300)² passes through float32 there, and comes back."""
    narrow = write_types(parse(SQUARES, opset=19), TensorProto.FLOAT16, set())
    x = np.full(4, 300, np.float32)
    assert np.isfinite(Session(narrow, optimize=False).run({"x": x})["y"]).all()
    assert np.isinf(Session(emulate_types(name_nodes(narrow)), optimize=False).run({"x": x})["y"]).all()


def half_model() -> onnx.ModelProto:
    text = """g (float16[N,64] x, bool flag) => (float16[N,64] y) {
        [mm] h = MatMul(x, w)
        [if] y = If(flag) <then_branch = then () => (float16[A,B] t) { [add] t = Add(h, small) },
                           else_branch = other () => (float16[A,B] e) { [same] e = Identity(h) }> }"""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((64, 64)), "small": rng.standard_normal(64)}
    return parse(text, **{name: value.astype(np.float16) for name, value in weights.items()})


def run_half(model: onnx.ModelProto, flag: bool, dtype: type = np.float32) -> np.ndarray:
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
        got, want = run_half(wide, flag), run_half(model, flag, np.float16)
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
        assert run_half(back, flag, np.float16).dtype == np.float16


def test_what_stays_float_goes_back_to_half() -> None:
    model = half_model()
    wide = widen_model(model)
    back = restore_stored(wide, read_types(model).stored)
    onnx.checker.check_model(back, full_check=True)
    assert back.ByteSize() < wide.ByteSize() * 0.6
    types = {t.name: t.data_type for t in back.graph.initializer}
    assert types["w/float16"] == TensorProto.FLOAT16
    assert types["small"] == TensorProto.FLOAT, "a Cast would cost more than it saves"
    np.testing.assert_array_equal(run_half(back, True), run_half(wide, True))


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
    np.testing.assert_allclose(run_half(back, True), run_half(wide, True), rtol=1e-2, atol=1e-3)


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
