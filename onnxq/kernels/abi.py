"""cuda/fq_call.h for ctypes: the argument of the CPU twin, the CUDA kernels and their emulation."""

from __future__ import annotations

import ctypes
from enum import IntEnum, IntFlag


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

    @property
    def scale_size(self) -> int:
        """Bytes of a scale: float, for double tensors double."""
        return 8 if self is DType.F64 else 4


class Flag(IntFlag):
    """Variants of the arithmetic, as bits of `Call.flags`."""

    # Gradients of clip, then round.
    EDGE_CLIP = 1
    # The scale is first rounded to x's type.
    SCALE_AS_X = 2


class Divisor(ctypes.Structure):
    """A divisor, with 2**64 / value + 1, by which the kernels divide with one multiplication."""

    _fields_ = (("value", ctypes.c_uint64), ("magic", ctypes.c_uint64))

    @classmethod
    def of(cls, value: int) -> Divisor:
        """Make a divisor; value >= 1."""
        return cls(value, 0 if value == 1 else (1 << 64) // value + 1)


# Fields by type, in groups that follow each other in the struct; their order is part of the ABI.
_POINTERS = ("x", "dy", "y", "scale", "zero_point", "dscale", "dzero_point", "partial")
_SHAPE = ("outer", "channels", "inner", "block")
_GEOMETRY = ("count", "scales", "segments", "run", "runs", "splits", "partial_outer", "partial_inner")
_DIVISORS = ("by_inner", "by_channels", "by_block", "by_blocks", "by_pieces")


class Call(ctypes.Structure):
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
