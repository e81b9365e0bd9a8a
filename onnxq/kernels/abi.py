"""The argument of the kernels, cuda/fq_call.h for ctypes, and a tensor's memory as [outer, channels, inner].

The CPU twin, the CUDA kernels and their emulation take it, whatever the order of the tensor's dimensions.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from math import prod


class DType(IntEnum):
    """Element types; the names are suffixes of kernel names."""

    F32 = 0
    F16 = 1
    BF16 = 2
    F64 = 3

    @property
    def suffix(self) -> str:
        """Suffix of kernel names: `f32` of `fq_forward_f32`."""
        return self.name.lower()

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return (4, 2, 2, 8)[self]


class Flag(IntFlag):
    """Variants of the arithmetic, as bits of `KernelCall.flags`."""

    # Gradients of clip, then round.
    EDGE_CLIP = 1
    # The scale is first rounded to x's type.
    SCALE_AS_X = 2


class Divisor(ctypes.Structure):
    """A divisor, with 2**64 / value + 1, by which the kernels divide with one multiplication."""

    _fields_ = (("value", ctypes.c_uint64), ("magic", ctypes.c_uint64))


def make_divisor(value: int) -> Divisor:
    """Make a divisor; value >= 1."""
    return Divisor(value, 0 if value == 1 else (1 << 64) // value + 1)


# Fields by type, in groups that follow each other in the struct; their order is part of the ABI.
_POINTERS = ("x", "dy", "y", "scale", "zero_point", "dscale", "dzero_point", "partial")
_SHAPE = ("outer", "channels", "inner", "block")
_GEOMETRY = (
    "count",
    "scales",
    "segments",
    "run",
    "runs",
    "splits",
    "partial_outer",
    "partial_inner",
)
_DIVISORS = ("by_inner", "by_channels", "by_block", "by_blocks", "by_pieces")


class KernelCall(ctypes.Structure):
    """FqCall; cuda/fq_call.h documents the fields."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SHAPE),
        ("grad_scale", ctypes.c_double),
        ("zero_point_grad_scale", ctypes.c_double),
        ("qmin", ctypes.c_int32),
        ("qmax", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("threads", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in _GEOMETRY),
        *((name, Divisor) for name in _DIVISORS),
    )


@dataclass(frozen=True)
class Layout:
    """[outer, channels, inner] in memory order."""

    outer: int
    channels: int
    inner: int
    # Elements along channels that share a scale; 0: one scale per channel.
    block: int = 0
    # The tensor's dimensions from the slowest to the fastest in memory. A blocked scale must have the same layout:
    # `scale.permute(order).contiguous()`.
    order: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.outer * self.channels * self.inner

    @property
    def blocks(self) -> int:
        """Number of blocks along the channels."""
        return -(-self.channels // self.block) if self.block else 1

    @property
    def scales(self) -> int:
        """Number of scales."""
        return self.outer * self.blocks * self.inner if self.block else self.channels


def find_layout(
    shape: Sequence[int], strides: Sequence[int], axis: int | None = None, block_size: int = 0
) -> Layout | None:
    """Find the layout of a tensor; None if it is not dense (gaps, overlaps, expanded dimensions) and must be copied.

    shape, strides: in elements. axis: None for per tensor. block_size: above 0 for blocks along `axis`.
    """
    rank = len(shape)
    # Dimensions of size 1 may have any stride, so theirs is ignored.
    order = tuple(
        sorted(range(rank), key=lambda dim: (-strides[dim] if shape[dim] > 1 else 0, dim))
    )
    if prod(shape):
        expected = 1
        for dim in reversed(order):
            if shape[dim] > 1 and strides[dim] != expected:
                return None
            expected *= shape[dim]
    if axis is None:
        return Layout(1, 1, prod(shape), 0, order)
    place = order.index(axis % rank)
    outer = prod(shape[dim] for dim in order[:place])
    inner = prod(shape[dim] for dim in order[place + 1 :])
    return Layout(outer, shape[axis], inner, block_size, order)
