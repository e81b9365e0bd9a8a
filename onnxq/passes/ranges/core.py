"""Candidate ranges of one activation, from one histogram of its values.

minmax clips nothing and has the coarsest steps; percentiles, least squared error and least divergence (Migacz 2017)
clip. None is best everywhere: a MobileNetV2 has 27 dB with minmax and 32 with mse, six layers of BERT lose 10 dB if the
whole range is not kept, and accuracy can drop suddenly with a percentile (ViT-B/32: 76 to 7 % from 99.999 to 99.9). So
all of them are candidates, and the error behind the operator that reads the tensor decides.
"""

from __future__ import annotations

from onnxq.arrays import Array
from onnxq.numerics import qparams_from_range
from onnxq.observers import create_observer
from onnxq.observers.histogram import HistogramObserver
from onnxq.plan import Bound
from onnxq.spec import ObserverSpec, QParams, QuantSpec

# The first clips nothing: it is minmax.
OBSERVERS = (
    ObserverSpec("percentile", (("percentile", 100.0),)),
    ObserverSpec("percentile", (("percentile", 99.999),)),
    ObserverSpec("percentile", (("percentile", 99.99),)),
    ObserverSpec("mse"),
    ObserverSpec("entropy"),
)
# Name of the candidate that clips nothing.
WHOLE = "minmax"
# Largest error of a candidate relative to that of the present range: one decibel less. Smaller differences are noise of
# few samples (MobileNetV2, uint8: 39.2 dB as calibrated, 36.6 at 0.97 on four samples, 38.4 at 0.8 on sixteen).
WORTH = 0.8


class RangeCandidates:
    """Candidate ranges of one tensor: `add_sample` with its values, then read `list_qparams`."""

    def __init__(self, spec: QuantSpec) -> None:
        self._spec = spec
        self._observers: dict[str, HistogramObserver] = {}
        for observer_spec in OBSERVERS:
            observer = create_observer(observer_spec, spec)
            assert isinstance(observer, HistogramObserver)
            self._observers[_name_observer(observer_spec)] = observer
        self._first = next(iter(self._observers.values()))
        # All read the same histogram, so it is filled once.
        for observer in self._observers.values():
            observer.histogram = self._first.histogram

    def add_sample(self, values: Array) -> None:
        """Add a sample. Raises CalibrationError on NaN and inf."""
        self._first.update(values)

    def list_qparams(self, bound: Bound, present: QParams | None = None) -> dict[str, QParams]:
        """Observer's name -> scale and zero point, without duplicates and `present`; {} if there were no values."""
        candidates: dict[str, QParams] = {}
        ranges = set() if present is None else {(float(present.scale), int(present.zero_point))}
        for name, observer in self._observers.items() if self._first.count else ():
            qparams = qparams_from_range(*observer.range(), self._spec, origin=name, bound=bound)
            # Each candidate costs a run of every reader, so the same range is tried once.
            key = (float(qparams.scale), int(qparams.zero_point))
            if key not in ranges:
                ranges.add(key)
                candidates[name] = qparams
        return candidates


def _name_observer(observer: ObserverSpec) -> str:
    share = dict(observer.options).get("percentile")
    if share == 100.0:
        return WHOLE
    return f"{observer.name} {share:g}" if share is not None else observer.name


def choose_candidate(errors: dict[str, float], present: str) -> str:
    """The candidate with the least error if that is below `WORTH` times the present one's, else `present`."""
    # Of equal errors the first by name, so that no order of dictionaries decides.
    best = min(errors, key=lambda name: (errors[name], name))
    return best if errors[best] < WORTH * errors[present] else present
