"""Operators whose int8 weights a kernel multiplies by 8-bit data in 16-bit sums, as a backend declares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from onnxq.arrays import Array, Shape
from onnxq.graph import NodeRef


class Data(Enum):
    """The form in which an operator reads its integer data."""

    PAIR = "behind a DequantizeLinear"
    STORED = "as an input"
    DYNAMIC = "quantized by the kernel itself, to uint8"


@dataclass(frozen=True, kw_only=True)
class IntegerProduct:
    """One operator, with the inputs that hold its data and its weights."""

    op: str
    domains: tuple[str, ...] = ("",)
    reads: Data
    data: int = 0
    # Input of the data's zero point, whose type is that of the data; -1: none.
    zero: int = -1
    weights: Shape
    # The kernel is an integer one only with a QuantizeLinear behind it.
    result: bool = False


@dataclass(frozen=True)
class IntegerSums:
    """find_product: the entry for a node, None for other operators.

    pair_weights: the stored weights of a node as [rows, sums, 2], one pair for each 16-bit sum; None where the node's
    kernel is exact.
    """

    find_product: Callable[[NodeRef], IntegerProduct | None]
    pair_weights: Callable[[NodeRef, Array], Array | None]
