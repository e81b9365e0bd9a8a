"""First and second moments of what a linear operator reads, streamed: nothing of a sample is kept.

For x (float model) and y (quantized model), both as columns of the operator's matrix form, centred:

    H = cov(y, y)     C = cov(x, y)     mean(x), mean(y)

Convolutions are unfolded (im2col), each group by itself, so a depthwise one has a k x k matrix a channel. Products are
float32 BLAS on blocks of rows shifted by the first block's mean, sums float64: no cancellation, no large temporaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_ROWS = 4096
# Positions worth having: re-fitting needs 100 for each column; more than that changes nothing that was measured.
_PER_COLUMN, _FEWEST, _MOST = 128, 8192, 1 << 17
# Multiply-adds of one operator's H, which bound its time to a second or two.
_WORK = 4e10


@dataclass(frozen=True)
class Geometry:
    """How an operator's input becomes rows of its matrix form.

    kernel: () for Gemm and MatMul, whose last axis holds the columns. pads: begins, then ends, as in ONNX;
    auto_pad overrides them. upsample: for a transposed convolution, the steps between values of its input, with zeros
    between; it is then a convolution of stride 1 with the kernel turned round, whose pads may be negative (cut off).
    """

    groups: int = 1
    kernel: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    auto_pad: str = "NOTSET"
    upsample: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Moments:
    """h, c: float64 [groups, K, K], c empty where no re-fit is possible; mean_x, mean_y: float64 [groups, K].

    count: positions seen. parts: the same for each sample, means only: (positions, mean_x, mean_y).
    """

    h: Array
    c: Array
    mean_x: Array
    mean_y: Array
    count: int
    parts: tuple[tuple[int, Array, Array], ...] = ()


def position_limit(groups: int, size: int) -> int:
    """Most positions worth looking at for an operator with `groups` matrices of `size` columns."""
    wanted = min(max(_PER_COLUMN * size, _FEWEST), _MOST)
    return int(max(min(wanted, _WORK / (groups * size * size)), 4 * size, 64))


def sampled(total: int, limit: int, seed: int) -> NDArray[np.int64]:
    """At most `limit` of `total` positions, ascending, the same for the same seed."""
    if total <= limit:
        return np.arange(total)
    return np.sort(np.random.default_rng((seed, total, limit)).choice(total, size=limit, replace=False))


def positions(shape: tuple[int, ...], geometry: Geometry) -> int:
    """Number of rows an input of this shape gives: output pixels, or everything before the last axis."""
    if not geometry.kernel:
        return int(np.prod(shape[:-1], dtype=np.int64))
    return int(shape[0] * np.prod(_output(_spread_out(shape[2:], geometry), geometry), dtype=np.int64))


def columns(x: Array, geometry: Geometry, chosen: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows `chosen` of the matrix form of x, [groups, rows, K]; K in the order of the flattened weight."""
    values = np.asarray(x, np.float32)
    if not geometry.kernel:
        return values.reshape(-1, values.shape[-1])[chosen][None]
    values = _upsampled(values, geometry)
    ends = _padding(values.shape[2:], geometry)
    kept = tuple(slice(max(-low, 0), -max(-high, 0) or None) for low, high in ends)
    values = values[(slice(None), slice(None), *kept)]
    ends = [(max(low, 0), max(high, 0)) for low, high in ends]
    padded = np.pad(values, [(0, 0), (0, 0), *ends]) if any(map(any, ends)) else values
    reach = tuple((k - 1) * d + 1 for k, d in zip(geometry.kernel, geometry.dilations, strict=True))
    axes = tuple(range(2, values.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=axes)
    every = [slice(None), slice(None), *(slice(None, None, s) for s in (*geometry.strides, *geometry.dilations))]
    windows = windows[tuple(every)]
    place = np.unravel_index(chosen, (values.shape[0], *windows.shape[2 : values.ndim]))
    picked: tuple[Any, ...] = (place[0], slice(None), *place[1:])
    rows = windows[picked]
    size = values.shape[1] // geometry.groups * int(np.prod(geometry.kernel))
    return np.ascontiguousarray(rows.reshape(len(chosen), geometry.groups, size).transpose(1, 0, 2))


def _spread_out(spatial: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    if not geometry.upsample:
        return spatial
    return tuple((n - 1) * step + 1 if n else 0 for n, step in zip(spatial, geometry.upsample, strict=True))


def _upsampled(values: NDArray[np.float32], geometry: Geometry) -> NDArray[np.float32]:
    """With zeros between the values, for a transposed convolution."""
    if all(step == 1 for step in geometry.upsample):
        return values
    wide = np.zeros((*values.shape[:2], *_spread_out(values.shape[2:], geometry)), np.float32)
    wide[(slice(None), slice(None), *(slice(None, None, step) for step in geometry.upsample))] = values
    return wide


def _output(spatial: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    reach = [(k - 1) * d + 1 for k, d in zip(geometry.kernel, geometry.dilations, strict=True)]
    ends = _padding(spatial, geometry)
    return tuple(
        max((n + low + high - r) // s + 1, 0)
        for n, (low, high), r, s in zip(spatial, ends, reach, geometry.strides, strict=True)
    )


def _padding(spatial: tuple[int, ...], geometry: Geometry) -> list[tuple[int, int]]:
    """(before, after) of each spatial axis."""
    rank = len(geometry.kernel)
    if geometry.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        found = []
        for n, k, d, s in zip(spatial, geometry.kernel, geometry.dilations, geometry.strides, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            small, large = total // 2, total - total // 2
            found.append((small, large) if geometry.auto_pad == "SAME_UPPER" else (large, small))
        return found
    if geometry.auto_pad == "VALID":
        return [(0, 0)] * rank
    return [(geometry.pads[k], geometry.pads[k + rank]) for k in range(rank)]


class Accumulator:
    """Moments of any number of blocks. second: False keeps to the means (operators too large for a matrix)."""

    def __init__(self, groups: int, size: int, *, second: bool = True) -> None:
        self._second, self._cross = second, second
        self._size = size
        shape = (groups, size, size) if second else (groups, 0, 0)
        self._h, self._c = np.zeros(shape), np.zeros(shape)
        self._x, self._y = np.zeros((groups, size)), np.zeros((groups, size))
        self._shift: tuple[Array, Array] | None = None
        self._waiting: list[tuple[Array, Array]] = []
        self._parts: list[tuple[int, Array, Array]] = []
        self._count = self._pending = 0

    @property
    def started(self) -> bool:
        """True once something was added."""
        return self._shift is not None

    def without_cross(self) -> None:
        """Leave out C, half the work, where there will be too few positions to re-fit anything. Before any update."""
        self._cross, self._c = False, self._c[:, :0, :0]

    def update(self, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Add a sample's rows: x and y float32 [groups, rows, K], the same positions of both models."""
        if not x.shape[1]:
            return
        self._parts.append((x.shape[1], x.mean(axis=1, dtype=np.float64), y.mean(axis=1, dtype=np.float64)))
        if self._shift is None:
            self._shift = (x.mean(axis=1, keepdims=True), y.mean(axis=1, keepdims=True))
        # Few rows at a time would spend all the time adding K x K sums.
        rows = max(_ROWS // len(self._x), 256)
        for first in range(0, x.shape[1], rows):
            a = x[:, first : first + rows] - self._shift[0]
            b = y[:, first : first + rows] - self._shift[1]
            self._waiting.append((a, b))
            self._pending += a.shape[1]
            if self._pending >= rows:
                self._flush()
        self._count += x.shape[1]

    def _flush(self) -> None:
        if not self._waiting:
            return
        a, b = (np.concatenate(parts, axis=1) for parts in zip(*self._waiting, strict=True))
        self._waiting, self._pending = [], 0
        self._x += a.sum(axis=1, dtype=np.float64)
        self._y += b.sum(axis=1, dtype=np.float64)
        if self._second:
            self._h += b.transpose(0, 2, 1) @ b
        if self._cross:
            self._c += a.transpose(0, 2, 1) @ b

    def result(self) -> Moments:
        """The moments of everything added."""
        self._flush()
        n = max(self._count, 1)
        x, y = self._x / n, self._y / n
        h, c = self._h / n, self._c / n
        if self._second:
            h -= y[:, :, None] * y[:, None, :]
            h = (h + h.transpose(0, 2, 1)) / 2
        if self._cross:
            c -= x[:, :, None] * y[:, None, :]
        if self._shift is not None:
            x, y = x + self._shift[0][:, 0], y + self._shift[1][:, 0]
        return Moments(h, c, x, y, self._count, tuple(self._parts))


def together(one: Moments, other: Moments) -> Moments:
    """Moments of the samples of both."""
    n = max(one.count + other.count, 1)
    a, b = one.count / n, other.count / n
    x, y = (a * one.mean_x + b * other.mean_x), (a * one.mean_y + b * other.mean_y)
    dx, dy = one.mean_x - other.mean_x, one.mean_y - other.mean_y
    h, c = one.h[:, :0], one.c[:, :0]
    if one.h.size and other.h.size:
        h = a * one.h + b * other.h + a * b * dy[:, :, None] * dy[:, None, :]
    if one.c.size and other.c.size:
        c = a * one.c + b * other.c + a * b * dx[:, :, None] * dy[:, None, :]
    return Moments(h, c, x, y, one.count + other.count, (*one.parts, *other.parts))
