"""INT4 and UINT4 as ONNX stores them: two values per byte, the first in the low half; an odd end is padded with 0."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pack_int4(values: ArrayLike) -> NDArray[np.uint8]:
    """Pack int8 values in [-8, 7] or uint8 values in [0, 15], any shape -> uint8 [ceil(n / 2)]."""
    flat = np.asarray(values)
    # Values outside would lose their upper half without notice.
    low, high = (-8, 7) if flat.dtype == np.int8 else (0, 15)
    if flat.dtype not in (np.int8, np.uint8) or (flat.size and (flat.min() < low or flat.max() > high)):
        raise ValueError(f"4-bit values are int8 in [-8, 7] or uint8 in [0, 15], not {flat.dtype}")
    halves = flat.ravel().view(np.uint8) & 0x0F
    if halves.size % 2:
        halves = np.append(halves, np.uint8(0))
    return np.asarray(halves[0::2] | (halves[1::2] << 4), np.uint8)


def unpack_int4(packed: ArrayLike, shape: tuple[int, ...], *, signed: bool) -> NDArray[Any]:
    """Unpack uint8 [ceil(n / 2)] -> int8 (signed) or uint8 values of `shape`; the inverse of `pack_int4`."""
    data = np.asarray(packed, np.uint8).ravel()
    count = int(np.prod(shape, dtype=np.int64))
    if data.size != (count + 1) // 2:
        raise ValueError(f"{data.size} bytes do not hold {count} 4-bit values")
    halves = np.empty(data.size * 2, np.uint8)
    halves[0::2] = data & 0x0F
    halves[1::2] = data >> 4
    values = halves[:count]
    # Sign extension: left by 4 moves the sign bit to bit 7, and the arithmetic shift back copies it.
    return ((values << 4).view(np.int8) >> 4 if signed else values).reshape(shape)
