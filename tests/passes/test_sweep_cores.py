"""The sweep's maths against brute force: moments of random geometries, rounding, re-fit and bias."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

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
    round_to_nearest,
    round_with_feedback,
)
from onnxq.passes.rounding.im2col import (
    Geometry,
    compute_gather_indices,
    gather_positions,
    sample_positions,
    window_means,
)
from onnxq.passes.rounding.second_moments import Accumulator, Moments, merge_moments, position_limit
from onnxq.runtime import Session


def conv(x: np.ndarray, w: np.ndarray, attrs: dict[str, Any]) -> np.ndarray:
    """What ONNX Runtime makes of it."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", **attrs)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, x.shape)],
        [helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return Session(proto, optimize=False).run({"x": x})["y"]


@st.composite
def geometries(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]:
    """(attributes of a Conv, shape of its input, shape of its weight)."""
    rank = draw(st.integers(1, 2))
    several = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
    kernel, strides = draw(several), draw(several)
    dilations = draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    groups, inside, rows = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "group": groups}
    auto = draw(st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if auto == "NOTSET":
        attrs["pads"] = draw(st.lists(st.integers(0, 2), min_size=2 * rank, max_size=2 * rank))
    elif auto == "VALID":
        attrs["auto_pad"] = auto
    else:
        # ONNX Runtime refuses dilations with SAME.
        attrs["auto_pad"], attrs["dilations"] = auto, [1] * rank
    spatial = tuple(draw(st.lists(st.integers(6, 9), min_size=rank, max_size=rank)))
    shape = (draw(st.integers(1, 2)), groups * inside, *spatial)
    return attrs, shape, (groups * rows, inside, *kernel)


def geometry_of(attrs: dict[str, Any]) -> Geometry:
    rank = len(attrs["kernel_shape"])
    return Geometry(
        groups=attrs["group"],
        kernel=tuple(attrs["kernel_shape"]),
        strides=tuple(attrs["strides"]),
        dilations=tuple(attrs["dilations"]),
        pads=tuple(attrs.get("pads", (0,) * (2 * rank))),
        auto_pad=attrs.get("auto_pad", "NOTSET"),
    )


@given(geometries(), st.integers(0, 1000))
@settings(max_examples=60)
def test_rows_times_weights_are_the_convolution(case: Any, seed: int) -> None:
    attrs, shape, weight = case
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(weight).astype(np.float32)
    wanted = conv(x, w, attrs)
    geometry = geometry_of(attrs)
    total = gather_positions(shape, geometry)
    assert total == wanted.shape[0] * int(np.prod(wanted.shape[2:]))
    rows = compute_gather_indices(shape, geometry, np.arange(total)).columns(x).transpose(0, 2, 1)
    each = rows.reshape(len(rows), shape[0], -1, rows.shape[2]).mean(axis=2, dtype=np.float64)
    np.testing.assert_allclose(window_means(x, geometry), each.transpose(1, 0, 2), atol=1e-5)
    some = np.flatnonzero(rng.integers(0, 2, total))
    assert np.array_equal(compute_gather_indices(shape, geometry, some).columns(x).transpose(0, 2, 1), rows[:, some])
    groups = geometry.groups
    got = rows @ w.reshape(groups, weight[0] // groups, -1).transpose(0, 2, 1)
    got = got.transpose(1, 0, 2).reshape(wanted.shape[0], *wanted.shape[2:], weight[0])
    np.testing.assert_allclose(np.moveaxis(got, -1, 1), wanted, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_streamed_moments_are_the_moments(groups: int, size: int, parts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = sum(parts)
    # Far from 0: sums of uncentred float32 products would lose everything.
    x = (rng.standard_normal((groups, size, total)) + 300).astype(np.float32)
    y = (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32)
    sums, first = Accumulator(groups, size), 0
    for count in parts:
        sums.update(x[:, :, first : first + count], y[:, :, first : first + count])
        first += count
    found = sums.result()
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
        sums.update(a[:, :, ::3], b[:, :, ::3], [whole])
    found = sums.result()
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
    whole.update(x, y)
    for first in range(0, 20000, 777):
        parts.update(x[:, :, first : first + 777], y[:, :, first : first + 777])
    np.testing.assert_allclose(whole.result().h, parts.result().h, rtol=1e-4, atol=1e-4)


def test_without_second_moments_only_means_are_kept() -> None:
    sums = Accumulator(1, 1000, second=False)
    sums.update(np.ones((1, 1000, 4), np.float32), np.zeros((1, 1000, 4), np.float32))
    found = sums.result()
    assert found.h.size == 0
    assert found.mean_x.tolist() == [[1.0] * 1000]
    assert not may_refit(found)


def test_positions_are_chosen_alike_each_time_and_never_twice() -> None:
    chosen = sample_positions(1000, 100, 3)
    assert np.array_equal(chosen, sample_positions(1000, 100, 3))
    assert len(set(chosen.tolist())) == 100
    assert not np.array_equal(chosen, sample_positions(1000, 100, 4))
    assert sample_positions(50, 100, 0).tolist() == list(range(50))
    assert position_limit(1, 2304) < position_limit(1, 64) * 8
    assert position_limit(1, 16) >= 100 * 16


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
        sums.update(x, y.astype(np.float32))
        found.append(sums.result())
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


def test_moments_of_two_halves_are_those_of_all() -> None:
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((2, 3, 900)) + 5).astype(np.float32)
    y = (x * 0.7 + 1).astype(np.float32)
    whole, one, other = Accumulator(2, 3), Accumulator(2, 3), Accumulator(2, 3)
    for first in range(0, 900, 300):
        whole.update(x[:, :, first : first + 300], y[:, :, first : first + 300])
        (one if first < 600 else other).update(x[:, :, first : first + 300], y[:, :, first : first + 300])
    wanted, found = whole.result(), merge_moments(one.result(), other.result())
    assert found.count == wanted.count
    assert len(found.parts) == 3
    for name in ("h", "c", "mean_x", "mean_y"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    alone = merge_moments(wanted, Accumulator(2, 3).result())
    np.testing.assert_allclose(alone.h, wanted.h)


def test_a_bias_follows_samples_only_as_far_as_they_agree() -> None:
    w = np.ones((1, 1, 1), np.float32)

    def bias(errors: list[float]) -> float:
        sums = Accumulator(1, 1)
        for error in errors:
            sums.update(np.full((1, 1, 10), 1.0, np.float32), np.full((1, 1, 10), 1.0 - error, np.float32))
        return float(correct_bias(np.zeros((1, 1)), w, w, sums.result())[0, 0])

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


@pytest.mark.parametrize("pad", ["SAME_UPPER", "SAME_LOWER"])
def test_same_padding_splits_an_odd_pixel_as_asked(pad: str) -> None:
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    geometry = Geometry(kernel=(2,), strides=(1,), dilations=(1,), auto_pad=pad)
    rows = compute_gather_indices(x.shape, geometry, np.arange(4)).columns(x)[0].T
    wanted = {"SAME_UPPER": [[0, 1], [1, 2], [2, 3], [3, 0]], "SAME_LOWER": [[0, 0], [0, 1], [1, 2], [2, 3]]}
    assert rows.tolist() == wanted[pad]
