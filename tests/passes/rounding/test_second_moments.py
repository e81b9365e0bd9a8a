"""Second moments added up in parts, of some positions, of tokens and of halves."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import onnxq
from onnxq.config import TensorConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.rounding import layerwise as sampling
from onnxq.passes.rounding.layerwise import MomentsRequest
from onnxq.passes.rounding.operators import Geometry, window_means
from onnxq.passes.rounding.second_moments import Accumulator, merge_moments
from onnxq.passes.rounding.statistics import OperatorStatistics, gather_statistics
from onnxq.pipeline.prepared import load_state
from onnxq.sites import TensorId
from tests.passes.context import place
from tests.passes.kit import parse
from tests.passes.rounding.kit import FOUR, add_samples, calibrated
from tests.pipeline.models import images, residual
from tests.planner.kit import draft

Array = NDArray[Any]


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_streamed_moments_are_the_moments(groups: int, size: int, parts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = sum(parts)
    # Far from 0: sums of uncentred float32 products would lose everything.
    x = (rng.standard_normal((groups, size, total)) + 300).astype(np.float32)
    y = (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
    sums, first = Accumulator(groups, size), 0
    for count in parts:
        add_samples(sums, x[:, :, first : first + count], y[:, :, first : first + count])
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
        add_samples(sums, a[:, :, ::3], b[:, :, ::3], [whole])
    found = sums.make_moments()
    p, q = (v.astype(np.float64) - v.astype(np.float64).mean(axis=2, keepdims=True) for v in (x, y))
    some = [*range(0, 40, 3), *range(40, 60, 3)]
    np.testing.assert_allclose(found.mean_y, y.mean(axis=2, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(found.h, q[:, :, some] @ q[:, :, some].transpose(0, 2, 1) / len(some), atol=1e-4)
    np.testing.assert_allclose(found.c, p[:, :, some] @ q[:, :, some].transpose(0, 2, 1) / len(some), atol=1e-4)
    assert (found.count, found.weight) == (len(some), 60)


def test_means_of_tokens_leave_out_those_that_do_not_count() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    found = window_means(x, Geometry(), np.array([[True, False, True], [False, False, True]]))
    np.testing.assert_allclose(found[:, 0], [x[0, [0, 2]].mean(axis=0), x[1, 2]])
    np.testing.assert_allclose(window_means(x, Geometry())[:, 0], x.mean(axis=1))


def test_many_rows_in_one_update_equal_many_updates() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 1, 3, 20000)).astype(np.float32)
    whole, parts = Accumulator(1, 3), Accumulator(1, 3)
    add_samples(whole, x, y)
    for first in range(0, 20000, 777):
        add_samples(parts, x[:, :, first : first + 777], y[:, :, first : first + 777])
    np.testing.assert_allclose(whole.make_moments().h, parts.make_moments().h, rtol=1e-4, atol=1e-4)


def test_moments_of_two_halves_are_those_of_all() -> None:
    x = (np.random.default_rng(7).standard_normal((2, 3, 900)) + 5).astype(np.float32)
    y = (x * 0.7 + 1).astype(np.float32)
    whole, one, other = Accumulator(2, 3), Accumulator(2, 3), Accumulator(2, 3)
    for first in range(0, 900, 300):
        add_samples(whole, x[:, :, first : first + 300], y[:, :, first : first + 300])
        add_samples(one if first < 600 else other, x[:, :, first : first + 300], y[:, :, first : first + 300])
    wanted, found = whole.make_moments(), merge_moments(one.make_moments(), other.make_moments())
    assert found.count == wanted.count
    assert len(found.parts) == 3
    for name in ("h", "c", "mean_x", "mean_y"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    alone = merge_moments(wanted, Accumulator(2, 3).make_moments())
    np.testing.assert_allclose(alone.h, wanted.h)


# ---- Samples that count in second moments alone.


@dataclass(frozen=True)
class Given:
    """Tensors as they are."""

    values: Array

    @property
    def feeds(self) -> list[dict[str, Array]]:
        return [{} for _ in self.values]

    def iterate_tensors(self, wanted: MomentsRequest) -> list[tuple[dict[str, Array], Array, Array]]:
        return [({}, one, one) for one in self.values]


def gather(real: Array, others: Array) -> OperatorStatistics:
    wanted = MomentsRequest("n", TensorId("x"), TensorId("x"), Geometry(), (1, 8), second=True, halves=True)
    return gather_statistics(Given(real), Given(others), wanted)


@pytest.mark.parametrize("rows", [4, 2000])
def test_others_count_where_positions_are_few_and_in_second_moments_alone(rows: int) -> None:
    rng = np.random.default_rng(0)
    real, other = (rng.standard_normal((6, rows, 8)).astype(np.float32) * scale for scale in (1, 3))
    plain, both = gather(real, real[:0]), gather(real, other)
    assert np.array_equal(plain.moments.mean_x, both.moments.mean_x)
    assert plain.moments.weight == both.moments.weight == 6 * rows
    grown = float(np.trace(both.moments.h[0]) / np.trace(plain.moments.h[0]))
    assert grown == 1 if rows == 2000 else 3 < grown < 9


def test_others_go_with_the_half_of_their_sample() -> None:
    real = np.zeros((3, 2, 8), np.float32)
    real[0::2, 0], real[1::2, 1] = 1, 1
    plain, both = gather(real, real[:0]), gather(real, np.concatenate([real] * 3))
    for one, other in zip(plain.halves, both.halves, strict=True):
        np.testing.assert_allclose(one.h, other.h, atol=1e-12)


def test_others_are_left_out_where_a_half_has_no_samples_and_where_they_overflow() -> None:
    assert gather(np.zeros((2, 0, 8), np.float32), np.ones((2, 2, 8), np.float32)).moments.count == 0
    real = np.random.default_rng(0).standard_normal((4, 4, 8)).astype(np.float32)
    other = real.copy()
    other[1, 2, 3], other[2, 0, 0] = np.nan, np.inf
    found = gather(real, other).moments
    assert found.count == 6 * 4
    assert np.isfinite(found.h).all()


# ---- How many samples rounding takes, and in which other ways it is shown pictures.

PLANS = {
    bits: onnxq.make_plan(residual(), images(8), FOUR.model_copy(update={"weights": TensorConfig(bits=bits)}))
    for bits in (8, 4)
}


def test_weights_of_few_bits_get_more_of_large_samples() -> None:
    data = load_data(images(40), GraphIndex(load_state(residual()).model).inputs)
    counts = {}
    for bits, plan in PLANS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_TOO_MANY", 16 * data[0]["x"].size)
            patch.setattr(sampling, "_TOO_MANY_NARROW", 24 * data[0]["x"].size)
            counts[bits] = len(sampling.take_enough(data, plan, FOUR))
    assert counts == {8: 16, 4: 24}


def test_samples_are_fewer_where_a_runner_holds_large_tensors() -> None:
    """p is held beside r for the sum behind the product; of y, which no node reads, nothing is."""
    text = "p = Relu(x) r = Sigmoid(p) q = MatMul(r, w) s = Add(p, q) y = MatMul(s, w)"
    proto = parse(f"g (float[N,4] x) => (float[N,4] y) {{ {text} }}", w=np.eye(4, dtype=np.float32))
    state, plan, _ = calibrated(proto, {"x": np.ones((40, 4), np.float32)}, FOUR)
    sizes = {"p": 70, "r": 30, "q": 500, "s": 20, "y": 9000}
    problem = draft(proto)
    shapes = {TensorId(name): (size, 1) for name, size in sizes.items()}
    placed = place(state, plan, replace(problem, ops=replace(problem.ops, shapes=shapes)))
    data = load_data({"x": np.ones((40, 4), np.float32)}, GraphIndex(state.model).inputs)
    with pytest.MonkeyPatch.context() as patch:
        counts = []
        for most in (4000, 1299, 100):
            patch.setattr(sampling, "_MOST_ALIVE", most)
            counts.append(len(sampling.take_enough(data, plan, FOUR, placed)))
    # 100 values are alive in front of the first product.
    assert counts == [40, 12, 8]


def test_pictures_are_shown_in_other_ways_for_few_bits_only() -> None:
    samples = [{"x": np.random.default_rng(k).random((1, 3, 16, 16), np.float32)} for k in range(4)]
    counts = {}
    for bits, plan in PLANS.items():
        counts[bits] = [len(sampling.augment_samples(samples, plan, skip)) for skip in ((), ("augmented_samples",))]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_MOST_AUGMENTED", 13 * samples[0]["x"].size)
            counts[bits].append(len(sampling.augment_samples(samples, plan, ())))
    assert counts == {8: [0, 0, 0], 4: [20, 0, 8]}
    assert sampling.augment_samples([], PLANS[4], ()) == []
