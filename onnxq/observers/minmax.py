"""Ranges that leave nothing out: the extremes, and the mean of the samples' extremes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from numpy.typing import NDArray

from onnxq.observers.base import Range, as_range, checked, nothing_seen, register_observer, same_kind
from onnxq.spec import QuantSpec


@register_observer("minmax")
class MinMax:
    """The smallest and the largest value seen."""

    per_sample = False

    def __init__(self, quant: QuantSpec) -> None:
        self.count = 0
        self.minimum, self.maximum = math.inf, -math.inf

    def update(self, x: NDArray[Any]) -> None:
        """Take in an array; CalibrationError on NaN or inf."""
        values = checked(x)
        if values is not None:
            self.count += values.flat.size
            self.minimum, self.maximum = min(self.minimum, values.low), max(self.maximum, values.high)

    def merge(self, other: MinMax) -> None:
        """Take in what `other` has seen."""
        same_kind(self, other)
        self.count += other.count
        self.minimum, self.maximum = min(self.minimum, other.minimum), max(self.maximum, other.maximum)

    def range(self) -> Range:
        """lo, hi; CalibrationError if nothing was seen."""
        if not self.count:
            raise nothing_seen("minmax")
        return as_range(self.minimum, self.maximum)


@register_observer("moving_average")
class MovingAverage:
    """The mean of the samples' minima and the mean of their maxima.

    An exponential average, which the name comes from, depends on the order of the samples; the plain mean of all
    does not. Sums are exact fractions.
    """

    per_sample = True

    def __init__(self, quant: QuantSpec) -> None:
        self.count = 0
        self._samples = 0
        self._low, self._high = Fraction(0), Fraction(0)

    def update(self, x: NDArray[Any]) -> None:
        """Take in one sample; CalibrationError on NaN or inf."""
        values = checked(x)
        if values is not None:
            self.count += values.flat.size
            self._samples += 1
            self._low += Fraction(values.low)
            self._high += Fraction(values.high)

    def merge(self, other: MovingAverage) -> None:
        """Take in what `other` has seen."""
        same_kind(self, other)
        self.count += other.count
        self._samples += other._samples
        self._low += other._low
        self._high += other._high

    def range(self) -> Range:
        """lo, hi; CalibrationError if nothing was seen."""
        if not self._samples:
            raise nothing_seen("moving_average")
        return as_range(float(self._low / self._samples), float(self._high / self._samples))
