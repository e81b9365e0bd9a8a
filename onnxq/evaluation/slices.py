"""Error sums of the slices of an output: parts whose scale is another than the whole's, judged by themselves.

A YOLO head holds boxes to 640 beside scores to 1. The boxes make up nearly all of its signal and of its noise, so that
the output has 37 dB when its scores have 25.

A slice is one index of one axis; the first axis is the batch and has none. Its scale is its largest absolute value in
the reference, the range that a quantizer must cover (an RMS says nothing of scores that are 0 nearly everywhere).
Sorted by scale, slices form bands: one more than 10 times smaller than the one before begins the next. The first band
is judged with the whole, which it dominates; each other band is a part with an SQNR of its own, unless it cannot
matter:

- Slices within 0 and 1 share one scale: for the probabilities of a class that no sample shows, errors count beside 1.
- Slices that stay below 1/10000 of the output's largest value are padding, or dead channels.
- A band of less than 2 % of the axis is a channel that happens to be small.
- Axes that are long, or whose size changes from sample to sample, are positions and not channels.
- The scale of a slice with fewer than 8 values is chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array64 = NDArray[np.float64]

# Ratio of scales, 20 dB: beyond it the whole's SQNR says nothing of the part.
_APART = 10.0
# Of the largest value of the output. Scores to 0.5 beside boxes to 4096 pixels are above it.
_DEAD = 1e-4
# Of the slices of an axis. The scores of a head with 20 numbers a box and one class make up 5 %; one dead channel in a
# state of 128 makes up 0.8 %.
_LEAST_SHARE = 0.02
# Of eight normal values the largest is below a tenth of their deviation once in 10^9 draws; of one, once in 13.
_FEWEST_VALUES = 8
# Slices of an axis. Longer axes are anchors, sound or words; and promotion keeps such sums for some 300 settings.
_MOST_SLICES = 4096


@dataclass(frozen=True)
class Part:
    """Slices of one axis of an output, like "[:, 4:, :]", and their sums. spread: standard error of their noise."""

    text: str
    signal: float
    noise: float
    spread: float


class AxisSums:
    """Sums of each slice of one axis, [slices] each. squared: of each sample's noise squared. count: values a slice."""

    def __init__(self, size: int) -> None:
        self.signal, self.noise, self.squared = np.zeros(size), np.zeros(size), np.zeros(size)
        self.low, self.high = np.full(size, np.inf), np.full(size, -np.inf)
        self.count = self.samples = 0

    def update(self, reference: Array64, axis: int, squares: tuple[Array64, Array64]) -> None:
        """Add one sample. squares: of the reference and of the error."""
        size = self.signal.size
        shape = (-1, size, int(np.prod(reference.shape[axis + 1 :])))
        signal, noise = (array.reshape(shape).sum(axis=(0, 2)) for array in squares)
        values = reference.reshape(shape)
        self.signal += signal
        self.noise += noise
        self.squared += np.square(noise)
        np.minimum(self.low, values.min(axis=(0, 2)), out=self.low)
        np.maximum(self.high, values.max(axis=(0, 2)), out=self.high)
        self.count += reference.size // size
        self.samples += 1

    def add(self, other: AxisSums) -> None:
        """Add the sums of one sample."""
        self.signal += other.signal
        self.noise += other.noise
        self.squared += other.squared
        np.minimum(self.low, other.low, out=self.low)
        np.maximum(self.high, other.high, out=self.high)
        self.count += other.count
        self.samples += other.samples

    def bands(self) -> Iterator[NDArray[np.intp]]:
        """Yield the indices of each band that counts, but for the first."""
        if self.count < _FEWEST_VALUES:
            return
        peaks = np.maximum(np.abs(self.low), np.abs(self.high))
        order = np.argsort(-peaks, kind="stable")
        order = order[peaks[order] >= _DEAD * peaks.max()]
        shares = ((self.low >= 0.0) & (self.high <= 1.0))[order]
        falls = peaks[order][1:] * _APART < peaks[order][:-1]
        for band in np.split(order, 1 + np.flatnonzero(falls & ~(shares[1:] & shares[:-1])))[1:]:
            if band.size >= _LEAST_SHARE * peaks.size:
                yield np.sort(band)

    def spread(self, band: NDArray[np.intp]) -> float:
        """Standard error of the band's noise, summed over samples; all of it where one sample says nothing of others.

        Slices are taken to be loud in the same samples, which is the worst case.
        """
        noise, n = self.noise[band], self.samples
        if n < 2:
            return float(noise.sum())
        variance = np.maximum(self.squared[band] - np.square(noise) / n, 0.0) / (n - 1)
        return float(np.sqrt(variance * n).sum())


class SliceSums:
    """Error sums of all slices of one output; memory goes with their number and not with the samples'."""

    def __init__(self) -> None:
        self._rank = 0
        self._axes: dict[int, AxisSums] | None = None

    def update(self, reference: Array64, error: Array64) -> None:
        """Add one sample: the reference's values and the differences from them, of one shape."""
        shape = reference.shape
        if self._axes is None:
            self._rank = len(shape)
            sizes = {axis: size for axis, size in enumerate(shape) if axis and 1 < size <= _MOST_SLICES}
            self._axes = {axis: AxisSums(size) for axis, size in sizes.items()}
        for axis, sums in tuple(self._axes.items()):
            if len(shape) != self._rank or shape[axis] != sums.signal.size:
                del self._axes[axis]
        if self._axes:
            squares = np.square(reference), np.square(error)
            for axis, sums in self._axes.items():
                sums.update(reference, axis, squares)

    def add(self, other: SliceSums) -> None:
        """Add the sums of one sample, or of none."""
        if other._axes is None:
            return
        if self._axes is None:
            self._rank = other._rank
            self._axes = {axis: AxisSums(sums.signal.size) for axis, sums in other._axes.items()}
        for axis, sums in tuple(self._axes.items()):
            found = other._axes.get(axis)
            if other._rank != self._rank or found is None or found.signal.size != sums.signal.size:
                del self._axes[axis]
            else:
                sums.add(found)

    def parts(self) -> Iterator[Part]:
        """Yield every part that has to be judged by itself."""
        for axis, sums in (self._axes or {}).items():
            for band in sums.bands():
                signal, noise = float(sums.signal[band].sum()), float(sums.noise[band].sum())
                index = _format_indices(band, sums.signal.size)
                text = ", ".join(index if k == axis else ":" for k in range(self._rank))
                yield Part(f"[{text}]", signal, noise, sums.spread(band))


def _format_indices(indices: NDArray[np.intp], size: int) -> str:
    """Sorted indices as a slice where they are one, else as the first runs of them."""
    steps = np.diff(indices)
    if steps.size and (steps == steps[0]).all():
        step = int(steps[0])
        return _format_run(int(indices[0]), int(indices[-1]), size, step)
    runs = np.split(indices, 1 + np.flatnonzero(steps > 1))
    texts = [_format_run(int(run[0]), int(run[-1]), size) for run in runs[:3]]
    return texts[0] if len(runs) == 1 else f"({', '.join([*texts, '…'][: len(runs)])})"


def _format_run(first: int, last: int, size: int, step: int = 1) -> str:
    if first == last:
        return str(first)
    text = f"{first or ''}:{'' if last + step >= size else last + 1}"
    return f"{text}:{step}" if step > 1 else text
