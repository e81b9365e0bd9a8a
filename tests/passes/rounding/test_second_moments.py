"""Second moments added up in parts, of some positions, of tokens and of halves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxq.passes.rounding.gptq_core import (
    may_refit,
)
from onnxq.passes.rounding.im2col import (
    Geometry,
    window_means,
)
from onnxq.passes.rounding.second_moments import Accumulator, merge_moments


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_streamed_moments_are_the_moments(groups: int, size: int, parts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = sum(parts)
    # Far from 0: sums of uncentred float32 products would lose everything.
    x = (rng.standard_normal((groups, size, total)) + 300).astype(np.float32)
    y = (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
    sums, first = Accumulator(groups, size), 0
    for count in parts:
        sums.add_samples(x[:, :, first : first + count], y[:, :, first : first + count])
        first += count
    found = sums.make_moments()
    assert found.count == total
    if not total:
        return
    a, b = (v.astype(np.float64) for v in (x, y))
    np.testing.assert_allclose(found.mean_x, a.mean(axis=2), rtol=1e-6)
    np.testing.assert_allclose(found.mean_y, b.mean(axis=2), rtol=1e-6)
    a, b = a - a.mean(axis=2, keepdims=True), b - b.mean(axis=2, keepdims=True)
    np.testing.assert_allclose(found.h, b @ b.transpose(0, 2, 1) / total, atol=1e-4)
    np.testing.assert_allclose(found.c, a @ b.transpose(0, 2, 1) / total, atol=1e-4)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_moments_of_some_positions_are_about_the_means_of_all(groups: int, size: int, seed: int, lying: bool) -> None:
    rng = np.random.default_rng(seed)
    x, y = (rng.standard_normal((2, groups, size, 60)) + rng.standard_normal((2, 1, 1, 1)) * 20).astype(np.float32)
    if lying:  # as a matrix product's input lies: a column's values next to each other
        x, y = (np.asfortranarray(v[0])[None] if groups == 1 else v for v in (x, y))
    sums = Accumulator(groups, size)
    for part in (slice(0, 40), slice(40, 60)):
        a, b = x[:, :, part], y[:, :, part]
        whole = (a.shape[2], a.mean(axis=2, dtype=np.float64), b.mean(axis=2, dtype=np.float64))
        sums.add_samples(a[:, :, ::3], b[:, :, ::3], [whole])
    found = sums.make_moments()
    p, q = (v.astype(np.float64) - v.astype(np.float64).mean(axis=2, keepdims=True) for v in (x, y))
    some = [*range(0, 40, 3), *range(40, 60, 3)]
    np.testing.assert_allclose(found.mean_y, y.mean(axis=2, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(found.h, q[:, :, some] @ q[:, :, some].transpose(0, 2, 1) / len(some), atol=1e-4)
    np.testing.assert_allclose(found.c, p[:, :, some] @ q[:, :, some].transpose(0, 2, 1) / len(some), atol=1e-4)
    assert (found.count, found.weight) == (len(some), 60)


def test_means_of_tokens_leave_out_those_that_do_not_count() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    counted = np.array([[True, False, True], [False, False, True]])
    found = window_means(x, Geometry(), counted)
    np.testing.assert_allclose(found[:, 0], [x[0, [0, 2]].mean(axis=0), x[1, 2]])
    np.testing.assert_allclose(window_means(x, Geometry())[:, 0], x.mean(axis=1))


def test_many_rows_in_one_update_equal_many_updates() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1, 3, 20000)).astype(np.float32)
    whole, parts = Accumulator(1, 3), Accumulator(1, 3)
    whole.add_samples(x, y)
    for first in range(0, 20000, 777):
        parts.add_samples(x[:, :, first : first + 777], y[:, :, first : first + 777])
    np.testing.assert_allclose(whole.make_moments().h, parts.make_moments().h, rtol=1e-4, atol=1e-4)


def test_without_second_moments_only_means_are_kept() -> None:
    sums = Accumulator(1, 1000, second=False)
    sums.add_samples(np.ones((1, 1000, 4), np.float32), np.zeros((1, 1000, 4), np.float32))
    found = sums.make_moments()
    assert found.h.size == 0
    assert found.mean_x.tolist() == [[1.0] * 1000]
    assert not may_refit(found)


def test_moments_of_two_halves_are_those_of_all() -> None:
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((2, 3, 900)) + 5).astype(np.float32)
    y = (x * 0.7 + 1).astype(np.float32)
    whole, one, other = Accumulator(2, 3), Accumulator(2, 3), Accumulator(2, 3)
    for first in range(0, 900, 300):
        whole.add_samples(x[:, :, first : first + 300], y[:, :, first : first + 300])
        (one if first < 600 else other).add_samples(x[:, :, first : first + 300], y[:, :, first : first + 300])
    wanted, found = whole.make_moments(), merge_moments(one.make_moments(), other.make_moments())
    assert found.count == wanted.count
    assert len(found.parts) == 3
    for name in ("h", "c", "mean_x", "mean_y"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    alone = merge_moments(wanted, Accumulator(2, 3).make_moments())
    np.testing.assert_allclose(alone.h, wanted.h)
