"""Candidates for a range, and when another is better."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.errors import CalibrationError
from onnxq.numerics import qparams_from_range
from onnxq.observers import create_observer
from onnxq.passes.ranges.core import RangeCandidates, choose_candidate
from onnxq.spec import ObserverSpec, QuantSpec


def test_candidates_are_those_of_the_observers_without_repeats() -> None:
    spec = QuantSpec(signed=False, symmetric=False)
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    ranges = RangeCandidates(spec)
    ranges.add_sample(values[:20_000])
    ranges.add_sample(values[20_000:])
    found = ranges.list_qparams((None, None))
    assert set(found) == {"minmax", "percentile 99.999", "percentile 99.99", "mse", "entropy"}
    for name, one in (("mse", ObserverSpec("mse")), ("entropy", ObserverSpec("entropy"))):
        alone = create_observer(one, spec)
        alone.update(values)
        assert float(found[name].scale) == float(qparams_from_range(*alone.range(), spec).scale)
    wide = float(found["minmax"].scale) * 255
    assert wide == pytest.approx(float(values.max() - values.min()), rel=1e-5)
    few = RangeCandidates(spec)
    few.add_sample(np.ones(3, np.float32))
    assert len(few.list_qparams((None, None))) < 5
    assert RangeCandidates(spec).list_qparams((None, None)) == {}
    with pytest.raises(CalibrationError):
        few.add_sample(np.array([np.nan], np.float32))


def test_a_range_must_be_better_by_more_than_chance() -> None:
    assert choose_candidate({"now": 1.0, "a": 0.85, "b": 0.9}, "now") == "now"
    assert choose_candidate({"now": 1.0, "a": 0.7, "b": 0.6}, "now") == "b"
