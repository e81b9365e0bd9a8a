"""QONNX's operators read as pairs compute what QONNX specifies, whatever their bits, signs and ways of rounding."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.annotate import annotate_model, find_pairs, read_model
from onnxq.errors import ModelError
from onnxq.runtime import Session
from tests.annotate import models

DOMAIN = "qonnx.custom_op.general"


def round_as(mode: str, x: np.ndarray) -> np.ndarray:
    """The ways of rounding of QONNX, from its specification."""
    size, sign = np.abs(x), np.sign(x)
    ways = {
        "ROUND": np.round(x),
        "CEIL": np.ceil(x),
        "FLOOR": np.floor(x),
        "UP": sign * np.ceil(size),
        "DOWN": sign * np.floor(size),
        "HALF_UP": sign * np.floor(size + np.float32(0.5)),
        "HALF_DOWN": sign * np.ceil(size - np.float32(0.5)),
    }
    return ways[mode]


def quantize(x, scale, zero, bits, signed, narrow, mode):
    """Quant, from its specification, in float32."""
    low = np.float32(-(2.0 ** (bits - 1)) + narrow if signed else 0)
    high = np.float32(2.0 ** (bits - 1) - 1 if signed else 2.0**bits - 1 - narrow)
    codes = round_as(mode, np.clip(x / scale + zero, low, high))
    return (codes - zero) * scale


def make_model(op_type: str, numbers, attrs, x: np.ndarray, *, constant: bool, version: int = 1) -> onnx.ModelProto:
    """One operator on an input, or on a constant that is added to it."""
    names = [f"n{k}" for k in range(len(numbers))]
    source = "w" if constant else "x"
    nodes = [helper.make_node(op_type, [source, *names], ["q"], name="quant", domain=DOMAIN, **attrs)]
    nodes.append(helper.make_node("Sub" if constant else "Identity", ["q", "x"][: 1 + constant], ["y"], name="last"))
    tensors = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in zip(names, numbers, strict=True)]
    if constant:
        tensors.append(numpy_helper.from_array(x, "w"))
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape)) for name in "xy"]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, version)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def answer(model: onnx.ModelProto, x: np.ndarray, *, constant: bool) -> np.ndarray:
    read = read_model(model).proto
    onnx.checker.check_model(read, full_check=True)
    assert not [node for node in read.graph.node if node.domain]
    return Session(read, optimize=False).run({"x": np.zeros_like(x) if constant else x})["y"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 12),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["ROUND", "CEIL", "FLOOR", "UP", "DOWN", "HALF_UP", "HALF_DOWN"]),
    st.sampled_from([(), (1,), (3, 1, 1), (1, 3, 1, 1)]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_quant_computes_what_it_says(bits, signed, narrow, mode, shape, constant, moved, seed) -> None:
    rng = np.random.default_rng(seed)
    # Powers of two, so that no quotient is rounded before it is rounded.
    scale = (2.0 ** rng.integers(-6, 2, shape)).astype(np.float32)
    zero = np.float32(2 * rng.integers(0, 2 ** (bits - 2)) if moved else 0)
    x = (rng.integers(-(2 ** (bits + 2)), 2 ** (bits + 2), (2, 3, 4, 4)) / 4 * scale.max()).astype(np.float32)
    attrs = {"signed": int(signed), "narrow": int(narrow), "rounding_mode": mode}
    model = make_model("Quant", (scale, zero, bits), attrs, x, constant=constant)
    expected = quantize(x, scale, zero, bits, signed, narrow, mode)
    np.testing.assert_array_equal(answer(model, x, constant=constant), expected)
    pairs = find_pairs(read_model(model).proto)
    # A constant of few values may look narrower than it was meant.
    assert len(pairs) == (bits <= 8 or (constant and bits <= 16))
    if pairs and not constant and not narrow:
        assert pairs[0].bits == bits


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_trunc_of_both_versions(constant: bool, version: int) -> None:
    x = (np.random.default_rng(0).integers(0, 1024, (1, 2, 8, 8)) / 64).astype(np.float32)
    scale, coarse = np.float32(1 / 64), np.float32(1 / 4)
    numbers = (scale, 0, 10, 6) if version == 1 else (scale, 0, 10, coarse, 6)
    attrs = {"rounding_mode": "FLOOR"} | ({"signed": 0, "narrow": 0} if version == 2 else {})
    model = make_model("Trunc", numbers, attrs, x, constant=constant, version=version)
    codes = np.floor(np.round(x / scale) / 16)
    expected = codes * scale if version == 1 else np.clip(codes, 0, 63) * coarse
    np.testing.assert_array_equal(answer(model, x, constant=constant), expected)
    read = read_model(model)
    # Version 1 says nothing of its levels, so nothing bounds them.
    assert len(find_pairs(read.proto)) == (version == 2)
    assert [note.code for note in read.notes if hasattr(note, "code")] == ["W145"][: version == 1]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("op_type", ["BipolarQuant", "Quant"])
def test_signs(constant: bool, op_type: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 8, 8)).astype(np.float32)
    x[0, 0, 0, :2] = 0.0, -0.0
    numbers = (0.25,) if op_type == "BipolarQuant" else (0.25, 0, 1)
    model = make_model(op_type, numbers, {} if op_type == "BipolarQuant" else {"signed": 1}, x, constant=constant)
    np.testing.assert_array_equal(answer(model, x, constant=constant), np.where(x >= 0, 0.25, -0.25).astype(np.float32))
    (pair,) = find_pairs(read_model(model).proto)
    assert pair.bits == 2


@pytest.mark.parametrize("make", [models.two_widths, models.qcdq, models.modelopt])
def test_what_is_written_as_qonnx_is_read_as_the_same_pairs(make) -> None:
    before = find_pairs(make())
    written = annotate_model(make(), form="qonnx").model
    assert any(node.op_type == "Quant" for node in written.graph.node)
    found, wanted = (
        sorted((pair.bits, pair.scale_min, pair.scale_max) for pair in pairs)
        for pairs in (find_pairs(read_model(written).proto), before)
    )
    assert found == wanted


def test_numbers_that_are_not_constant_are_an_error_by_name() -> None:
    x = np.ones((1, 2), np.float32)
    model = make_model("Quant", (0.5, 0, 8), {"signed": 1}, x, constant=False)
    model.graph.node[0].input[1] = "x"
    with pytest.raises(ModelError, match="quant: its input 1 is computed at run time") as caught:
        onnxq.inspect(model)
    assert caught.value.code == "Q518"
    other = make_model("Quant", (0.5, 0, 8), {"signed": 1, "rounding_mode": "ODD"}, x, constant=False)
    with pytest.raises(ModelError, match="rounds by 'ODD'"):
        onnxq.inspect(other)
    with pytest.raises(ModelError, match="not above 0"):
        onnxq.inspect(make_model("BipolarQuant", (0.0,), {}, x, constant=False))
