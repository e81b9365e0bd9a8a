"""The search for the cheapest range, on costs whose minimum is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.observers.histogram import Array, find_best_range

COARSE, FINE = 33, (9, 9)


def near(low: float, high: float) -> Callable[[Array, Array], Array]:
    """A cost that is least at [low, high]."""
    return lambda lo, hi: (lo - low) ** 2 + (hi - high) ** 2


def search(
    low: float, high: float, cost: Callable[[Array, Array], Array], *, symmetric: bool = False
) -> tuple[float, float]:
    return find_best_range(low, high, symmetric, cost, least=0.01, coarse=COARSE, fine=FINE)


@pytest.mark.parametrize(
    ("low", "high", "best"),
    [
        pytest.param(-1.0, 1.0, (-0.5, 0.5), id="both ends alike"),
        pytest.param(-1.0, 4.0, (-0.9, 0.3), id="one end far in"),
        pytest.param(-8.0, 1.0, (-0.2, 0.95), id="the other end far in"),
        pytest.param(0.0, 6.0, (0.0, 1.7), id="no values below 0"),
        pytest.param(-6.0, 0.0, (-1.7, 0.0), id="no values above 0"),
    ],
)
def test_ends_shrink_each_by_itself(low, high, best):
    found = search(low, high, near(*best))
    # The last refinement is finer than a hundredth.
    assert found == pytest.approx(best, rel=0.02, abs=0.01)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 4.0), (-4.0, 1.0), (0.5, 4.0)])
def test_a_symmetric_range_is_as_wide_as_the_larger_end(low, high):
    lo, hi = search(low, high, near(-4.0, 4.0), symmetric=True)
    assert (lo, hi) == (-4.0, 4.0)
    lo, hi = search(low, high, near(-1.5, 1.5), symmetric=True)
    assert lo == -hi
    assert hi == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize(("low", "high", "widest"), [(2.0, 5.0, (0.0, 5.0)), (-5.0, -2.0, (-5.0, 0.0))])
def test_0_is_in_every_range(low, high, widest):
    assert search(low, high, lambda lo, hi: -(hi - lo)) == widest


def test_of_equals_the_widest_is_taken():
    assert search(-3.0, 7.0, lambda lo, hi: np.zeros(lo.shape)) == (-3.0, 7.0)
    # Flat below 2: nothing is gained by going further in.
    _, high = search(0.0, 7.0, lambda lo, hi: np.maximum(hi - 2.0, 0.0))
    assert high == pytest.approx(2.0, rel=0.16)


def test_no_end_shrinks_below_the_least_factor():
    low, high = search(-4.0, 2.0, near(0.0, 0.0))
    assert -0.04 * 1.2 <= low <= -0.04 / 1.2
    assert 0.02 / 1.2 <= high <= 0.02 * 1.2


@settings(max_examples=40)
@given(st.floats(-100, -0.01), st.floats(0.01, 100), st.floats(0.02, 1), st.floats(0.02, 1))
def test_the_found_range_lies_inside_and_costs_no_more_than_the_whole(low, high, left, right):
    cost = near(low * left, high * right)
    found = search(low, high, cost)
    assert low <= found[0] <= 0 <= found[1] <= high
    before, after = (float(cost(np.array([one[0]]), np.array([one[1]]))[0]) for one in ((low, high), found))
    assert after <= before


def test_finer_rounds_come_closer():
    best = (-0.377, 0.733)
    errors = []
    for fine in ((), (9,), (9, 9)):
        found = find_best_range(-1.0, 1.0, False, near(*best), least=0.01, coarse=COARSE, fine=fine)
        errors.append(max(abs(found[0] - best[0]), abs(found[1] - best[1])))
    assert errors[0] > errors[1] > errors[2]
