"""Fake quantization of weights that keep the 16-bit sums of kernels: `onnxq.numerics.fake_quant_weight` with gradients.

`onnxq.numerics.weights` defines the sums. With g the gradient of y, where two neighbours overflow theirs:

    (q0, q1) = the integers nearest to (x0 / s + z, x1 / s + z) with |q0 + q1| <= 128, none larger than it was
    y = (q - z) s        dx = g        ds = 64 g above 128, -64 g below -128

and every other weight has the values and gradients of the op. In real numbers both neighbours move by the same amount,
so that y0 + y1 = 128 s whatever x0 + x1 is: each contributes 64 to ds, and the scale learns to leave room. dx is that
of a weight inside its range, not 0, so that training can move the two back.

The op runs first; then the few sums that overflow are corrected. On the CPU only these are computed. On other devices
and under a compiler, selecting them would wait for the device, so all sums are computed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from onnxq.numerics import SumOrders
from onnxq.numerics.weights import MOST, SumOrder
from torch_frontend.fake_quant import reference
from torch_frontend.fake_quant.grid import Gradients, Grid, TensorPair

# One index tensor per axis, for advanced indexing.
At = tuple[Tensor, ...]

# Two integers can add up to MOST + 1 only if the real numbers they round add up to at least MOST; 0.01 covers the
# rounding errors of float32 at this size (2**7 * 2**-24 per operation) many times over.
_SUSPECT = MOST - 0.01


def fake_quantize_in_sums(
    x: Tensor, scale: Tensor, zero_point: Tensor, orders: Sequence[SumOrder], *settings: Any
) -> Tensor:
    """`torch.ops.onnxq.fake_quantize(x, scale, zero_point, *settings)` of a weight that keeps its sums of `orders`."""
    return _KeepSums.apply(x, scale, zero_point, tuple(orders), settings)


class _KeepSums(torch.autograd.Function):
    """The op and the correction of its sums in one function, since both change the same gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        orders: SumOrders,
        settings: tuple[Any, ...],
    ) -> Tensor:
        y: Tensor = torch.ops.onnxq.fake_quantize(x, scale, zero_point, *settings)
        grid = Grid(*settings)
        sparse = _selects_sums(x, zero_point, grid, orders)
        if sparse:
            at, values, sign = _find_overflows(x, scale, zero_point, grid, orders[0])
            y[at] = values.to(y.dtype)
        else:
            at = ()
            # The new value of every weight, and the sign of those in sums that overflow, 0 elsewhere.
            aligned, steps, zero = reference.align_operands(x, scale, zero_point, grid)
            ratio = aligned / steps
            nearest = ratio.round().clamp(grid.qmin - zero, grid.qmax - zero) + zero
            codes, sign = keep_sums(nearest, ratio + zero, orders)
            values = (codes - zero) * steps
            y = torch.where(sign != 0, values.to(y.dtype), y)
        ctx.save_for_backward(x, scale, zero_point, sign, *at)
        ctx.settings = settings
        ctx.sparse = sparse
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, scale, zero_point, sign, *where = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        at = tuple(where)
        grid = Grid(*ctx.settings)
        # rest: dy for the op, 0 at moved weights. moved: dy at these, which passes unchanged.
        if ctx.sparse:
            moved = dy[at]
            rest = dy.index_put(at, moved.new_zeros(())) if len(moved) else dy
        else:
            moved = dy
            rest = dy.masked_fill(sign != 0, 0.0)
        dx, dscale, dzero = torch.ops.onnxq.fake_quantize_backward(
            rest, x, scale, zero_point, *needed, *ctx.settings
        )
        if needed[0]:
            dx = (
                dx.index_put_(at, moved.to(dx.dtype))
                if ctx.sparse
                else torch.where(sign != 0, moved, dx)
            )
        if needed[1]:
            # 64 for each of the two weights, with the sign of their sum.
            room = moved.double() * sign * (MOST // 2 * grid.grad_scale)
            added = (
                _sum_at(room, at, scale, grid)
                if ctx.sparse
                else reference.sum_like(room, scale, grid)
            )
            dscale = dscale + added.to(dscale.dtype)
        gradients = zip((dx, dscale, dzero), needed, strict=True)
        return (*(gradient if need else None for gradient, need in gradients), None, None)


def _selects_sums(x: Tensor, zero_point: Tensor, grid: Grid, orders: Sequence[SumOrder]) -> bool:
    """True where the sums that overflow are cheap to select: on the CPU, one scale for both neighbours."""
    if (
        len(orders) > 1
        or grid.block_size
        or x.device.type != "cpu"
        or torch.compiler.is_compiling()
    ):
        return False
    return (grid.axis is None or grid.axis % x.dim() == orders[0][0]) and not bool(zero_point.any())


def _find_overflows(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, order: SumOrder
) -> tuple[At, Tensor, Tensor]:
    """Indices, new values and signs of the weights in overflowing sums. All zero points are 0."""
    values, steps, _ = reference.align_operands(x, scale, zero_point, grid)
    first, second = split_sums(values, order)
    # Without views sums lie in [rows, sums], and the steps are one a row.
    limits = steps if not steps.dim() or _has_views(x.shape, order) else steps.reshape(-1, 1)
    found = (first + second).abs_() >= limits * _SUSPECT
    # np.flatnonzero takes a seventh of the time of torch.nonzero: 0.14 ms for a million sums.
    suspects = torch.unravel_index(torch.from_numpy(np.flatnonzero(found.numpy())), found.shape)
    at = [_locate_weights(suspects, x.shape, order, k) for k in (0, 1)]
    sizes = [steps.expand(x.shape)[places] for places in at]
    aims = [values[places] / size for places, size in zip(at, sizes, strict=True)]
    nearest = [aim.round().clamp(grid.qmin, grid.qmax) for aim in aims]
    over, sign, moved = fit_sums(*nearest, *aims)
    both = tuple(torch.cat([one[over], other[over]]) for one, other in zip(*at, strict=True))
    found = torch.cat([(q * size)[over] for q, size in zip(moved, sizes, strict=True)])
    return both, found, sign[over].repeat(2)


def keep_sums(codes: Tensor, aims: Tensor, orders: Sequence[SumOrder]) -> TensorPair:
    """Integers that keep every sum, as `onnxq.numerics.limit_sums`, and the signs of the sums that overflowed, else 0.

    codes: integers as floats. aims: the real numbers before rounding, in steps. Both of the weight's shape.
    """
    # One order after the other, as numpy does: the second sees the integers that the first has moved.
    signs = torch.zeros_like(codes)
    for order in orders:
        pairs = split_sums(codes, order)
        over, sign, moved = fit_sums(*pairs, *split_sums(aims, order))
        codes = join_sums(
            *(torch.where(over, q, k) for q, k in zip(moved, pairs, strict=True)), codes, order
        )
        joined = (torch.where(over, sign, before) for before in split_sums(signs, order))
        signs = join_sums(*joined, signs, order)
    return codes, signs


def keep_soft_sums(codes: Tensor, orders: Sequence[SumOrder]) -> Tensor:
    """Real numbers that keep every sum: both neighbours of one that overflows give half of the excess, with gradients.

    codes: of the weight's shape, for roundings that are still being learned.
    """
    for order in orders:
        first, second = split_sums(codes, order)
        # Only weights of one sign can overflow: of opposite signs one is clamped to 0, and the sum fits.
        above = (first.clamp(min=0) + second.clamp(min=0) - MOST).clamp(min=0)
        below = (first.clamp(max=0) + second.clamp(max=0) + MOST).clamp(max=0)
        excess = (above + below) / 2
        codes = join_sums(first - excess, second - excess, codes, order)
    return codes


def fit_sums(
    first: Tensor, second: Tensor, aim: Tensor, other: Tensor
) -> tuple[Tensor, Tensor, TensorPair]:
    """(overflows, sign, neighbours that keep the sum) of each sum, as `onnxq.numerics.round_within_sum`.

    first, second: neighbours' integers, as floats. aim, other: the real numbers before rounding. Where a sum does not
    overflow, the neighbours are undefined.
    """
    over = ((first + second).abs() > MOST) & ((first > 0) == (second > 0))
    # Negative sums are mirrored, so that one formula serves both signs.
    sign = torch.where(first > 0, 1.0, -1.0).to(first.dtype)
    most = first * sign
    most_other = second * sign
    # The types of numpy's code, for equal bits: real numbers are float32, their difference float64.
    aims = [(wanted.float() * sign.float()).double().clamp(1, MOST) for wanted in (aim, other)]
    # Both give up the same amount: a - d and b - d add up to MOST.
    share = ((aims[0] - aims[1] + MOST) / 2).round().to(first.dtype)
    # Neither grows.
    share = share.maximum(MOST - most_other).minimum(most)
    return over, sign, (share * sign, (MOST - share).minimum(most_other) * sign)


def split_sums(t: Tensor, order: SumOrder) -> TensorPair:
    """The first and the second weight of each sum, in two tensors of one shape; views where possible."""
    last = order[-1]
    if _has_views(t.shape, order):
        first, second = t.unflatten(last, (-1, 2)).unbind(last + 1)
        return first, second
    rows = _arrange_rows(t, order)
    # The last of an odd number has no neighbour.
    return rows[:, 0 : rows.shape[1] // 2 * 2 : 2], rows[:, 1::2]


def join_sums(first: Tensor, second: Tensor, t: Tensor, order: SumOrder) -> Tensor:
    """The inverse of `split_sums`. t: the tensor that was split; it has the last weight of an odd number."""
    last = order[-1]
    if _has_views(t.shape, order):
        return torch.stack([first, second], last + 1).flatten(last, last + 1)
    rows = torch.stack([first, second], 2).flatten(1)
    if (before := _arrange_rows(t, order)).shape[1] % 2:
        rows = torch.cat([rows, before[:, -1:]], 1)
    back = [order.index(axis) for axis in range(t.dim())]
    return rows.reshape([t.shape[axis] for axis in order]).permute(back)


def _has_views(shape: Sequence[int], order: SumOrder) -> bool:
    """True where every sum's neighbours stand side by side along the last axis of the order."""
    return shape[order[-1]] % 2 == 0


def _arrange_rows(t: Tensor, order: SumOrder) -> Tensor:
    """[t.shape[order[0]], all other weights in the order of the sums]."""
    return t.permute(order).reshape(t.shape[order[0]], -1)


def _locate_weights(sums: At, shape: torch.Size, order: SumOrder, k: int) -> At:
    """Indices of the k-th weight of each sum. sums: indices into a result of `split_sums`."""
    last = order[-1]
    if _has_views(shape, order):
        return tuple(index * 2 + k if axis == last else index for axis, index in enumerate(sums))
    rows, columns = sums
    inside = torch.unravel_index(columns * 2 + k, [shape[axis] for axis in order[1:]])
    by_axis = dict(zip(order, (rows, *inside), strict=True))
    return tuple(by_axis[axis] for axis in range(len(shape)))


def _sum_at(terms: Tensor, at: At, scale: Tensor, grid: Grid) -> Tensor:
    """Sums of `terms`, which stand at `at`, over each group that shares a scale, of the scale's shape, in float64."""
    if grid.axis is None:
        return terms.sum().reshape(scale.shape)
    axis = grid.axis % len(at)
    return torch.zeros_like(scale, dtype=torch.float64).index_add_(0, at[axis], terms)
