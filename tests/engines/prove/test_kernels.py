"""The kernel that does a node's work, and the type it computes in, from the words of each engine."""

from dataclasses import replace

import pytest

from onnxq.backends import find_engine
from onnxq.backends.engine import Kernel, Tensor
from onnxq.engines.prove.kernels import Arithmetic, NodeWork, is_low
from onnxq.engines.prove.proof import UNSEEN

# Of all engines: the cases say which one a kernel is of.
ORT = find_engine("ort").words
WORDS = replace(find_engine("tensorrt-rtx").words, int8=ORT.int8, packed=ORT.packed)


def tensor(dtype: str, *shape: int, name: str = "t") -> Tensor:
    return Tensor(name=name, dtype=dtype, shape=shape or (1, 32, 8, 8))


def kernel(
    kind: str, *inputs: Tensor, weights: tuple[Tensor, ...] = (), out: str = "float32", name: str = "k"
) -> Kernel:
    return Kernel(name=name, kind=kind, inputs=inputs, weights=weights, outputs=(tensor(out),))


X8, X32, X16 = tensor("int8"), tensor("float32"), tensor("float16")
W8, W32, W4 = tensor("int8", 32, 32, 3, 3), tensor("float32", 32, 32, 3, 3), tensor("int4", 32, 32)
BIAS, SCALES = tensor("float32", 32), tensor("float32", 1, 32, 1, 1)

# Operator, kernel, the type of its arithmetic.
CASES = {
    "integers on both sides": ("Conv", kernel("correlation", X8, weights=(W8, SCALES)), "int8"),
    "unsigned data": ("Conv", kernel("CaskConvolution", tensor("uint8"), weights=(W8,)), "int8"),
    "float data": ("Conv", kernel("correlation", X32, weights=(W8,)), "int8 weights, float32"),
    "float weights": ("Conv", kernel("correlation", X8, weights=(W32,)), "float32"),
    "floats": ("Conv", kernel("FusedConv", X32, weights=(W32, BIAS)), "float32"),
    "half": ("Gemm", kernel("gemm", X16, weights=(tensor("float16", 64, 64),), out="float16"), "float16"),
    "fp8": ("MatMul", kernel("gemm", tensor("float8"), tensor("float8")), "float8"),
    "int4 dequantized in the kernel": (
        "MatMul", kernel("runtime_fusion", X16, weights=(W4, SCALES), out="float16"), "int4 weights, float16",
    ),
    "bytes dequantized in the kernel": (
        "MatMul", kernel("runtime_fusion", X8, weights=(W8,), out="float32"), "int8 weights, float32",
    ),
    "two activations": ("MatMul", kernel("gemm", X8, tensor("int8")), "int8"),
    "the weight comes in dequantized": (
        "MatMul", kernel("gemm", X8, tensor("float32", 64, 64), weights=(BIAS,)), "float32",
    ),
    # A skip branch in float, larger than the weight, is added behind the product.
    "the inspector's own weight": (
        "Conv", kernel("CaskConvolution", X8, X32, weights=(tensor("int8", 9, name="weights"),)), "int8",
    ),
    "max pooling of bytes": ("MaxPool", kernel("maxpool", X8, out="int8"), "int8"),
    "pooling in a generated kernel": ("MaxPool", kernel("kgen", X8, X32, out="int8"), "float32"),
    "average pooling": ("AveragePool", kernel("avgpool", X32), "float32"),
    "anything else": ("Softmax", kernel("kgen", X8), "float32"),
    "ONNX Runtime, integers": ("Conv", kernel("QLinearConv", tensor("uint8"), weights=(W8,), out="uint8"), "int8"),
    "ONNX Runtime, from floats": ("MatMul", kernel("MatMulIntegerToFloat", tensor("uint8"), weights=(W8,)), "int8"),
    "ONNX Runtime, dynamic": ("MatMul", kernel("DynamicQuantizeMatMul", X32, weights=(W8,)), "int8"),
    "ONNX Runtime, blocks": (
        "MatMul", kernel("MatMulNBits", X32, weights=(tensor("uint8", 64, 2, 16),)), "uint8 weights, float32",
    ),
    "fused attention": (
        "MatMul", kernel("kgen", X8, tensor("int8"), tensor("int8"), tensor("bool"), name="__myl_gemm_mha_v2"), "int8",
    ),
    "attention in half": (
        "MatMul", kernel("kgen", X16, X16, X16, tensor("bool"), out="float16", name="_mha"), "float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("op", "found", "dtype"), CASES.values(), ids=CASES)
def test_the_type_a_kernel_computes_in(op: str, found: Kernel, dtype: str) -> None:
    work = NodeWork(op, (found,), WORDS)
    assert str(work.find_arithmetic(found)) == dtype
    assert work.type == dtype


def test_several_kernels_give_all_their_types_once() -> None:
    low, real = CASES["integers on both sides"][1], CASES["floats"][1]
    assert NodeWork("Conv", (low, low), WORDS).type == "int8"
    assert NodeWork("Conv", (low, real), WORDS).type == "int8+float32"
    assert NodeWork("Conv", (), WORDS).type == UNSEEN
    assert str(Arithmetic("float16", "int4")) == "int4 weights, float16"


@pytest.mark.parametrize(
    ("op", "kinds", "workers"),
    [
        ("Conv", ["kgen", "correlation", "reformat"], ["correlation"]),
        ("Conv", ["CaskFlattenConvolution"], ["CaskFlattenConvolution"]),
        ("Gemm", ["PointWise", "CaskGemmConvolution"], ["CaskGemmConvolution"]),
        ("MatMul", ["MatrixMultiply", "Reformat"], ["MatrixMultiply"]),
        ("MaxPool", ["maxpool", "correlation"], ["maxpool"]),
        ("AveragePool", ["Pooling", "reformat"], ["Pooling"]),
        ("Conv", ["QLinearConv", "QuantizeLinear"], ["QLinearConv"]),
        ("LSTM", ["lstm_cell", "kgen"], ["lstm_cell"]),
        # None says so by its kind: all of them may.
        ("Conv", ["kgen", "reformat"], ["kgen", "reformat"]),
        ("Conv", [], []),
    ],
)
def test_the_kernels_that_do_a_nodes_work(op: str, kinds: list[str], workers: list[str]) -> None:
    assert [one.kind for one in NodeWork(op, tuple(map(kernel, kinds)), WORDS).workers] == workers


def test_fused_attention_is_known_by_its_name() -> None:
    mha, other = kernel("kgen", name="_gemm_mha_v2"), kernel("kgen")
    assert NodeWork("MatMul", (other, mha), WORDS).workers == (mha,)


@pytest.mark.parametrize(
    ("op", "found", "text"),
    [
        ("Conv", kernel("correlation", X8, weights=(W8, SCALES)), "int8 x int8 -> float32"),
        ("Conv", kernel("correlation", X8, weights=(tensor("", 32, 32, 3, 3),)), "int8 x ? -> float32"),
        ("MaxPool", kernel("maxpool", X8, out="int8"), "int8 -> int8"),
        ("Softmax", kernel("kgen", X8, X32), "int8 x float32 -> float32"),
    ],
)
def test_operands_and_results_in_words(op: str, found: Kernel, text: str) -> None:
    assert NodeWork(op, (found,), WORDS).describe_types(found) == text


def test_types_that_quantized_tensors_are_stored_in() -> None:
    low = {"int8", "uint8", "int4", "uint4", "int16", "uint16", "float8", "float4"}
    every = low | {"int32", "int64", "float16", "bfloat16", "float32", "bool", ""}
    assert {dtype for dtype in every if is_low(dtype)} == low
