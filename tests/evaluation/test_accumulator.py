"""Error sums: equal to the formulas, blind to how samples are cut up, and never good where a number is missing."""

import numpy as np
import pytest

from onnxq.evaluation.accumulator import ErrorAccumulator, measure_error, relative_noise, sum_squares


def test_hand_computed_values() -> None:
    found = measure_error(np.array([3.0, -4.0]), np.array([3.0, -3.0]), "y")
    assert found.name == "y"
    assert found.max_abs == 1.0
    assert found.sqnr_db == pytest.approx(10 * np.log10(25))
    assert found.cosine == pytest.approx((9 + 12) / (5 * np.sqrt(18)))


def test_identical_zero_and_empty_arrays() -> None:
    x, empty = np.arange(5.0), np.zeros((0, 3))
    for same in (x, x * 0, empty):
        found = measure_error(same, same)
        assert (found.sqnr_db, found.max_abs) == (np.inf, 0.0)
        assert found.cosine == pytest.approx(1.0)
    lost = measure_error(x * 0, x)
    assert lost.sqnr_db < -1000
    assert lost.cosine == 0.0
    assert measure_error(x, -x).cosine == pytest.approx(-1.0)


def test_float16_and_int8_do_not_overflow() -> None:
    a = np.full(1000, 60000, np.float16)
    sums = ErrorAccumulator()
    sums.update(a, -a)
    assert sums.noise / a.size == (2 * float(a[0])) ** 2
    assert measure_error(np.int8([127]), np.int8([-128])).max_abs == 255.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_never_looks_good(bad: float) -> None:
    x = np.arange(1.0, 5.0)
    y = x.copy()
    y[2] = bad
    sums = ErrorAccumulator("y")
    sample = sums.update(x, y)
    assert sample is not None
    assert sample.noise == sample.max_abs == np.inf
    sums.update(x, x)
    found = sums.result()
    assert (found.sqnr_db, found.cosine, found.max_abs) == (-np.inf, 0.0, np.inf)


def test_where_the_reference_is_not_finite_nothing_counts() -> None:
    x, y = np.array([1.0, np.inf, 3.0]), np.array([1.0, 7.0, 2.0])
    found = measure_error(x, y)
    assert found == measure_error(x[[0, 2]], y[[0, 2]])


def test_shapes_must_agree() -> None:
    assert measure_error(np.ones(3), np.ones((3, 1))).sqnr_db == -np.inf


def test_sums_do_not_depend_on_how_samples_are_cut() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3, 4)).astype(np.float32)
    y = x + rng.standard_normal(x.shape).astype(np.float32) / 10
    cut = ErrorAccumulator()
    peaks = [sample.peak for k in range(8) if (sample := cut.update(x[k], y[k])) is not None]
    assert peaks == [np.abs(one).max() for one in x]
    whole, parts = measure_error(x, y), cut.result()
    assert parts.max_abs == whole.max_abs
    assert (parts.sqnr_db, parts.cosine) == pytest.approx((whole.sqnr_db, whole.cosine))


def test_the_largest_of_each_row_are_counted_where_that_is_asked_for() -> None:
    reference = np.array([[3.0, 2.0, 1.0], [-np.inf, 0.5, 0.25], [1.0, 2.0, 0.0]])
    value = np.array([[2.0, 3.0, 1.0], [9.0, 0.5, 0.25], [1.0, np.nan, 0.0]])
    whole, parts = ErrorAccumulator(top_k=1), ErrorAccumulator(top_k=1)
    whole.update(reference, value)
    for row in range(3):
        one = ErrorAccumulator(top_k=1)
        one.update(reference[row : row + 1], value[row : row + 1])
        parts.add(one)
    assert (whole.result().top_k, whole.result().rows) == (0.0, 3)
    assert parts.result().top_k == 0.0
    same = measure_error(reference, reference)
    assert np.isnan(same.top_k)
    again = ErrorAccumulator(top_k=2)
    again.update(reference[:1], value[:1])
    assert again.result().top_k == 1.0


# ---- Noise over signal in float32: as exact as a search needs, and over as soon as it is lost.


def test_relative_noise() -> None:
    assert relative_noise([0.25, 0.5], 25.0) == pytest.approx(0.03)
    assert relative_noise([0.0], 0.0) == 0.0


def test_errors_are_summed_as_their_squares_are() -> None:
    exact, got = np.random.default_rng(0).standard_normal((2, 300, 101)).astype(np.float32)
    assert sum_squares(got, exact) == sum_squares(got - exact)
    assert sum_squares(got[:0], exact[:0]) == 0.0


def test_long_sums_stay_exact() -> None:
    values = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32) + 100
    assert sum_squares(values) == pytest.approx(float(np.square(values, dtype=np.float64).sum()), rel=1e-6)


def test_the_rest_is_not_computed_once_it_is_beyond_the_limit() -> None:
    noises = iter([4.0, 4.0, 4.0])
    assert relative_noise(noises, 12.0, most=0.1) == np.inf
    assert len([*noises]) == 2
