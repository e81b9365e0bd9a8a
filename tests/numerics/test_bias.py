from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.errors import PlanError
from onnxq.numerics import bias_qparams, floor_weight_scale, quantize
from onnxq.spec import PerChannel, QParams, QuantSpec


def _numbers(*scale: float) -> QParams:
    array = np.asarray(scale[0] if len(scale) == 1 else scale, np.float32)
    return QParams(array, np.zeros(array.shape, np.int32))


def test_the_scale_is_the_float32_product() -> None:
    x, w = _numbers(0.1), _numbers(0.3, 0.7, 1e-6)
    got = bias_qparams(x, w, 3)
    assert got.scale.dtype == np.float32
    np.testing.assert_array_equal(got.scale, np.float32(0.1) * np.float32([0.3, 0.7, 1e-6]))
    assert got.zero_point.tolist() == [0, 0, 0]
    whole = bias_qparams(x, _numbers(0.3), 5)
    assert whole.scale.shape == ()
    assert whole.scale == np.float32(0.1) * np.float32(0.3)


def test_channel_scales_repeat_group_by_group() -> None:
    got = bias_qparams(_numbers(1.0), _numbers(2.0, 3.0), 6)
    assert got.scale.tolist() == [2.0, 3.0, 2.0, 3.0, 2.0, 3.0]


def test_scales_that_do_not_fit_are_plan_errors() -> None:
    with pytest.raises(PlanError, match="do not fit"):
        bias_qparams(_numbers(1.0), _numbers(2.0, 3.0), 5)
    with pytest.raises(PlanError, match="per tensor"):
        bias_qparams(_numbers(1.0, 2.0), _numbers(2.0), 2)
    with pytest.raises(PlanError, match="do not fit"):
        floor_weight_scale(np.ones(2), 1.0, np.ones(3))
    block = QParams(np.ones((2, 2), np.float32), np.zeros((2, 2), np.int32))
    with pytest.raises(PlanError, match="do not fit"):
        bias_qparams(_numbers(1.0), block, 4)


@given(
    st.lists(st.floats(0, 10, width=32), min_size=1, max_size=5),
    st.integers(1, 3),
    st.floats(2.0**-24, 100, width=32),
    st.integers(0, 2**32 - 1),
)
def test_no_bias_overflows_on_a_floored_scale(channels: list[float], groups: int, x: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bias = (rng.standard_normal(len(channels) * groups) * 10.0 ** rng.integers(-12, 12)).astype(np.float32)
    floored = floor_weight_scale(np.float32(channels), x, bias)
    assert floored.dtype == np.float32
    assert (floored >= np.float32(channels)).all()
    assert (floored >= 2.0**-24).all()
    scale = bias_qparams(_numbers(x), QParams(floored, np.zeros(len(channels), np.int32)), bias.size)
    q = quantize(bias, scale, QuantSpec(bits=32, granularity=PerChannel(0)))
    assert np.abs(q.astype(np.int64)).max() <= 2**29 + 64
    steps = scale.scale.astype(np.float64)
    assert (np.abs(q * steps - bias) <= 0.5 * steps * (1 + 1e-9)).all()


def test_scales_that_hold_their_bias_stay_as_they_are() -> None:
    scale = np.float32([0.01, 0.02])
    np.testing.assert_array_equal(floor_weight_scale(scale, 0.1, [3.0, -4.0]), scale)


def test_a_dead_channel_is_raised_to_what_its_bias_needs() -> None:
    floored = floor_weight_scale(np.float32([1e-38, 0.0, 0.01]), 0.05, np.float32([5.0, 0.0, 5.0]))
    assert floored[0] == pytest.approx(5.0 / (0.05 * 2**29), rel=1e-6)
    assert floored[1] == 2.0**-24
    assert floored[2] == np.float32(0.01)
    whole = floor_weight_scale(np.float32(1e-30), 0.05, np.float32([1.0, -5.0]))
    assert whole.shape == ()
    assert whole == floored[0]
