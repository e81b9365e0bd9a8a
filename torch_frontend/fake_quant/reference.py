"""Fake quantization in plain torch operators: the standard for every kernel, and the fallback where there is none.

    r = rint(x / s), z = rint(zero_point), q = clip(r + z, qmin, qmax), y = (q - z) s

With g the gradient of y, and t = x / s, n = qmin - z, p = qmax - z:

    edge "round", n <= r <= p inside:    dx = g inside, 0 outside    ds = g (r - t) inside, g n below, g p above
    edge "clip",  n < t < p inside:      the same
    dz = 0 inside, -g s outside

These are LSQ's (Esser et al. 2020) and LSQ+'s (Bhalgat et al. 2020) gradients; LSQ+'s offset is -z s, and z is rounded
so that what was trained is what ONNX can hold. x is divided in float32 (float64 for float64), by a scale that float16
tensors round to float16, as `onnxq.numerics` and ONNX Runtime do. NaN stays NaN, counts as inside, and makes the
gradient of the scale NaN; infinities saturate. A scale that is not above 0 makes all of its values NaN.
"""

import torch
from torch import Tensor

from torch_frontend.fake_quant.grid import Gradients, Grid, Needed, spread_over, sum_groups


def compute_forward(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Return y, of x's shape, dtype and, for a dense x, strides."""
    values, steps, zero = align_operands(x, scale, zero_point, grid)
    codes = (values / steps).round_().clamp(grid.qmin - zero, grid.qmax - zero)
    # Adding 0 turns -0 into the +0 that an integer becomes.
    return torch.empty_like(x).copy_(codes.add_(0.0).mul_(steps))


def compute_backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    grid: Grid,
    needed: Needed = (True, True, True),
) -> Gradients:
    """Return (dx, dscale, dzero_point), each like the tensor it belongs to, None where not needed. Sums in float64."""
    values, steps, zero = align_operands(x, scale, zero_point, grid)
    slope = dy.to(values.dtype)
    ratio = values / steps
    rounded = ratio.round()
    low = grid.qmin - zero
    high = grid.qmax - zero
    # NaN compares false with both ends, so it counts as inside.
    below, above = (
        (ratio <= low, ratio >= high) if grid.edge == "clip" else (rounded < low, rounded > high)
    )
    outside = below | above
    dx = dscale = dzero = None
    if needed[0]:
        dx = torch.empty_like(x).copy_(slope.masked_fill(outside, 0.0))
    if needed[1]:
        # As LSQ has it (Esser et al. 2020): the end where x is clipped, else round(x / s) - x / s.
        term = torch.where(below, low, torch.where(above, high, rounded - ratio))
        dscale = (sum_like(slope * term, scale, grid) * grid.grad_scale).to(scale.dtype)
    if needed[2]:
        # Only values that are clipped depend on the zero point, by -s.
        cut = sum_like(slope.masked_fill(~outside, 0.0), zero_point, grid)
        dzero = (cut * -scale.to(cut.dtype) * grid.zero_point_grad_scale).to(zero_point.dtype)
    return dx, dscale, dzero


def align_operands(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """(x, scale, rounded zero point) in the type of the arithmetic, shaped to broadcast."""
    width = torch.promote_types(x.dtype, torch.float32)
    # ONNX stores the scale of float16 tensors as float16.
    stored = scale.to(torch.float16) if x.dtype == torch.float16 else scale
    stored = stored.where(scale > 0, torch.nan)
    qparams = (stored.to(width), zero_point.to(width).round())
    steps, zero = (spread_over(t, x.shape, grid.axis, grid.block_size) for t in qparams)
    return x.to(width), steps, zero


def sum_like(terms: Tensor, like: Tensor, grid: Grid) -> Tensor:
    """Sum of `terms` over each group that shares a scale, of the shape of `like`, in float64."""
    return sum_groups(terms, grid.axis, grid.block_size).reshape(like.shape)
