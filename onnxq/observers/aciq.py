"""Analytical clipping (Banner, Nahshan, Soudry: Post training 4-bit quantization, NeurIPS 2019).

For values of a known distribution, clipped to [-a, a] and rounded in `steps` equal steps, the expected squared error is
that of the tails plus (2 a / steps)^2 / 12. It is least where

    Laplace(b):    a / b = W(3 steps^2)                                             (W: Lambert's function)
    Gauss(sigma):  phi(z) - z Q(z) = z / (6 steps^2) with z = a / sigma             (phi: density, Q: upper tail)

The paper counts 2**bits steps. A quantizer that represents 0 exactly has 2**bits - 1, or 2**bits - 2 if it is
symmetric; the difference matters at 2 to 4 bits.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from onnxq.arrays import Interval, as_float64
from onnxq.errors import ConfigError, suggest_names
from onnxq.numerics import symmetric_steps
from onnxq.observers.base import MinMax, Values, register_observer, require_even_steps
from onnxq.spec import QuantSpec

DISTRIBUTIONS = ("auto", "gaussian", "laplace")
# mean |x| / sigma is sqrt(2 / pi) = 0.798 for a Gaussian and sqrt(1 / 2) = 0.707 for a Laplacian.
_BETWEEN = (math.sqrt(2 / math.pi) + math.sqrt(0.5)) / 2
_NORMAL = NormalDist()
# Values per step: 1 MiB of float32, which stays in the cache.
_CHUNK = 1 << 18


def aciq_alpha(distribution: str, steps: float) -> float:
    """Find the clipping point a in units of sigma ("gaussian") or b ("laplace"). steps: number of them in [-a, a]."""

    def excess(z: float) -> float:
        # Minus the derivative by z of the expected squared error, times 3 steps² / 2. The error is
        # 2 ∫ (x - z)² p(x) dx beyond z for what is clipped, and z² / (3 steps²) for rounding.
        if distribution == "laplace":
            return 3 * steps**2 * math.exp(-z) - z
        density = _NORMAL.pdf(z)
        tail = math.erfc(z / math.sqrt(2)) / 2
        return 6 * steps**2 * (density - z * tail) - z

    # Bisection down to neighbouring floats. `excess` falls; at 64 its exponentials are far below any step.
    low = 0.0
    high = 64.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


@register_observer("aciq")
class Aciq(MinMax):
    """Optimal clipping of a Gaussian or Laplacian with the data's moments; never beyond the range of the data.

    distribution: "gaussian", "laplace", or "auto" for the one whose mean |x| / sigma is nearer.
    One-sided data (Relu) are treated as half of a distribution around 0, without the zeros.

    The moments are independent of the order of the values. Floating-point sums depend on it, so values are counted by
    sign, exponent and first 7 bits of the mantissa (the upper half of a float32), and the sums run over these counts. A
    value is known to 0.4 %, the moments far better.
    """

    name = "aciq"

    def __init__(self, quant: QuantSpec, *, distribution: str = "auto") -> None:
        require_even_steps("aciq", quant)
        if distribution not in DISTRIBUTIONS:
            raise ConfigError(
                "observer 'aciq'",
                f"distribution={distribution!r}",
                suggest_names(distribution, DISTRIBUTIONS),
                code="Q311",
            )
        super().__init__(quant)
        self.distribution = distribution
        self._counts = np.zeros(1 << 16, np.int64)

    def add_values(self, values: Values) -> None:
        """Count the values."""
        super().add_values(values)
        for start in range(0, values.flat.size, _CHUNK):
            chunk = np.ascontiguousarray(values.flat[start : start + _CHUNK])
            self._counts += np.bincount(chunk.view(np.uint32) >> np.uint32(16), minlength=1 << 16)

    def add_observed(self, other: Aciq) -> None:  # type: ignore[override]
        """Add the counts."""
        super().add_observed(other)
        self._counts += other._counts

    def choose_range(self) -> Interval:
        """Choose the range by the moments."""
        one_sided = self.minimum >= 0.0 or self.maximum <= 0.0
        center, mean_abs, sigma = self._compute_spread(one_sided)
        if self.quant.symmetric:
            steps = 2.0 * symmetric_steps(self.quant)
        else:
            # One-sided data use all steps for their half of the distribution.
            steps = float(self.quant.qmax - self.quant.qmin) * (2 if one_sided else 1)
        kind = self.distribution
        if kind == "auto":
            kind = "gaussian" if mean_abs > _BETWEEN * sigma else "laplace"
        reach = aciq_alpha(kind, steps) * (sigma if kind == "gaussian" else mean_abs)
        return center - reach, center + reach

    def _compute_spread(self, one_sided: bool) -> tuple[float, float, float]:
        """Return center, mean |x - center| and sigma. one_sided: around 0, without zeros and denormals."""
        used = np.flatnonzero(self._counts)
        # The middle of the floats with this upper half.
        values = as_float64(
            ((used.astype(np.uint32) << np.uint32(16)) | np.uint32(1 << 15)).view(np.float32)
        )
        counts = as_float64(self._counts[used])
        # The middle of the first cell is not 0, though zeros are by far the most of its values.
        tiny = abs(values) < 2.0**-126
        values[tiny] = 0.0
        if one_sided:
            counts[tiny] = 0.0
        total = max(float(counts.sum()), 1.0)
        center = 0.0 if one_sided else float((counts * values).sum()) / total
        off = values - center
        deviation = float((counts * abs(off)).sum()) / total
        variance = float((counts * off * off).sum()) / total
        return center, deviation, math.sqrt(variance)
