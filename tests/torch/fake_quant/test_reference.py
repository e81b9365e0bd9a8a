"""The numbers of fake_quantize: bit for bit those of onnxq.numerics, which are those of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ml_dtypes
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq import numerics
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from torch_frontend.fake_quant import fake_quantize
from torch_frontend.fake_quant.grid import Grid
from torch_frontend.fake_quant.reference import compute_forward

SEEDS = st.integers(0, 2**32 - 1)
SPECS = st.builds(
    QuantSpec,
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16]),
    signed=st.booleans(),
    symmetric=st.just(False),
    narrow_range=st.booleans(),
)


def _ours(x: Any, numbers: QParams, spec: QuantSpec) -> Any:
    """fake_quantize of a numpy array; the compiled kernel and the reference must agree first."""
    values = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else None
    values = torch.from_numpy(x) if values is None else values
    grain = spec.granularity
    axis = None if isinstance(grain, PerTensor) else grain.axis
    block = grain.size if isinstance(grain, PerBlock) else 0
    scale, zero = torch.from_numpy(numbers.scale), torch.from_numpy(numbers.zero_point.astype(np.float32))
    y = fake_quantize(values, scale, zero, qmin=spec.qmin, qmax=spec.qmax, axis=axis, block_size=block)
    assert y.dtype == values.dtype
    assert y.shape == values.shape
    same_bits(y, compute_forward(values, scale, zero, Grid(spec.qmin, spec.qmax, axis, block)))
    return y.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if values.dtype == torch.bfloat16 else y.numpy()


def same_bits(one: Any, other: Any) -> None:
    """Equal bit for bit, except that one NaN is as good as another."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = (one.view(width) == other.view(width)) | (one.isnan() & other.isnan())
    assert same.all(), (one[~same][:5], other[~same][:5])


def _numbers(rng: Any, spec: QuantSpec, shape: tuple[int, ...], centre: float) -> QParams:
    scale = np.asarray(centre * rng.uniform(0.0625, 16, shape), np.float32)
    return QParams(scale, np.asarray(rng.integers(spec.qmin, spec.qmax, shape, endpoint=True), np.int32))


def _awkward(rng: Any, scale: Any, shape: tuple[int, ...]) -> Any:
    """Any bit pattern of float32 but NaN (denormals, infinities), and ties and levels of the scale with neighbours."""
    count = int(np.prod(shape))
    with np.errstate(all="ignore"):
        any_bits = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
        steps = rng.integers(-(2 ** rng.integers(2, 18)), 2**18, count).astype(np.float32) / np.float32(2)
        levels = steps * rng.choice(np.ravel(scale), count)
        beside = np.nextafter(levels, rng.choice(np.float32([-np.inf, 0, np.inf]), count))
    x = np.choose(rng.integers(0, 3, count), [any_bits, levels, beside]).astype(np.float32).reshape(shape)
    return np.where(np.isnan(x), np.float32(0), x)


@settings(max_examples=80)
@given(spec=SPECS, seed=SEEDS, shape=st.lists(st.integers(0, 9), min_size=0, max_size=4), data=st.data())
def test_equals_numerics(spec: QuantSpec, seed: int, shape: list[int], data: Any) -> None:
    """Shapes, axes, granularities, ranges, ties and extremes, in float32, float16 and bfloat16."""
    rng = np.random.default_rng(seed)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1)) if shape else 0
    kind = data.draw(st.sampled_from(["tensor", "channel", "block"] if shape else ["tensor"]))
    size = data.draw(st.integers(1, 5))
    grain, scales = {
        "tensor": lambda: (PerTensor(), ()),
        "channel": lambda: (PerChannel(axis), (shape[axis],)),
        "block": lambda: (PerBlock(axis, size), _blocked(shape, axis, size)),
    }[kind]()
    spec = QuantSpec(
        bits=spec.bits, signed=spec.signed, symmetric=False, narrow_range=spec.narrow_range, granularity=grain
    )
    numbers = _numbers(rng, spec, scales, 2.0 ** data.draw(st.integers(-16, 90)))
    x = _awkward(rng, numbers.scale if numbers.scale.size else np.float32([1]), tuple(shape))
    with np.errstate(all="ignore"):
        assert _ours(x, numbers, spec).tobytes() == numerics.fake_quant(x, numbers, spec).tobytes()
        short = x.astype(ml_dtypes.bfloat16)
        wanted = numerics.fake_quant(short, numbers, spec).astype(ml_dtypes.bfloat16)
        assert _ours(short, numbers, spec).tobytes() == wanted.tobytes()
    numbers = _numbers(rng, spec, scales, 2.0 ** data.draw(st.integers(-14, 8)))
    half = rng.integers(0, 2**16, tuple(shape)).astype(np.uint16).view(np.float16)
    half = np.where(np.isnan(half), np.float16(1), half)
    assert _ours(half, numbers, spec).tobytes() == numerics.fake_quant(half, numbers, spec).tobytes()


def _blocked(shape: list[int], axis: int, size: int) -> tuple[int, ...]:
    return tuple(-(-dim // size) if k == axis % len(shape) else dim for k, dim in enumerate(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grain", ["tensor", "channel", "block"])
def test_nan_stays_and_infinities_saturate(dtype: Any, grain: str) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.25, -0.25, -0.0]] * 20, dtype=dtype)
    axis, block, shape = {"tensor": (None, 0, ()), "channel": (1, 0, (6,)), "block": (0, 4, (5, 6))}[grain]
    scale, zero = torch.full(shape, 0.5), torch.full(shape, 3.0)
    y = fake_quantize(x, scale, zero, qmin=-8, qmax=7, axis=axis, block_size=block)
    assert y[:, 0].isnan().all()
    assert y[:, 1:].tolist() == [[2.0, -5.5, 0.0, 0.0, 0.0]] * 20
    assert not y[:, 1:].signbit()[:, 2:].any()


def test_float64_is_computed_in_float64() -> None:
    x = torch.tensor([0.5 + 1e-12, 0.5 - 1e-12, 0.5, 1.5], dtype=torch.float64)
    third = torch.tensor(1 / 3, dtype=torch.float64)
    y = fake_quantize(x, torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0), qmin=-8, qmax=7)
    assert y.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert fake_quantize(x, third, torch.tensor(0.0), qmin=-8, qmax=7)[0] == 2 * third
