"""Fake quantization with straight-through gradients: one fast operator for the CPU and CUDA, and its reference.

op         registration with torch: schemas, shapes without data, gradients, vmap
kernels    which implementation a device gets, and the reason when it is the reference
calls      kernel arguments and output tensors of one call; the CPU's kernels, and launches by a plan
device     the CUDA kernels, by the CUDA driver
reference  the same in plain torch operators, the standard for all others
sums       weights that keep the 16-bit sums of kernels
grid       integer range, granularity and gradient rule of one call, with checks
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from onnxq.numerics import SumOrder
from torch_frontend.fake_quant import op as _op  # registers the operators
from torch_frontend.fake_quant import reference
from torch_frontend.fake_quant.kernels import SlowFakeQuantWarning, available
from torch_frontend.fake_quant.sums import fake_quantize_in_sums

__all__ = ["SlowFakeQuantWarning", "available", "fake_quantize", "reference"]

del _op


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    *,
    qmin: int,
    qmax: int,
    axis: int | None = None,
    block_size: int = 0,
    grad_scale: float = 1.0,
    zero_point_grad_scale: float | None = None,
    edge: Literal["clip", "round"] = "round",
    sum_orders: Sequence[SumOrder] = (),
) -> Tensor:
    """Quantize x to the integers qmin..qmax and dequantize it, in x's dtype, shape and memory format.

    q = clip(rint(x / s) + rint(z), qmin, qmax); y = (q - rint(z)) * s, bit for bit as `onnxq.numerics.fake_quant`
    except that NaN stays NaN.

    x: float32, float16, bfloat16 or float64, any strides, may be empty.
    scale, zero_point: float32, on x's device, of shape [] (axis None), [channels] (axis), or x's shape with
        ceil(dim / block_size) at axis.
    grad_scale: factor on the gradient of the scale. zero_point_grad_scale: on that of the zero point; grad_scale by
        default. x, scale and zero_point each get a gradient if they require one.
    edge: gradient mask. "clip" is LSQ's (Esser et al. 2020: clip, then round). "round" is that of a fixed scale: the
        gradient passes wherever x rounds to an integer of the range.
    sum_orders: the 16-bit sums that an int8 weight keeps, see `sums`; then as `onnxq.numerics.fake_quant_weight`.
    Raises ConfigError if shapes, dtypes, devices or the integer range do not fit, and on the CPU for a scale of 0 or
    below; on a GPU, which it would have to wait for, such a scale makes its values NaN.
    """
    # LSQ+ multiplies both gradients by one factor.
    zero_factor = grad_scale if zero_point_grad_scale is None else zero_point_grad_scale
    settings = (qmin, qmax, axis, block_size, grad_scale, zero_factor, edge)
    # The op settles empty tensors before any kernel sees them.
    if sum_orders and x.numel():
        return fake_quantize_in_sums(x, scale, zero_point, sum_orders, *settings)
    return torch.ops.onnxq.fake_quantize(x, scale, zero_point, *settings)
