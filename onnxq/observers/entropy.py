"""The range of least Kullback-Leibler divergence (S. Migacz, 8-bit inference with TensorRT, GTC 2017).

For a candidate range, P is the histogram inside it with all values outside added to its outermost bins, and Q is the
histogram inside it *without* those, each level's count spread evenly over its non-empty bins. D(P || Q) weighs the
values moved by clipping against the resolution lost to rounding.

Common faults of other implementations are avoided: too few bins (with as many bins as levels there is no choice);
zeros, which are exact at any scale and would dominate; a histogram whose range is fixed by the first batch; levels
other than those of the quantizer, which treat one-sided and asymmetric ranges like symmetric ones.
"""

from dataclasses import replace

import numpy as np

from onnxq.arrays import Array64, Indices, Interval, as_float32, as_float64
from onnxq.numerics import qparams_from_range, symmetric_steps
from onnxq.observers.base import register_observer, require_even_steps
from onnxq.observers.histogram import MIN_BINS, HistogramObserver, HistogramView, find_best_range
from onnxq.spec import PerChannel, QuantSpec


@register_observer("entropy")
class Entropy(HistogramObserver):
    """Minimises the divergence between the histogram and its quantized version.

    It compares 2048 to 4095 bins; finer ones would measure the noise of small counts.
    """

    name = "entropy"

    def __init__(self, quant: QuantSpec, *, bins: int = 2 * MIN_BINS) -> None:
        require_even_steps(self.name, quant)
        super().__init__(quant, bins)

    def make_reference(self) -> HistogramView:
        """Return the histogram to be compared: of |x| for symmetric specs, in 2048 to 4095 bins."""
        view = self.histogram.make_view()
        return (view.make_absolute() if self.quant.symmetric else view).merge_bins(MIN_BINS)

    def choose_range(self) -> Interval:
        """Choose the range of least divergence; the whole range if only zeros were observed."""
        view = self.make_reference()
        if not view.counts.any():
            return view.minimum, view.maximum
        quant = self.quant
        divergence = KullbackLeibler(view, quant)
        steps = 1 + (symmetric_steps(quant) if quant.symmetric else quant.qmax - quant.qmin)
        # With as many bins as levels no bins share a level: narrower ranges lose nothing to rounding.
        least = min(0.5, max(2.0**-10, steps / view.counts.size))
        ends = self.histogram.minimum, self.histogram.maximum
        return find_best_range(
            *ends, quant.symmetric, divergence, least=least, coarse=61, fine=(9,)
        )


class KullbackLeibler:
    """lo [n], hi [n] -> D(P || Q) in nats over the non-empty bins of a histogram; inf for a range without values.

    Q is constant inside a level, so sum(p log(p / q)) needs sums over levels only. With reference counts r of sum R,
    and levels of n bins with count k (K including the values outside), it is
    (sum(r log r) - sum(K log(k / n))) / R - log(R / sum(k)).
    """

    def __init__(self, view: HistogramView, spec: QuantSpec) -> None:
        full = view.counts > 0
        edges = view.edges
        # float32, as the quantizer sees values.
        self._centers = as_float32(((edges[:-1] + edges[1:]) / 2)[full])
        self._counts = as_float64(view.counts[full])
        self._below = np.concatenate(([0.0], self._counts.cumsum()))
        self._logs = np.concatenate(([0.0], _self_log(self._counts).cumsum()))
        self._spec = replace(spec, granularity=PerChannel(0))

    def __call__(self, low: Array64, high: Array64) -> Array64:
        """The divergence of each range."""
        first = np.searchsorted(self._centers, low, "left")
        last = np.searchsorted(self._centers, high, "right")
        costs = np.full(low.shape, np.inf)
        some = np.flatnonzero(first < last)
        if some.size:
            costs[some] = self._compute_costs(low[some], high[some], first[some], last[some])
        return costs

    def _compute_costs(self, low: Array64, high: Array64, first: Indices, last: Indices) -> Array64:
        """Compute the divergences of ranges that contain the bins first .. last-1, at least one each."""
        # The bins of all ranges one after another: `begin` is where each range starts, `places` the bins' numbers.
        sizes = last - first
        begin = np.concatenate(([0], sizes.cumsum()[:-1]))
        places = np.arange(int(sizes.sum())) + np.repeat(first - begin, sizes)
        qparams = qparams_from_range(low, high, self._spec)
        scale, zero = (
            as_float32(np.repeat(values, sizes)) for values in (qparams.scale, qparams.zero_point)
        )
        # As the quantizer rounds, except for the zero point, which shifts all levels of a range equally.
        codes = np.rint(self._centers[places] / scale)
        codes = np.clip(
            codes, np.float32(self._spec.qmin) - zero, np.float32(self._spec.qmax) - zero, out=codes
        )
        below = self._below
        total = below[-1]
        # A level is a run of bins, because levels ascend with their bins.
        new = np.concatenate(([True], codes[1:] != codes[:-1]))
        new[begin] = True
        starts = np.flatnonzero(new)
        bins = np.diff(np.append(starts, places.size))
        mass = below[places[starts] + bins] - below[places[starts]]
        left = below[first]
        right = total - below[last]
        whole = mass.copy()
        run = np.searchsorted(starts, begin)
        ends = np.append(run[1:], starts.size) - 1
        # Values outside are clipped to the outermost levels.
        np.add.at(whole, run, left)
        np.add.at(whole, ends, right)
        own = below[last] - below[first]
        entropy = self._compute_entropy(first, last, left, right)
        parts = np.add.reduceat(whole * np.log(mass / bins), run)
        return as_float64((entropy - parts) / total - np.log(total / own))

    def _compute_entropy(
        self, first: Indices, last: Indices, left: Array64, right: Array64
    ) -> Array64:
        """Compute sum(r log r) of the reference: the bins inside, with counts outside added to the outermost two."""
        inside = self._logs[last] - self._logs[first]
        a = self._counts[first]
        b = self._counts[last - 1]
        single = last - first == 1
        low = _self_log(a + left + np.where(single, right, 0.0)) - _self_log(a)
        high = np.where(single, 0.0, _self_log(b + right) - _self_log(b))
        return inside + low + high


def _self_log(counts: Array64) -> Array64:
    return counts * np.log(counts)
