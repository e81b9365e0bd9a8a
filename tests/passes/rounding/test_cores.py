"""Rounding strategies on bare arrays: never worse than nearest, near the best there is by brute force; refits."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
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
from onnxq.passes.rounding.low_bit_core import FACTORS, descend_values, shrink_moments
from onnxq.passes.rounding.second_moments import Accumulator, Moments
from tests.passes.rounding.arrays import add_samples, round_low_bit, round_to_nearest, round_with_feedback

F = np.float32
LIMITS = (-7, 7)


class Layer(NamedTuple):
    """Weights [groups, rows, K], the second moments of correlated inputs, and scales that cover each row."""

    w: np.ndarray
    h: np.ndarray
    scale: np.ndarray
    zero: np.ndarray

    def measure_error(self, codes: np.ndarray, damping: float = 0.1) -> np.ndarray:
        """The error of each row's output."""
        return layer_error(self.w, codes, self.scale, self.zero, damp_moments(self.h, damping))

    def round_to_nearest(self, limits: tuple[int, int] = LIMITS) -> np.ndarray:
        return round_to_nearest(self.w, self.scale, self.zero, limits)

    def round_with_feedback(self, limits: tuple[int, int] = LIMITS, damping: float = 0.1) -> np.ndarray:
        return round_with_feedback(self.w, factor_hessian(self.h, damping=damping), self.scale, self.zero, limits)


def make_layer(seed: int, rows: int, size: int, groups: int = 1, *, most: int = 7, zero: int = 0) -> Layer:
    """most: the largest integer."""
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((groups, 4 * size, size)) @ rng.standard_normal((groups, size, size))
    w = rng.standard_normal((groups, rows, size)).astype(F)
    scale = np.broadcast_to(abs(w).max(axis=2, keepdims=True) / most, w.shape).astype(F)
    return Layer(w, data.transpose(0, 2, 1) @ data / (4 * size), scale, np.full(w.shape, zero, np.int32))


SIZES = (st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 20), st.integers(1, 3))


@given(*SIZES, st.integers(2, 8), st.booleans(), st.sampled_from([0.01, 0.1]))
def test_feedback_is_never_worse_than_nearest(
    seed: int, rows: int, size: int, groups: int, bits: int, symmetric: bool, damping: float
) -> None:
    limits = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    layer = make_layer(seed, rows, size, groups, most=limits[1], zero=not symmetric)
    found = layer.round_with_feedback(limits, damping)
    assert found.min() >= limits[0]
    assert found.max() <= limits[1]
    plain = layer.measure_error(layer.round_to_nearest(limits), damping)
    assert (layer.measure_error(found, damping) <= plain * (1 + 1e-9)).all()
    assert found.tobytes() == layer.round_with_feedback(limits, damping).tobytes()


def test_rounding_comes_near_the_best_there_is() -> None:
    """Feedback brings most of what can be had beside nearest rounding, and descent behind it nearly all."""
    gained, reached = [], []
    for seed in range(30):
        layer = make_layer(seed, 1, 5)
        base = np.floor(layer.w / layer.scale).astype(np.int32)[0, 0]
        every = np.stack([base + np.array(up) for up in itertools.product((-1, 0, 1, 2), repeat=5)])[None]
        w, scale, zero = (np.repeat(one, every.shape[1], axis=1) for one in (layer.w, layer.scale, layer.zero))
        wide = Layer(w, layer.h, scale, zero)
        best = wide.measure_error(every).min()
        start = layer.round_with_feedback()
        descended = descend_values(layer.w, start, damp_moments(layer.h, 0.1), layer.scale, layer.zero, LIMITS)
        plain, gptq, found = (
            layer.measure_error(codes)[0, 0] for codes in (layer.round_to_nearest(), start, descended)
        )
        assert best <= min(gptq, plain) + 1e-9
        assert found <= gptq * (1 + 1e-6)
        gained.append((plain - gptq) / (plain - best) if plain > best else 1.0)
        reached.append((gptq / best, found / best))
    assert np.mean(gained) > 0.7
    by_feedback, by_descent = np.mean(reached, axis=0)
    assert by_descent < 1.1
    assert by_descent < by_feedback


def test_without_correlation_nearest_is_what_comes_out() -> None:
    layer = make_layer(1, 5, 7)
    for h in (np.diag(np.arange(1.0, 8.0))[None], np.zeros_like(layer.h)):
        alone = layer._replace(h=h)
        assert np.array_equal(alone.round_with_feedback(), layer.round_to_nearest())


def test_groups_are_rounded_each_by_itself() -> None:
    layer = make_layer(3, 2, 9, groups=4)
    whole = layer.round_with_feedback()
    for g in range(4):
        part = slice(g, g + 1)
        assert np.array_equal(whole[part], Layer(*(one[part] for one in layer)).round_with_feedback())


def test_long_rows_go_through_several_blocks() -> None:
    layer = make_layer(5, 3, 300)
    found, plain = layer.measure_error(layer.round_with_feedback()), layer.measure_error(layer.round_to_nearest())
    assert found.sum() < 0.8 * plain.sum()


def test_what_spreads_errors_is_the_root_of_the_moments() -> None:
    data = np.random.default_rng(2).standard_normal((2, 1400, 700))
    h = data.transpose(0, 2, 1) @ data / 1400
    seen = factor_hessian(h, damping=0.1)
    at = seen.order
    sorted_h = np.take_along_axis(np.take_along_axis(seen.damped, at[:, :, None], 1), at[:, None, :], 2)
    lower = seen.lower.astype(np.float64)
    got = lower * seen.weights[:, None, :] @ lower.transpose(0, 2, 1)
    np.testing.assert_allclose(got, sorted_h, atol=1e-4)
    assert not np.triu(seen.lower[0], 1).any()
    assert np.array_equal(np.diagonal(seen.lower[1]), np.ones(700))


# ---- Few bits: single steps downhill, and scales of rows.


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 16), st.integers(1, 3))
@settings(max_examples=60)
def test_descent_ends_where_no_single_step_helps(seed: int, rows: int, size: int, groups: int) -> None:
    layer = make_layer(seed, rows, size, groups)
    start = layer.round_to_nearest()
    found = descend_values(layer.w, start, damp_moments(layer.h, 0.1), layer.scale, layer.zero, LIMITS)
    before, after = layer.measure_error(start), layer.measure_error(found)
    assert (after <= before * (1 + 1e-6)).all()
    assert np.abs(found).max() <= 7
    assert start.tobytes() == layer.round_to_nearest().tobytes()
    if (abs(found - start).sum(axis=2) >= size).any():
        return  # the most steps that it takes
    for k, step in itertools.product(range(size), (-1, 1)):
        moved = found.copy()
        moved[:, :, k] = np.clip(moved[:, :, k] + step, *LIMITS)
        assert (layer.measure_error(moved) >= after - 1e-4 * before - 1e-9).all()


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 20), st.integers(1, 3), st.booleans())
@settings(max_examples=40)
def test_scales_and_levels_together_beat_levels_alone(
    seed: int, rows: int, size: int, groups: int, thorough: bool
) -> None:
    w, h, scale, zero = make_layer(seed, rows, size, groups)
    found, again = (round_low_bit(w, factor_hessian(h), scale, zero, LIMITS, thorough=thorough) for _ in range(2))
    assert found.codes.tobytes() == again.codes.tobytes()
    assert found.factors.tobytes() == again.factors.tobytes()
    assert abs(found.codes).max() <= 7
    assert found.factors.shape == (groups, rows)
    assert (found.factors > 0).all()
    # No row's output is weaker or stronger than it was, as far as one scale can see to that.
    damped = damp_moments(h, 0.1)
    rounded = found.codes * scale * found.factors[:, :, None]
    wanted = np.einsum("grk,grk->gr", w @ damped, w)
    got = np.einsum("grk,grk->gr", w @ damped, rounded)
    free = (found.factors > 0.99 * min(FACTORS) / 1.25) & (abs(got / wanted - 1) > 1e-4)
    limited = [min(abs(f / factor - end) for factor in FACTORS for end in (1.25, 0.8)) for f in found.factors[free]]
    assert all(gap < 1e-4 for gap in limited)


def test_a_row_of_few_large_weights_gets_a_smaller_scale() -> None:
    w = np.random.default_rng(0).standard_normal((1, 1, 400)).astype(F)
    w[0, 0, 0] = 6.0
    scale, zero, seen = np.full(w.shape, 6.0 / 7, F), np.zeros(w.shape, np.int32), factor_hessian(np.eye(400)[None])
    found = round_low_bit(w, seen, scale, zero, LIMITS)
    assert found.factors[0, 0] < 0.9
    wide = round_to_nearest(w, scale, zero, LIMITS) * scale
    assert np.sum((w - found.codes * scale * found.factors[0, 0]) ** 2) < np.sum((w - wide) ** 2)
    held = round_low_bit(w, seen, scale, zero, LIMITS, least=np.full((1, 1), 0.95))
    assert held.factors[0, 0] >= 0.95


def test_dead_rows_and_dead_inputs_are_left_in_peace() -> None:
    w, h, scale, zero = make_layer(4, 3, 6)
    w[0, 1] = 0
    for moments in (h, np.zeros_like(h)):
        found = round_low_bit(w, factor_hessian(moments), scale, zero, LIMITS, thorough=True)
        assert found.codes[0, 1].tolist() == [0] * 6
        assert found.factors[0, 1] == 1
        assert np.isfinite(found.factors).all()


@pytest.mark.parametrize("size", [5, 40])
def test_moments_that_halves_disagree_on_shrink_to_their_diagonal(size: int) -> None:
    rng = np.random.default_rng(1)
    halves = [x.transpose(0, 2, 1) @ x / 8 for x in rng.standard_normal((2, 1, 8, size))]
    both = sum(halves) / 2
    shrunk = shrink_moments(both, *halves)
    away = ~np.eye(size, dtype=bool)
    assert np.allclose(np.diagonal(shrunk[0]), np.diagonal(both[0]))
    assert abs(shrunk[0][away]).sum() < 0.75 * abs(both[0][away]).sum()
    assert np.array_equal(shrink_moments(both, both, both), both)
    # It is nearer to the truth, which here is the identity.
    assert np.sum((shrunk[0] - np.eye(size)) ** 2) < np.sum((both[0] - np.eye(size)) ** 2)


# ---- Weights and biases fitted again to the inputs of the quantized model.


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
        add_samples(sums, x, y.astype(np.float32))
        found.append(sums.make_moments())
    return found[0], found[1]


def test_a_refit_must_help_samples_it_did_not_see() -> None:
    w = np.random.default_rng(6).standard_normal((1, 3, 6)).astype(np.float32)
    assert choose_ridge(w, *halves((0.5, 0.5), 0.1)) == min(RIDGES)
    assert choose_ridge(w, *halves((0.5, 2.0), 0.1)) is None
    assert choose_ridge(w, *halves((0.5, 0.5), 0.1, count=6 * POSITIONS_PER_COLUMN // 2 - 1)) is None


def test_the_ridge_grows_where_there_is_little_to_learn_from() -> None:
    w = np.random.default_rng(6).standard_normal((1, 3, 6)).astype(np.float32)
    chosen = [choose_ridge(w, *halves((0.9, 0.9), 0.1, count=count)) for count in (100, 200, 1000)]
    assert chosen == [0.1, 0.03, min(RIDGES)]
    # Weaker ones, which lose, do not hide that the strongest gains.
    assert choose_ridge(w, *halves((0.8, 0.8), 0.5, count=100)) == max(RIDGES)


def test_a_bias_follows_samples_only_as_far_as_they_agree() -> None:
    w = np.ones((1, 1, 1), np.float32)

    def bias(errors: list[float]) -> float:
        sums = Accumulator(1, 1)
        for error in errors:
            add_samples(sums, np.full((1, 1, 10), 1.0, np.float32), np.full((1, 1, 10), 1.0 - error, np.float32))
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
