"""Error sums of one tensor against its reference, added up sample by sample: nothing of a sample is kept.

Slices of an output, parts whose scale is another than the whole's, are judged by themselves.
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

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from onnxq.arrays import Array, Array64, Indices, are_finite, as_float64

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
# Elements: 64 KiB of float32, whose sum is exact enough, and which stay in the cache.
_BLOCK = 1 << 14


@dataclass(frozen=True)
class OutputPart:
    """Slices of one axis of an output, like "[:, 4:, :]", and their sums. spread: standard error of their noise."""

    text: str
    signal: float
    noise: float
    spread: float


@dataclass(frozen=True, eq=False)
class AxisSums:
    """Sums of each slice of one axis, [slices] each. squared: of each sample's noise squared. count: values a slice."""

    signal: Array64
    noise: Array64
    squared: Array64
    low: Array64
    high: Array64
    count: int
    samples: int = 1

    @classmethod
    def measure_sample(
        cls, reference: Array64, axis: int, squares: tuple[Array64, Array64]
    ) -> AxisSums:
        """The sums of one sample. squares: of the reference and of the error."""
        size = reference.shape[axis]
        # [in front of the axis, along it, behind it].
        shape = (-1, size, math.prod(reference.shape[axis + 1 :]))
        signal, noise = (array.reshape(shape).sum(axis=(0, 2)) for array in squares)
        values = reference.reshape(shape)
        ends = values.min(axis=(0, 2)), values.max(axis=(0, 2))
        return cls(signal, noise, np.square(noise), *ends, reference.size // size)

    def merge(self, other: AxisSums) -> AxisSums:
        """The sums of both."""
        return AxisSums(
            self.signal + other.signal,
            self.noise + other.noise,
            self.squared + other.squared,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.count + other.count,
            self.samples + other.samples,
        )

    def list_bands(self) -> Iterator[Indices]:
        """Yield the indices of each band that counts, but for the first."""
        if self.count < _FEWEST_VALUES:
            return
        peaks = np.maximum(abs(self.low), abs(self.high))
        order = (-peaks).argsort(kind="stable")
        order = order[peaks[order] >= _DEAD * peaks.max()]
        # Probabilities are not parted from each other: a class that no sample shows is
        # small everywhere.
        shares = ((self.low >= 0.0) & (self.high <= 1.0))[order]
        falls = peaks[order][1:] * _APART < peaks[order][:-1]
        for band in np.split(order, 1 + np.flatnonzero(falls & ~(shares[1:] & shares[:-1])))[1:]:
            if band.size >= _LEAST_SHARE * peaks.size:
                yield np.sort(band)

    def measure_spread(self, band: Indices) -> float:
        """Standard error of the band's noise, summed over samples; all of it where one sample says nothing of others.

        Slices are taken to be loud in the same samples, which is the worst case.
        """
        noise = self.noise[band]
        n = self.samples
        if n < 2:
            return float(noise.sum())
        # Rounding may leave less than 0.
        variance = np.maximum(self.squared[band] - np.square(noise) / n, 0.0) / (n - 1)
        return float(np.sqrt(variance * n).sum())


class SliceSums:
    """Error sums of all slices of one output; memory goes with their number and not with the samples'."""

    def __init__(self) -> None:
        self._rank = 0
        self._axes: dict[int, AxisSums] | None = None

    def update(self, reference: Array64, error: Array64) -> None:
        """Add one sample: the reference's values and the differences from them, of one shape."""
        sample = SliceSums()
        sample._rank = reference.ndim
        sliced = [
            axis for axis, size in enumerate(reference.shape) if axis and 1 < size <= _MOST_SLICES
        ]
        # What the samples before have ruled out need not be measured.
        counted = sliced if self._axes is None else [axis for axis in sliced if axis in self._axes]
        sample._axes = {}
        if counted:
            squares = np.square(reference), np.square(error)
            sample._axes = {
                axis: AxisSums.measure_sample(reference, axis, squares) for axis in counted
            }
        self.add(sample)

    def add(self, other: SliceSums) -> None:
        """Add the sums of one sample, or of none."""
        if other._axes is None:
            return
        if self._axes is None:
            self._rank = other._rank
            self._axes = dict(other._axes)
            return
        for axis, sums in tuple(self._axes.items()):
            added = other._axes.get(axis)
            # Along an axis whose size changes, as that of positions, slices of two samples have
            # nothing in common.
            if other._rank != self._rank or added is None or added.signal.size != sums.signal.size:
                del self._axes[axis]
            else:
                self._axes[axis] = sums.merge(added)

    def parts(self) -> Iterator[OutputPart]:
        """Yield every part that has to be judged by itself."""
        for axis, sums in (self._axes or {}).items():
            for band in sums.list_bands():
                signal = float(sums.signal[band].sum())
                noise = float(sums.noise[band].sum())
                index = _format_indices(band, sums.signal.size)
                text = ", ".join(index if k == axis else ":" for k in range(self._rank))
                yield OutputPart(f"[{text}]", signal, noise, sums.measure_spread(band))


def _format_indices(indices: Indices, size: int) -> str:
    """Sorted indices as a slice where they are one, else as the first runs of them."""
    steps = np.diff(indices)
    if steps.size and (steps == steps[0]).all():
        return _format_run(int(indices[0]), int(indices[-1]), size, int(steps[0]))
    runs = np.split(indices, 1 + np.flatnonzero(steps > 1))
    texts = [_format_run(int(run[0]), int(run[-1]), size) for run in runs[:3]]
    return texts[0] if len(runs) == 1 else f"({', '.join([*texts, '…'][: len(runs)])})"


def _format_run(first: int, last: int, size: int, step: int = 1) -> str:
    if first == last:
        return str(first)
    text = f"{first or ''}:{'' if last + step >= size else last + 1}"
    return f"{text}:{step}" if step > 1 else text


@dataclass(frozen=True, kw_only=True)
class OutputAccuracy:
    """How far one tensor is from its reference over all samples.

    sqnr_db: 10 log10(signal / noise) of the whole tensor, or of the part of it that is farther; inf when identical,
    -inf when shapes differ or a value is not finite where the reference is. whole_db: of the whole. part: the slices
    that `sqnr_db` is of, like "[:, 4:, :]", "" for the whole. cosine: of the angle between all values of both.
    max_abs: the largest difference. top_k: share of the k largest along the last axis that both name, the mean of all
    rows; nan without rows.
    """

    name: str
    sqnr_db: float
    whole_db: float
    part: str = ""
    cosine: float
    max_abs: float
    top_k: float = math.nan
    rows: int = 0


@dataclass
class ErrorAccumulator:
    """Sums of one tensor over samples, in float64. Positions where the reference is not finite do not count.

    slices: judge parts of other scales by themselves too, for a tensor that people read. top_k: count how many of the k
    largest of each row are the same; 0: do not.
    """

    name: str = ""
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    power: float = 0.0
    # The largest difference, and the largest value of the reference.
    max_abs: float = 0.0
    peak: float = 0.0
    # Values of the reference that are NaN.
    nans: int = 0
    comparable: bool = True
    slices: SliceSums | None = None
    top_k: int = 0
    # Shares of the k largest that agree, summed over the rows along the last axis.
    hits: float = 0.0
    rows: int = 0

    def update(self, reference: Array, value: Array) -> ErrorAccumulator | None:
        """Add one sample and return its own sums; None for shapes that differ, and for empty arrays."""
        if reference.shape != value.shape:
            self.comparable = False
            return None
        if reference.size == 0:
            return None
        ref = as_float64(reference)
        got = as_float64(value)
        if self.top_k and ref.ndim and ref.shape[-1] > 1:
            hits, rows = _count_shared(ref, got, self.top_k)
            self.hits += hits
            self.rows += rows
        known = np.isfinite(ref)
        if not known.all():
            self.nans += int(np.isnan(ref).sum())
            # A mask's -inf, or the log of 0: there is no distance to it, so it counts as equal.
            ref = np.where(known, ref, 0.0)
            got = np.where(known, got, 0.0)
        sample = ErrorAccumulator(signal=_dot(ref, ref), peak=float(abs(ref).max()))
        if not are_finite(got):
            self.comparable = False
            sample.noise = sample.max_abs = math.inf
            return sample
        error = got - ref
        sample.noise = _dot(error, error)
        sample.dot = _dot(ref, got)
        sample.power = _dot(got, got)
        sample.max_abs = float(abs(error).max())
        self.add(sample)
        # Integers are labels and indices, whose slices have no scales.
        if self.slices is not None and reference.dtype.kind == "f":
            self.slices.update(ref, error)
        return sample

    def add(self, other: ErrorAccumulator) -> None:
        """Add the sums of one `update` of another accumulator: to the bit as if it had been one of this."""
        self.comparable = self.comparable and other.comparable
        self.signal += other.signal
        self.noise += other.noise
        self.dot += other.dot
        self.power += other.power
        self.max_abs = max(self.max_abs, other.max_abs)
        self.peak = max(self.peak, other.peak)
        self.nans += other.nans
        self.hits += other.hits
        self.rows += other.rows
        if self.slices is not None and other.slices is not None:
            self.slices.add(other.slices)

    def result(self) -> OutputAccuracy:
        """The error over all samples so far. An all-zero pair agrees perfectly."""
        top_k = self.hits / self.rows if self.rows else math.nan
        if not self.comparable:
            return OutputAccuracy(
                name=self.name,
                sqnr_db=-math.inf,
                whole_db=-math.inf,
                cosine=0.0,
                max_abs=math.inf,
                top_k=top_k,
                rows=self.rows,
            )
        # Roots first: the product of two sums of squares may overflow.
        norm = float(np.sqrt(self.signal) * np.sqrt(self.power))
        cosine = self.dot / norm if norm > 0 else float(self.noise == 0.0)
        whole = compute_sqnr(self.signal, self.noise)
        parts = [(compute_sqnr(part.signal, part.noise), part.text) for part in self.parts()]
        worst, part = min([(whole, ""), *parts], key=lambda pair: pair[0])
        return OutputAccuracy(
            name=self.name,
            sqnr_db=worst,
            whole_db=whole,
            part=part,
            cosine=cosine,
            max_abs=self.max_abs,
            top_k=top_k,
            rows=self.rows,
        )

    def parts(self) -> tuple[OutputPart, ...]:
        """The parts that are judged by themselves."""
        return () if self.slices is None else tuple(self.slices.parts())


def _dot(first: Array64, other: Array64) -> float:
    return float(first.ravel() @ other.ravel())


def _count_shared(reference: Array64, value: Array64, k: int) -> tuple[float, int]:
    """Over all rows: the share of the k largest that both name, summed; and the number of rows. NaN is the least."""
    width = reference.shape[-1]
    k = min(k, width)
    rows = [
        np.where(np.isnan(array), -math.inf, array).reshape(-1, width)
        for array in (reference, value)
    ]
    if k == 1:
        return float((rows[0].argmax(axis=1) == rows[1].argmax(axis=1)).sum()), len(rows[0])
    # A stable sort: equal values keep the order of their indices in both.
    mine, theirs = ((-array).argsort(axis=1, kind="stable")[:, :k] for array in rows)
    same = (mine[:, :, None] == theirs[:, None, :]).any(axis=2)
    return float(same.mean(axis=1).sum()), len(mine)


def compute_sqnr(signal: float, noise: float) -> float:
    """SQNR in dB of two sums of squares; inf without noise, and a finite, very low figure without signal."""
    if noise == 0.0:
        return math.inf
    return 10.0 * float(np.log10(max(signal, np.finfo(np.float64).tiny) / noise))


def noise_to_db(noise: float) -> float:
    """Relative noise power as SQNR."""
    if noise <= 0.0:
        return math.inf
    # Answers that are no numbers have no noise power; the worst figure stands for it.
    return -10.0 * math.log10(noise) if math.isfinite(noise) else -math.inf


def db_to_noise(sqnr_db: float) -> float:
    """An SQNR as relative noise power."""
    return float(10.0 ** (-sqnr_db / 10.0))


def measure_error(reference: Array, value: Array) -> OutputAccuracy:
    """The error of one array against another."""
    sums = ErrorAccumulator()
    sums.update(reference, value)
    return sums.result()


def sum_squares(values: Array, exact: Array | None = None) -> float:
    """Sum of squares, in float32 block by block: some three times as fast as the sums of `ErrorAccumulator`.

    exact: of the same shape, to be subtracted first.
    """
    flat, *others = (
        np.ascontiguousarray(array, np.float32).ravel()
        for array in (values, exact)
        if array is not None
    )
    total = 0.0
    for k in range(0, flat.size, _BLOCK):
        block = flat[k : k + _BLOCK]
        # Not all differences at a time: fresh memory for them costs more than the arithmetic.
        for other in others:
            block = block - other[k : k + _BLOCK]
        total += float(np.dot(block, block))
    return total


def relative_noise(noises: Iterable[float], signal: float, most: float = np.inf) -> float:
    """Noise over signal of layers' outputs, for searches that try thousands of candidates.

    Returns inf as soon as the result is beyond `most`.
    """
    wrong = 0.0
    # Outputs that are all 0 have no signal.
    floor = max(signal, 1e-30)
    for noise in noises:
        wrong += noise
        if wrong / floor > most:
            return np.inf
    return wrong / floor
