"""fake_quantize of weights that keep 16-bit sums: the values of numpy, the gradients of its docstring."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onnxq import numerics
from onnxq.numerics import SumOrder, fake_quant_weight, find_saturating_sums
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from torch_frontend.fake_quant import fake_quantize, sums
from torch_frontend.fake_quant.grid import Grid
from torch_frontend.fake_quant.reference import sum_like

LAYOUTS: list[tuple[tuple[int, ...], tuple[SumOrder, ...]]] = [
    ((5, 8), ((0, 1),)),
    ((5, 7), ((0, 1),)),
    ((7, 5), ((1, 0),)),
    ((6, 5), ((0, 1), (1, 0))),
    ((4, 3, 3), ((0, 2, 1),)),
    ((4, 6, 3, 3), ((0, 2, 3, 1),)),
    ((4, 3, 1, 5), ((0, 2, 3, 1),)),
    ((2, 3, 2, 1, 3), ((0, 2, 3, 4, 1),)),
]


def _sparse_and_dense(monkeypatch: pytest.MonkeyPatch, dense: bool) -> None:
    if dense:
        monkeypatch.setattr(sums, "_selects_sums", lambda *_: False)


def _case(seed: int, layout: int, symmetric: bool, half: bool) -> tuple[Any, QParams, QuantSpec, tuple[SumOrder, ...]]:
    rng = np.random.default_rng(seed)
    shape, orders = LAYOUTS[layout]
    grains = [PerTensor(), *(PerChannel(axis) for axis in range(len(shape))), PerBlock(1, 2)]
    spec = QuantSpec(bits=8, symmetric=symmetric, granularity=grains[rng.integers(len(grains))])
    w = rng.standard_normal(shape).astype(np.float16 if half else np.float32)
    numbers = numerics.weight_qparams(w, spec)
    scale = numbers.scale * np.asarray(rng.uniform(0.3, 1.5, numbers.scale.shape), np.float32)
    # Whole and half steps: ties, and sums exactly at their limit.
    spread = numerics.align_qparams(QParams(scale, numbers.zero_point), spec, shape, np.float32)[0]
    levels = rng.choice([-128, -127, -64.5, -64, -1, -0.5, 0.5, 1, 2, 63.5, 64, 65, 127, 200, np.inf], shape)
    w = np.where(rng.random(shape) < 0.5, w, (levels * spread).astype(w.dtype))
    return w, QParams(np.asarray(scale, np.float32), numbers.zero_point), spec, orders


def _torch(w: Any, numbers: QParams, spec: QuantSpec, orders: Any, *, learn: bool = False) -> tuple[Tensor, ...]:
    """The rounded weight, the weight and the scale."""
    grain = spec.granularity
    x, scale = torch.from_numpy(w).requires_grad_(learn), torch.from_numpy(numbers.scale).requires_grad_(learn)
    zero = torch.from_numpy(numbers.zero_point.astype(np.float32))
    axis, block = getattr(grain, "axis", None), getattr(grain, "size", 0)
    y = fake_quantize(
        x, scale, zero, qmin=spec.qmin, qmax=spec.qmax, axis=axis, block_size=block, grad_scale=0.5, sum_orders=orders
    )
    return y, x, scale


@pytest.mark.parametrize("dense", [False, True])
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), layout=st.integers(0, len(LAYOUTS) - 1), symmetric=st.booleans(), half=st.booleans()
)
def test_equals_numerics(dense: bool, seed: int, layout: int, symmetric: bool, half: bool) -> None:
    w, numbers, spec, orders = _case(seed, layout, symmetric, half)
    with pytest.MonkeyPatch.context() as patch:
        _sparse_and_dense(patch, dense)
        y = _torch(w, numbers, spec, orders)[0]
    np.testing.assert_array_equal(y.numpy(), fake_quant_weight(w, numbers, spec, orders))
    assert y.numpy().dtype == w.dtype


def _overflowing(w: Any, numbers: QParams, spec: QuantSpec, order: SumOrder) -> Tensor:
    """The sign of every weight whose sum would overflow, 0 for the others."""
    integers = numerics.quantize(w, numbers, spec).astype(np.int32)
    signs = np.sign(numerics.pair_neighbours(integers, order).sum(axis=2)) * find_saturating_sums(integers, order)
    rows = np.repeat(signs, 2, axis=1)[:, : w.size // w.shape[order[0]]]
    return torch.from_numpy(rows.reshape([w.shape[axis] for axis in order]).transpose(np.argsort(order)).copy())


@pytest.mark.parametrize("dense", [False, True])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), layout=st.integers(0, len(LAYOUTS) - 1), symmetric=st.booleans())
def test_gradients(dense: bool, seed: int, layout: int, symmetric: bool) -> None:
    """Straight through for both weights of a sum that overflows, 64 steps each for the scale; else the op's."""
    w, numbers, spec, (order, *_) = _case(seed, layout, symmetric, False)
    dy = torch.from_numpy(np.random.default_rng(seed).standard_normal(w.shape).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        _sparse_and_dense(patch, dense)
        y, x, scale = _torch(w, numbers, spec, [order], learn=True)
        y.backward(dy)
    sign = _overflowing(w, numbers, spec, order)
    plain, plain_x, plain_scale = _torch(w, numbers, spec, [], learn=True)
    plain.backward(dy.masked_fill(sign != 0, 0.0))
    assert torch.equal(x.grad, torch.where(sign != 0, dy, plain_x.grad))  # type: ignore[arg-type]
    grain = spec.granularity
    grid = Grid(spec.qmin, spec.qmax, getattr(grain, "axis", None), getattr(grain, "size", 0))
    room = sum_like(0.5 * 64 * sign * dy.double(), scale, grid)
    torch.testing.assert_close(scale.grad, plain_scale.grad + room.float(), rtol=1e-5, atol=1e-3, equal_nan=True)


def test_strides_stay_and_empty_weights_pass() -> None:
    x = torch.randn(8, 6, 3, 3).contiguous(memory_format=torch.channels_last)
    scale = torch.full((8,), 0.01)
    given_ = {"qmin": -128, "qmax": 127, "axis": 0, "sum_orders": [(0, 2, 3, 1)]}
    y = fake_quantize(x, scale, torch.zeros(8), **given_)
    assert y.stride() == x.stride()
    assert torch.equal(y, fake_quantize(x.contiguous(), scale, torch.zeros(8), **given_))
    assert fake_quantize(x[:, :0], scale, torch.zeros(8), **given_).shape == (8, 0, 3, 3)
