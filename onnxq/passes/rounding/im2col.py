"""im2col: a convolution's input as columns of its matrix form, for chosen positions, or their means over all positions.

Positions are gathered by index, without a padded copy, a window view or a transposition, and the same index serves all
tensors of a shape. Means over every position need no unfolding: the sum of a tap's inputs over all positions is a sum
over the elements that the tap reads, so one product per axis with a matrix of counts gives all taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from onnxq.arrays import Array, Array64, Floats, Integers, Mask, Shape


@dataclass(frozen=True)
class Geometry:
    """How an operator's input becomes columns of its matrix form.

    kernel: () for Gemm and MatMul, whose last axis holds the columns. pads: begins, then ends, as in ONNX;
    auto_pad overrides them. upsample: for a transposed convolution, the distance of its input values after zeros are
    inserted; it is then a convolution of stride 1 with the flipped kernel, whose pads may be negative (cropping).
    """

    groups: int = 1
    kernel: Shape = ()
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    auto_pad: str = "NOTSET"
    upsample: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Places:
    """Gather indices of chosen positions of an input.

    index: int64 [taps, n] into the values of one channel, samples of the batch one after the other; without a kernel
    [n]. outside: flat indices into `index` of entries that lie in padding.
    """

    geometry: Geometry
    index: Integers
    outside: Integers

    def gather_columns(self, x: Array) -> Floats:
        """Columns of x, of the shape they were made for: [groups, K, n], K in the order of the flattened weight."""
        values = np.asarray(x, np.float32)
        if not self.geometry.kernel:
            return values.reshape(-1, values.shape[-1])[self.index].T[None]
        flat = np.moveaxis(values, 0, 1).reshape(values.shape[1], -1)
        columns = flat.take(self.index.reshape(-1), axis=1)
        # Their indices point somewhere into the input.
        if self.outside.size:
            columns[:, self.outside] = 0
        taps, count = self.index.shape
        return columns.reshape(self.geometry.groups, len(flat) // self.geometry.groups * taps, count)


def compute_gather_indices(shape: Shape, geometry: Geometry, chosen: Integers) -> Places:
    """Gather indices of the positions `chosen` of an input of this shape."""
    if not geometry.kernel:
        return Places(geometry, chosen, chosen[:0])
    batch, *at = np.unravel_index(chosen, (shape[0], *_find_output(shape[2:], geometry)))
    rank = len(at)
    index = np.asarray(batch, np.int64).reshape((1,) * rank + (-1,)) * int(np.prod(shape[2:], dtype=np.int64))
    inside: Array = np.ones((1,) * (rank + 1), bool)
    for axis, output in enumerate(at):
        read, there = _find_reads(axis, shape[2 + axis], shape[2:], geometry, output)
        aligned = [1] * rank + [len(chosen)]
        aligned[axis] = len(read)
        step = int(np.prod(shape[3 + axis :], dtype=np.int64))
        index = index + (read * step).reshape(aligned)
        inside = inside & there.reshape(aligned)
    outside = np.flatnonzero(~np.broadcast_to(inside, (*geometry.kernel, len(chosen))))
    return Places(geometry, index.reshape(int(np.prod(geometry.kernel)), len(chosen)), outside)


def window_means(x: Array, geometry: Geometry, chosen: Mask | None = None) -> Array64:
    """Means of the columns over all positions, for each entry of the first axis: [entries, groups, K].

    chosen: bool [entries, positions], the positions that count, only without a kernel; None: all.
    """
    values = np.asarray(x, np.float32)
    entries = values.shape[0]
    if not geometry.kernel:
        rows = values.reshape(entries, -1, values.shape[-1])
        counted = np.ones(rows.shape[:2], np.float32) if chosen is None else chosen.astype(np.float32)
        total = np.maximum(counted.sum(axis=1, dtype=np.float64), 1)
        return np.asarray((counted[:, None] @ rows) / total[:, None, None])
    total = np.maximum(gather_positions(values.shape, geometry) / max(entries, 1), 1)
    spatial = tuple(int(size) for size in values.shape[2:])
    counts = _count_reads(spatial, geometry)
    # 1 x 1 without stride or padding, as most are: one product with a vector.
    if all(taps.shape[1] == 1 and taps.all() for taps in counts):
        sums: Array = values.reshape(-1, int(np.prod(spatial))) @ np.ones(int(np.prod(spatial)), np.float32)
    else:
        # One axis after the other, the last first: [the rest, places, taps of the later axes] -> [the rest, all taps].
        sums = values.reshape(-1, spatial[-1]) @ counts[-1]
        for size, taps in reversed(list(zip(spatial[:-1], counts[:-1], strict=True))):
            sums = (taps.T @ sums.reshape(-1, size, sums.shape[-1])).reshape(-1, taps.shape[1] * sums.shape[-1])
    return np.asarray(sums.reshape(entries, geometry.groups, -1) / total)


def gather_positions(shape: Shape, geometry: Geometry) -> int:
    """Number of columns of an input of this shape: output pixels, or the product of all axes but the last."""
    if not geometry.kernel:
        return int(np.prod(shape[:-1], dtype=np.int64))
    return int(shape[0] * np.prod(_find_output(shape[2:], geometry), dtype=np.int64))


def sample_positions(total: int, limit: int, seed: int) -> Integers:
    """At most `limit` of `total` positions, ascending, the same for the same seed."""
    if total <= limit:
        return np.arange(total)
    return np.sort(np.random.default_rng((seed, total, limit)).choice(total, size=limit, replace=False, shuffle=False))


def _find_reads(axis: int, size: int, spatial: Shape, geometry: Geometry, output: Array) -> tuple[Integers, Mask]:
    """(index along the axis that each tap reads for each output, True where it is inside the input), both [taps, n]."""
    taps = np.arange(geometry.kernel[axis])[:, None] * geometry.dilations[axis]
    read = (
        taps + np.asarray(output, np.int64)[None] * geometry.strides[axis] - _find_padding(spatial, geometry)[axis][0]
    )
    step = geometry.upsample[axis] if geometry.upsample else 1
    there = (read >= 0) & (read < size * step) & (read % step == 0)
    return np.where(there, read // step, 0), there


# All samples of one operator have one shape or few, and the next operator others.
@lru_cache(maxsize=4)
def _count_reads(spatial: Shape, geometry: Geometry) -> tuple[Floats, ...]:
    """For each axis the number of outputs that read each element by each tap: [elements, taps]."""
    every = []
    for axis, size in enumerate(spatial):
        read, there = _find_reads(axis, size, spatial, geometry, np.arange(_find_output(spatial, geometry)[axis]))
        counts = np.zeros((size, len(read)), np.float32)
        tap = np.broadcast_to(np.arange(len(read))[:, None], read.shape)
        counts[read[there], tap[there]] = 1
        every.append(counts)
    return tuple(every)


def _spread_out(spatial: Shape, geometry: Geometry) -> Shape:
    if not geometry.upsample:
        return spatial
    return tuple((n - 1) * step + 1 if n else 0 for n, step in zip(spatial, geometry.upsample, strict=True))


def _find_output(spatial: Shape, geometry: Geometry) -> Shape:
    reach = [(k - 1) * d + 1 for k, d in zip(geometry.kernel, geometry.dilations, strict=True)]
    ends = _find_padding(spatial, geometry)
    return tuple(
        max((n + low + high - r) // s + 1, 0)
        for n, (low, high), r, s in zip(_spread_out(spatial, geometry), ends, reach, geometry.strides, strict=True)
    )


def _find_padding(spatial: Shape, geometry: Geometry) -> list[tuple[int, int]]:
    """(before, after): padding of each spatial axis."""
    rank = len(geometry.kernel)
    if geometry.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        pads = []
        for n, k, d, s in zip(spatial, geometry.kernel, geometry.dilations, geometry.strides, strict=True):
            # As in ONNX: ceil(n / s) outputs, and the odd pad at the end (SAME_UPPER) or in front.
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            small, large = total // 2, total - total // 2
            pads.append((small, large) if geometry.auto_pad == "SAME_UPPER" else (large, small))
        return pads
    if geometry.auto_pad == "VALID":
        return [(0, 0)] * rank
    return [(geometry.pads[k], geometry.pads[k + rank]) for k in range(rank)]
