"""A histogram that grows with its data and does not depend on their order.

Bins are 2**e wide and aligned at multiples of 2**e; value x is in bin trunc(x / 2**e). Because
trunc(trunc(x / w) / 2) = trunc(x / 2w), halving the resolution later gives exactly the counts that coarser bins
would have collected. The exponent e is the smallest that covers [min, max] with the available bins. So the final
counts are a function of the set of values alone. Scaling by a power of two is exact in float32; truncation, unlike
floor, is not affected by denormals that underflow to -0. Bin 0, from -2**e to 2**e, is twice as wide.

Bins cover [min, max] only, and exact zeros are counted apart, so one-sided and zero-heavy data (Relu) waste no bins.

Observers that minimise a cost search here for the part of a range whose quantization costs least. `find_candidates`
reads several observers off one histogram.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.arrays import Array, Array64, Integers, Interval, as_float64
from onnxq.errors import ConfigError
from onnxq.numerics import qparams_from_range
from onnxq.numerics.ranges import Bound
from onnxq.observers.base import (
    ValueObserver,
    Values,
    create_observer,
    flatten_values,
    register_observer,
)
from onnxq.spec import ObserverSpec, QParams, QuantSpec

Counts = Integers

# Fewer are too coarse for 8 bits; more take megabytes per site.
MIN_BINS = 2048
MAX_BINS = 1 << 20

# Far below the least scale (2**-56), far above the range in which float32 flushes to 0 (2**-126).
_LEAST_EXPONENT = -60
# Bin numbers stay below 2**24, up to which float32 holds every integer.
_DIGITS = 24
# Values per step: 128 KiB of float32 and 256 KiB of indices stay in the second-level cache.
_CHUNK = 1 << 15


@dataclass(frozen=True, eq=False)
class HistogramView:
    """The contents of a histogram."""

    # Number of the first bin.
    first: int
    # Bins are 2**exponent wide.
    exponent: int
    # [n]: non-zero values in bins first .. first+n-1.
    counts: Counts
    # Number of exact zeros.
    zeros: int
    # Exact.
    minimum: float
    maximum: float

    @property
    def count(self) -> int:
        """Number of values including zeros."""
        return int(self.counts.sum()) + self.zeros

    @property
    def edges(self) -> Array64:
        """Bin edges [n + 1]; the outermost are the exact minimum and maximum. A bin of width 0 is a point mass."""
        # Truncation moves the lower edge of every bin up to 0 by one bin.
        lower = np.arange(self.first, self.first + self.counts.size + 1, dtype=np.float64)
        lower[lower <= 0] -= 1
        edges = np.ldexp(lower, self.exponent)
        edges[0] = self.minimum
        edges[-1] = self.maximum
        return edges

    def make_absolute(self) -> HistogramView:
        """Make the histogram of |x|."""
        bins = abs(np.arange(self.first, self.first + self.counts.size))
        first = int(bins.min())
        counts = np.zeros(int(bins.max()) - first + 1, np.int64)
        np.add.at(counts, bins - first, self.counts)
        ends = sorted((abs(self.minimum), abs(self.maximum)))
        low = 0.0 if self.minimum <= 0.0 <= self.maximum else ends[0]
        return HistogramView(first, self.exponent, counts, self.zeros, low, ends[1])

    def merge_bins(self, bins: int) -> HistogramView:
        """Merge neighbouring bins as often as at least `bins` remain."""
        shift = max(0, (self.counts.size // bins).bit_length() - 1)
        first, counts = _merge_bins(self.first, self.counts, shift)
        # A copy, since the histogram goes on counting while the view is read.
        return HistogramView(
            first, self.exponent + shift, counts, self.zeros, self.minimum, self.maximum
        )

    def find_quantile(self, below: float, above: float) -> float:
        """Find the value with `below` values under it and `above` over it (`count` together), linear inside bins."""
        if below <= 0 or above <= 0:
            return self.minimum if below <= 0 else self.maximum
        edges = self.edges
        total = as_float64(np.concatenate(([0], self.counts.cumsum())))
        if self.zeros:
            # A jump of the cumulative count at 0.
            under = float(np.interp(0.0, edges, total))
            left = edges < 0
            right = edges > 0
            edges = np.concatenate((edges[left], [0.0, 0.0], edges[right]))
            total = np.concatenate(
                (total[left], [under, under + self.zeros], total[right] + self.zeros)
            )
        # From the nearer end, so that x and -x have mirrored quantiles and rounding errors do not reach the rare tail.
        if below > above:
            return -_find_crossing(-edges[::-1], total[-1] - total[::-1], above)
        return _find_crossing(edges, total, below)


def _find_crossing(edges: Array64, total: Array64, rank: float) -> float:
    """Find where the cumulative count `total` passes `rank`; at the end of a gap without values, not at its start."""
    k = int(np.searchsorted(total, rank, side="right"))
    if k >= total.size:
        return float(edges[-1])
    if k == 0:
        return float(edges[0])
    share = (rank - total[k - 1]) / (total[k] - total[k - 1])
    return float(edges[k - 1] + share * (edges[k] - edges[k - 1]))


class Histogram:
    """Counts of float32 values in `bins` to twice as many bins between their minimum and maximum."""

    def __init__(self, bins: int) -> None:
        self.bins = bins
        self.zeros = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        self._exponent = _LEAST_EXPONENT
        self._first = 0
        self._counts = np.zeros(0, np.int64)

    @property
    def count(self) -> int:
        """Number of values observed."""
        return int(self._counts.sum()) + self.zeros

    def count_values(self, values: Values) -> None:
        """Count validated values."""
        self._extend_range(values.low, values.high)
        scale = np.float32(2.0**-self._exponent)
        size = min(_CHUNK, values.flat.size)
        scaled = np.empty(size, np.float32)
        index = np.empty(size, np.int32)
        place = np.empty(size, np.intp)
        straddles = values.low <= 0.0 <= values.high
        for start in range(0, values.flat.size, size):
            chunk = values.flat[start : start + size]
            n = chunk.size
            with np.errstate(under="ignore"):
                np.multiply(chunk, scale, out=scaled[:n])
            # The cast truncates, which finds the bin. To int32 first, because that cast is vectorised.
            np.copyto(index[:n], scaled[:n], casting="unsafe")
            np.subtract(index[:n], self._first, out=place[:n])
            self._counts += np.bincount(place[:n], minlength=self._counts.size)
            if straddles:
                # They went into bin 0; from there to their own count.
                zeros = n - int(np.count_nonzero(chunk != 0))
                self.zeros += zeros
                self._counts[-self._first] -= zeros

    def add_histogram(self, other: Histogram) -> None:
        """Add another histogram's counts. Raises ValueError if it has another number of bins."""
        if self.bins != other.bins:
            raise ValueError(f"cannot merge {other.bins} bins into {self.bins}")
        if other.minimum > other.maximum:  # empty
            return
        self._extend_range(other.minimum, other.maximum)
        first, counts = _merge_bins(other._first, other._counts, self._exponent - other._exponent)
        self._counts[first - self._first : first - self._first + counts.size] += counts
        self.zeros += other.zeros

    def make_view(self) -> HistogramView:
        """Copy the counts so far."""
        return HistogramView(
            self._first, self._exponent, self._counts.copy(), self.zeros, self.minimum, self.maximum
        )

    def _extend_range(self, low: float, high: float) -> None:
        """Extend the range to [low, high], merging bins as far as necessary."""
        if low >= self.minimum and high <= self.maximum:
            return
        self.minimum = min(self.minimum, low)
        self.maximum = max(self.maximum, high)
        exponent, first, last = _choose_layout(self.minimum, self.maximum, 2 * self.bins)
        counts = np.zeros(last - first + 1, np.int64)
        if self._counts.size:
            start, merged = _merge_bins(self._first, self._counts, exponent - self._exponent)
            # The old bins lie inside of the new ones, since a range only grows.
            counts[start - first : start - first + merged.size] = merged
        self._exponent = exponent
        self._first = first
        self._counts = counts


def _choose_layout(low: float, high: float, capacity: int) -> tuple[int, int, int]:
    """Find the smallest exponent at which [low, high] takes at most `capacity` bins, and the first and last bin number.

    Both limits grow with the range, so a part of the data never has a coarser layout than the whole.
    """
    exponent = max(_LEAST_EXPONENT, math.frexp(max(-low, high))[1] - _DIGITS)
    while True:
        first = int(math.ldexp(low, -exponent))
        last = int(math.ldexp(high, -exponent))
        if last - first < capacity:
            return exponent, first, last
        exponent += 1


def _merge_bins(first: int, counts: Counts, shift: int) -> tuple[int, Counts]:
    """Halve the resolution `shift` times; return the first bin number and the counts."""
    if shift == 0 or not counts.size:
        return first, counts
    bins = np.arange(first, first + counts.size)
    # Towards 0, as the bins were made; a plain shift of a negative number goes down.
    coarse = np.where(bins < 0, -(-bins >> shift), bins >> shift)
    merged = np.zeros(int(coarse[-1] - coarse[0]) + 1, np.int64)
    np.add.at(merged, coarse - coarse[0], counts)
    return int(coarse[0]), merged


class HistogramObserver(ValueObserver):
    """Collects a histogram of at least `bins` bins over the range of the data; subclasses choose the range from it."""

    def __init__(self, quant: QuantSpec, bins: int) -> None:
        if not MIN_BINS <= bins <= MAX_BINS:
            cause = f"bins={bins} is outside {MIN_BINS} … {MAX_BINS}"
            raise ConfigError(f"observer {self.name!r}", cause, "default: 4096", code="Q311")
        super().__init__(quant)
        self.histogram = Histogram(bins)

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of values observed."""
        return self.histogram.count

    @property
    def minimum(self) -> float:  # type: ignore[override]
        """The smallest of them."""
        return self.histogram.minimum

    @property
    def maximum(self) -> float:  # type: ignore[override]
        """The largest of them."""
        return self.histogram.maximum

    def add_values(self, values: Values) -> None:
        """Count the values."""
        self.histogram.count_values(values)

    def add_observed(self, other: HistogramObserver) -> None:
        """Add the histogram, which must have the same number of bins."""
        self.histogram.add_histogram(other.histogram)


Cost = Callable[[Array64, Array64], Array64]


def find_best_range(
    low: float,
    high: float,
    symmetric: bool,
    cost: Cost,
    *,
    least: float,
    coarse: int,
    fine: Sequence[int],
) -> Interval:
    """Find the [lo, hi] of least cost inside [low, high] extended to contain 0; among equals the widest.

    cost: lo [n], hi [n] -> [n]. symmetric: ranges are [-t, t]. Otherwise both ends first shrink by the same factor,
    then each by itself, in turns; an end at 0 (one-sided data) stays.
    least: smallest factor tried. coarse: number of factors from 1 to it, in equal ratios. fine: for each round of
    refinement the number of factors between the neighbours of the best one.
    """
    top = max(-low, high)
    low, high = (-top, top) if symmetric else (min(low, 0.0), max(high, 0.0))
    steps = np.geomspace(1.0, least, coarse)
    ratio = float(steps[0] / steps[1])
    free = np.array([low < 0.0, high > 0.0])
    widest = np.array([low, high])
    # Each end twice: the best low end depends on the high one.
    turns = [free]
    if not symmetric and free.all():
        turns += [np.array([True, False]), np.array([False, True])] * 2
    ends = widest
    least_cost = float(cost(widest[:1], widest[1:])[0])
    for which in turns:
        ends, least_cost = _keep_better(
            np.where(which, steps[:, None] * widest, ends), ends, least_cost, cost
        )
    for count in fine:
        near = np.geomspace(ratio, 1 / ratio, count)
        for which in turns[:1] if len(turns) == 1 else turns[1:3]:
            tried = np.clip(np.where(which, near[:, None] * ends, ends), widest[0], widest[1])
            ends, least_cost = _keep_better(tried, ends, least_cost, cost)
        # The next round searches between the neighbours of the best factor.
        ratio **= 2.0 / (count - 1)
    return float(ends[0]), float(ends[1])


def _keep_better(
    tried: Array64, ends: Array64, least_cost: float, cost: Cost
) -> tuple[Array64, float]:
    costs = cost(tried[:, 0], tried[:, 1])
    best = int(np.argmin(costs))
    return (tried[best], float(costs[best])) if costs[best] < least_cost else (ends, least_cost)


@register_observer("percentile")
class Percentile(HistogramObserver):
    """Keeps `percentile` % of all values, zeros included.

    Symmetric specs exclude the largest magnitudes, asymmetric ones half of the rest at each end. Inside a bin values
    are assumed to be evenly spread. The range never exceeds the exact minimum and maximum, given by percentile=100.
    """

    name = "percentile"

    def __init__(self, quant: QuantSpec, *, percentile: float = 99.999, bins: int = 4096) -> None:
        if not 50.0 < percentile <= 100.0:
            raise ConfigError(
                "observer 'percentile'",
                f"percentile={percentile} is outside (50, 100]",
                "default: 99.999",
                code="Q311",
            )
        super().__init__(quant, bins)
        self.percentile = percentile

    def choose_range(self) -> Interval:
        """Find the quantiles at both ends."""
        view = self.histogram.make_view()
        out = view.count * ((100.0 - self.percentile) / 100.0)
        if self.quant.symmetric:
            top = view.make_absolute().find_quantile(view.count - out, out)
            return -top, top
        rest = view.count - out / 2
        return view.find_quantile(out / 2, rest), view.find_quantile(rest, out / 2)


# Candidates of a range: minmax, the first, clips nothing and has the coarsest steps; percentiles, least squared error
# and least divergence (Migacz 2017) clip. Noise is as the square of the step, so each is tried where its step is below
# so many times the present one's: on eight networks for two targets, 13 of 501 candidates above won, 10 of them by less
# than a twentieth of the noise.
# Name of the candidate that clips nothing.
WHOLE = "minmax"
_CANDIDATES = {
    WHOLE: (ObserverSpec("percentile", (("percentile", 100.0),)), 0.9),
    "percentile 99.999": (ObserverSpec("percentile", (("percentile", 99.999),)), 0.9),
    "percentile 99.99": (ObserverSpec("percentile", (("percentile", 99.99),)), 0.9),
    "mse": (ObserverSpec("mse"), 0.95),
    "entropy": (ObserverSpec("entropy"), 0.7),
}


def find_candidates(
    samples: Iterable[Array], spec: QuantSpec, bound: Bound, step: float
) -> dict[str, QParams]:
    """Candidate ranges of a tensor, by observers: name -> scale and zero point, each once; {} if there were no values.

    step: those that are hardly finer are left out. Raises CalibrationError on NaN and inf.
    """
    # All observers read the same histogram, so it is filled once.
    histogram = Histogram(2 * MIN_BINS)
    for sample in samples:
        values = flatten_values(sample)
        if values is not None:
            histogram.count_values(values)
    candidates = {}
    ranges = set()
    for name, (observer_spec, worth) in _CANDIDATES.items() if histogram.count else ():
        observer = create_observer(observer_spec, spec)
        assert isinstance(observer, HistogramObserver)
        observer.histogram = histogram
        qparams = qparams_from_range(*observer.range(), spec, origin=name, bound=bound)
        # Each candidate costs a run of every reader, so the same range is tried once.
        key = (float(qparams.scale), int(qparams.zero_point))
        if key not in ranges and not worth * step <= key[0] <= step:
            ranges.add(key)
            candidates[name] = qparams
    return candidates
