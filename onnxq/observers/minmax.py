"""Ranges without clipping by a criterion: the extremes, and the mean of the samples' extremes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from numpy.typing import NDArray

from onnxq.observers.base import Range, check_same_kind, flatten_values, make_empty_error, make_range, register_observer
from onnxq.spec import QuantSpec


@register_observer("minmax")
class MinMax:
    """The smallest and the largest value observed."""

    per_sample = False
    infinite = False

    def __init__(self, quant: QuantSpec) -> None:
        self.count = 0
        self.minimum, self.maximum = math.inf, -math.inf

    def update(self, x: NDArray[Any]) -> None:
        """Observe an array. Raises CalibrationError on NaN or inf."""
        values = flatten_values(x)
        if values is not None:
            self.count += values.flat.size
            self.minimum, self.maximum = min(self.minimum, values.low), max(self.maximum, values.high)

    def merge(self, other: MinMax) -> None:
        """Add the values that `other` has observed."""
        check_same_kind(self, other)
        self.count += other.count
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)

    def range(self) -> Range:
        """Return lo, hi. Raises CalibrationError without values."""
        if not self.count:
            raise make_empty_error("minmax")
        return make_range(self.minimum, self.maximum)


@register_observer("moving_average")
class MovingAverage:
    """The mean of the samples' minima and the mean of their maxima.

    The name comes from an exponential average, which depends on the order of the samples; the plain mean does not.
    """

    per_sample = True
    infinite = False

    def __init__(self, quant: QuantSpec) -> None:
        self.count = 0
        self._samples = 0
        # Exact sums of floats: rounding would depend on the order.
        self._low, self._high = Fraction(0), Fraction(0)

    def update(self, x: NDArray[Any]) -> None:
        """Observe one sample. Raises CalibrationError on NaN or inf."""
        values = flatten_values(x)
        if values is not None:
            self.count += values.flat.size
            self._samples += 1
            self._low += Fraction(values.low)
            self._high += Fraction(values.high)

    def merge(self, other: MovingAverage) -> None:
        """Add the values that `other` has observed."""
        check_same_kind(self, other)
        self.count += other.count
        self._samples += other._samples
        self._low += other._low
        self._high += other._high

    def range(self) -> Range:
        """Return lo, hi. Raises CalibrationError without values."""
        if not self._samples:
            raise make_empty_error("moving_average")
        return make_range(float(self._low / self._samples), float(self._high / self._samples))
