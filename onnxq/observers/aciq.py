"""Analytical clipping (Banner, Nahshan, Soudry: Post training 4-bit quantization, NeurIPS 2019).

For values of a known distribution, clipped to [-a, a] and rounded in `steps` equal steps, the expected squared error is
that of the tails plus (2 a / steps)^2 / 12. It is least where

    Laplace(b):    a / b = W(3 steps^2)                                             (W: Lambert's function)
    Gauss(sigma):  phi(z) - z Q(z) = z / (6 steps^2) with z = a / sigma             (phi: density, Q: upper tail)

The paper counts 2**bits steps; a quantizer with 0 among its levels has 2**bits - 1, or 2**bits - 2 when it is
symmetric, which is what makes a difference at 2 to 4 bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import ConfigError
from onnxq.nearest import did_you_mean
from onnxq.numerics import symmetric_steps
from onnxq.observers.base import (
    Range,
    Values,
    as_range,
    checked,
    even_steps,
    nothing_seen,
    register_observer,
    same_kind,
)
from onnxq.spec import QuantSpec

DISTRIBUTIONS = ("auto", "gaussian", "laplace")
# mean |x| / sigma is sqrt(2 / pi) = 0.798 for a Gaussian and sqrt(1 / 2) = 0.707 for a Laplacian.
_BETWEEN = (math.sqrt(2 / math.pi) + math.sqrt(0.5)) / 2


def aciq_alpha(distribution: str, steps: float) -> float:
    """Clipping point in units of sigma ("gaussian") or b ("laplace"); steps: number of steps between -a and a."""

    def excess(z: float) -> float:
        if distribution == "laplace":
            return 3 * steps**2 * math.exp(-z) - z
        density, tail = math.exp(-z * z / 2) / math.sqrt(2 * math.pi), math.erfc(z / math.sqrt(2)) / 2
        return 6 * steps**2 * (density - z * tail) - z

    low, high = 0.0, 64.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return low


@register_observer("aciq")
class Aciq:
    """Clips where a Gaussian or Laplacian with the data's moments should be clipped; never beyond the range seen.

    distribution: "gaussian", "laplace", or "auto", which takes the one whose mean |x| / sigma is nearer.
    One-sided data (Relu) count as half of a distribution around 0, zeros left out.
    """

    per_sample = False

    def __init__(self, quant: QuantSpec, *, distribution: str = "auto") -> None:
        even_steps("aciq", quant)
        if distribution not in DISTRIBUTIONS:
            raise ConfigError(
                "observer 'aciq'",
                f"distribution={distribution!r}",
                did_you_mean(distribution, DISTRIBUTIONS),
                code="Q311",
            )
        self.quant, self.distribution = quant, distribution
        self.minimum, self.maximum = math.inf, -math.inf
        self._moments = Moments()

    @property
    def count(self) -> int:
        """Number of values seen."""
        return self._moments.count

    def update(self, x: NDArray[Any]) -> None:
        """Take in an array; CalibrationError on NaN or inf."""
        values = checked(x)
        if values is not None:
            self.minimum, self.maximum = min(self.minimum, values.low), max(self.maximum, values.high)
            self._moments.update(values)

    def merge(self, other: Aciq) -> None:
        """Take in what `other` has seen."""
        same_kind(self, other)
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)
        self._moments.merge(other._moments)

    def range(self) -> Range:
        """lo, hi; CalibrationError if nothing was seen."""
        if not self.count:
            raise nothing_seen("aciq")
        one_sided = self.minimum >= 0.0 or self.maximum <= 0.0
        center, mean_abs, sigma = self._moments.spread(one_sided)
        if self.quant.symmetric:
            steps = 2.0 * symmetric_steps(self.quant)
        else:
            steps = float(self.quant.qmax - self.quant.qmin) * (2 if one_sided else 1)
        kind = self.distribution
        if kind == "auto":
            kind = "gaussian" if mean_abs > _BETWEEN * sigma else "laplace"
        reach = aciq_alpha(kind, steps) * (sigma if kind == "gaussian" else mean_abs)
        return as_range(*np.clip((center - reach, center + reach), self.minimum, self.maximum))


class Moments:
    """Mean, mean absolute deviation and standard deviation that do not depend on the order of the values.

    Floating-point sums do, so values are counted by their sign, exponent and first 7 bits of mantissa (the upper half
    of a float32) and the sums are taken over these counts. Each value is known to 0.4 %, their spread to far better.
    """

    _CHUNK = 1 << 18

    def __init__(self) -> None:
        self._counts = np.zeros(1 << 16, np.int64)

    @property
    def count(self) -> int:
        """Number of values seen."""
        return int(self._counts.sum())

    def update(self, values: Values) -> None:
        """Count checked values."""
        for start in range(0, values.flat.size, self._CHUNK):
            chunk = np.ascontiguousarray(values.flat[start : start + self._CHUNK])
            self._counts += np.bincount(chunk.view(np.uint32) >> np.uint32(16), minlength=1 << 16)

    def merge(self, other: Moments) -> None:
        """Add another's counts."""
        self._counts += other._counts

    def spread(self, one_sided: bool) -> tuple[float, float, float]:
        """Center, mean |x - center|, sigma; one-sided: around 0, zeros (and denormals) left out."""
        used = np.flatnonzero(self._counts)
        # The middle of what shares the upper half.
        values = ((used.astype(np.uint32) << np.uint32(16)) | np.uint32(1 << 15)).view(np.float32).astype(np.float64)
        counts = self._counts[used].astype(np.float64)
        tiny = np.abs(values) < 2.0**-126
        values[tiny] = 0.0
        if one_sided:
            counts[tiny] = 0.0
        total = max(float(counts.sum()), 1.0)
        center = 0.0 if one_sided else float((counts * values).sum()) / total
        off = values - center
        return center, float((counts * np.abs(off)).sum()) / total, math.sqrt(float((counts * off * off).sum()) / total)
