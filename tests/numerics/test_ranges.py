from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from onnxq.errors import CalibrationError
from onnxq.numerics import clip_bounds, fake_quant, qparams_from_range, scale_floor
from onnxq.runtime import optimize_graph
from onnxq.spec import PerChannel, QParams, QuantSpec
from tests.passes.kit import ops, parse

LARGEST = float(np.finfo(np.float32).max)
FLOATS = st.floats(-(2.0**127), 2.0**127, width=32)
SPECS = st.builds(
    QuantSpec,
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16]),
    signed=st.booleans(),
    symmetric=st.booleans(),
    narrow_range=st.booleans(),
)


def _levels(numbers: QParams, spec: QuantSpec) -> tuple[Any, Any]:
    """Lowest and highest representable value, multiplied in float32 as ONNX Runtime's optimizer does."""
    ends = [np.float32(level) - numbers.zero_point.astype(np.float32) for level in (spec.qmin, spec.qmax)]
    return ends[0] * numbers.scale, ends[1] * numbers.scale


@given(FLOATS, FLOATS, SPECS)
@example(-LARGEST, LARGEST, QuantSpec())
@example(-LARGEST, LARGEST, QuantSpec(signed=False, symmetric=False))
@example(-LARGEST, LARGEST, QuantSpec(bits=2))
def test_a_range_gives_a_sound_scale_and_covers_its_values(a: float, b: float, spec: QuantSpec) -> None:
    lo, hi = min(a, b), max(a, b)
    numbers = qparams_from_range(lo, hi, spec)
    assert numbers.scale.shape == numbers.zero_point.shape == ()
    assert numbers.scale.dtype == np.float32
    assert numbers.zero_point.dtype == np.int32
    assert np.isfinite(numbers.scale)
    assert numbers.scale >= scale_floor(spec) >= 2.0**-32
    assert spec.qmin <= numbers.zero_point <= spec.qmax
    low, high = _levels(numbers, spec)
    assert np.isfinite(low)
    assert np.isfinite(high)
    assert fake_quant(np.float32(0), numbers, spec) == 0
    # Never further than half a step, but for the zero point's own rounding (half a step more at an end).
    worst = max(abs(float(fake_quant(np.float32(x), numbers, spec)) - x) for x in (lo, hi))
    assert worst <= 1.001 * float(numbers.scale) + 2.0**-120


@pytest.mark.parametrize(("symmetric", "scale"), [(False, 2 / 255), (True, 1.5 / 127)])
def test_a_range_has_a_least_width(symmetric: bool, scale: float) -> None:
    spec = QuantSpec(signed=symmetric, symmetric=symmetric, min_range=2.0)
    assert float(qparams_from_range(-0.5, 0.0, spec).scale) == pytest.approx(scale)
    free = qparams_from_range(-3.0, 0.5, replace(spec, min_range=0.0))
    assert float(qparams_from_range(-3.0, 0.5, spec).scale) == float(free.scale)


@given(st.floats(2.0**-8, 2.0**20, width=32), st.floats(-1, 0, width=32))
def test_footroom_is_a_third_of_the_levels_or_what_is_below_zero(high: float, low: float) -> None:
    spec = QuantSpec(signed=False, symmetric=False, footroom=True)
    numbers = qparams_from_range(low * high, high, spec)
    assert _levels(numbers, spec)[1] == pytest.approx(high, rel=0.01)
    assert numbers.zero_point >= 85
    # The bound of a Relu in front does not take it away.
    bounded = qparams_from_range(low * high, high, spec, bound=(0.0, high))
    assert bounded.zero_point == 85
    assert _levels(bounded, spec)[1] == pytest.approx(high, rel=1e-6)
    assert bounded.computed_for != QuantSpec(signed=False, symmetric=False).levels


@given(FLOATS, SPECS)
def test_symmetric_levels_end_at_the_largest_value(a: float, spec: QuantSpec) -> None:
    assume(abs(a) > 2.0**-8)
    if not spec.symmetric:
        return
    numbers = qparams_from_range(min(a, 0.0), max(a, 0.0), spec)
    assert int(numbers.zero_point) == (0 if spec.signed else 2 ** (spec.bits - 1))
    assert _levels(numbers, spec)[1] == pytest.approx(abs(a), rel=1e-6)


def test_int8_symmetric_divides_by_127() -> None:
    assert qparams_from_range(-1.0, 0.5, QuantSpec()).scale == np.float32(1 / 127)
    unsigned = qparams_from_range(-1.0, 0.5, QuantSpec(signed=False))
    assert (unsigned.scale, unsigned.zero_point) == (np.float32(1 / 127), 128)


def test_asymmetric_zero_point_follows_the_range() -> None:
    spec = QuantSpec(signed=False, symmetric=False)
    assert qparams_from_range(0.0, 6.0, spec).zero_point == 0
    assert qparams_from_range(2.0, 6.0, spec).zero_point == 0  # widened to hold 0
    assert qparams_from_range(-6.0, -2.0, spec).zero_point == 255
    middle = qparams_from_range(-1.0, 3.0, spec)
    assert (middle.scale, middle.zero_point) == (np.float32(4 / 255), 64)
    assert qparams_from_range(-1.0, 3.1, spec).zero_point == 62  # 62.2 steps below 0
    assert qparams_from_range(0.0, 6.0, QuantSpec(symmetric=False)).zero_point == -128


def test_arrays_are_per_channel() -> None:
    spec = QuantSpec(granularity=PerChannel(0))
    numbers = qparams_from_range([-1.0, 0.0, -0.25], [0.5, 2.0, 0.125], spec, origin="three")
    np.testing.assert_array_equal(numbers.scale, np.float32([1 / 127, 2 / 127, 0.25 / 127]))
    assert numbers.zero_point.tolist() == [0, 0, 0]
    assert numbers.origin == "three"


@pytest.mark.parametrize("spec", [QuantSpec(), QuantSpec(signed=False, symmetric=False)])
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30])
def test_dead_channels_get_the_floor(spec: QuantSpec, size: float) -> None:
    numbers = qparams_from_range(-size, size, spec)
    assert numbers.scale == 2.0**-24
    assert fake_quant(np.float32(0), numbers, spec) == 0
    # 16 bits have a finer one.
    assert qparams_from_range(-1e-3, 1e-3, QuantSpec(bits=16)).scale == np.float32(1e-3 / 32767)


@pytest.mark.parametrize(("lo", "hi"), [(np.nan, 1), (0, np.nan), (-np.inf, 1), (0, np.inf), (2, 1)])
def test_a_range_that_is_none_is_a_calibration_error(lo: float, hi: float) -> None:
    with pytest.raises(CalibrationError, match=r"conv1: .*(finite|empty)"):
        qparams_from_range([0.0, lo], [1.0, hi], QuantSpec(granularity=PerChannel(0)), origin="conv1")


@given(
    FLOATS,
    FLOATS,
    SPECS,
    st.one_of(st.none(), st.floats(-1000, 0, width=32)),
    st.one_of(st.none(), st.floats(0, 1000, width=32)),
)
def test_levels_lie_in_the_bound(a: float, b: float, spec: QuantSpec, low: float | None, high: float | None) -> None:
    numbers = qparams_from_range(min(a, b), max(a, b), spec, bound=(low, high))
    bottom, top = _levels(numbers, spec)
    floor = scale_floor(spec)
    below, above = spec.qmin - int(numbers.zero_point), spec.qmax - int(numbers.zero_point)
    if low is not None and below and low / below >= floor:
        assert bottom >= np.float32(low)
    if high is not None and above and high / above >= floor:
        assert top <= np.float32(high)
    if not spec.symmetric and low == 0.0:
        assert numbers.zero_point == spec.qmin
    assert numbers.scale >= floor


@pytest.mark.parametrize("high", [6.0, 1.0, 0.1, 20.0, 3.3, 1e-3])
def test_relu6_keeps_its_top_level_and_onnxruntime_may_drop_the_clip(high: float) -> None:
    spec = QuantSpec(signed=False, symmetric=False)
    plain = qparams_from_range(0.0, high, spec)
    bound = qparams_from_range(0.0, high, spec, bound=(0.0, high))
    assert np.float32(255) * bound.scale <= np.float32(high)
    assert np.float32(plain.scale) - bound.scale <= 2 * np.spacing(plain.scale)


def test_a_bound_the_scheme_cannot_keep_changes_nothing() -> None:
    assert qparams_from_range(0.0, 4.0, QuantSpec(), bound=(0.0, None)) == qparams_from_range(0.0, 4.0, QuantSpec())
    floor = qparams_from_range(0.0, 4.0, QuantSpec(signed=False, symmetric=False), bound=(0.0, 1e-20))
    assert floor.scale == 2.0**-24
    # A range wider than its bound is cut.
    spec = QuantSpec(signed=False, symmetric=False)
    assert qparams_from_range(-2.0, 9.0, spec, bound=(0.0, 6.0)) == qparams_from_range(0.0, 6.0, spec, bound=(0.0, 6.0))


def test_clip_bounds_need_one_finite_pair() -> None:
    with pytest.raises(CalibrationError, match="per tensor"):
        clip_bounds(qparams_from_range([0.0], [1.0], QuantSpec(bits=4)), QuantSpec(bits=4, granularity=PerChannel(0)))
    spec = QuantSpec(bits=4, symmetric=False)
    huge = QParams(np.asarray(60000, np.float32), np.asarray(0, np.int32))
    assert clip_bounds(huge, spec) == (-480000, 420000)
    with pytest.raises(CalibrationError, match="float16"):
        clip_bounds(huge, spec, np.float16)
    low, high = clip_bounds(qparams_from_range(-1.0, 1.0, QuantSpec(bits=4)), QuantSpec(bits=4))
    assert isinstance(low, np.float32)
    assert (low, high) == (np.float32(-8) * np.float32(1 / 7), np.float32(7) * np.float32(1 / 7))


UINT8 = QuantSpec(signed=False, symmetric=False)
WEIGHT = np.random.default_rng(0).integers(-127, 127, (8, 8, 1, 1)).astype(np.int8)
TEXT = """g (float[1,8,6,6] x) => (float[1,8,6,6] y) {
    xq = QuantizeLinear(x, xs, xz) xd = DequantizeLinear(xq, xs, xz) wd = DequantizeLinear(w, ws, wz)
    v = Conv(xd, wd) c = Clip(v, lo, hi) q = QuantizeLinear(c, s, z) y = DequantizeLinear(q, s, z) }"""


def fuses(low: float, high: float, numbers: QParams) -> bool:
    """Whether ONNX Runtime computes DQ -> Conv -> Clip(low, high) -> Q in integers."""
    constants = {"xs": 0.05, "xz": np.uint8(0), "w": WEIGHT, "ws": 0.01, "wz": np.int8(0), "lo": low, "hi": high}
    model = parse(TEXT, **constants, s=numbers.scale, z=numbers.zero_point.astype(np.uint8))
    kernels = set(ops(optimize_graph(model)))
    assert ("QLinearConv" in kernels) != bool(kernels & {"Clip", "Conv", "FusedConv"})
    return "QLinearConv" in kernels


@pytest.mark.parametrize("high", [6.0, 1.0, 0.1, 3.3, 1000.0])
def test_a_relu6_fuses(high: float) -> None:
    assert fuses(0.0, high, qparams_from_range(0.0, high, UINT8, bound=(0.0, high)))


def test_every_clip_fuses_with_its_bound_whatever_was_seen() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        low, high = float(np.float32(-np.exp(rng.uniform(-2, 2)))), float(np.float32(np.exp(rng.uniform(-2, 2))))
        seen = rng.uniform(0.3, 1.0, 2)
        numbers = qparams_from_range(low * seen[0], high * seen[1], UINT8, bound=(low, high))
        assert fuses(low, high, numbers), (low, high, seen)


def test_without_its_bound_a_clip_may_keep_the_conv_float() -> None:
    assert not fuses(-1.0, 1.0, qparams_from_range(-1.0, 1.0, UINT8))
    assert fuses(-1.0, 1.0, qparams_from_range(-1.0, 1.0, UINT8, bound=(-1.0, 1.0)))
