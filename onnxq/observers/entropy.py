"""The range of least Kullback-Leibler divergence (S. Migacz, 8-bit inference with TensorRT, GTC 2017), done right.

For a candidate range, P is the histogram inside it with everything outside added to its outermost bins, and Q is the
histogram inside it *without* that, each level's count spread evenly over its non-empty bins. D(P || Q) weighs what
clipping moves against what the levels blur.

What is usually got wrong, and is not here: too few bins (as many bins as levels leave nothing to choose); zeros, which
are exact at any scale and would drown the rest; a histogram whose range the first batch fixed; levels other than those
of the quantizer, so that one-sided and asymmetric ranges are treated like symmetric ones.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics import qparams_from_range, quantize, symmetric_steps
from onnxq.observers.base import even_steps, register_observer
from onnxq.observers.histogram import MIN_BINS, HistogramObserver, View
from onnxq.observers.search import best_range
from onnxq.spec import PerTensor, QuantSpec

Array = NDArray[np.float64]


@register_observer("entropy")
class Entropy(HistogramObserver):
    """Minimises the divergence between the histogram and its quantized version.

    Finer histograms than its 2048 to 4095 bins would weigh the noise of small counts.
    """

    name = "entropy"

    def __init__(self, quant: QuantSpec, *, bins: int = 2 * MIN_BINS) -> None:
        even_steps(self.name, quant)
        super().__init__(quant, bins)

    def reference(self) -> View:
        """The histogram whose divergence counts: of |x| for symmetric specs, in 2048 to 4095 bins."""
        view = self.histogram.view()
        return (view.absolute() if self.quant.symmetric else view).coarse(MIN_BINS)

    def clipped(self) -> tuple[float, float]:
        """The range of least divergence; the whole one when only zeros were seen."""
        view = self.reference()
        if not view.counts.any():
            return view.minimum, view.maximum
        divergence = Divergence(view, self.quant)
        levels = 1 + (symmetric_steps(self.quant) if self.quant.symmetric else self.quant.qmax - self.quant.qmin)
        # As many bins as levels: the narrowest range that can still tell blurring from clipping.
        least = min(0.5, max(2.0**-10, levels / view.counts.size))
        ends = self.histogram.minimum, self.histogram.maximum
        return best_range(*ends, self.quant.symmetric, divergence, least=least, coarse=61, fine=(9,))


class Divergence:
    """lo [n], hi [n] -> D(P || Q) in nats over the non-empty bins of a histogram; inf for a range without values."""

    def __init__(self, view: View, spec: QuantSpec) -> None:
        full = view.counts > 0
        edges = view.edges
        self._centers = ((edges[:-1] + edges[1:]) / 2)[full].astype(np.float32)
        self._counts = view.counts[full].astype(np.float64)
        self._below = np.concatenate(([0.0], np.cumsum(self._counts)))
        self._spec = replace(spec, granularity=PerTensor())

    def __call__(self, low: Array, high: Array) -> Array:
        return np.array([self._one(lo, hi) for lo, hi in zip(low, high, strict=True)])

    def _one(self, low: float, high: float) -> float:
        first, last = np.searchsorted(self._centers, low, "left"), np.searchsorted(self._centers, high, "right")
        if first >= last:
            return float("inf")
        kept = self._counts[first:last]
        reference = kept.copy()
        reference[0] += self._below[first]
        reference[-1] += self._below[-1] - self._below[last]
        levels = quantize(self._centers[first:last], qparams_from_range(low, high, self._spec), self._spec)
        places = levels.astype(np.intp) - self._spec.qmin
        blurred = (np.bincount(places, kept) / np.maximum(np.bincount(places), 1))[places]
        p, q = reference / reference.sum(), blurred / blurred.sum()
        return float((p * np.log(p / q)).sum())
