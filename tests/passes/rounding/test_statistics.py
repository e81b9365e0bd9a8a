"""Samples that count in second moments alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxq.passes.rounding.im2col import Geometry
from onnxq.passes.rounding.second_moments import Workspace
from onnxq.passes.rounding.statistics import MomentsRequest, StatisticsSource, gather_statistics
from onnxq.sites import TensorId

Array = NDArray[Any]


@dataclass(frozen=True)
class Given(StatisticsSource):
    """Tensors as they are."""

    values: Array

    @property
    def feeds(self) -> list[dict[str, Array]]:
        return [{} for _ in self.values]

    def iterate_tensors(self, wanted: MomentsRequest) -> list[tuple[dict[str, Array], Array, Array]]:
        return [({}, one, one) for one in self.values]


@pytest.mark.parametrize("rows", [4, 2000])
def test_others_count_where_positions_are_few_and_in_second_moments_alone(rows: int) -> None:
    rng = np.random.default_rng(0)
    real, other = (rng.standard_normal((6, rows, 8)).astype(np.float32) * scale for scale in (1, 3))
    wanted = MomentsRequest("n", TensorId("x"), TensorId("x"), Geometry(), (1, 8), second=True, halves=True)
    plain, both = (gather_statistics(Given(real), Given(some), wanted, Workspace()) for some in (real[:0], other))
    assert np.array_equal(plain.moments.mean_x, both.moments.mean_x)
    assert plain.moments.weight == both.moments.weight == 6 * rows
    grown = float(np.trace(both.moments.h[0]) / np.trace(plain.moments.h[0]))
    assert grown == 1 if rows == 2000 else 3 < grown < 9


def test_others_go_with_the_half_of_their_sample() -> None:
    real = np.zeros((3, 2, 8), np.float32)
    real[0::2, 0], real[1::2, 1] = 1, 1
    wanted = MomentsRequest("n", TensorId("x"), TensorId("x"), Geometry(), (1, 8), second=True, halves=True)
    plain, both = (
        gather_statistics(Given(real), Given(some), wanted, Workspace())
        for some in (real[:0], np.concatenate([real] * 3))
    )
    assert plain.halves is not None
    assert both.halves is not None
    for one, other in zip(plain.halves, both.halves, strict=True):
        np.testing.assert_allclose(one.h, other.h, atol=1e-12)


def test_a_half_without_real_samples_takes_no_others() -> None:
    empty = np.zeros((2, 0, 8), np.float32)
    some = np.ones((2, 2, 8), np.float32)
    wanted = MomentsRequest("n", TensorId("x"), TensorId("x"), Geometry(), (1, 8), second=True, halves=True)
    assert gather_statistics(Given(empty), Given(some), wanted, Workspace()).moments.count == 0


def test_others_that_overflow_are_left_out() -> None:
    real = np.random.default_rng(0).standard_normal((4, 4, 8)).astype(np.float32)
    other = real.copy()
    other[1, 2, 3], other[2, 0, 0] = np.nan, np.inf
    wanted = MomentsRequest("n", TensorId("x"), TensorId("x"), Geometry(), (1, 8), second=True, halves=True)
    found = gather_statistics(Given(real), Given(other), wanted, Workspace()).moments
    assert found.count == 6 * 4
    assert np.isfinite(found.h).all()
