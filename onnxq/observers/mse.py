"""The range of least squared error: clipping against rounding, with the quantizer's own values."""

from dataclasses import replace

import numpy as np

from onnxq.arrays import Array64, Indices, Interval, as_float64
from onnxq.numerics import list_quantized_values, qparams_from_range
from onnxq.observers.base import register_observer
from onnxq.observers.histogram import HistogramObserver, HistogramView, find_best_range
from onnxq.spec import PerChannel, QuantSpec

# With more values the steps are finer than the bins, and rounding errors are practically uniform: s^2 / 12 each.
_MOST_LEVELS = 1024


@register_observer("mse")
class Mse(HistogramObserver):
    """Minimises E[(x - fake_quant(x))^2] over both ends of the range (asymmetric) or its magnitude (symmetric)."""

    name = "mse"

    def __init__(self, quant: QuantSpec, *, bins: int = 4096) -> None:
        super().__init__(quant, bins)

    def choose_range(self) -> Interval:
        """Choose the best range, to a quarter of a percent of its width."""
        error = SquaredError(self.histogram.make_view(), self.quant)
        ends = self.histogram.minimum, self.histogram.maximum
        return find_best_range(
            *ends, self.quant.symmetric, error, least=2.0**-10, coarse=97, fine=(17, 9)
        )


class SquaredError:
    """lo [n], hi [n] -> sum of (x - fake_quant(x))^2 over a histogram, with values spread evenly inside each bin.

    All values between two neighbouring decision points p go to one level v, at the cost M2 - 2 v M1 + v^2 M0, where
    M0, M1, M2 are their count, sum and sum of squares. Summed by parts, with v' the topmost level and C0(p), C1(p) the
    count and the sum of the values below p, that is

        M2 - 2 v' M1 + v'^2 M0 + sum over p of 2 (v above p - v below p) (C1(p) - p C0(p))

    with M over all values. Cumulated over the bins, C1(p) - p C0(p) is an exact piecewise polynomial, so the cost is
    exact for the density that the histogram stands for. Zeros cost nothing.
    """

    def __init__(self, view: HistogramView, spec: QuantSpec) -> None:
        self._spec = replace(spec, granularity=PerChannel(0))
        self._levels = list_quantized_values(spec)
        edges = view.edges
        self._first = view.first
        self._per_width = 2.0**-view.exponent
        # A bin of width 0 is a point mass: no density, its count is in the sums.
        width = np.diff(edges)
        counts = as_float64(view.counts)
        density = np.divide(counts, width, out=np.zeros_like(counts), where=width > 0)
        a = edges[:-1]
        b = edges[1:]
        parts = (counts, counts * (a + b) / 2, counts * (a * a + a * b + b * b) / 3)
        # [3, bins + 1]: count, sum and sum of squares.
        self._below = np.pad(np.cumsum(parts, axis=1), ((0, 0), (1, 0)))
        # One more bin for all values above; without density its start does not matter.
        self._start = edges
        self._half = np.append(density / 2, 0.0)
        self._all = self._below[:, -1]

    def __call__(self, low: Array64, high: Array64) -> Array64:
        """The mean squared error of each range."""
        qparams = qparams_from_range(low, high, self._spec)
        scale = as_float64(qparams.scale)[:, None]
        zero = qparams.zero_point[:, None]
        if self._levels.size > _MOST_LEVELS:
            return self._outside_and_rounded((self._levels[[0, -1]] - zero) * scale, scale[:, 0])
        values = (self._levels - zero) * scale
        # Rounding goes over from one level to the next in the middle between them.
        points = (values[:, 1:] + values[:, :-1]) / 2
        bins = self._find_bins(points)
        m0 = self._below[0][bins]
        m1 = self._below[1][bins]
        inside = np.maximum(points, self._start[0]) - self._start[bins]
        short = m1 - points * m0 - self._half[bins] * inside * inside
        top = values[:, -1]
        all0, all1, all2 = self._all
        # As if all values went to the highest level; then, for each border, those below it go one
        # level lower, which changes their squared errors by 2 · gap · (x - border).
        lower = (np.diff(values, axis=1) * short).sum(axis=1)
        return as_float64(all2 - 2 * top * all1 + top**2 * all0 + 2 * lower)

    def _outside_and_rounded(self, ends: Array64, scale: Array64) -> Array64:
        """Sum the cost of clipping to `ends` [n, 2], and s^2 / 12 for each value between them."""
        bins = self._find_bins(ends)
        a = self._start[bins]
        t = np.maximum(ends, self._start[0])
        powers = np.stack((t - a, (t * t - a * a) / 2, (t**3 - a**3) / 3))
        below = self._below[:, bins] + 2 * self._half[bins] * powers
        above = self._all[:, None] - below[:, :, 1]
        m0, m1, m2 = np.stack((below[:, :, 0], above), axis=2)
        outside = (m2 - 2 * ends * m1 + ends**2 * m0).sum(axis=1)
        inside = below[0][:, 1] - below[0][:, 0]
        return as_float64(outside + inside * scale**2 / 12)

    def _find_bins(self, points: Array64) -> Indices:
        """Find the bin of each point; from the largest value on, one past the last, also for a point mass."""
        count = self._half.size - 1
        places = np.trunc(points * self._per_width)
        bins = (
            np.clip(places, self._first, self._first + count - 1, out=places).astype(np.intp)
            - self._first
        )
        bins[points >= self._start[-1]] = count
        return bins
