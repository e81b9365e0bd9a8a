"""Fake quantization in plain torch operators: what every kernel must equal, and what runs where there is none.

    r = rint(x / s), z = rint(zero_point), q = clip(r + z, qmin, qmax), y = (q - z) s

With g the gradient of y, and t = x / s, n = qmin - z, p = qmax - z:

    edge "round", n <= r <= p inside:    dx = g inside, 0 outside    ds = g (r - t) inside, g n below, g p above
    edge "clip",  n < t < p inside:      the same
    dz = 0 inside, -g s outside

These are LSQ's (Esser et al. 2020) and LSQ+'s (Bhalgat et al. 2020) gradients; LSQ+'s offset is -z s, and z is rounded
so that what was trained is what ONNX can hold. x is divided in float32 (float64 for float64), by a scale that float16
tensors round to float16, as `onnxq.numerics` and ONNX Runtime do. NaN stays NaN, counts as inside, and makes the
gradient of the scale NaN; infinities saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_frontend.fake_quant.grid import Grid, Needed, qparam_shape


def forward(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """y of x's shape, dtype and, for a dense x, strides."""
    values, steps, zero = aligned(x, scale, zero_point, grid)
    levels = (values / steps).round_().clamp(grid.qmin - zero, grid.qmax - zero)
    return torch.empty_like(x).copy_(levels.add_(0.0).mul_(steps))  # 0 makes -0 the +0 that an integer gives


def backward(
    dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, needed: Needed = (True, True, True)
) -> tuple[Tensor | None, ...]:
    """dx, dscale, dzero_point, each like the tensor it belongs to, None where not needed. Sums run in float64."""
    values, steps, zero = aligned(x, scale, zero_point, grid)
    slope = dy.to(values.dtype)
    ratio = values / steps
    rounded = ratio.round()
    low, high = grid.qmin - zero, grid.qmax - zero
    below, above = (ratio <= low, ratio >= high) if grid.edge == "clip" else (rounded < low, rounded > high)
    outside = below | above
    dx = dscale = dzero = None
    if needed[0]:
        dx = torch.empty_like(x).copy_(slope.masked_fill(outside, 0.0))
    if needed[1]:
        term = torch.where(below, low, torch.where(above, high, rounded - ratio))
        dscale = (gathered(slope * term, scale, grid) * grid.grad_scale).to(scale.dtype)
    if needed[2]:
        cut = gathered(slope.masked_fill(~outside, 0.0), zero_point, grid)
        dzero = (cut * -scale.to(cut.dtype) * grid.zero_point_grad_scale).to(zero_point.dtype)
    return dx, dscale, dzero


def aligned(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """x, scale and rounded zero point in the type the arithmetic runs in, shaped to broadcast."""
    width = torch.float64 if x.dtype == torch.float64 else torch.float32
    stored = scale.to(torch.float16) if x.dtype == torch.float16 else scale
    return (
        x.to(width),
        _spread(stored.to(width), x, grid),
        _spread(zero_point.to(width).round(), x, grid),
    )


def _spread(values: Tensor, x: Tensor, grid: Grid) -> Tensor:
    if grid.axis is None:
        return values.reshape(())
    axis = grid.axis % x.dim()
    if not grid.block_size:
        return values.reshape([-1 if k == axis else 1 for k in range(x.dim())])
    return values.repeat_interleave(grid.block_size, axis).narrow(axis, 0, x.shape[axis])


def gathered(terms: Tensor, like: Tensor, grid: Grid) -> Tensor:
    """Sums of `terms` over what shares one scale, of shape `like`, in float64."""
    terms = terms.to(torch.float64)
    if grid.axis is None:
        return terms.sum().reshape(like.shape)
    axis = grid.axis % terms.dim()
    if not grid.block_size:
        others = [k for k in range(terms.dim()) if k != axis]
        return terms.sum(others) if others else terms
    blocks = qparam_shape(terms, grid)
    gap = blocks[axis] * grid.block_size - terms.shape[axis]
    rows = torch.nn.functional.pad(terms.movedim(axis, -1), (0, gap)).movedim(-1, axis)
    return rows.unflatten(axis, (blocks[axis], grid.block_size)).sum(axis + 1)
