"""Rounding strategies on bare arrays: never worse than nearest, near the best there is by brute force; refits."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.backends.ort.rules import find_sum_order
from onnxq.config import TensorConfig
from onnxq.graph import GraphIndex, name_nodes
from onnxq.numerics import SumOrder
from onnxq.passes.rounding import gptq_core
from onnxq.passes.rounding.gptq_core import choose_ridge, correct_bias, damp_moments, factor_hessian, layer_error
from onnxq.passes.rounding.low_bit_core import FACTORS, descend_values, shrink_moments
from onnxq.passes.rounding.operators import Operator, list_operators
from onnxq.passes.rounding.second_moments import Accumulator, Moments
from tests.passes.rounding import kit
from tests.passes.rounding.kit import round_to_nearest, round_with_feedback
from tests.pipeline.models import EVERYTHING, quantize

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
        best = Layer(w, layer.h, scale, zero).measure_error(every).min()
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
        assert np.array_equal(layer._replace(h=h).round_with_feedback(), layer.round_to_nearest())


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
def test_scales_and_levels_beat_levels_alone(seed: int, rows: int, size: int, groups: int, thorough: bool) -> None:
    w, h, scale, zero = make_layer(seed, rows, size, groups)
    found, again = (kit.round_low_bit(w, factor_hessian(h), scale, zero, LIMITS, thorough=thorough) for _ in range(2))
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
    found = kit.round_low_bit(w, seen, scale, zero, LIMITS)
    assert found.factors[0, 0] < 0.9
    wide = round_to_nearest(w, scale, zero, LIMITS) * scale
    assert np.sum((w - found.codes * scale * found.factors[0, 0]) ** 2) < np.sum((w - wide) ** 2)
    assert kit.round_low_bit(w, seen, scale, zero, LIMITS, least=np.full((1, 1), 0.95)).factors[0, 0] >= 0.95


def test_dead_rows_and_dead_inputs_are_left_in_peace() -> None:
    w, h, scale, zero = make_layer(4, 3, 6)
    w[0, 1] = 0
    for moments in (h, np.zeros_like(h)):
        found = kit.round_low_bit(w, factor_hessian(moments), scale, zero, LIMITS, thorough=True)
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
    assert gptq_core.may_refit(moments)
    np.testing.assert_allclose(gptq_core.refit_weight(w, moments, ridge=1e-9), 2 * w, rtol=1e-5)
    assert not gptq_core.may_refit(Moments(moments.h, moments.c, moments.mean_x, moments.mean_y, 59))


def halves(factor: tuple[float, float], noise: float, count: int = 4000) -> tuple[Moments, Moments]:
    """Of x and y = factor * x + noise, the factor of each half of the samples its own."""
    rng = np.random.default_rng(5)
    found = []
    for one in factor:
        sums = Accumulator(1, 6)
        x = rng.standard_normal((1, 6, count)).astype(np.float32)
        y = one * x + noise * rng.standard_normal(x.shape)
        kit.add_samples(sums, x, y.astype(np.float32))
        found.append(sums.make_moments())
    return found[0], found[1]


def test_a_refit_must_help_samples_it_did_not_see() -> None:
    w = np.random.default_rng(6).standard_normal((1, 3, 6)).astype(np.float32)
    assert choose_ridge(w, *halves((0.5, 0.5), 0.1)) == min(gptq_core.RIDGES)
    assert choose_ridge(w, *halves((0.5, 2.0), 0.1)) is None
    assert choose_ridge(w, *halves((0.5, 0.5), 0.1, count=6 * gptq_core.POSITIONS_PER_COLUMN // 2 - 1)) is None


def test_the_ridge_grows_where_there_is_little_to_learn_from() -> None:
    w = np.random.default_rng(6).standard_normal((1, 3, 6)).astype(np.float32)
    chosen = [choose_ridge(w, *halves((0.9, 0.9), 0.1, count=count)) for count in (100, 200, 1000)]
    assert chosen == [0.1, 0.03, min(gptq_core.RIDGES)]
    # Weaker ones, which lose, do not hide that the strongest gains.
    assert choose_ridge(w, *halves((0.8, 0.8), 0.5, count=100)) == max(gptq_core.RIDGES)


def test_a_bias_follows_samples_only_as_far_as_they_agree() -> None:
    w = np.ones((1, 1, 1), np.float32)

    def bias(errors: list[float]) -> float:
        sums = Accumulator(1, 1)
        for error in errors:
            kit.add_samples(sums, np.full((1, 1, 10), 1.0, np.float32), np.full((1, 1, 10), 1.0 - error, np.float32))
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


Array = np.ndarray[Any, Any]
BYTES = (-128, 127)


def neighbouring(size: int, rng: np.random.Generator) -> Array:
    """Partners of `size` columns in a random order of sums; the last of an odd number is alone."""
    order = rng.permutation(size)
    found = np.full(size, -1, np.int64)
    even = size // 2 * 2
    found[order[0:even:2]], found[order[1:even:2]] = order[1:even:2], order[0:even:2]
    return found


@st.composite
def layers(draw: st.DrawFn) -> tuple[Array, Array, Array, Array, Array]:
    """(w, H, scale, zero, partner): weights that fill the range, so that many sums would overflow."""
    groups, rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 45))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    w = rng.uniform(-1, 1, (groups, rows, size)).astype(np.float32)
    mixing = rng.standard_normal((groups, size, size)) * 0.4 + np.eye(size)
    x = mixing @ rng.standard_normal((groups, size, 3 * size))
    h = x @ x.transpose(0, 2, 1) / x.shape[2]
    zero = np.zeros((groups, rows, 1), np.int32)
    if draw(st.booleans()):
        zero = rng.integers(-90, 91, (groups, rows, 1)).astype(np.int32)
    reach = 127 if draw(st.booleans()) else 100
    scale = np.abs(w).max(axis=2, keepdims=True) / reach
    wide = np.broadcast_to(scale.astype(np.float32), w.shape), np.broadcast_to(zero, w.shape)
    return w, h, *wide, neighbouring(size, rng)


def keeps(levels: Array, partner: Array) -> bool:
    """No sum of the stored integers can overflow, one after the other."""
    for k, other in enumerate(partner):
        if other >= 0:
            one, two = levels[:, :, k].astype(int), levels[:, :, other].astype(int)
            if (255 * (np.maximum(one, 0) + np.maximum(two, 0)) > 32767).any():
                return False
            if (255 * (np.minimum(one, 0) + np.minimum(two, 0)) < -32768).any():
                return False
    return True


@settings(max_examples=60)
@given(layers())
def test_rounding_keeps_every_sum_and_is_no_worse_than_the_nearest(case: Any) -> None:
    w, h, scale, zero, partner = case
    seen = factor_hessian(h)
    plain = round_to_nearest(w, scale, zero, BYTES, partner)
    found = round_with_feedback(w, seen, scale, zero, BYTES, partner)
    for levels in (plain, found):
        assert keeps(levels, partner)
        assert levels.min() >= BYTES[0]
        assert levels.max() <= BYTES[1]
    errors = [layer_error(w, levels, scale, zero, seen.damped) for levels in (found, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-6) + 1e-12).all()


@settings(max_examples=60)
@given(layers())
def test_each_row_takes_a_scale_of_its_own_that_is_worth_it(case: Any) -> None:
    w, h, scale, zero, partner = case
    seen = factor_hessian(h)
    found = kit.round_within_sums(w, seen, scale, zero, BYTES, partner)
    assert keeps(found.codes, partner)
    assert found.factors.shape == w.shape[:2]
    assert ((found.factors >= 1) & (found.factors <= 2)).all()
    wider = np.asarray(scale * found.factors[:, :, None], np.float32)
    plain = layer_error(w, round_to_nearest(w, wider, zero, BYTES, partner), wider, zero, seen.damped)
    assert (layer_error(w, found.codes, wider, zero, seen.damped) <= plain * (1 + 1e-6) + 1e-12).all()


@settings(max_examples=30)
@given(layers())
def test_weights_with_room_are_rounded_as_without_the_bound(case: Any) -> None:
    w, h, scale, _, partner = case
    narrow, zero, seen = w * np.float32(0.45), np.zeros(w.shape, np.int32), factor_hessian(h)
    free = round_with_feedback(narrow, seen, scale, zero, BYTES)
    if keeps(free, partner) and np.abs(free).max() <= 64:
        found = kit.round_within_sums(narrow, seen, scale, zero, BYTES, partner)
        assert np.array_equal(found.codes, free)
        assert (found.factors == 1).all()
        assert np.array_equal(round_with_feedback(narrow, seen, scale, zero, BYTES, partner), free)


def draw_uniform(shape: tuple[int, int, int], count: int, spread: float) -> tuple[Any, ...]:
    """(w, its Hessian, scale, zero): uniform weights, and inputs whose columns differ in size by e to the spread."""
    rng = np.random.default_rng(0)
    w = rng.uniform(-1, 1, shape).astype(np.float32)
    x = rng.standard_normal((shape[0], shape[2], count)) * np.exp(spread * rng.standard_normal((shape[0], shape[2], 1)))
    scale = np.broadcast_to(np.abs(w).max(axis=2, keepdims=True) / np.float32(127), w.shape)
    return w, factor_hessian(x @ x.transpose(0, 2, 1) / count), scale, np.zeros(w.shape, np.int32)


def test_columns_not_rounded_yet_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose partners are rounded at other times; memory that nothing was written to is full of NaN."""
    (w, seen, scale, zero), partner = draw_uniform((6, 4, 8), 60, 1.0), np.arange(8) ^ 1
    wanted = round_with_feedback(w, seen, scale, zero, BYTES, partner)
    full = np.full_like
    nan = lambda like, *_, **__: full(like, np.nan if like.dtype.kind == "f" else 77)  # noqa: E731
    monkeypatch.setattr(np, "empty_like", nan)
    assert np.array_equal(round_with_feedback(w, seen, scale, zero, BYTES, partner), wanted)
    assert keeps(wanted, partner)


def test_wider_steps_pay_for_uniform_weights() -> None:
    (w, seen, scale, zero), partner = draw_uniform((1, 16, 64), 400, 0.0), np.arange(64) ^ 1
    found = kit.round_within_sums(w, seen, scale, zero, BYTES, partner)
    wider = np.asarray(scale * found.factors[:, :, None], np.float32)
    same = layer_error(w, round_with_feedback(w, seen, scale, zero, BYTES, partner), scale, zero, seen.damped)
    assert layer_error(w, found.codes, wider, zero, seen.damped).sum() < 0.8 * same.sum()


# --- which columns share a sum ------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[str, tuple[int, ...], tuple[int | None, ...], dict[str, Any]]] = {
    "Conv": ("Conv", (6, 4, 3, 3), (None, 4, 6, 6), {}),
    "Conv of odd depth": ("Conv", (5, 3, 3, 1), (None, 3, 6, 6), {}),
    "Conv 1-D": ("Conv", (6, 4, 3), (None, 4, 9), {}),
    "grouped Conv": ("Conv", (6, 2, 3, 3), (None, 4, 6, 6), {"group": 2}),
    "depthwise Conv, two outputs": ("Conv", (8, 1, 3, 3), (None, 4, 6, 6), {"group": 4}),
    "MatMul": ("MatMul", (7, 5), (None, 7), {}),
    "Gemm": ("Gemm", (8, 5), (None, 8), {}),
    "Gemm transB": ("Gemm", (5, 7), (None, 7), {"transB": 1}),
}


def operator(name: str) -> tuple[Operator, SumOrder]:
    """The operator as the sweep sees it, and the order of its sums."""
    op, weight, shape, attrs = LAYOUTS[name]
    rng = np.random.default_rng(0)
    proto = kit.one_node(op, rng.standard_normal(weight).astype(np.float32), shape, **attrs)
    config = EVERYTHING.model_copy(update={"target": "virtual", "weights": TensorConfig(scheme="symmetric")})
    data = {"x": rng.standard_normal((8, *shape[1:])).astype(np.float32)}
    index = GraphIndex(name_nodes(proto))
    (found,) = list_operators(index, quantize(proto, data, config).plan)
    return found, find_sum_order(index.find_node("op"), weight)


def slow_partners(one: Operator, order: SumOrder) -> list[list[list[int]]]:
    """[groups][rows][K]: the column that stands beside each in its row of sums, weight by weight."""
    shape = one.weight.shape
    beside: dict[int, int] = {}
    flat = np.arange(one.weight.size).reshape(shape)
    for line in np.moveaxis(flat, order[0], 0):
        rest = [axis - (axis > order[0]) for axis in order[1:]]
        sums = line.transpose(rest).ravel().tolist()
        for first, second in zip(sums[0::2], sums[1::2], strict=False):
            beside[first], beside[second] = second, first
    rows = one.to_rows(flat)
    return [[[row.tolist().index(beside[k]) if k in beside else -1 for k in row.tolist()] for row in g] for g in rows]


@pytest.mark.parametrize("name", LAYOUTS)
def test_partner_columns_are_those_that_share_a_sum_in_every_row(name: str) -> None:
    one, order = operator(name)
    flat = np.arange(one.weight.size).reshape(one.weight.shape)
    slow = slow_partners(one, order)
    for g, group in enumerate(one.to_rows(flat)):
        for r, row in enumerate(group):
            found = gptq_core.find_partner_columns(row, one.weight.shape, order)
            assert found.tolist() == slow[g][r] == slow[0][0]
