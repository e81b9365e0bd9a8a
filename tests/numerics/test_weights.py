from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.errors import CalibrationError, ConfigError, PlanError
from onnxq.numerics import bias_qparams, fake_quant, floor_weight_scale, qparams_from_range, quantize, weight_qparams
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, PerTensor, QParams, QuantSpec

MSE = ObserverSpec("mse")
GRAINS = (PerTensor(), PerChannel(0), PerChannel(1), PerChannel(-1), PerBlock(0, 3), PerBlock(1, 4))


def _weight(shape: tuple[int, ...] = (6, 10, 3, 3), seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.laplace(size=shape)
    rows = np.exp(rng.normal(size=shape[0])).reshape(-1, *[1] * (len(shape) - 1))
    return (values * rows).astype(np.float32)


def _rows(w: Any, spec: QuantSpec) -> list[Any]:
    """What shares a scale, the slow and obvious way."""
    grain = spec.granularity
    if isinstance(grain, PerTensor):
        return [w]
    if isinstance(grain, PerChannel):
        return [w.take(k, axis=grain.axis) for k in range(w.shape[grain.axis])]
    cuts = [range(a, min(a + grain.size, w.shape[grain.axis])) for a in range(0, w.shape[grain.axis], grain.size)]
    lines = [w.take(cut, axis=grain.axis) for cut in cuts]
    others = np.moveaxis(np.stack([line.min(axis=grain.axis) for line in lines]), 0, grain.axis).shape
    rows = []
    for index in np.ndindex(others):
        place = tuple(k for axis, k in enumerate(index) if axis != grain.axis)
        rows.append(np.moveaxis(lines[index[grain.axis]], grain.axis, -1)[place])
    return rows


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("grain", GRAINS, ids=str)
def test_minmax_is_the_range_of_each_group(grain: Any, symmetric: bool) -> None:
    w = _weight()
    spec = QuantSpec(bits=4, symmetric=symmetric, granularity=grain)
    numbers = weight_qparams(w, spec)
    rows = _rows(w, spec)
    wanted = qparams_from_range([r.min() for r in rows], [r.max() for r in rows], spec)
    np.testing.assert_array_equal(numbers.scale.ravel(), wanted.scale)
    np.testing.assert_array_equal(numbers.zero_point.ravel(), wanted.zero_point)
    assert fake_quant(w, numbers, spec).shape == w.shape  # and the shape is the one quantize wants
    assert numbers.origin == "weights, minmax"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("grain", GRAINS, ids=str)
def test_mse_is_never_worse_than_minmax_in_any_group(grain: Any, symmetric: bool, bits: int) -> None:
    w = _weight()
    spec = QuantSpec(bits=bits, symmetric=symmetric, granularity=grain)
    errors = []
    for observer in (MSE, None):
        gap = fake_quant(w, weight_qparams(w, spec, observer=observer), spec) - w
        errors.append(np.array([np.square(r, dtype=np.float64).sum() for r in _rows(gap, spec)]))
    assert (errors[0] <= errors[1] * (1 + 1e-6)).all()
    if bits < 4 and isinstance(grain, (PerTensor, PerChannel)):
        assert errors[0].sum() < 0.9 * errors[1].sum()


@pytest.mark.parametrize(("bits", "length"), [(2, 500), (3, 500), (4, 500), (6, 500), (8, 1500)])
def test_mse_finds_what_a_fine_search_finds(bits: int, length: int) -> None:
    w = _weight((4, length))
    spec = QuantSpec(bits=bits, granularity=PerChannel(0))
    found = np.square(fake_quant(w, weight_qparams(w, spec, observer=MSE), spec) - w).sum(axis=1)
    top = np.abs(w).max(axis=1)
    least = np.full(4, np.inf)
    for factor in np.linspace(1, 0.05, 2000):
        numbers = qparams_from_range(-top * factor, top * factor, spec)
        least = np.minimum(least, np.square(fake_quant(w, numbers, spec) - w).sum(axis=1))
    assert (found <= least * 1.02).all()


def test_mse_lets_the_ends_of_an_asymmetric_range_move_apart() -> None:
    w = np.random.default_rng(1).normal(size=(1, 20000)).astype(np.float32)
    w[0, 0] = 40.0  # one outlier at the upper end only
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    found = np.square(fake_quant(w, weight_qparams(w, spec, observer=MSE), spec) - w).sum()
    grid = [qparams_from_range(lo, hi, spec) for lo in np.linspace(-4, -1, 40) for hi in np.linspace(2, 12, 60)]
    assert found <= 1.02 * min(np.square(fake_quant(w, numbers, spec) - w).sum() for numbers in grid)


def test_zero_and_empty_weights_have_the_floor() -> None:
    for w in (np.zeros((3, 4), np.float32), np.zeros((3, 0), np.float32)):
        for observer in (None, MSE):
            numbers = weight_qparams(w, QuantSpec(granularity=PerChannel(0)), observer=observer)
            assert numbers.scale.tolist() == [2.0**-24] * 3


def test_float16_weights_are_taken() -> None:
    w = _weight().astype(np.float16)
    assert weight_qparams(w, QuantSpec()).scale == np.float32(np.abs(w).max() / np.float64(127))


def test_faults_have_their_own_errors() -> None:
    w = _weight()
    with pytest.raises(ConfigError, match=r"minmax|mse"):
        weight_qparams(w, QuantSpec(), observer=ObserverSpec("minmix"))
    with pytest.raises(ConfigError, match="'steps'"):
        weight_qparams(w, QuantSpec(), observer=ObserverSpec("mse", (("steps", 3),)))
    with pytest.raises(ConfigError, match="axis 4"):
        weight_qparams(w, QuantSpec(granularity=PerChannel(4)))
    w[0, 0, 0, 0] = np.nan
    with pytest.raises(CalibrationError, match="NaN"):
        weight_qparams(w, QuantSpec())


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
    assert bias_qparams(_numbers(1.0), _numbers(2.0, 3.0), 6).scale.tolist() == [2.0, 3.0, 2.0, 3.0, 2.0, 3.0]


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


def test_a_dead_channel_is_raised_to_what_its_bias_needs_and_others_stay() -> None:
    floored = floor_weight_scale(np.float32([1e-38, 0.0, 0.01, 0.02]), 0.05, [5.0, 0.0, 5.0, -4.0])
    assert floored[0] == pytest.approx(5.0 / (0.05 * 2**29), rel=1e-6)
    assert floored[1] == 2.0**-24
    assert floored[2:].tolist() == np.float32([0.01, 0.02]).tolist()
    whole = floor_weight_scale(np.float32(1e-30), 0.05, np.float32([1.0, -5.0]))
    assert whole.shape == ()
    assert whole == floored[0]
