"""The values of fake_quantize are those of onnxq.numerics, and so of ONNX Runtime; its gradients the papers'."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import ml_dtypes
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq import numerics
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.numerics.reference import draw_awkward
from tests.numerics.test_ranges import SPECS
from torch_frontend.fake_quant import fake_quantize
from torch_frontend.fake_quant.grid import Grid, qparam_shape
from torch_frontend.fake_quant.reference import compute_backward, compute_forward

SEEDS = st.integers(0, 2**32 - 1)


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
        "block": lambda: (PerBlock(axis, size), qparam_shape(torch.Size(shape), axis, size)),
    }[kind]()
    spec = replace(spec, symmetric=False, granularity=grain)
    numbers = _numbers(rng, spec, scales, 2.0 ** data.draw(st.integers(-16, 90)))
    x = draw_awkward(rng, numbers.scale if numbers.scale.size else np.float32([1]), tuple(shape))
    x[np.isnan(x)] = 0
    with np.errstate(all="ignore"):
        assert _ours(x, numbers, spec).tobytes() == numerics.fake_quant(x, numbers, spec).tobytes()
        short = x.astype(ml_dtypes.bfloat16)
        wanted = numerics.fake_quant(short, numbers, spec).astype(ml_dtypes.bfloat16)
        assert _ours(short, numbers, spec).tobytes() == wanted.tobytes()
    numbers = _numbers(rng, spec, scales, 2.0 ** data.draw(st.integers(-14, 8)))
    half = rng.integers(0, 2**16, tuple(shape)).astype(np.uint16).view(np.float16)
    half = np.where(np.isnan(half), np.float16(1), half)
    assert _ours(half, numbers, spec).tobytes() == numerics.fake_quant(half, numbers, spec).tobytes()


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


GRAINS = {"tensor": (None, 0), "first": (0, 0), "middle": (1, 0), "last": (-1, 0), "block": (1, 3), "blocks": (-1, 4)}
# (qmin, qmax, zero point around): signed, unsigned, narrow
LEVELS = [(-8, 7, 0.0), (0, 15, 6.0), (-127, 127, 0.0), (-2, 1, 0.0)]


def _case(grain: str, levels: tuple[int, int, float], dtype: Any, shape: tuple[int, ...] = (5, 7, 9)) -> Any:
    rng = torch.Generator().manual_seed(7)
    axis, block = GRAINS[grain]
    qmin, qmax, centre = levels
    grid = Grid(qmin, qmax, axis, block)
    x = torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
    scales = qparam_shape(x.shape, grid.axis, grid.block_size)
    width = torch.float64 if dtype == torch.float64 else torch.float32
    scale = (torch.rand(scales, generator=rng, dtype=torch.float64) + 0.5) * 4 / (qmax - qmin)
    zero = centre + torch.rand(scales, generator=rng, dtype=torch.float64) * 3
    return x, scale.to(width), zero.to(width), grid


def _call(x: Any, scale: Any, zero: Any, grid: Grid) -> Any:
    return fake_quantize(
        x, scale, zero, qmin=grid.qmin, qmax=grid.qmax, axis=grid.axis, block_size=grid.block_size,
        grad_scale=grid.grad_scale, zero_point_grad_scale=grid.zero_point_grad_scale, edge=grid.edge,
    )  # fmt: skip


def _spread(values: Any, x: Any, grid: Grid) -> Any:
    if grid.axis is None:
        return values
    axis = grid.axis % x.dim()
    if grid.block_size:
        return values.repeat_interleave(grid.block_size, axis).narrow(axis, 0, x.shape[axis])
    return values.reshape([-1 if k == axis else 1 for k in range(x.dim())])


def _through(rounded: Any, value: Any) -> Any:
    return value + (rounded - value).detach()


def _clamp(values: Any, low: Any, high: Any) -> Any:
    """The values within bounds; those at the ends have gradients, which clamp no longer gives them in torch 2.14."""
    return torch.where(values < low, low, torch.where(values > high, high, values))


def test_the_two_edges_differ_in_the_outer_half_step_only() -> None:
    x = torch.tensor([-4.4, -4.0, 3.0, 3.4, 3.6], requires_grad=True)
    grads = {}
    for edge in ("clip", "round"):
        y = fake_quantize(x, torch.tensor(1.0), torch.tensor(0.0), qmin=-4, qmax=3, edge=edge)  # type: ignore[arg-type]
        (grads[edge],) = torch.autograd.grad(y.sum(), x)
    assert grads["clip"].tolist() == [0, 0, 0, 0, 0]
    assert grads["round"].tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("edge", ["round", "clip"])
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("grain", GRAINS)
def test_equals_autograd_of_composed_operators(grain: str, levels: tuple[int, int, float], edge: str) -> None:
    """The same straight-through rule, written with detach and where, in float64."""
    x, scale, zero, grid = _case(grain, levels, torch.float64)
    grid = grid._replace(edge=edge)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = [t.clone().requires_grad_() for t in (x, scale, zero)]
    _call(*found, grid).backward(dy)
    composed = [t.clone().requires_grad_() for t in (x, scale, zero)]
    steps, shift = _spread(composed[1], x, grid), _spread(_through(composed[2].round(), composed[2]), x, grid)
    ratio = composed[0] / steps
    if edge == "clip":
        ratio = _clamp(ratio, grid.qmin - shift, grid.qmax - shift)
    y = (_clamp(_through(ratio.round(), ratio) + shift, grid.qmin, grid.qmax) - shift) * steps
    y.backward(dy)
    for one, other in zip(found, composed, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)])
@pytest.mark.parametrize("grain", GRAINS)
def test_gradients_only_for_what_requires_them(grain: str, wanted: tuple[int, int, int]) -> None:
    x, scale, zero, grid = _case(grain, LEVELS[1], torch.float32)
    every = [t.clone().requires_grad_() for t in (x, scale, zero)]
    _call(*every, grid).square().sum().backward()
    some = [t.clone().requires_grad_(bool(need)) for t, need in zip((x, scale, zero), wanted, strict=True)]
    _call(*some, grid).square().sum().backward()
    for one, other, need in zip(some, every, wanted, strict=True):
        assert (one.grad is not None) == bool(need)
        if need:
            assert torch.equal(one.grad, other.grad)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    grain=st.sampled_from(["tensor", "channel", "block"]),
    edge=st.sampled_from(["round", "clip"]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    bits=st.integers(2, 8),
    data=st.data(),
)
def test_compiled_backward_equals_the_reference(
    seed: int, shape: list[int], grain: str, edge: str, dtype: Any, bits: int, data: Any
) -> None:
    """dx bit for bit; dscale and dzero_point up to the order of summation. Half of the values are ties or ends."""
    rng = np.random.default_rng(seed)
    axis = None if grain == "tensor" else data.draw(st.integers(-len(shape), len(shape) - 1))
    block = data.draw(st.integers(1, 9)) if grain == "block" else 0
    qmin, qmax = data.draw(st.sampled_from([(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), (0, 2**bits - 1)]))
    grid = Grid(qmin, qmax, axis, block, 0.5, 2.0, edge)
    x = torch.from_numpy(rng.normal(0, 2 ** (bits - 1), shape))
    scales = qparam_shape(x.shape, grid.axis, grid.block_size)
    scale = torch.from_numpy(rng.uniform(0.3, 2, scales)).float().reshape(scales)
    zero = torch.from_numpy(rng.uniform(qmin, qmax, scales)).float().reshape(scales)
    ties = (x * 2).round() / 2 * _spread(scale.double(), x, grid)
    x = torch.where(torch.from_numpy(rng.random(shape) < 0.5), x, ties).to(dtype)
    dy = torch.from_numpy(rng.normal(size=shape)).to(dtype)
    leaves = [t.requires_grad_() for t in (x, scale, zero)]
    found = torch.autograd.grad(_call(*leaves, grid), leaves, dy)
    with torch.no_grad():
        dx, dscale, dzero = compute_backward(dy, x, scale, zero, grid)
        weight = compute_backward(dy.abs(), x, scale, zero, Grid(qmin, qmax, axis, block, edge=edge))
    assert found[0].dtype == dtype
    assert torch.equal(found[0], dx)
    # Each term is rounded to float32 before it is summed: errors grow with the terms' size, not with the sum.
    reach = float(max(abs(qmin), abs(qmax)) * 2 * dy.abs().sum()) + float(weight[2].abs().sum())
    torch.testing.assert_close(found[1], dscale, rtol=1e-5, atol=1e-7 * reach)
    torch.testing.assert_close(found[2], dzero, rtol=1e-5, atol=1e-7 * reach)


@pytest.mark.parametrize("edge", ["round", "clip"])
@pytest.mark.parametrize("grain", ["tensor", "last"])
def test_nan_counts_as_inside_and_reaches_the_scale(grain: str, edge: str) -> None:
    x = torch.tensor([[0.2, float("nan")], [float("inf"), -0.4]] * 9, requires_grad=True)
    shape = () if grain == "tensor" else (2,)
    scale, zero = torch.full(shape, 0.1, requires_grad=True), torch.zeros(shape, requires_grad=True)
    _call(x, scale, zero, Grid(-8, 7, GRAINS[grain][0], edge=edge)).sum().backward()
    assert x.grad.tolist() == [[1, 1], [0, 1]] * 9
    assert scale.grad.isnan().tolist() == (True if grain == "tensor" else [False, True])
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("strides", ["contiguous", "channels_last", "transposed", "sliced", "expanded"])
def test_gradients_follow_any_strides(strides: str) -> None:
    x = {
        "contiguous": lambda t: t,
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
        "sliced": lambda t: torch.cat([t, t])[::2],
        "expanded": lambda t: t[:1].expand(2, -1, -1, -1),
    }[strides](torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(2)))
    scale, zero = torch.linspace(0.1, 0.3, 6), torch.linspace(-2, 2, 6)
    dy = torch.randn(5, 4, 6, 2, generator=torch.Generator().manual_seed(3)).permute(3, 2, 1, 0)
    results = []
    for given_x in (x, x.contiguous()):
        leaves = [t.detach().requires_grad_() for t in (given_x, scale, zero)]
        y = _call(*leaves, Grid(-8, 7, 1))
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    if strides in ("channels_last", "transposed"):
        assert results[0][0].stride() == x.stride() == results[0][1].stride()
