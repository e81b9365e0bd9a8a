"""The kernel that does a node's work, and the type it computes in, by the words that its engine has for kernels."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from onnxq.backends.base import WEIGHTED_OPS
from onnxq.backends.engine import Kernel, Kernels, KernelWords, Tensor, Tensors
from onnxq.engines.prove.proof import FLOAT8, INT8, INT16, STORED, UNSEEN
from onnxq.sites import drop_repeats

# Products: nearly all of a network's arithmetic. The second group moves or averages, which int8 makes cheaper too.
PRODUCTS = frozenset((*WEIGHTED_OPS, "Einsum", "Attention"))
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


@dataclass(frozen=True)
class NodeWork:
    """The work of a node: its operator, the kernels that have a part in it, and the words of their engine."""

    op: str
    kernels: Kernels
    words: KernelWords

    @cached_property
    def workers(self) -> Kernels:
        """Those of the kernels that do the node's work; all of them when none says so by its kind."""
        parts = (*(self.words.pools if self.op in POOLS else self.words.products), self.op.lower())
        workers = [
            kernel
            for kernel in self.kernels
            if any(part in kernel.kind.lower() for part in parts)
            or self._is_attention(kernel)
            or kernel.kind in self.words.int8
        ]
        return tuple(workers or self.kernels)

    @cached_property
    def arithmetic(self) -> tuple[Arithmetic, ...]:
        """The arithmetic of the workers, each kind once."""
        return drop_repeats(map(self.find_arithmetic, self.workers))

    @property
    def type(self) -> str:
        """The type that the node computes in: "int8", "float32", "int4 weights, float16" …

        Several kernels of different types give all of them, joined by "+": int8 then is only a part of the truth.
        """
        return "+".join(map(str, self.arithmetic)) or UNSEEN

    def find_arithmetic(self, kernel: Kernel) -> Arithmetic:
        """The arithmetic of one of the kernels."""
        if kernel.kind in self.words.int8:
            return Arithmetic(INT8)
        surrounding = _find_float_type(kernel.inputs + kernel.outputs)
        # The type of weights stored in fewer bits than they are computed with.
        low = [tensor for tensor in kernel.weights if is_low(tensor.dtype)]
        stored = max(low, key=lambda tensor: tensor.size).dtype if low else ""
        if kernel.kind in self.words.packed:
            return Arithmetic(surrounding, stored or INT8)
        operands = self._find_operands(kernel)
        types = {tensor.dtype for tensor in operands}
        product = self.op in PRODUCTS
        whole = self._is_pool(kernel) or (product and kernel.kind != self.words.dequantizes)
        if whole and types and types <= _BYTES:
            return Arithmetic(INT8)
        if whole and types == {FLOAT8}:
            return Arithmetic(FLOAT8)
        if whole and self.words.integers and types and types <= _INTEGERS - {FLOAT8}:
            return Arithmetic(INT16 if types & _WORDS else INT8, stored if stored in STORED else "")
        computed = _find_float_type(operands) if types - _INTEGERS else surrounding
        return Arithmetic(computed, stored if product and kernel.inputs else "")

    def describe_types(self, kernel: Kernel) -> str:
        """The operands of the node in a kernel and the kernel's results: "int8 x int8 -> float32"."""
        read = " x ".join(tensor.dtype or "?" for tensor in self._find_operands(kernel))
        return f"{read} -> {', '.join(drop_repeats(t.dtype or '?' for t in kernel.outputs))}"

    def _is_attention(self, kernel: Kernel) -> bool:
        return bool(self.words.attention) and self.words.attention in kernel.name

    def _is_pool(self, kernel: Kernel) -> bool:
        """A kernel for nothing but a pool, and not one generated from it and its neighbours."""
        kind = kernel.kind
        return self.op in POOLS and (
            kind == self.op or any(part in kind.lower() for part in self.words.pools)
        )

    def _find_operands(self, kernel: Kernel) -> Tensors:
        """The two factors of a product (all inputs of fused attention), the data of anything else.

        The weight is the largest constant, unless the second input is larger: it is computed, or dequantized before.
        """
        inputs = kernel.inputs
        if self._is_attention(kernel):
            low = tuple(tensor for tensor in inputs if is_low(tensor.dtype))
            # Query, key and value; masks come as bool or float beside them.
            rest = tuple(tensor for tensor in inputs if tensor.dtype != "bool")
            return low if len(low) >= _QKV else rest
        if self.op not in PRODUCTS:
            return inputs[:1] if self._is_pool(kernel) else inputs
        weight = max(kernel.weights, key=lambda tensor: tensor.size, default=None)
        if weight is None:
            return inputs[:2]
        # The inspector says of some constants that they are the weight.
        told = weight.name == "weights" or is_low(weight.dtype)
        if not told and len(inputs) > 1 and inputs[1].size >= weight.size:
            return inputs[:2]
        return (*inputs[:1], weight)


def _find_float_type(tensors: Iterable[Tensor]) -> str:
    """The float type among tensors; float32 when they are integers all, since arithmetic between them is in float."""
    return next(
        (tensor.dtype for tensor in tensors if "float" in tensor.dtype and tensor.dtype != FLOAT8),
        "float32",
    )
