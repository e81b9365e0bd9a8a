"""int32 biases. Their scale is that of the accumulator: activation scale times weight scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxq.errors import PlanError
from onnxq.spec import QParams

# |bias| stays below 2**29 steps, a quarter of int32; the rest is for the accumulated products.
_BIAS_STEPS = 2.0**29
# The least scale of 8-bit values, see `numerics.ranges`.
_WEIGHT_FLOOR = 2.0**-24


def bias_qparams(x: QParams, w: QParams, count: int) -> QParams:
    """Make the qparams of a bias: scale s_x * s_w, multiplied in float32 as the engine does, zero point 0.

    x: per tensor. w: per tensor -> scale []; per output channel -> scale [count].
    count: number of bias values. If a weight channel serves several groups (ConvTranspose), the channel scales repeat
        group by group.
    Raises PlanError if x is not per tensor or the weight's channels do not divide `count`.
    """
    if np.size(x.scale) != 1:
        raise PlanError("bias", "its input is not quantized per tensor", "use a float bias", code="Q407")
    scale = np.asarray(x.scale, np.float32).reshape(()) * np.asarray(w.scale, np.float32)
    if np.ndim(w.scale):
        if np.ndim(w.scale) != 1 or count % max(np.size(w.scale), 1):
            raise PlanError(
                "bias",
                f"{count} values do not fit weight scales of shape {np.shape(w.scale)}",
                "use a float bias",
                code="Q407",
            )
        # The bias lists the channels of the first group, then those of the second …
        scale = np.tile(scale, count // np.size(w.scale))
    scale = np.asarray(scale, np.float32)
    return QParams(scale, np.zeros(scale.shape, np.int32), "activation scale * weight scale")


def floor_weight_scale(w_scale: ArrayLike, x_scale: ArrayLike, bias: ArrayLike) -> NDArray[np.float32]:
    """Raise weight scales so that no bias with scale s_x * s_w overflows: w_s >= max(2**-24, |b| / (x_s * 2**29)).

    Dead channels (weights all 0, bias not) need this.
    w_scale: [] or [channels]; x_scale: []; bias: [count], with count a multiple of the channels (groups).
    Returns float32 of w_scale's shape. Raises PlanError if the shapes do not fit.
    """
    scale = np.asarray(w_scale, np.float32)
    size = np.abs(np.asarray(bias, np.float64)).ravel()
    if np.size(x_scale) != 1 or scale.ndim > 1 or size.size % max(scale.size, 1):
        raise PlanError(
            "bias",
            f"{size.size} values do not fit weight scales of shape {scale.shape}",
            "use a float bias",
            code="Q407",
        )
    largest = size.reshape(-1, scale.size).max(axis=0, initial=0.0).reshape(scale.shape)
    needed = np.maximum(largest / (np.asarray(x_scale, np.float64).reshape(()) * _BIAS_STEPS), _WEIGHT_FLOOR)
    return np.asarray(np.maximum(scale, needed), np.float32)
