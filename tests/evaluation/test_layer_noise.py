"""Noise over signal in float32: as exact as a search needs, and over as soon as it is lost."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.evaluation.layer_noise import relative_noise, sum_squares


def test_hand_computed() -> None:
    assert relative_noise([np.array([3.0, 4.0])], [np.array([3.0, 4.5])]) == pytest.approx(0.25 / 25)
    assert relative_noise([np.array([3.0, 4.0])], [np.array([3.0, 4.5])], signal=0.5) == pytest.approx(0.5)
    assert relative_noise([np.zeros(2)], [np.zeros(2)]) == 0.0


def test_long_sums_stay_exact() -> None:
    values = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32) + 100
    assert sum_squares(values) == pytest.approx(float(np.square(values, dtype=np.float64).sum()), rel=1e-6)


def test_the_rest_is_not_computed_once_it_is_beyond_the_limit() -> None:
    asked: list[int] = []

    def candidates() -> object:
        for k in range(3):
            asked.append(k)
            yield np.full(4, 2.0)

    assert relative_noise([np.ones(4)] * 3, candidates(), most=0.1) == np.inf  # type: ignore[arg-type]
    assert asked == [0]
