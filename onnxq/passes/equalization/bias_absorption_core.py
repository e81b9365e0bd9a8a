"""Bias absorption: a constant per channel is subtracted from a tensor and added to the bias of the next layer.

After Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"
(https://arxiv.org/abs/1906.04721), section 4.1.2. For a per-channel c,

    L(W, x) + b = L(W, x - c) + (b + W·c)

and x - c is the output of the layer in front with its bias lowered by c. The paper takes c = max(0, β - 3γ) of the
batch normalization in front of a ReLU, which changes the rare values below c, and ignores padding, which stays 0 when
the values around it move. Both change the function, so here

* without an activation between, c is the middle of the channel's range on samples: exact for any input, and channels
  with different offsets then share one range; a symmetric range gains at most half, more where channels differ;
* behind a ReLU, c is the smallest value of the channel on samples (times 0.9), so that no observed value is cut off;
* only where no padding enters the layers behind.

By default biases are absorbed only if that narrows the tensor's range by at least 2 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.passes.affine_core import Array64

# Least share by which the tensor's range must shrink.
WORTH = 0.02
# Share of a ReLU output's smallest value that is absorbed; the rest is a margin for other inputs than the samples.
_KEPT = 0.9


def compute_shifts(low: Array64, high: Array64, *, rectified: bool) -> Array64:
    """c of each channel from its smallest and largest values, [channels] each; zeros if the range hardly shrinks.

    rectified: behind a ReLU. Values are those of float32, as a plan stores them.
    """
    c = np.maximum(low, 0.0) * _KEPT if rectified else (low + high) / 2.0
    c = np.where(np.isfinite(c), c, 0.0).astype(np.float32).astype(np.float64)
    before, after = _width(low, high), _width(low - c, high - c)
    return c if after < (1.0 - WORTH) * before else np.zeros_like(c)


def _width(low: Array64, high: Array64) -> float:
    """Width of the range that one scale has to cover; it always contains zero."""
    return float(max(high.max(initial=0.0), 0.0) - min(low.min(initial=0.0), 0.0))


def absorb_shifts(weight: NDArray[Any], c: Array64, axis: int, groups: int) -> Array64:
    """W·c, [output channels]: added to the bias if the input is lowered everywhere by c, [input channels].

    axis: W's output axis, 0 for Conv ([out, in / groups, kernel…]) and a transposed Gemm, 1 for [in, out] matrices.
    """
    wide = weight.astype(np.float64)
    if axis:
        return np.asarray(c @ wide)
    flat = wide.reshape(groups, wide.shape[0] // groups, wide.shape[1], -1).sum(axis=3)
    return np.asarray(np.einsum("goi,gi->go", flat, c.reshape(groups, -1)).reshape(-1))
