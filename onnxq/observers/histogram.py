"""A histogram that grows with its data and never depends on the order in which the data came.

Bins are 2**e wide and aligned at multiples of 2**e; value x is in bin trunc(x / 2**e). Because
trunc(trunc(x / w) / 2) = trunc(x / 2w), halving the resolution later gives exactly the counts that the coarser bins
would have counted, and e is the smallest that covers [min, max] with the bins there are. So the final counts are a
function of the set of values alone. Scaling by a power of two is exact in float32; truncation, unlike floor, is not
disturbed by denormals that underflow to -0. Bin 0, from -2**e to 2**e, is twice as wide.

Bins cover [min, max] only, and exact zeros are counted apart: neither one-sided nor zero-heavy data (Relu) wastes bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import ConfigError
from onnxq.observers.base import Range, Values, as_range, checked, nothing_seen, same_kind
from onnxq.spec import QuantSpec

Counts = NDArray[np.int64]

MIN_BINS, MAX_BINS = 2048, 1 << 20

# 2**-60: far below any scale's floor, far above what float32 arithmetic would flush.
_LEAST_EXPONENT = -60
# Bin numbers stay below 2**24, where every float32 integer is exact.
_DIGITS = 24
# 128 KiB of float32 and 256 KiB of indices: both stay in the second-level cache.
_CHUNK = 1 << 15


@dataclass(frozen=True, eq=False)
class View:
    """What a histogram knows: counts [n] of the non-zero values in bins first .. first+n-1 of width 2**exponent.

    zeros: number of exact zeros; count: zeros + counts.sum(). minimum, maximum: exact.
    """

    first: int
    exponent: int
    counts: Counts
    zeros: int
    minimum: float
    maximum: float

    @property
    def count(self) -> int:
        """Number of values, zeros included."""
        return int(self.counts.sum()) + self.zeros

    @property
    def edges(self) -> NDArray[np.float64]:
        """Bin edges [n + 1]; the outermost are the true minimum and maximum (a bin of width 0 is a point mass)."""
        lower = np.arange(self.first, self.first + self.counts.size + 1, dtype=np.float64)
        lower[lower <= 0] -= 1
        edges = np.ldexp(lower, self.exponent)
        edges[0], edges[-1] = self.minimum, self.maximum
        return edges

    def absolute(self) -> View:
        """The histogram of |x|."""
        numbers = np.abs(np.arange(self.first, self.first + self.counts.size))
        first = int(numbers.min())
        counts = np.zeros(int(numbers.max()) - first + 1, np.int64)
        np.add.at(counts, numbers - first, self.counts)
        ends = sorted((abs(self.minimum), abs(self.maximum)))
        low = 0.0 if self.minimum <= 0.0 <= self.maximum else ends[0]
        return View(first, self.exponent, counts, self.zeros, low, ends[1])

    def coarse(self, bins: int) -> View:
        """The same with neighbouring bins put together, as often as at least `bins` remain."""
        shift = max(0, (self.counts.size // bins).bit_length() - 1)
        first, counts = _merged(self.first, self.counts, shift)
        return View(first, self.exponent + shift, counts, self.zeros, self.minimum, self.maximum)

    def quantile(self, below: float, above: float) -> float:
        """The value with `below` values under it and `above` over it (their sum is `count`), linear inside bins."""
        if below <= 0 or above <= 0:
            return self.minimum if below <= 0 else self.maximum
        edges, total = self.edges, np.concatenate(([0], np.cumsum(self.counts))).astype(np.float64)
        if self.zeros:
            under = float(np.interp(0.0, edges, total))
            left, right = edges < 0, edges > 0
            edges = np.concatenate((edges[left], [0.0, 0.0], edges[right]))
            total = np.concatenate((total[left], [under, under + self.zeros], total[right] + self.zeros))
        # Counted from the nearer end, so that x and -x have mirrored quantiles and rounding spares the rare tail.
        if below > above:
            return -_crossing(-edges[::-1], total[-1] - total[::-1], above)
        return _crossing(edges, total, below)


def _crossing(edges: NDArray[np.float64], total: NDArray[np.float64], rank: float) -> float:
    """Where the cumulative count `total` passes `rank`; at the end of a gap without values, not at its start."""
    k = int(np.searchsorted(total, rank, side="right"))
    if k >= total.size:
        return float(edges[-1])
    if k == 0:
        return float(edges[0])
    share = (rank - total[k - 1]) / (total[k] - total[k - 1])
    return float(edges[k - 1] + share * (edges[k] - edges[k - 1]))


class Histogram:
    """Counts of float32 values in at least `bins` (at most twice as many) bins between their minimum and maximum."""

    def __init__(self, bins: int) -> None:
        self.bins = bins
        self.zeros = 0
        self.minimum, self.maximum = math.inf, -math.inf
        self._exponent, self._first = _LEAST_EXPONENT, 0
        self._counts: Counts = np.zeros(0, np.int64)

    @property
    def count(self) -> int:
        """Number of values seen."""
        return int(self._counts.sum()) + self.zeros

    def update(self, values: Values) -> None:
        """Count checked values."""
        self._cover(values.low, values.high)
        scale = np.float32(2.0**-self._exponent)
        size = min(_CHUNK, values.flat.size)
        scaled, index = np.empty(size, np.float32), np.empty(size, np.int32)
        place = np.empty(size, np.intp)
        straddles = values.low <= 0.0 <= values.high
        for start in range(0, values.flat.size, size):
            chunk = values.flat[start : start + size]
            n = chunk.size
            with np.errstate(under="ignore"):
                np.multiply(chunk, scale, out=scaled[:n])
            # Casting truncates, which is the binning; int32 first, because that cast is the vectorised one.
            np.copyto(index[:n], scaled[:n], casting="unsafe")
            np.subtract(index[:n], self._first, out=place[:n])
            self._counts += np.bincount(place[:n], minlength=self._counts.size)
            if straddles:
                zeros = n - int(np.count_nonzero(chunk != 0))
                self.zeros += zeros
                self._counts[-self._first] -= zeros

    def merge(self, other: Histogram) -> None:
        """Add another histogram's counts. ValueError if it has another number of bins."""
        if self.bins != other.bins:
            raise ValueError(f"cannot merge {other.bins} bins into {self.bins}")
        if other.minimum > other.maximum:
            return
        self._cover(other.minimum, other.maximum)
        first, counts = _merged(other._first, other._counts, self._exponent - other._exponent)
        self._counts[first - self._first : first - self._first + counts.size] += counts
        self.zeros += other.zeros

    def view(self) -> View:
        """The counts so far; a copy."""
        return View(self._first, self._exponent, self._counts.copy(), self.zeros, self.minimum, self.maximum)

    def _cover(self, low: float, high: float) -> None:
        """Grow the range to hold [low, high]; put bins together as far as that takes."""
        if low >= self.minimum and high <= self.maximum:
            return
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        exponent, first, last = _layout(self.minimum, self.maximum, 2 * self.bins)
        counts = np.zeros(last - first + 1, np.int64)
        if self._counts.size:
            start, kept = _merged(self._first, self._counts, exponent - self._exponent)
            counts[start - first : start - first + kept.size] = kept
        self._exponent, self._first, self._counts = exponent, first, counts


def _layout(low: float, high: float, capacity: int) -> tuple[int, int, int]:
    """Smallest exponent at which [low, high] takes at most `capacity` bins; numbers of the first and last of them.

    Both limits grow with the range, so a part of the data never has a coarser layout than the whole.
    """
    exponent = max(_LEAST_EXPONENT, math.frexp(max(-low, high))[1] - _DIGITS)
    while True:
        first, last = int(math.ldexp(low, -exponent)), int(math.ldexp(high, -exponent))
        if last - first < capacity:
            return exponent, first, last
        exponent += 1


def _merged(first: int, counts: Counts, shift: int) -> tuple[int, Counts]:
    """First bin number and counts after `shift` halvings of the resolution."""
    if shift == 0 or not counts.size:
        return first, counts
    numbers = np.arange(first, first + counts.size)
    coarse = np.where(numbers < 0, -(-numbers >> shift), numbers >> shift)
    merged = np.zeros(int(coarse[-1] - coarse[0]) + 1, np.int64)
    np.add.at(merged, coarse - coarse[0], counts)
    return int(coarse[0]), merged


class HistogramObserver:
    """Collects a histogram of at least `bins` bins over the range seen; subclasses say what range follows."""

    per_sample = False
    name = ""

    def __init__(self, quant: QuantSpec, bins: int) -> None:
        if not MIN_BINS <= bins <= MAX_BINS:
            raise ConfigError(
                f"observer {self.name!r}",
                f"bins={bins} is outside {MIN_BINS} … {MAX_BINS}",
                "default: 4096",
                code="Q311",
            )
        self.quant = quant
        self.histogram = Histogram(bins)

    @property
    def count(self) -> int:
        """Number of values seen."""
        return self.histogram.count

    def update(self, x: NDArray[Any]) -> None:
        """Take in an array; CalibrationError on NaN or inf."""
        values = checked(x)
        if values is not None:
            self.histogram.update(values)

    def merge(self, other: HistogramObserver) -> None:
        """Take in what `other` has seen; it must have the same kind and number of bins."""
        same_kind(self, other)
        self.histogram.merge(other.histogram)

    def range(self) -> Range:
        """lo, hi, inside the range seen; CalibrationError if nothing was seen."""
        if not self.count:
            raise nothing_seen(self.name)
        low, high = self.clipped()
        return as_range(*np.clip((low, high), self.histogram.minimum, self.histogram.maximum))

    def clipped(self) -> tuple[float, float]:
        """lo, hi from the histogram; called only when it holds values."""
        raise NotImplementedError
