"""Rounding by second moments inside 16-bit sums: sums kept, errors no larger than those of bounded nearest rounding."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.backends.ort.rules import find_sum_order
from onnxq.config import TensorConfig
from onnxq.graph import GraphIndex, name_nodes
from onnxq.numerics import SumOrder
from onnxq.passes.rounding.gptq_core import factor_hessian, find_partner_columns, layer_error
from onnxq.passes.rounding.operators import Operator, list_operators
from tests.passes.rounding.arrays import round_to_nearest, round_with_feedback, round_within_sums
from tests.passes.rounding.kit import one_node
from tests.pipeline.models import EVERYTHING, quantize

Array = np.ndarray[Any, Any]
LIMITS = (-128, 127)


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
    plain = round_to_nearest(w, scale, zero, LIMITS, partner)
    found = round_with_feedback(w, seen, scale, zero, LIMITS, partner)
    for levels in (plain, found):
        assert keeps(levels, partner)
        assert levels.min() >= LIMITS[0]
        assert levels.max() <= LIMITS[1]
    errors = [layer_error(w, levels, scale, zero, seen.damped) for levels in (found, plain)]
    assert (errors[0] <= errors[1] * (1 + 1e-6) + 1e-12).all()


@settings(max_examples=60)
@given(layers())
def test_each_row_takes_a_scale_of_its_own_that_is_worth_it(case: Any) -> None:
    w, h, scale, zero, partner = case
    seen = factor_hessian(h)
    found = round_within_sums(w, seen, scale, zero, LIMITS, partner)
    assert keeps(found.codes, partner)
    assert found.factors.shape == w.shape[:2]
    assert ((found.factors >= 1) & (found.factors <= 2)).all()
    wider = np.asarray(scale * found.factors[:, :, None], np.float32)
    plain = layer_error(w, round_to_nearest(w, wider, zero, LIMITS, partner), wider, zero, seen.damped)
    assert (layer_error(w, found.codes, wider, zero, seen.damped) <= plain * (1 + 1e-6) + 1e-12).all()


@settings(max_examples=30)
@given(layers())
def test_weights_with_room_are_rounded_as_without_the_bound(case: Any) -> None:
    w, h, scale, _, partner = case
    narrow, zero, seen = w * np.float32(0.45), np.zeros(w.shape, np.int32), factor_hessian(h)
    free = round_with_feedback(narrow, seen, scale, zero, LIMITS)
    if keeps(free, partner) and np.abs(free).max() <= 64:
        found = round_within_sums(narrow, seen, scale, zero, LIMITS, partner)
        assert np.array_equal(found.codes, free)
        assert (found.factors == 1).all()
        assert np.array_equal(round_with_feedback(narrow, seen, scale, zero, LIMITS, partner), free)


def test_columns_not_rounded_yet_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose partners are rounded at other times; memory that nothing was written to is full of NaN."""
    rng = np.random.default_rng(0)
    w = rng.uniform(-1, 1, (6, 4, 8)).astype(np.float32)
    x = rng.standard_normal((6, 8, 60)) * np.exp(rng.standard_normal((6, 8, 1)))
    seen, partner = factor_hessian(x @ x.transpose(0, 2, 1) / 60), np.arange(8) ^ 1
    scale = np.broadcast_to(np.abs(w).max(axis=2, keepdims=True) / np.float32(127), w.shape)
    zero = np.zeros(w.shape, np.int32)
    wanted = round_with_feedback(w, seen, scale, zero, LIMITS, partner)
    full = np.full_like
    nan = lambda like, *_, **__: full(like, np.nan if like.dtype.kind == "f" else 77)  # noqa: E731
    monkeypatch.setattr(np, "empty_like", nan)
    assert np.array_equal(round_with_feedback(w, seen, scale, zero, LIMITS, partner), wanted)
    assert keeps(wanted, partner)


def test_wider_steps_pay_for_uniform_weights() -> None:
    rng = np.random.default_rng(0)
    w = rng.uniform(-1, 1, (1, 16, 64)).astype(np.float32)
    x = rng.standard_normal((1, 64, 400))
    seen, partner = factor_hessian(x @ x.transpose(0, 2, 1) / 400), np.arange(64) ^ 1
    scale = np.broadcast_to(np.abs(w).max(axis=2, keepdims=True) / np.float32(127), w.shape)
    zero = np.zeros(w.shape, np.int32)
    found = round_within_sums(w, seen, scale, zero, LIMITS, partner)
    wider = np.asarray(scale * found.factors[:, :, None], np.float32)
    same = layer_error(w, round_with_feedback(w, seen, scale, zero, LIMITS, partner), scale, zero, seen.damped)
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
    proto = one_node(op, rng.standard_normal(weight).astype(np.float32), shape, **attrs)
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
            found = find_partner_columns(row, one.weight.shape, order)
            assert found.tolist() == slow[g][r] == slow[0][0]
