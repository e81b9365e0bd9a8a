"""The kernel that does a node's work, and the type it computes in, by the words that its engine has for kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from onnxq.backends.engine import Kernel, Kernels, KernelWords, Tensor
from onnxq.engines.prove.proof import FLOAT8, INT8, INT16, STORED, UNSEEN

# Products: nearly all of a network's arithmetic. The second group moves or averages, which int8 makes cheaper too.
PRODUCTS = frozenset(
    {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum", "LSTM", "GRU", "RNN", "Attention"}
)
POOLS = frozenset({"MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool"})
HEAVY = PRODUCTS | POOLS

# Query, key and value.
_QKV = 3
_INTEGERS = frozenset({INT8, "uint8", FLOAT8, *STORED, "int16", "uint16"})
_BYTES = frozenset({INT8, "uint8"})
_WORDS = frozenset({INT16, "uint16"})


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


def find_workers(op: str, kernels: Sequence[Kernel], words: KernelWords) -> Kernels:
    """Those of a node's kernels that do its work; all of them when none says so by its kind."""
    parts = (*(words.pools if op in POOLS else words.products), op.lower())
    workers = [
        kernel
        for kernel in kernels
        if any(part in kernel.kind.lower() for part in parts)
        or _is_attention(kernel, words)
        or kernel.kind in words.int8
    ]
    return tuple(workers or kernels)


def _is_attention(kernel: Kernel, words: KernelWords) -> bool:
    return bool(words.attention) and words.attention in kernel.name


def find_computed_type(op: str, kernels: Sequence[Kernel], words: KernelWords) -> str:
    """The type a node computes in, given the kernels that do its work: "int8", "float32", "int4 weights, float16" …

    Several kernels of different types give all of them, joined by "+": int8 then is only a part of the truth.
    """
    return "+".join(map(str, list_arithmetic(op, kernels, words))) or UNSEEN


def list_arithmetic(
    op: str, kernels: Sequence[Kernel], words: KernelWords
) -> tuple[Arithmetic, ...]:
    """The arithmetic of a node, each kind once, given the kernels that do its work."""
    return tuple(dict.fromkeys(find_arithmetic(op, kernel, words) for kernel in kernels))


def find_arithmetic(op: str, kernel: Kernel, words: KernelWords) -> Arithmetic:
    """The arithmetic of a kernel that computes a node of this operator."""
    if kernel.kind in words.int8:
        return Arithmetic(INT8)
    if kernel.kind in words.packed:
        return Arithmetic(
            _find_float_type(kernel.inputs + kernel.outputs),
            _find_weight_type(kernel.weights) or INT8,
        )
    operands = _find_operands(op, kernel, words)
    types = {tensor.dtype for tensor in operands}
    whole = _is_pool(op, kernel, words) or (op in PRODUCTS and kernel.kind != words.dequantizes)
    if whole and types and types <= _BYTES:
        return Arithmetic(INT8)
    if whole and types == {FLOAT8}:
        return Arithmetic(FLOAT8)
    if whole and words.integers and types and types <= _INTEGERS - {FLOAT8}:
        stored = _find_weight_type(kernel.weights)
        return Arithmetic(INT16 if types & _WORDS else INT8, stored if stored in STORED else "")
    computed = (
        _find_float_type(operands)
        if types - _INTEGERS
        else _find_float_type(kernel.inputs + kernel.outputs)
    )
    stored = _find_weight_type(kernel.weights) if op in PRODUCTS else ""
    return Arithmetic(computed, stored if kernel.inputs else "")


def describe_types(op: str, kernel: Kernel, words: KernelWords) -> str:
    """The operands of a node in its kernel and the kernel's results: "int8 x int8 -> float32"."""
    written = dict.fromkeys(tensor.dtype or "?" for tensor in kernel.outputs)
    return f"{' x '.join(tensor.dtype or '?' for tensor in _find_operands(op, kernel, words))} -> {', '.join(written)}"


def _is_pool(op: str, kernel: Kernel, words: KernelWords) -> bool:
    """A kernel for nothing but a pool, and not one generated from it and its neighbours."""
    return op in POOLS and (
        kernel.kind == op or any(part in kernel.kind.lower() for part in words.pools)
    )


def _find_operands(op: str, kernel: Kernel, words: KernelWords) -> tuple[Tensor, ...]:
    """The two factors of a product (all inputs of fused attention), the data of anything else.

    The weight is the largest constant, unless the second input is larger: it is computed, or dequantized before.
    """
    if _is_attention(kernel, words):
        low = tuple(tensor for tensor in kernel.inputs if is_low(tensor.dtype))
        # Query, key and value; masks come as bool or float beside them.
        return (
            low
            if len(low) >= _QKV
            else tuple(tensor for tensor in kernel.inputs if tensor.dtype != "bool")
        )
    if op not in PRODUCTS:
        return kernel.inputs[:1] if _is_pool(op, kernel, words) else kernel.inputs
    weight = max(kernel.weights, key=lambda tensor: tensor.size, default=None)
    if (
        weight is not None and weight.name == "weights"
    ):  # the inspector says which constant is the weight
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
    return next(
        (tensor.dtype for tensor in tensors if "float" in tensor.dtype and tensor.dtype != FLOAT8),
        "float32",
    )
