"""FP8 E4M3 is computed bit for bit as ONNX Runtime's QuantizeLinear and DequantizeLinear do with saturate=1."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.errors import ConfigError
from onnxq.numerics import dequantize, fake_quant, list_quantized_values, qparams_from_range, quantize, weight_qparams
from onnxq.runtime import Session
from onnxq.spec import FLOAT8, PerChannel, QParams, QuantSpec
from tests.networks import parse_text

SPEC = QuantSpec(storage=FLOAT8)
HARD = np.array([0, -0.0, np.inf, -np.inf, np.nan, 448, 449, 463.9, 464, 480, -464, 2**-9, 2**-10, 3 * 2**-11, 17, 19])


def run_engine(x: np.ndarray, scale: np.ndarray, axis: int = 1) -> np.ndarray:
    """x through QuantizeLinear and DequantizeLinear of ONNX Runtime. axis: of several scales."""
    kind = f"{'float' if x.dtype == np.float32 else 'float16'}[{','.join('AB'[: x.ndim])}]"
    text = f"""g ({kind} x) => ({kind} y) {{
        q = QuantizeLinear <axis = {axis}> (x, s, z) y = DequantizeLinear <axis = {axis}> (q, s, z) }}"""
    zero = np.zeros(scale.shape, ml_dtypes.float8_e4m3fn)
    proto = parse_text(text, opset=19, ir=9, s=scale.astype(x.dtype), z=zero)
    return Session(proto, optimize=False).run({"x": x})["y"]


EVERY = list_quantized_values(SPEC).astype(np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("scale", [1.0, 0.037, 1e-4, 33.3])
def test_as_onnx_runtime(dtype: type, scale: float) -> None:
    rng = np.random.default_rng(0)
    assert EVERY.size == 253
    numbers = QParams(np.float32(dtype(scale)), np.int32(0))
    ties = ((EVERY[1:] + EVERY[:-1]) / 2 * numbers.scale).astype(np.float32)
    beside = np.nextafter(ties, rng.choice(np.float32([-np.inf, np.inf]), ties.size))
    some = [rng.standard_normal(20000) * 10 ** rng.uniform(-8, 5, 20000), HARD, ties, beside, [1e-45, 3e38]]
    with np.errstate(over="ignore", under="ignore"):
        x = np.concatenate(some).astype(dtype)
    mine = fake_quant(x, numbers, SPEC)
    assert mine.dtype == dtype
    np.testing.assert_array_equal(mine, run_engine(x, np.asarray(scale)))


def test_per_channel_as_onnx_runtime() -> None:
    x = np.random.default_rng(1).standard_normal((3, 500)).astype(np.float32)
    scale = np.array([0.01, 0.1, 1.0], np.float32)
    spec = QuantSpec(storage=FLOAT8, granularity=PerChannel(0))
    mine = fake_quant(x, QParams(scale, np.zeros(3, np.int32)), spec)
    np.testing.assert_array_equal(mine, run_engine(x, scale, axis=0))


@given(st.floats(-1e6, 1e6, width=32), st.floats(2.0**-20, 1e4, width=32))
@settings(max_examples=200, deadline=None)
def test_levels_are_kept_and_the_error_is_bounded(x: float, scale: float) -> None:
    """Quantizing again changes nothing; within range the relative error is at most 2**-4, near 0 half a step."""
    numbers = QParams(np.float32(scale), np.int32(0))
    once = fake_quant(np.float32(x), numbers, SPEC)
    np.testing.assert_array_equal(fake_quant(once, numbers, SPEC), once)
    assert quantize(np.float32(x), numbers, SPEC).dtype == ml_dtypes.float8_e4m3fn
    if abs(x) <= 448 * scale:
        assert abs(once - x) <= max(abs(x) * 2**-4, scale * 2**-10) * (1 + 1e-5)
    else:
        assert abs(once) == np.float32(448) * np.float32(scale)


@given(st.floats(0.0, 1e6, width=32), st.floats(0.0, 1e6, width=32))
@settings(max_examples=100, deadline=None)
def test_the_range_ends_at_448(low: float, high: float) -> None:
    numbers = qparams_from_range(-low, high, SPEC)
    top = max(low, high)
    assert int(numbers.zero_point) == 0
    if top > 1e-3:
        assert float(numbers.scale) == pytest.approx(top / 448, rel=1e-6)
        assert float(fake_quant(np.float32(top), numbers, SPEC)) == pytest.approx(top, rel=1e-5)


def test_weights_per_channel() -> None:
    sizes = np.array([[1], [10], [0.1], [0]], np.float32)
    w = np.random.default_rng(2).standard_normal((4, 9)).astype(np.float32) * sizes
    spec = QuantSpec(storage=FLOAT8, granularity=PerChannel(0))
    numbers = weight_qparams(w, spec)
    back = dequantize(quantize(w, numbers, spec), numbers, spec)
    assert (np.abs(back - w) <= np.abs(w) * 2**-4 + 1e-6).all()
    assert not back[3].any()


@pytest.mark.parametrize("wrong", [{"bits": 4}, {"symmetric": False}, {"signed": False}, {"narrow_range": True}])
def test_what_fp8_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        QuantSpec(**{"storage": FLOAT8, **wrong})  # type: ignore[arg-type]
