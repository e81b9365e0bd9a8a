"""The range of least squared error: clipping against rounding, with the quantizer's own levels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics import levels, qparams_from_range
from onnxq.observers.base import register_observer
from onnxq.observers.histogram import HistogramObserver, View
from onnxq.observers.search import best_range
from onnxq.spec import PerChannel, QuantSpec

Array = NDArray[np.float64]

# Beyond this the steps are finer than the bins: rounding errors are then as good as uniform, s^2 / 12.
_MOST_LEVELS = 1024


@register_observer("mse")
class Mse(HistogramObserver):
    """Minimises E[(x - fake_quant(x))^2] over both ends of the range (asymmetric) or its magnitude (symmetric)."""

    name = "mse"

    def __init__(self, quant: QuantSpec, *, bins: int = 4096) -> None:
        super().__init__(quant, bins)

    def clipped(self) -> tuple[float, float]:
        """The best range, to a quarter of a percent of its width."""
        error = SquaredError(self.histogram.view(), self.quant)
        ends = self.histogram.minimum, self.histogram.maximum
        return best_range(*ends, self.quant.symmetric, error, least=2.0**-10, coarse=97, fine=(17, 9))


class SquaredError:
    """lo [n], hi [n] -> sum of (x - fake_quant(x))^2 over a histogram, values spread evenly inside each bin.

    Between two neighbouring decision points all values go to one level v, at the cost M2 - 2 v M1 + v^2 M0, where M0,
    M1, M2 are the count, sum and sum of squares of the values between them. Cumulated over the bins these are exact
    piecewise polynomials, so the cost is exact for the density that the histogram stands for. Zeros cost nothing.
    """

    def __init__(self, view: View, spec: QuantSpec) -> None:
        self._spec = replace(spec, granularity=PerChannel(0))
        self._levels = levels(spec)
        self._edges = view.edges
        width = np.diff(self._edges)
        counts = view.counts.astype(np.float64)
        self._density = np.divide(counts, width, out=np.zeros_like(counts), where=width > 0)
        a, b = self._edges[:-1], self._edges[1:]
        parts = (counts, counts * (a + b) / 2, counts * (a * a + a * b + b * b) / 3)
        self._moments = np.stack([np.concatenate(([0.0], np.cumsum(part))) for part in parts])

    def __call__(self, low: Array, high: Array) -> Array:
        numbers = qparams_from_range(low, high, self._spec)
        scale, zero = numbers.scale.astype(np.float64)[:, None], numbers.zero_point[:, None]
        few = self._levels.size <= _MOST_LEVELS
        values = ((self._levels if few else self._levels[[0, -1]]) - zero) * scale
        points = (values[:, 1:] + values[:, :-1]) / 2 if few else values
        below = self._cumulated(points)
        start, end = np.zeros((3, len(scale), 1)), np.broadcast_to(self._moments[:, -1:, None], (3, len(scale), 1))
        m0, m1, m2 = np.diff(np.concatenate((start, below, end), axis=2), axis=2)
        if few:
            return np.asarray((m2 - 2 * values * m1 + values**2 * m0).sum(axis=1))
        outside = (m2 - 2 * values[:, [0, 0, 1]] * m1 + values[:, [0, 0, 1]] ** 2 * m0)[:, [0, 2]].sum(axis=1)
        return np.asarray(outside + m0[:, 1] * scale[:, 0] ** 2 / 12)

    def _cumulated(self, points: Array) -> Array:
        """Count, sum and sum of squares of all values up to each point: [3, *points.shape]."""
        bins = np.clip(np.searchsorted(self._edges, points, side="right") - 1, 0, self._density.size - 1)
        a = self._edges[bins]
        t = np.clip(points, a, self._edges[bins + 1])
        density = self._density[bins]
        inside = np.stack((t - a, (t * t - a * a) / 2, (t**3 - a**3) / 3)) * density
        # Past the last edge everything is below, also a point mass there.
        return np.where(points >= self._edges[-1], self._moments[:, -1:, None], self._moments[:, bins] + inside)
