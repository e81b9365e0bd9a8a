"""TensorRT's lists of kernels: the builder's message and the inspector's JSON of TensorRT 10 and 11."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.backends import find_engine
from onnxq.backends.trt.kernels import find_dtype, find_node_names, moves_data, read_inspector, read_layers_message
from onnxq.engines.prove.kernels import NodeWork

_NHWC = "Strides: [3136,1,112,4], StrideOrder: [3,0,2,1], Datatype: {}, Format: (NHWC) Channel major format }}"
INT8, FLOAT = _NHWC.format("Int8"), _NHWC.format("Float")
CORRELATION = (
    f"Name: /0/Conv_myl0_1, LayerType: correlation, Inputs: [ {{ Name: a, Dimensions: [1,4,28,28], {INT8}], Constants: "
    f"[ {{ Name: w, Dimensions: [16,4,3,3], {INT8}, {{ Name: s, Dimensions: [1,16,1,1], {FLOAT}], Outputs: "
    f"[ {{ Name: b, Dimensions: [1,16,28,28], {FLOAT}], TacticName: __myelin_CASK_STUB, StreamId: 0, "
    "Metadata: [ONNX Layer: /0/Conv][ONNX Layer: x [0]/DequantizeLinear]"
)
SIGNAL = "Name: s, LayerType: signal, Inputs: [], Outputs: [], TacticName: , StreamId: 1, Metadata: "

WORDS = find_engine("tensorrt").words


def test_the_builders_message_is_read_line_by_line():
    first, second = read_layers_message(f"Layers:\n{CORRELATION}\nnonsense\n{SIGNAL}\n")
    assert (first.name, first.kind, first.tactic) == ("/0/Conv_myl0_1", "correlation", "__myelin_CASK_STUB")
    assert first.nodes == ("/0/Conv", "x [0]/DequantizeLinear")
    assert [(t.name, t.dtype, t.shape) for t in first.inputs] == [("a", "int8", (1, 4, 28, 28))]
    assert [(t.name, t.dtype) for t in first.weights] == [("w", "int8"), ("s", "float32")]
    assert first.outputs[0].layout == "(NHWC) Channel major format"
    assert (second.kind, second.inputs, second.outputs, second.nodes) == ("signal", (), (), ())


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1), unique=True))
def test_node_names_come_back_whatever_they_hold(names):
    usual = [name for name in names if "[ONNX Layer: " not in name]
    for joint in ("", "\x1e", "\x1f"):
        assert find_node_names(joint.join(f"[ONNX Layer: {name}]" for name in usual)) == tuple(usual)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("Int8", "int8"),
        ("Half", "float16"),
        ("FP8", "float8"),
        ("BFloat16", "bfloat16"),
        ("UInt8", "uint8"),
        ("Thirty-two wide channel vectorized row major Int8 format.", "int8"),
        ("Row major linear FP16 format", "float16"),
        ("Channel major FP32 format where channel % 4 == 0", "float32"),
        ("Row major linear BF16 format", "bfloat16"),
        ("", ""),
    ],
)
def test_types_are_found_in_tensorrts_words(words, dtype):
    assert find_dtype(words) == dtype


def engine(**more) -> str:
    """As TensorRT 8.6 to 10 print a fused int8 convolution with a residual input."""
    words = "Thirty-two wide channel vectorized row major Int8 format."
    layer = {
        "Name": "conv1 + add + relu",
        "LayerType": "CaskConvolution",
        "Inputs": [
            {"Name": "x", "Dimensions": [1, 64, 56, 56], "Format/Datatype": words},
            {"Name": "skip", "Dimensions": [1, 64, 56, 56], "Format/Datatype": words.replace("Int8", "FP16")},
        ],
        "Outputs": [{"Name": "y", "Dimensions": [1, 64, 56, 56], "Format/Datatype": words}],
        "ParameterType": "Convolution",
        "Weights": {"Type": "Int8", "Count": 36864},
        "Bias": {"Type": "Float", "Count": 64},
        "TacticName": "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32",
        "StreamId": 0,
        "Metadata": "[ONNX Layer: conv1]\x1e[ONNX Layer: add]\x1e[ONNX Layer: relu]",
    }
    return json.dumps({"Layers": [layer | more, "a layer told by name only"], "Bindings": ["x", "y"]})


def test_the_inspectors_json_is_read():
    first, second = read_inspector(engine())
    assert first.nodes == ("conv1", "add", "relu")
    assert [tensor.dtype for tensor in (*first.inputs, *first.weights, *first.outputs)] == [
        "int8", "float16", "int8", "int8",
    ]  # fmt: skip
    assert (second.name, second.nodes) == ("a layer told by name only", ())
    assert NodeWork("Conv", (first,), WORDS).workers == (first,)
    assert NodeWork("Conv", (first,), WORDS).type == "int8"  # the skip in float16 is added behind the product


def test_a_float_convolution_of_the_inspector_is_float():
    half = {"Name": "x", "Dimensions": [1, 64, 56, 56], "Format/Datatype": "Row major linear FP16 format"}
    (first, _) = read_inspector(engine(Inputs=[half], Outputs=[half], Weights={"Type": "Half", "Count": 36864}))
    assert NodeWork("Conv", (first,), WORDS).type == "float16"


@pytest.mark.parametrize("key", ["Datatype", "DataType"])
def test_the_inspector_of_tensorrt_11_has_types_of_their_own(key):
    value = {"Name": "a", "Dimensions": [4, 64], key: "Int8", "Format": "(Linear) Row major linear format"}
    layer = {
        "Name": "m_myl0_1", "LayerType": "gemm", "Inputs": [value], "Constants": [value | {"Name": "w"}],
        "Outputs": [value | {key: "Float"}], "TacticName": "", "Metadata": "[ONNX Layer: m]",
    }  # fmt: skip
    (kernel,) = read_inspector(json.dumps({"Layers": [layer]}))
    assert NodeWork("MatMul", (kernel,), WORDS).type == "int8"


@pytest.mark.parametrize(
    ("name", "kind", "moves"),
    [
        ("__myl_MoveCast_myl0_0", "kgen", True),
        ("__myl_Conc_myl0_0", "runtime_function", True),
        ("__myl_MulMinMaxRounCast_myl0_1", "kgen", False),
        ("__myl_ReplCastMulCastFc_myl0_0", "runtime_fusion", False),
        ("_gemm_mha_v2_myl0_3", "kgen", False),
        ("Reformatting CopyNode for Input Tensor 0 to conv1", "Reformat", True),
        ("conv1 + relu", "CaskConvolution", False),
        ("s", "signal", True),
    ],
)
def test_kernels_that_only_move_data_are_told_by_their_operations(name: str, kind: str, moves: bool) -> None:
    assert moves_data(name, kind) is moves


def test_sizes_that_are_no_numbers_are_left_out() -> None:
    """The text comes from a file, which may be damaged."""
    damaged = CORRELATION.replace("[1,4,28,28]", "[1,\x01,28,28]")
    (found,) = read_layers_message(f"Layers:\n{damaged}\n")
    assert found.inputs[0].shape == (1, 28, 28)
