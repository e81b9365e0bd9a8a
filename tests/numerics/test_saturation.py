"""Rounding inside 16-bit sums against brute force: what it keeps, what it leaves alone, how near it stays."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq import numerics
from onnxq.numerics.weights import MOST
from onnxq.spec import PerChannel, PerTensor, QuantSpec
from tests.numerics.reference import multiply_saturating

Array = np.ndarray[Any, Any]
INT8 = QuantSpec(bits=8, granularity=PerChannel(0))


def orders_of(rank: int) -> list[numerics.SumOrder]:
    """Those that kernels have: of a matrix as stored and transposed, of a Conv channel by channel, of an LSTM."""
    lstm: list[numerics.SumOrder] = [((1, 0), 2)]
    return [(0, 1), (1, 0)] if rank == 2 else [(0, *range(2, rank), 1), *(lstm if rank == 3 else [])]


@st.composite
def weights(draw: st.DrawFn) -> tuple[Array, Array, list[numerics.SumOrder]]:
    """(int8 weights, the real numbers they stand for, orders): many of them large, dimensions odd and even."""
    rank = draw(st.integers(2, 4))
    shape = tuple(draw(st.lists(st.integers(1, 5 if rank > 2 else 9), min_size=rank, max_size=rank)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    wanted = rng.uniform(-140, 140, shape) if draw(st.booleans()) else rng.uniform(50, 129, shape)
    values = np.clip(np.rint(wanted), -128, 127).astype(np.int8)
    every = orders_of(rank)
    return values, wanted.astype(np.float32), draw(st.sampled_from([every, every[:1], every[::-1]]))


def slow_sums(values: Array, order: numerics.SumOrder) -> list[list[tuple[int, ...]]]:
    """Row by row the places of the weights of each sum, the obvious way."""
    first, *others = order
    channel, *apart = first if isinstance(first, tuple) else (first,)
    found = []
    for row in range(values.shape[channel]):
        sums = []
        for run in itertools.product(*(range(values.shape[axis]) for axis in apart)):
            places = []
            for at in itertools.product(*(range(values.shape[axis]) for axis in others)):
                place = dict(zip((channel, *apart, *others), (row, *run, *at), strict=True))
                places.append(tuple(place[axis] for axis in range(values.ndim)))
            sums += [tuple(places[k : k + 2]) for k in range(0, len(places), 2)]
        found.append(sums)
    return found  # type: ignore[return-value]


def overflows(values: Array, sum_of: Any) -> bool:
    """Some inputs of 0 to 255 leave 16 bits: 255 for every weight of one sign."""
    stored = [int(values[place]) for place in sum_of]
    return 255 * sum(max(v, 0) for v in stored) > 32767 or 255 * sum(min(v, 0) for v in stored) < -32768


@given(weights())
def test_saturating_sums_are_those_that_some_input_overflows(case: Any) -> None:
    values, _, orders = case
    for order in orders:
        wanted = [[overflows(values, one) for one in row] for row in slow_sums(values, order)]
        assert numerics.find_saturating_sums(values, order).tolist() == wanted


@given(weights())
def test_neighbours_are_the_sums_in_order_and_partners_each_others(case: Any) -> None:
    values, _, orders = case
    for order in orders:
        wanted = [
            [[int(values[p]) for p in one] + [0] * (2 - len(one)) for one in row] for row in slow_sums(values, order)
        ]
        assert numerics.pair_neighbours(values, order).tolist() == wanted
        found = numerics.find_partners(values.shape, order)
        flat = found.ravel()
        beside = np.flatnonzero(flat >= 0)
        assert (flat[flat[beside]] == beside).all()
        assert (flat[beside] != beside).all()
        for row in slow_sums(values, order):
            for one in row:
                numbers = [int(np.ravel_multi_index(place, values.shape)) for place in one]
                assert [int(found[place]) for place in one] == (numbers[::-1] if len(numbers) == 2 else [-1])


@given(weights())
def test_kept_sums_cannot_overflow_and_nothing_else_changes(case: Any) -> None:
    values, wanted, orders = case
    found = numerics.limit_sums(values, wanted, orders)
    assert found.dtype == values.dtype
    for order in orders:
        assert not numerics.find_saturating_sums(found, order).any()
    # Towards 0, and never across it.
    assert (np.abs(found.astype(int)) <= np.abs(values.astype(int))).all()
    assert (found.astype(int) * np.sign(values) >= 0).all()
    touched = np.zeros(values.shape, bool)
    for order in orders:
        for row, bad in zip(slow_sums(values, order), numerics.find_saturating_sums(values, order), strict=True):
            for one, over in zip(row, bad, strict=True):
                for place in one if over else ():
                    touched[place] = True
    assert np.array_equal(found[~touched], values[~touched])
    assert np.array_equal(numerics.limit_sums(found, wanted, orders), found)


def nearest_by_trial(values: list[int], aims: list[float]) -> float:
    """The least squared distance of any two integers that keep their sum, neither larger than it was."""
    one, two = (np.arange(0, abs(v) + 1) * np.sign(v) for v in values)
    allowed = np.abs(one[:, None] + two[None]) <= MOST
    gaps = np.square(one - aims[0])[:, None] + np.square(two - aims[1])[None]
    return float(gaps[allowed].min())


@given(weights())
def test_of_the_integers_that_keep_a_sum_the_nearest_are_taken(case: Any) -> None:
    values, wanted, orders = case
    order = orders[0]
    found = numerics.limit_sums(values, wanted, [order])
    # Where rounding clipped, the aim is what the integers can be at all.
    aims = np.clip(wanted.astype(np.float64), -128, 128)
    for row, bad in zip(slow_sums(values, order), numerics.find_saturating_sums(values, order), strict=True):
        for one, over in zip(row, bad, strict=True):
            if over:
                here = [int(values[place]) for place in one], [float(aims[place]) for place in one]
                gap = sum((int(found[place]) - float(aims[place])) ** 2 for place in one)
                assert gap <= nearest_by_trial(*here) + 1e-3


# --- weights with scales -------------------------------------------------------------------------------


@pytest.mark.parametrize("grain", [PerChannel(0), PerChannel(1), PerTensor()], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_quantize_weight_is_quantize_where_nothing_overflows(grain: Any, dtype: Any) -> None:
    spec = QuantSpec(bits=8, granularity=grain)
    w = np.random.default_rng(0).standard_normal((9, 7)).astype(dtype)
    numbers = numerics.weight_qparams(w, spec)
    plain = numerics.quantize(w, numbers, spec)
    for orders in ([(0, 1)], [(1, 0)], [(0, 1), (1, 0)]):
        found = numerics.quantize_weight(w, numbers, spec, orders)
        bad = [numerics.find_saturating_sums(plain, order).any() for order in orders]
        assert np.array_equal(found, plain) == (not any(bad))
        for order in orders:
            assert not numerics.find_saturating_sums(found, order).any()
    halved = w / dtype(2)
    within = numerics.quantize_weight(halved, numbers, spec, [(0, 1), (1, 0)])
    assert np.array_equal(within, numerics.quantize(halved, numbers, spec))


def test_quantize_weight_keeps_sums_of_stored_integers_with_a_zero_point() -> None:
    spec = QuantSpec(bits=8, symmetric=False, granularity=PerChannel(0))
    w = np.random.default_rng(1).uniform(-1, 0.3, (6, 10)).astype(np.float32)
    numbers = numerics.weight_qparams(w, spec)
    assert numbers.zero_point.any()
    found = numerics.quantize_weight(w, numbers, spec, [(0, 1)])
    assert numerics.find_saturating_sums(numerics.quantize(w, numbers, spec), (0, 1)).any()
    assert not numerics.find_saturating_sums(found, (0, 1)).any()


def test_weights_of_few_bits_are_left_alone() -> None:
    w = np.random.default_rng(2).standard_normal((6, 10)).astype(np.float32)
    for bits, storage in ((7, "int8"), (4, "int8"), (8, "uint8")):
        spec = QuantSpec(bits=bits, signed=storage == "int8", granularity=PerChannel(0))
        assert spec.storage == storage
        numbers = numerics.weight_qparams(w, spec, orders=[(0, 1)])
        assert np.array_equal(numbers.scale, numerics.weight_qparams(w, spec).scale)
        assert np.array_equal(numerics.quantize_weight(w, numbers, spec, [(0, 1)]), numerics.quantize(w, numbers, spec))
        rounded = numerics.fake_quant_weight(w, numbers, spec, [(0, 1)])
        assert np.array_equal(rounded, numerics.fake_quant(w, numbers, spec))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 12))
def test_wider_steps_lower_the_error_that_is_expected(seed: int, rows: int, sums: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((2, rows, sums)) * rng.choice([0.3, 1.0], (2, rows, 1))
    scale = np.abs(np.stack([first, second])).max(axis=(0, 2)) / 127
    noise, cost = rng.uniform(0.5, 3, rows) * 2 * sums, rng.uniform(0.5, 2, (rows, sums))

    def expected(factor: Array) -> Array:
        total = np.where(first * second > 0, np.abs(first + second), 0)
        excess = np.maximum(total - (MOST * scale * factor)[:, None], 0)
        return np.asarray(noise * (factor * scale) ** 2 / 12 + (cost * excess**2).sum(axis=1))

    factors = numerics.choose_widening(first, second, scale, noise, cost)
    assert factors.shape == (rows,)
    assert ((factors >= 1) & (factors <= 2)).all()
    found, before = expected(factors.astype(np.float64)), expected(np.ones(rows))
    assert (found <= before * (1 + 1e-6)).all()
    for factor in 1.03 ** np.arange(24):
        assert (found <= expected(np.full(rows, factor)) * (1 + 1e-5)).all()
    bound = (np.where(first * second > 0, np.abs(first + second), 0) > MOST * scale[:, None]).any(axis=1)
    assert (factors[~bound] == 1).all()


def test_wider_steps_lower_the_error_that_is_made() -> None:
    w = np.random.default_rng(3).uniform(-1, 1, (16, 64)).astype(np.float32)
    alone, wide = numerics.weight_qparams(w, INT8), numerics.weight_qparams(w, INT8, orders=[(0, 1)])
    assert (wide.scale >= alone.scale).all()
    errors = [np.square(numerics.fake_quant_weight(w, n, INT8, [(0, 1)]) - w).sum(axis=1) for n in (wide, alone)]
    assert errors[0].sum() < 0.8 * errors[1].sum()
    # Less than the bit that would do as well costs.
    seven = QuantSpec(bits=7, granularity=PerChannel(0))
    rounded = numerics.fake_quant(w, numerics.weight_qparams(w, seven), seven)
    assert errors[0].sum() < 0.75 * np.square(rounded - w).sum()


# --- the reference of the kernels ----------------------------------------------------------------------


def exactly(x: Array, w: Array) -> Array:
    return x.astype(np.int64) @ w.astype(np.int64)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 4))
def test_products_are_exact_for_weights_that_keep_their_sums(seed: int, size: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.integers(-128, 128, (size, columns)).astype(np.int8)
    kept = numerics.limit_sums(w, w, [(1, 0)])
    corners = np.array(list(itertools.product((0, 255), repeat=size)), np.uint8)
    for x in (corners, rng.integers(0, 256, (20, size)).astype(np.uint8)):
        assert np.array_equal(multiply_saturating(x, kept), exactly(x, kept))


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_products_saturate_for_some_input_if_a_sum_can_overflow(seed: int, size: int) -> None:
    w = np.random.default_rng(seed).integers(-128, 128, (size, 1)).astype(np.int8)
    corners = np.array(list(itertools.product((0, 255), repeat=size)), np.uint8)
    differ = (multiply_saturating(corners, w) != exactly(corners, w)).any()
    assert differ == numerics.find_saturating_sums(w, (1, 0)).any()
