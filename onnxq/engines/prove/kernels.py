"""The kernel that does a node's work, and the type it computes in: TensorRT and ONNX Runtime by the same rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxq.engines.prove.proof import FLOAT8, INT8, STORED, UNSEEN, Kernel, Tensor

# Products: nearly all of a network's arithmetic. The second group moves or averages, which int8 makes cheaper too.
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "LSTM", "GRU", "RNN", "Attention"})
POOLS = frozenset({"MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"})
HEAVY = PRODUCTS | POOLS

# Kernels that do a node's work, by parts of their kind (TensorRT-RTX's words, then TensorRT's), lower case.
# Others (kgen, reformat, pointwise) compute bias, activation and quantization around it.
_WORKERS = {
    "product": (
        "correlation", "gemm", "deconv", "runtime_fusion", "convolution", "caskflattenconvolution", "fusion",
        "fully_connected", "matrix", "mha", "attention", "conv",
    ),
    "pool": ("maxpool", "avgpool", "pooling"),
}  # fmt: skip
# Fused attention is listed as a generated kernel; its name tells it.
_ATTENTION, _QKV = "_mha", 3
# Reads integers, dequantizes them and multiplies floats.
_DEQUANTIZES = "runtime_fusion"

# ONNX Runtime's kernels on integers. Every other one computes in the type of its tensors, or moves them.
ORT_INT8 = frozenset(
    {
        "QLinearConv", "QLinearMatMul", "QGemm", "ConvInteger", "MatMulInteger", "MatMulIntegerToFloat",
        "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "QAttention", "QLinearAdd", "QLinearMul", "QLinearConcat",
        "QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax",
        "QLinearReduceMean", "QLinearWhere",
    }
)  # fmt: skip
# On float data and weights in few bits.
ORT_WEIGHTS = frozenset({"MatMulNBits", "GatherBlockQuantized", "MatMulBnb4"})

_INTEGERS = frozenset({INT8, "uint8", FLOAT8, *STORED, "int16", "uint16"})
_BYTES = frozenset({INT8, "uint8"})


@dataclass(frozen=True)
class Arithmetic:
    """The type that a kernel computes in. stored: dtype of a weight it reads in fewer bits, "" for none."""

    dtype: str
    stored: str = ""

    def __str__(self) -> str:
        return f"{self.stored} weights, {self.dtype}" if self.stored else self.dtype


def is_low(dtype: str) -> bool:
    """True for types that quantized tensors are stored in."""
    return dtype in _INTEGERS


def find_workers(op: str, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Those of a node's kernels that do its work; all of them when none says so by its kind."""
    words = _WORKERS["pool" if op in POOLS else "product"]
    found = tuple(
        kernel
        for kernel in kernels
        if any(word in kernel.kind.lower() for word in (*words, op.lower()))
        or _ATTENTION in kernel.name
        or kernel.kind in ORT_INT8
    )
    return found or tuple(kernels)


def find_computed_type(op: str, kernels: Sequence[Kernel]) -> str:
    """The type a node computes in, given the kernels that do its work: "int8", "float32", "int4 weights, float16" …

    Several kernels of different types give all of them, joined by "+": int8 then is only a part of the truth.
    """
    return "+".join(map(str, list_arithmetic(op, kernels))) or UNSEEN


def list_arithmetic(op: str, kernels: Sequence[Kernel]) -> tuple[Arithmetic, ...]:
    """The arithmetic of a node, each kind once, given the kernels that do its work."""
    return tuple(dict.fromkeys(find_arithmetic(op, kernel) for kernel in kernels))


def find_arithmetic(op: str, kernel: Kernel) -> Arithmetic:
    """The arithmetic of a kernel that computes a node of this operator."""
    if kernel.kind in ORT_INT8:
        return Arithmetic(INT8)
    if kernel.kind in ORT_WEIGHTS:
        return Arithmetic(_find_float_type(kernel.inputs + kernel.outputs), _find_weight_type(kernel.weights) or INT8)
    operands = _find_operands(op, kernel)
    types = {tensor.dtype for tensor in operands}
    whole = _is_pool(op, kernel) or (op in PRODUCTS and kernel.kind != _DEQUANTIZES)
    if whole and types and types <= _BYTES:
        return Arithmetic(INT8)
    if whole and types == {FLOAT8}:
        return Arithmetic(FLOAT8)
    computed = _find_float_type(operands) if types - _INTEGERS else _find_float_type(kernel.inputs + kernel.outputs)
    stored = _find_weight_type(kernel.weights) if op in PRODUCTS else ""
    return Arithmetic(computed, stored if kernel.inputs else "")


def describe_types(op: str, kernel: Kernel) -> str:
    """The operands of a node in its kernel and the kernel's results: "int8 x int8 -> float32"."""
    written = dict.fromkeys(tensor.dtype or "?" for tensor in kernel.outputs)
    return f"{' x '.join(tensor.dtype or '?' for tensor in _find_operands(op, kernel))} -> {', '.join(written)}"


def _is_pool(op: str, kernel: Kernel) -> bool:
    """A kernel for nothing but a pool, and not one generated from it and its neighbours."""
    return op in POOLS and (kernel.kind == op or any(word in kernel.kind.lower() for word in _WORKERS["pool"]))


def _find_operands(op: str, kernel: Kernel) -> tuple[Tensor, ...]:
    """The two factors of a product (all inputs of fused attention), the data of anything else.

    The weight is the largest constant, unless the second input is larger: it is computed, or dequantized before.
    """
    if _ATTENTION in kernel.name:
        low = tuple(tensor for tensor in kernel.inputs if is_low(tensor.dtype))
        # Query, key and value; masks come as bool or float beside them.
        return low if len(low) >= _QKV else tuple(tensor for tensor in kernel.inputs if tensor.dtype != "bool")
    if op not in PRODUCTS:
        return kernel.inputs[:1] if _is_pool(op, kernel) else kernel.inputs
    weight = max(kernel.weights, key=lambda tensor: tensor.size, default=None)
    if weight is not None and weight.name == "weights":  # the inspector says which constant is the weight
        return (*kernel.inputs[:1], weight)
    if weight is None:
        return kernel.inputs[:2]
    if len(kernel.inputs) > 1 and kernel.inputs[1].size >= weight.size and not is_low(weight.dtype):
        return kernel.inputs[:2]
    return (*kernel.inputs[:1], weight)


def _find_weight_type(weights: Iterable[Tensor]) -> str:
    """The type of weights stored in fewer bits than they are computed with."""
    low = [tensor for tensor in weights if is_low(tensor.dtype)]
    return max(low, key=lambda tensor: tensor.size).dtype if low else ""


def _find_float_type(tensors: Iterable[Tensor]) -> str:
    """The float type among tensors; float32 when they are integers all, since arithmetic between them is in float."""
    return next((tensor.dtype for tensor in tensors if "float" in tensor.dtype and tensor.dtype != FLOAT8), "float32")
