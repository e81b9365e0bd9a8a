from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.errors import PlanError
from onnxq.numerics import cast_scale, clip_bounds, dequantize, fake_quant, qparams_from_range, quantize
from onnxq.spec import Granularity, PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.networks import open_session, parse_text
from tests.numerics.reference import draw_awkward

STORAGES = ("int8", "uint8", "int16", "uint16", "int4", "uint4")
SEEDS = st.integers(0, 2**32 - 1)
Engine = Callable[..., tuple[Any, Any]]

WHOLE = PerTensor()
rounds_float16 = pytest.mark.skipif(
    tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < (1, 30),
    reason="ONNX Runtime before 1.30 truncates float16 in QuantizeLinear (microsoft/onnxruntime#32452)",
)


def _spec(storage: str, granularity: Granularity = WHOLE) -> QuantSpec:
    signed, bits = not storage.startswith("u"), int(storage.lstrip("uint"))
    return QuantSpec(bits=bits, signed=signed, storage=storage, granularity=granularity, symmetric=False)


def _same(ours: Any, theirs: Any) -> None:
    """Equal bit for bit: -0.0 is not 0.0."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.tobytes() == theirs.tobytes()


def _check(engine: Engine, x: Any, numbers: QParams, spec: QuantSpec) -> None:
    q, y = engine(x, numbers, spec)
    ours = quantize(x, numbers, spec)
    np.testing.assert_array_equal(ours.astype(np.int32), q)
    _same(fake_quant(x, numbers, spec), y)
    _same(dequantize(ours, numbers, spec, x.dtype), y)


@st.composite
def _numbers(draw: Any, spec: QuantSpec, shape: tuple[int, ...] = ()) -> QParams:
    """One drawn scale and zero point, the others near it at random."""
    rng = np.random.default_rng(draw(SEEDS))
    scale = draw(st.floats(2.0**-20, 2.0**100, width=32)) * rng.uniform(0.0625, 16, shape)
    zero = draw(st.integers(spec.qmin, spec.qmax))
    some = rng.integers(spec.qmin, spec.qmax, shape, endpoint=True)
    return QParams(np.asarray(scale, np.float32), np.asarray(some if shape else zero, np.int32))


# Drawn by numpy from hypothesis's seed: thousands of values an example instead of dozens.
GENERATORS = SEEDS.map(np.random.default_rng)


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=60)
@given(data=st.data())
def test_float32_per_tensor_equals_onnxruntime(engine: Engine, storage: str, data: Any) -> None:
    spec = _spec(storage)
    numbers = data.draw(_numbers(spec))
    _check(engine, draw_awkward(data.draw(GENERATORS), numbers.scale, (2000,)), numbers, spec)


@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=25)
@given(data=st.data())
def test_float32_per_channel_and_block_equal_onnxruntime(engine: Engine, storage: str, data: Any) -> None:
    axis = data.draw(st.integers(0, 2))
    shape = (6, 9, 8)
    channel = _spec(storage, PerChannel(axis))
    numbers = data.draw(_numbers(channel, (shape[axis],)))
    x = draw_awkward(data.draw(GENERATORS), numbers.scale, shape)
    # From |x / scale| = 2**31 on the engine's loops for the last axis and for blocks wrap, as its float16 kernel does.
    most = min(2.0**30 * float(numbers.scale.min()), 2.0**127)
    x = np.clip(np.nan_to_num(x), np.float32(-most), np.float32(most))
    _check(engine, x, numbers, channel)
    _check(engine, x, numbers, _spec(storage, PerChannel(axis - 3)))
    block = _spec(storage, PerBlock(axis, 2))
    scales = tuple(-(-dim // 2) if k == axis else dim for k, dim in enumerate(shape))
    rng = np.random.default_rng(data.draw(SEEDS))
    steps = (numbers.scale.min() * rng.uniform(1, 256, scales)).astype(np.float32)
    zeros = rng.integers(block.qmin, block.qmax, scales, endpoint=True).astype(np.int32)
    _check(engine, x, QParams(steps, zeros), block)


@rounds_float16
@pytest.mark.parametrize("storage", STORAGES)
def test_every_float16_equals_onnxruntime(engine: Engine, storage: str) -> None:
    """All 65536 values. ONNX Runtime's float16 kernel wraps from |x / scale| = 2**31 on; those follow ONNX here."""
    spec = _spec(storage)
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    for step in (2.0**-24, 3e-5, 0.1, 0.37, 1.0, 100.0):
        for zero in (spec.qmin, 0, (spec.qmin + spec.qmax) // 2, spec.qmax):
            numbers = QParams(np.asarray(step, np.float32), np.asarray(zero, np.int32))
            stored = float(np.float16(step))
            with np.errstate(invalid="ignore"):
                plain = np.abs(every.astype(np.float64) / stored) < 2.0**31 - 2.0**17
            assert plain.sum() > 40000
            _check(engine, every[plain], numbers, spec)


@rounds_float16
@pytest.mark.parametrize("storage", STORAGES)
@settings(max_examples=15)
@given(data=st.data())
def test_float16_per_channel_and_block_equal_onnxruntime(engine: Engine, storage: str, data: Any) -> None:
    rng = np.random.default_rng(data.draw(SEEDS))
    x = rng.integers(0, 2**16, (30, 7)).astype(np.uint16).view(np.float16)
    x[~np.isfinite(x)] = np.float16(-65504)
    for grain, shape in ((PerChannel(1), (7,)), (PerBlock(1, 2), (30, 4))):
        spec = _spec(storage, grain)
        steps = np.exp2(rng.uniform(-14, 7, shape)).astype(np.float32)
        zeros = rng.integers(spec.qmin, spec.qmax, shape, endpoint=True).astype(np.int32)
        _check(engine, x, QParams(steps, zeros), spec)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("storage", STORAGES)
def test_infinities_saturate_and_nan_is_the_lowest_level(storage: str, dtype: Any) -> None:
    spec = _spec(storage)
    middle = (spec.qmin + spec.qmax) // 2
    numbers = QParams(np.asarray(0.5, np.float32), np.asarray(middle, np.int32))
    q = quantize(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], dtype), numbers, spec)
    assert q.tolist() == [spec.qmax, spec.qmin, spec.qmin, middle, middle]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
@settings(max_examples=40)
@given(data=st.data())
def test_float_clip_before_8_bits_equals_the_narrow_type(engine: Engine, bits: int, signed: bool, data: Any) -> None:
    symmetric, narrow = data.draw(st.booleans()), data.draw(st.booleans())
    spec = QuantSpec(bits=bits, signed=signed, symmetric=symmetric, narrow_range=narrow)
    ends = st.floats(-(2.0**66), 2.0**66, width=32)
    lo, hi = sorted(data.draw(st.tuples(ends, ends)))
    numbers = qparams_from_range(lo, hi, spec)
    bounds = np.float32(clip_bounds(numbers, spec))
    around = [np.nextafter(bounds, np.float32(-np.inf)), bounds, np.nextafter(bounds, np.float32(np.inf))]
    awkward = draw_awkward(data.draw(GENERATORS), numbers.scale, (2000,))
    x = np.concatenate([awkward, *around, np.float32([np.inf, -np.inf])])
    x = x[~np.isnan(x)]
    q, y = engine(x, numbers, spec, clip_bounds(numbers, spec))
    assert q.min() >= spec.qmin
    assert q.max() <= spec.qmax
    np.testing.assert_array_equal(quantize(x, numbers, spec).astype(np.int32), q)
    _same(fake_quant(x, numbers, spec), y)


@rounds_float16
@pytest.mark.parametrize("bits", [2, 4, 7])
def test_float16_clip_equals_the_narrow_type(engine: Engine, bits: int) -> None:
    spec = QuantSpec(bits=bits, signed=False, symmetric=False)
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[~np.isnan(every)]
    for lo, hi in ((-1.0, 3.0), (0.0, 6.0), (-0.003, 0.001), (-300.0, 20.0)):
        numbers = qparams_from_range(lo, hi, spec)
        q, y = engine(every, numbers, spec, clip_bounds(numbers, spec, np.float16))
        np.testing.assert_array_equal(quantize(every, numbers, spec).astype(np.int32), q)
        _same(fake_quant(every, numbers, spec), y)


@pytest.mark.parametrize("count", [1, 7])
def test_int32_bias_round_trips_within_half_a_step(count: int) -> None:
    bias = np.linspace(-3, 3, count, dtype=np.float32)
    spec = QuantSpec(bits=32, granularity=PerChannel(0))
    numbers = QParams(np.full(count, 1e-7, np.float32), np.zeros(count, np.int32))
    q = quantize(bias, numbers, spec)
    assert q.dtype == np.int32
    assert np.abs(q * np.float64(np.float32(1e-7)) - bias).max() <= 0.5001e-7
    assert (quantize(np.full(count, 1e9, np.float32), numbers, spec) == 2**31 - 1).all()


def test_int32_bias_per_tensor_is_divided_in_float64() -> None:
    """float32 cannot hold 2**31 - 1, nor tell 16777217 steps from 16777216."""
    spec, numbers = QuantSpec(bits=32), QParams(np.asarray(2.0**-20, np.float32), np.asarray(0, np.int32))
    assert quantize(np.float32([1e9, -1e9]), numbers, spec).tolist() == [2**31 - 1, -(2**31)]
    third = QParams(np.asarray(1 / 3, np.float32), np.asarray(0, np.int32))
    wanted = [round(float(np.float32(7e6)) / float(np.float32(1 / 3)))]
    assert quantize(np.float32([7e6]), third, spec).tolist() == wanted


def test_int32_dequantize_equals_onnxruntime() -> None:
    q = np.array([0, 1, -1, 2**24 + 1, 2**31 - 1, -(2**31)], np.int32)
    text = "g (int32[6] q, float s) => (float[6] y) { y = DequantizeLinear(q, s) }"
    session = open_session(parse_text(text, opset=13))
    scale = np.asarray(3.1e-7, np.float32)
    numbers = QParams(scale, np.asarray(0, np.int32))
    _same(dequantize(q, numbers, QuantSpec(bits=32)), session.run(None, {"q": q, "s": scale})[0])


def test_float64_and_scalars_are_taken() -> None:
    numbers = QParams(np.asarray(0.1, np.float32), np.asarray(0, np.int32))
    assert quantize(np.array([0.25, 1e300, -1e300]), numbers, QuantSpec()).tolist() == [2, 127, -128]
    assert quantize(0.25, numbers, QuantSpec()).shape == ()
    assert fake_quant(np.float32(0.25), numbers, QuantSpec()).shape == ()


@pytest.mark.parametrize(
    ("scale", "spec", "shape"),
    [
        (np.ones(3), QuantSpec(), (3, 4)),
        (np.ones(3), QuantSpec(granularity=PerChannel(1)), (3, 4)),
        (np.ones(3), QuantSpec(granularity=PerChannel(2)), (3, 3)),
        (np.ones((3, 2)), QuantSpec(granularity=PerBlock(1, 2)), (3, 5)),
    ],
)
def test_a_scale_that_does_not_fit_is_a_plan_error(scale: Any, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    numbers = QParams(scale.astype(np.float32), np.zeros(scale.shape, np.int32))
    with pytest.raises(PlanError, match=r"scale|axis"):
        quantize(np.zeros(shape, np.float32), numbers, spec)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e-9])
def test_a_scale_that_is_none_is_a_plan_error(bad: float) -> None:
    numbers = QParams(np.asarray(bad, np.float32), np.asarray(0, np.int32))
    with pytest.raises(PlanError, match=r"0, negative or not finite as float16"):
        cast_scale(numbers, np.float16)


@pytest.mark.parametrize("spec", [
    QuantSpec(), QuantSpec(signed=False, symmetric=False), QuantSpec(bits=4, narrow_range=True), QuantSpec(bits=16),
    QuantSpec(signed=False, bits=16, symmetric=False), QuantSpec(granularity=PerChannel(1)),
    QuantSpec(bits=3, signed=False, symmetric=False, granularity=PerChannel(0)), QuantSpec(granularity=PerBlock(1, 4)),
])  # fmt: skip
def test_fake_quant_without_integers_is_quantize_and_dequantize_to_the_bit(spec: QuantSpec) -> None:
    rng = np.random.default_rng(3)
    values = (rng.standard_normal((5, 7)) * np.exp(rng.standard_normal((5, 7)) * 3)).astype(np.float32)
    values[0, :6] = [np.nan, np.inf, -np.inf, -0.0, 1e-40, -1e38]
    shape = {PerChannel(0): (5,), PerChannel(1): (7,), PerBlock(1, 4): (5, 2)}.get(spec.granularity, ())
    wide = rng.uniform(0.1, 3.0, shape)
    numbers = qparams_from_range(-wide, 1.5 * wide, spec)
    for x in (values, np.asfortranarray(values), values[:, ::-1] if spec.granularity != PerBlock(1, 4) else values):
        wanted = dequantize(quantize(x, numbers, spec), numbers, spec)
        got = fake_quant(x, numbers, spec)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32))
