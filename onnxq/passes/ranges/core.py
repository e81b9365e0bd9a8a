"""Candidates for the range of one activation, from one histogram of what it held.

minmax loses nothing outside and is coarsest inside; percentiles, least squared error and least divergence (Migacz
2017) clip. None is best everywhere: a MobileNetV2 has 27 dB with minmax and 32 with mse, six layers of BERT lose 10 dB
where the whole range is not kept, and a percentile is a cliff (ViT-B/32: 76 to 7 % from 99.999 to 99.9). So all of
them are candidates, and the error they cause behind the operator that reads the tensor decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics import fake_quant, qparams_from_range
from onnxq.observers import create
from onnxq.observers.histogram import HistogramObserver
from onnxq.spec import ObserverSpec, QParams, QuantSpec

Array = NDArray[Any]
Bound = tuple[float | None, float | None]

OBSERVERS = (
    ObserverSpec("percentile", (("percentile", 100.0),)),
    ObserverSpec("percentile", (("percentile", 99.999),)),
    ObserverSpec("percentile", (("percentile", 99.99),)),
    ObserverSpec("mse"),
    ObserverSpec("entropy"),
)
# What a candidate must leave at most of the error of the range there is: a decibel. Less is within what few samples can
# tell (MobileNetV2, uint8: 39.2 dB as calibrated, 36.6 at 0.97 on four samples, 38.4 at 0.8 on sixteen).
WORTH = 0.8


class Ranges:
    """`update` with values of a tensor, then `candidates`: what each observer makes of them, by name."""

    def __init__(self, spec: QuantSpec) -> None:
        self._spec = spec
        self._made: dict[str, HistogramObserver] = {}
        first: HistogramObserver | None = None
        for one in OBSERVERS:
            made = create(one, spec)
            if not isinstance(made, HistogramObserver):
                continue
            first = made if first is None else first
            # NOTE: they differ in what they read off a histogram, not in the histogram.
            made.histogram = first.histogram
            self._made[_name(one)] = made
        self._first = first

    def update(self, values: Array) -> None:
        """Take in a sample. Raises CalibrationError on NaN and inf."""
        if self._first is not None:
            self._first.update(values)

    def candidates(self, bound: Bound, present: QParams | None = None) -> dict[str, QParams]:
        """Scale and zero point by name, those equal to another or to `present` left out; {} when nothing was seen."""
        found: dict[str, QParams] = {}
        if self._first is None or not self._first.count:
            return found
        seen = set() if present is None else {(float(present.scale), int(present.zero_point))}
        for name, one in self._made.items():
            low, high = one.range()
            numbers = qparams_from_range(low, high, self._spec, origin=name, bound=bound)
            key = (float(numbers.scale), int(numbers.zero_point))
            if key not in seen:
                seen.add(key)
                found[name] = numbers
        return found


def _name(one: ObserverSpec) -> str:
    share = dict(one.options).get("percentile")
    if share == 100.0:
        return "minmax"
    return f"{one.name} {share:g}" if share is not None else one.name


def chosen(errors: dict[str, float], present: str) -> str:
    """The candidate of least error, if it leaves at most `WORTH` of what the present one causes; else that."""
    best = min(errors, key=lambda name: (errors[name], name))
    return best if errors[best] < WORTH * errors[present] else present


def rounded(values: Array, numbers: QParams, spec: QuantSpec) -> Array:
    """What a pair makes of the values, float32."""
    return np.asarray(fake_quant(values, numbers, spec), np.float32)
