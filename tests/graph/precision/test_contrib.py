"""Operators of ONNX Runtime that onnx does not know: files that have them load, and types go through them."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxq.graph import ensure_opset, get_index, infer_shapes, load_model, name_nodes
from onnxq.graph.precision.narrow import bind_types, write_types
from onnxq.runtime import Session
from onnxq.sites import TensorId
from tests.graph.kit import model
from tests.passes.kit import parse

F16 = int(TensorProto.FLOAT16)
MICROSOFT = "com.microsoft"


def make_norms(opset: int = 14) -> onnx.ModelProto:
    """Norms that ONNX Runtime has in ONNX's domain, and one of its own, with a Neg behind them."""
    text = """g (float[N,8] x) => (float[N,8] y) {
        [first] a = SimplifiedLayerNormalization <axis=-1, epsilon=1e-5>(x, scale)
        [second] b = LayerNormalization <axis=-1>(a, scale, scale)
        [third] c, mean, deviation, sum = com.microsoft.SkipSimplifiedLayerNormalization(b, x, scale)
        [neg] d = Neg(c) [add] y = Add(d, sum) }"""
    proto = model(text, opset, scale=np.linspace(1, 2, 8, dtype=np.float32))
    proto.graph.node[2].output[1:3] = ["", ""]
    return proto


def run(model: onnx.ModelProto) -> np.ndarray:
    return Session(model).run({"x": np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)})["y"]


def test_norms_of_onnx_runtime_in_the_domain_of_onnx_load_and_move_to_newer_opsets() -> None:
    newer = ensure_opset(load_model(make_norms()).proto, 21)
    assert [node.domain for node in newer.graph.node] == [node.domain for node in make_norms().graph.node]
    np.testing.assert_allclose(run(newer), run(make_norms()), rtol=1e-6)


def make_group_norm() -> onnx.ModelProto:
    """An operator of ONNX's own, of which onnx infers nothing."""
    text = """g (float[N,4,3,3] x) => (float[N,4,3,3] y) {
        n = GroupNormalization <num_groups=2>(x, scale, shift) y = Sigmoid(n) }"""
    return name_nodes(parse(text, opset=21, scale=np.ones(4, np.float32), shift=np.ones(4, np.float32)))


def test_types_and_shapes_go_through_them() -> None:
    norms = (name_nodes(make_norms()), ("a", "b", "c", "sum", "d"), ("N", 8))
    for proto, names, shape in (norms, (make_group_norm(), ("n", "y"), ("N", 4, 3, 3))):
        index = get_index(infer_shapes(proto))
        for name in names:
            assert (index.find_dtype(TensorId(name)), index.find_shape(TensorId(name))) == (TensorProto.FLOAT, shape)


@pytest.mark.parametrize("wide", [(), ("n/GroupNormalization",), ("y/Sigmoid",)])
def test_group_normalization_computes_in_either_type(wide: tuple[str, ...]) -> None:
    narrow = write_types(make_group_norm(), F16, wide)
    x = np.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype(np.float32)
    expected, found = (Session(model, optimize=False).run({"x": x})["y"] for model in (make_group_norm(), narrow))
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


def test_around_an_operator_of_unknown_types_everything_stays_float32() -> None:
    model = parse("g (float[N,4,3,3] x) => (float[N,4,3,3] y) { a = Relu(x) f = Neg(a) b = Neg(f) y = Relu(b) }")
    model.graph.node[1].op_type, model.graph.node[1].domain = "FusedConv", MICROSOFT
    model.graph.node[1].input.append("w")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4, 1, 1), np.float32), "w"))
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    narrow = write_types(name_nodes(model), F16, ())
    Session(narrow, optimize=False)
    assert [node.op_type for node in narrow.graph.node] == ["Cast", "Relu", "Cast", "FusedConv", "Neg", "Relu"]


def test_they_compute_in_float16() -> None:
    narrow = write_types(name_nodes(make_norms(17)), F16, ())
    assert [node.op_type for node in narrow.graph.node].count("Cast") == 2
    np.testing.assert_allclose(run(narrow), run(make_norms(17)), rtol=1e-2, atol=1e-2)


def make_attention(packed: bool) -> onnx.ModelProto:
    """A GroupQueryAttention of two heads, with scales of a cache, which are always float32."""
    rows, cache = "float[N,S,16]", "float[N,2,P,8]"
    given, read = (f"{rows} q", "q, , ") if packed else (f"{rows} q, {rows} k, {rows} v", "q, k, v")
    text = f"""g ({given}, {cache} pk, {cache} pv, int32[N] lengths, int32[1] total)
        => (float[A,B,C] z, float[D,E,F,G] k1, float[H,I,J,K] v1) {{
        [gqa] y, k1, v1 = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 2>(
            {read}, pk, pv, lengths, total, , , , , , scale, scale)
        [neg] z = Neg(y) }}"""
    return model(text, scale=np.ones(1, np.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_attention_gives_its_type_to_what_it_makes(packed: bool) -> None:
    index = get_index(infer_shapes(make_attention(packed)))
    assert index.find_dtype(TensorId("y")) == index.find_dtype(TensorId("z")) == TensorProto.FLOAT
    # Of query, key and value in one, the result is a part.
    assert index.find_shape(TensorId("y")) == (None if packed else ("N", "S", 16))
    binding = bind_types(index, index.find_node("gqa"), F16, 17)
    assert binding.able
    assert [one for one in binding.inputs if one is not None] == [True] * (3 if packed else 5) + [False] * 2


def test_outputs_that_are_always_float32_keep_the_node_there() -> None:
    model = make_norms(17)
    model.graph.node[2].output[1] = "mean"
    index = get_index(infer_shapes(model))
    assert not bind_types(index, index.find_node("third"), F16, 17).able
