"""Fake quantization with straight-through gradients: one fast operator for the CPU and CUDA, and its reference.

op         registration with torch: schemas, shapes without data, gradients
batching   its vmap rules
kernels    which implementation a device gets, and why not a better one
host       the compiled CPU kernels         } both fill what `calls` prepares
device     the CUDA kernels                 }
reference  the same in plain torch operators: what the others must equal
sums       weights that keep the 16-bit sums of kernels
grid       what a call asks for, checked
"""

from __future__ import annotations

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
    """Round x to the levels qmin..qmax of its scale and back, in x's dtype, shape and memory format.

    q = clip(rint(x / s) + rint(z), qmin, qmax); y = (q - rint(z)) * s, bit for bit as `onnxq.numerics.fake_quant`
    except that NaN stays NaN.

    x: float32, float16, bfloat16 or float64, any strides, may be empty. scale, zero_point: float32, on x's device,
        of shape [] (axis None), [channels] (axis), or x's shape with ceil(dim / block_size) at axis.
    Each of the three gets a gradient if it requires one. grad_scale multiplies that of the scale,
        zero_point_grad_scale (grad_scale by default) that of the zero point.
    edge: "clip" is LSQ's mask (Esser et al. 2020: clip, then round), "round" that of a fixed scale, where all that
        rounds to a level passes its gradient.
    sum_orders: the 16-bit sums that an int8 weight keeps, see `sums`; then as `onnxq.numerics.fake_quant_weight`.
    Raises ConfigError if shapes, dtypes, devices or levels do not fit.
    """
    zero_factor = grad_scale if zero_point_grad_scale is None else zero_point_grad_scale
    settings = (qmin, qmax, axis, block_size, grad_scale, zero_factor, edge)
    if sum_orders and x.numel():
        return fake_quantize_in_sums(x, scale, zero_point, sum_orders, *settings)
    y: Tensor = torch.ops.onnxq.fake_quantize(x, scale, zero_point, *settings)
    return y
