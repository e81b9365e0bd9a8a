"""Rounding by second moments against brute force, and refit scales and biases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.passes.rounding.gptq_core import (
    POSITIONS_PER_COLUMN,
    RIDGES,
    choose_ridge,
    correct_bias,
    damp_moments,
    factor_hessian,
    layer_error,
    may_refit,
    refit_weight,
)
from onnxq.passes.rounding.second_moments import Accumulator, Moments
from tests.passes.rounding.arrays import round_to_nearest, round_with_feedback


def problem(seed: int, rows: int, size: int, groups: int = 1, mixing: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Weights and the second moments of correlated inputs."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((groups, size, size)) * mixing + np.eye(size)
    data = rng.standard_normal((groups, 200, size)) @ mixed
    return rng.standard_normal((groups, rows, size)).astype(np.float32), data.transpose(0, 2, 1) @ data / 200


@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 20), st.integers(1, 3),
    st.integers(2, 8), st.booleans(), st.sampled_from([0.01, 0.1]),
)  # fmt: skip
def test_never_worse_than_nearest(
    seed: int, rows: int, size: int, groups: int, bits: int, symmetric: bool, damping: float
) -> None:
    w, h = problem(seed, rows, size, groups)
    limits = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    scale = np.broadcast_to(abs(w).max(axis=2, keepdims=True) / limits[1], w.shape).astype(np.float32)
    zero = np.full(w.shape, 0 if symmetric else 1, np.int32)
    found = round_with_feedback(w, factor_hessian(h, damping=damping), scale, zero, limits)
    assert found.min() >= limits[0]
    assert found.max() <= limits[1]
    damped = damp_moments(h, damping)
    plain = layer_error(w, round_to_nearest(w, scale, zero, limits), scale, zero, damped)
    assert (layer_error(w, found, scale, zero, damped) <= plain * (1 + 1e-9)).all()
    again = round_with_feedback(w, factor_hessian(h, damping=damping), scale, zero, limits)
    assert found.tobytes() == again.tobytes()


def test_rounding_comes_near_the_best_there_is() -> None:
    gained = []
    for seed in range(20):
        w, h = problem(seed, 1, 4)
        scale, zero = np.full(w.shape, 0.7, np.float32), np.zeros(w.shape, np.int32)
        limits = (-4, 3)
        damped = damp_moments(h, 0.1)
        every = np.array(list(itertools.product(range(-4, 4), repeat=4)), np.int32)[None]
        many = (np.repeat(a, every.shape[1], axis=1) for a in (w, scale, zero))
        big, scales, zeros = many
        best = layer_error(big, every, scales, zeros, damped).min()
        plain = layer_error(w, round_to_nearest(w, scale, zero, limits), scale, zero, damped)[0, 0]
        found = layer_error(w, round_with_feedback(w, factor_hessian(h), scale, zero, limits), scale, zero, damped)[
            0, 0
        ]
        assert best <= found + 1e-9
        gained.append((plain - found) / (plain - best) if plain > best else 1.0)
    assert np.mean(gained) > 0.7


def test_without_correlation_nearest_is_what_comes_out() -> None:
    w, _ = problem(1, 5, 7)
    scale, zero = np.full(w.shape, 0.3, np.float32), np.zeros(w.shape, np.int32)
    h = np.diag(np.arange(1.0, 8.0))[None]
    found = round_with_feedback(w, factor_hessian(h), scale, zero, (-8, 7))
    assert np.array_equal(found, round_to_nearest(w, scale, zero, (-8, 7)))
    assert np.array_equal(round_with_feedback(w, factor_hessian(0 * h), scale, zero, (-8, 7)), found)


def test_groups_are_rounded_each_by_itself() -> None:
    w, h = problem(3, 2, 9, groups=4)
    scale, zero = np.full(w.shape, 0.4, np.float32), np.zeros(w.shape, np.int32)
    whole = round_with_feedback(w, factor_hessian(h), scale, zero, (-8, 7))
    for g in range(4):
        part = slice(g, g + 1)
        assert np.array_equal(
            whole[part], round_with_feedback(w[part], factor_hessian(h[part]), scale[part], zero[part], (-8, 7))
        )


def test_long_rows_go_through_several_blocks() -> None:
    w, h = problem(5, 3, 300, mixing=0.2)
    scale = np.full(w.shape, 0.5, np.float32)
    zero = np.zeros(w.shape, np.int32)
    damped = damp_moments(h, 0.1)
    found = layer_error(w, round_with_feedback(w, factor_hessian(h), scale, zero, (-8, 7)), scale, zero, damped)
    plain = layer_error(w, round_to_nearest(w, scale, zero, (-8, 7)), scale, zero, damped)
    assert found.sum() < 0.8 * plain.sum()


def test_refit_undoes_what_can_be_undone() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 5000, 4))
    y = 0.5 * x
    cov = x[0].T @ x[0] / 5000
    moments = Moments(0.25 * cov[None], 0.5 * cov[None], x.mean(1), y.mean(1), 5000)
    w = rng.standard_normal((1, 3, 4)).astype(np.float32)
    assert may_refit(moments)
    np.testing.assert_allclose(refit_weight(w, moments, ridge=1e-9), 2 * w, rtol=1e-5)
    assert not may_refit(Moments(moments.h, moments.c, moments.mean_x, moments.mean_y, 59))


def halves(factor: tuple[float, float], noise: float, count: int = 4000) -> tuple[Moments, Moments]:
    """Of x and y = factor * x + noise, the factor of each half of the samples its own."""
    rng = np.random.default_rng(5)
    found = []
    for one in factor:
        sums = Accumulator(1, 6)
        x = rng.standard_normal((1, 6, count)).astype(np.float32)
        y = one * x + noise * rng.standard_normal(x.shape)
        sums.add_samples(x, y.astype(np.float32))
        found.append(sums.make_moments())
    return found[0], found[1]


def test_a_refit_must_help_samples_it_did_not_see() -> None:
    w = np.random.default_rng(6).standard_normal((1, 3, 6)).astype(np.float32)
    assert choose_ridge(w, *halves((0.5, 0.5), 0.1)) == min(RIDGES)
    assert choose_ridge(w, *halves((0.5, 2.0), 0.1)) is None
    assert choose_ridge(w, *halves((0.5, 0.5), 0.1, count=6 * POSITIONS_PER_COLUMN // 2 - 1)) is None


def test_the_ridge_grows_where_there_is_little_to_learn_from() -> None:
    w = np.random.default_rng(6).standard_normal((1, 3, 6)).astype(np.float32)
    chosen = choose_ridge(w, *halves((0.9, 0.9), 1.0, count=100))
    assert chosen is None or chosen > min(RIDGES)


def test_a_bias_follows_samples_only_as_far_as_they_agree() -> None:
    w = np.ones((1, 1, 1), np.float32)

    def bias(errors: list[float]) -> float:
        sums = Accumulator(1, 1)
        for error in errors:
            sums.add_samples(np.full((1, 1, 10), 1.0, np.float32), np.full((1, 1, 10), 1.0 - error, np.float32))
        return float(correct_bias(np.zeros((1, 1)), w, w, sums.make_moments())[0, 0])

    assert bias([0.3] * 4) == pytest.approx(0.3, rel=1e-5)
    assert bias([3.0, -3.0, 3.0, -2.9]) == 0.0
    assert 0.1 < bias([0.3, 0.1, 0.3, 0.1]) < 0.2
    assert bias([0.3]) == pytest.approx(0.3, rel=1e-5)


def test_corrected_bias_takes_the_mean_error_away() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 50, 3)) + 1
    y = x + 0.2
    w, rounded = rng.standard_normal((2, 2, 3)), rng.standard_normal((2, 2, 3))
    moments = Moments(np.zeros((2, 3, 3)), np.zeros((2, 3, 3)), x.mean(1), y.mean(1), 50)
    bias = correct_bias(np.ones((2, 2)), w, rounded, moments)
    wanted = (x @ w.transpose(0, 2, 1)).mean(1) + 1
    got = (y @ rounded.transpose(0, 2, 1)).mean(1) + bias
    np.testing.assert_allclose(got, wanted)
    same = Moments(moments.h, moments.c, y.mean(1), y.mean(1), 50)
    assert np.array_equal(correct_bias(np.ones((2, 2)), w, w, same), np.ones((2, 2)))
