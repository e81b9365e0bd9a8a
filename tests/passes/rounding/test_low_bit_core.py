"""Rounding at few bits: against brute force, and for what each part promises."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.passes.rounding.gptq_core import (
    damp_moments,
    factor_hessian,
    layer_error,
)
from onnxq.passes.rounding.low_bit_core import FACTORS, descend_values, shrink_moments
from tests.passes.rounding.arrays import round_low_bit, round_to_nearest, round_with_feedback

LIMITS = (-7, 7)


def problem(seed: int, rows: int, size: int, groups: int = 1) -> tuple[np.ndarray, ...]:
    """w, H, scale, zero: correlated inputs, one scale a row that covers it."""
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((groups, 4 * size, size)) @ rng.standard_normal((groups, size, size))
    w = rng.standard_normal((groups, rows, size)).astype(np.float32)
    scale = np.broadcast_to(abs(w).max(axis=2, keepdims=True) / 7, w.shape).astype(np.float32)
    return w, data.transpose(0, 2, 1) @ data / (4 * size), scale, np.zeros(w.shape, np.int32)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 16), st.integers(1, 3))
@settings(max_examples=60)
def test_descent_ends_where_no_single_step_helps(seed: int, rows: int, size: int, groups: int) -> None:
    w, h, scale, zero = problem(seed, rows, size, groups)
    damped = damp_moments(h, 0.1)
    start = round_to_nearest(w, scale, zero, LIMITS)
    found = descend_values(w, start, damped, scale, zero, LIMITS)
    before, after = (layer_error(w, levels, scale, zero, damped) for levels in (start, found))
    assert (after <= before * (1 + 1e-6)).all()
    assert found.min() >= LIMITS[0]
    assert found.max() <= LIMITS[1]
    assert start.tobytes() == round_to_nearest(w, scale, zero, LIMITS).tobytes()
    if (abs(found - start).sum(axis=2) >= size).any():
        return  # the most steps that it takes
    for k, step in itertools.product(range(size), (-1, 1)):
        moved = found.copy()
        moved[:, :, k] = np.clip(moved[:, :, k] + step, *LIMITS)
        assert (layer_error(w, moved, scale, zero, damped) >= after - 1e-4 * before - 1e-9).all()


def test_descent_comes_nearer_to_the_best_there_is_than_gptq() -> None:
    reached = []
    for seed in range(30):
        w, h, scale, zero = problem(seed, 1, 5)
        damped = damp_moments(h, 0.1)
        base = np.floor(w / scale).astype(np.int32)
        every = np.stack([base[0, 0] + np.array(up) for up in itertools.product((0, 1), repeat=5)])[None]
        wide = [np.repeat(array, every.shape[1], axis=1) for array in (w, scale, zero)]
        best = layer_error(wide[0], every, wide[1], wide[2], damped).min()
        gptq = round_with_feedback(w, factor_hessian(h), scale, zero, LIMITS)
        found = descend_values(w, gptq, damped, scale, zero, LIMITS)
        one, other = (float(layer_error(w, levels, scale, zero, damped)[0, 0]) for levels in (gptq, found))
        assert other <= one * (1 + 1e-6)
        reached.append((one / best, other / best))
    gptq_mean, found_mean = np.mean(reached, axis=0)
    assert found_mean < 1.1
    assert found_mean < gptq_mean


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 20), st.integers(1, 3), st.booleans())
@settings(max_examples=40)
def test_scales_and_levels_together_beat_levels_alone(
    seed: int, rows: int, size: int, groups: int, thorough: bool
) -> None:
    w, h, scale, zero = problem(seed, rows, size, groups)
    found = round_low_bit(w, factor_hessian(h), scale, zero, LIMITS, thorough=thorough)
    again = round_low_bit(w, factor_hessian(h), scale, zero, LIMITS, thorough=thorough)
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
    rng = np.random.default_rng(0)
    w = rng.standard_normal((1, 1, 400)).astype(np.float32)
    w[0, 0, 0] = 6.0
    scale, zero = np.full(w.shape, 6.0 / 7, np.float32), np.zeros(w.shape, np.int32)
    h = np.eye(400)[None]
    found = round_low_bit(w, factor_hessian(h), scale, zero, LIMITS)
    assert found.factors[0, 0] < 0.9
    wide = round_to_nearest(w, scale, zero, LIMITS) * scale
    assert np.sum((w - found.codes * scale * found.factors[0, 0]) ** 2) < np.sum((w - wide) ** 2)
    held = round_low_bit(w, factor_hessian(h), scale, zero, LIMITS, least=np.full((1, 1), 0.95))
    assert held.factors[0, 0] >= 0.95


def test_dead_rows_and_dead_inputs_are_left_in_peace() -> None:
    w, h, scale, zero = problem(4, 3, 6)
    w[0, 1] = 0
    for moments in (h, np.zeros_like(h)):
        found = round_low_bit(w, factor_hessian(moments), scale, zero, LIMITS, thorough=True)
        assert found.codes[0, 1].tolist() == [0] * 6
        assert found.factors[0, 1] == 1
        assert np.isfinite(found.factors).all()


@pytest.mark.parametrize("size", [5, 40])
def test_moments_that_halves_disagree_on_shrink_to_their_diagonal(size: int) -> None:
    rng = np.random.default_rng(1)
    few, other = (rng.standard_normal((1, 8, size)) for _ in range(2))
    halves = [x.transpose(0, 2, 1) @ x / 8 for x in (few, other)]
    both = sum(halves) / 2
    shrunk = shrink_moments(both, *halves)
    away = ~np.eye(size, dtype=bool)
    assert np.allclose(np.diagonal(shrunk[0]), np.diagonal(both[0]))
    assert abs(shrunk[0][away]).sum() < 0.75 * abs(both[0][away]).sum()
    assert np.array_equal(shrink_moments(both, both, both), both)
    # It is nearer to the truth, which here is the identity.
    assert np.sum((shrunk[0] - np.eye(size)) ** 2) < np.sum((both[0] - np.eye(size)) ** 2)


def test_what_spreads_errors_is_the_root_of_the_moments() -> None:
    rng = np.random.default_rng(2)
    data = rng.standard_normal((2, 1400, 700))
    h = data.transpose(0, 2, 1) @ data / 1400
    seen = factor_hessian(h, damping=0.1)
    at = seen.order
    sorted_h = np.take_along_axis(np.take_along_axis(seen.damped, at[:, :, None], 1), at[:, None, :], 2)
    lower = seen.lower.astype(np.float64)
    got = lower * seen.weights[:, None, :] @ lower.transpose(0, 2, 1)
    np.testing.assert_allclose(got, sorted_h, atol=1e-4)
    assert not np.triu(seen.lower[0], 1).any()
    assert np.array_equal(np.diagonal(seen.lower[1]), np.ones(700))
