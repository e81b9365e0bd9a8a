"""Affine maps through the weights of linear operators, on arrays.

A Conv, ConvTranspose, Gemm or MatMul computes y = L(W, x) + b, linear in W and x. With a and c one number per output
channel, and s and t scalars,

    a·y + c        = L(a·W, x) + (a·b + c)                 (a along W's output channels)
    L(W, s·x) + b  = L(s·W, x) + b                         (always: padding is zero, and s·0 = 0)
    L(W, x + t) + b = L(W, x) + (b + t·ΣW)                 (only where no padding enters; ΣW over all but the output)

Everything is computed in float64 and rounded once, to the weight's own type.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxq.arrays import Array

Array64 = NDArray[np.float64]


def scale_outputs(weight: Array, factor: Array64, axis: int, groups: int = 1) -> Array | None:
    """a·W. factor: [channels] or []; axis: W's output axis (ConvTranspose: 1, where channels = groups * W.shape[1]).

    None when the result does not fit W's type.
    """
    wide = weight.astype(np.float64)
    if factor.ndim == 0:
        return round_to_type(wide * factor, weight.dtype)
    if groups > 1 and axis == 1:
        split = wide.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        scaled = split * factor.reshape(groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
        return round_to_type(scaled.reshape(weight.shape), weight.dtype)
    shape = [1] * weight.ndim
    shape[axis] = -1
    return round_to_type(wide * factor.reshape(shape), weight.dtype)


def sum_inputs(weight: Array, axis: int) -> Array64:
    """ΣW, [channels along axis]: the increase of every output channel if all inputs grow by one."""
    return np.asarray(weight.astype(np.float64).sum(axis=tuple(k for k in range(weight.ndim) if k != axis)))


def compute_batchnorm_scale(
    scale: Array, bias: Array, mean: Array, var: Array, epsilon: float
) -> tuple[Array64, Array64] | None:
    """(a, c) of a BatchNormalization in inference, a·y + c; [channels] each. None if a variance is -epsilon or less."""
    spread = var.astype(np.float64) + epsilon
    if not (spread > 0).all():
        return None
    a = scale.astype(np.float64) / np.sqrt(spread)
    return a, bias.astype(np.float64) - mean.astype(np.float64) * a


def per_channel(value: Array, rank: int, axis: int, channels: int) -> Array64 | None:
    """A constant that broadcasts onto a tensor [.., channels at `axis`, ..] of `rank` without changing its shape.

    Returns [channels] or [] as float64; None when it varies along another axis or would raise the rank.
    """
    if value.ndim > rank:
        return None
    shape = (1,) * (rank - value.ndim) + value.shape
    if any(dim != 1 for k, dim in enumerate(shape) if k != axis % rank):
        return None
    flat = value.astype(np.float64).reshape(-1)
    # inf and NaN stay where they are: folded, they would spread over whole channels.
    if flat.size not in (1, channels) or not np.isfinite(flat).all():
        return None
    return flat if flat.size == channels and channels > 1 else flat.reshape(())


def round_to_type(value: Array64, dtype: np.dtype[Any]) -> Array | None:
    """`value` in a float type; None if it overflows, or is so small there that it loses significant digits."""
    # float16 is subnormal below 6e-5: a weight times 1/255 may end there.
    with np.errstate(over="ignore", under="ignore"):
        narrow = value.astype(dtype)
    wide = narrow.astype(np.float64)
    largest = float(np.abs(value).max(initial=0.0))
    # A unit in the last place of the largest value.
    limit = float(ml_dtypes.finfo(dtype).eps) * largest  # type: ignore[no-untyped-call]
    return narrow if bool(np.all(np.abs(wide - value) <= limit)) else None
