"""SmoothQuant's factors: its formula, the best exponent, and dead channels."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.passes.equalization.smoothquant_core import (
    SMOOTHING_ALPHAS,
    ChannelStatistics,
    SmoothedWeight,
    compute_smoothing,
    measure_layer_error,
    search_smoothing_exponent,
)
from onnxq.spec import PerChannel, QuantSpec

F = np.float32
U8, S8 = QuantSpec(signed=False, symmetric=False), QuantSpec(granularity=PerChannel(1))


def outliers(seed: int = 0) -> tuple[ChannelStatistics, tuple[SmoothedWeight, ...]]:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((64, 32)).astype(F)
    rows[:, [3, 17]] *= 60
    weights = (rng.standard_normal((32, 16)).astype(F), rng.standard_normal((32, 8)).astype(F))
    return ChannelStatistics(rows.min(axis=0), rows.max(axis=0), rows), tuple(SmoothedWeight(w, S8) for w in weights)


def test_outliers_are_smoothed_and_the_best_alpha_wins() -> None:
    seen, readers = outliers()
    s, alpha, error, plain = search_smoothing_exponent(seen, readers, U8)
    largest = np.maximum(-seen.low, seen.high)
    by_alpha = {
        a: measure_layer_error(seen, readers, U8, compute_smoothing(largest, [r.weight for r in readers], a))
        for a in SMOOTHING_ALPHAS
    }
    assert error == min(by_alpha.values()) == by_alpha[alpha]
    assert error < plain / 10
    assert np.prod(s.astype(float)) == pytest.approx(1.0, rel=1e-3)
    assert s.argsort()[-2:].tolist() in ([3, 17], [17, 3])


def test_the_formula() -> None:
    weights = [np.array([[1.0, -4.0], [9.0, 0.0]], F), np.array([[2.0], [1.0]], F)]
    s = compute_smoothing(np.array([8.0, 2.0]), weights, 0.5)
    np.testing.assert_allclose(s[0] / s[1], np.sqrt(8 / 4) / np.sqrt(2 / 9), rtol=1e-6)


def test_dead_channels_keep_their_size() -> None:
    s = compute_smoothing(np.array([0.0, 4.0, 1.0, 2.0]), [np.array([[1.0], [1.0], [1.0], [0.0]], F)], 0.5)
    assert s[0] == s[3] == 1.0
    np.testing.assert_allclose(s[1:3], [np.sqrt(2), np.sqrt(0.5)], rtol=1e-6)
    assert (compute_smoothing(np.zeros(3), [np.zeros((3, 2), F)], 0.5) == 1.0).all()
