"""Absorbing biases: what every channel of a tensor has in common goes through the next layer into its bias.

After Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"
(https://arxiv.org/abs/1906.04721), section 4.1.2. For a per-channel c,

    L(W, x) + b = L(W, x - c) + (b + W·c)

and x - c is what the layer in front makes with its bias lowered by c. The paper takes c = max(0, β - 3γ) of the batch
normalization in front of a ReLU, which changes the rare values below c, and pays no heed to padding, which stays 0 when
the values around it move. Both change the function, so here

* without an activation between, c is the middle of the channel's range on samples: exact for any input, and channels
  that stood apart share one range; at most half of a symmetric range is gained, more where channels differ;
* behind a ReLU, c is the smallest value of the channel on samples (times 0.9), so that nothing seen is cut off;
* only where no padding enters the layers behind.

Defaults: nothing is absorbed that narrows the tensor's range by less than 2 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.passes.affine_core import Array64

WORTH = 0.02
_KEPT = 0.9


def shifts(low: Array64, high: Array64, *, rectified: bool) -> Array64:
    """c of each channel from its smallest and largest values, [channels] each; zeros where it is not worth it.

    float32 values, as a plan stores them.
    """
    c = np.maximum(low, 0.0) * _KEPT if rectified else (low + high) / 2.0
    c = np.where(np.isfinite(c), c, 0.0).astype(np.float32).astype(np.float64)
    before, after = _width(low, high), _width(low - c, high - c)
    return c if after < (1.0 - WORTH) * before else np.zeros_like(c)


def _width(low: Array64, high: Array64) -> float:
    """The range one scale has to span: zero is always in it."""
    return float(max(high.max(initial=0.0), 0.0) - min(low.min(initial=0.0), 0.0))


def absorbed(weight: NDArray[Any], c: Array64, axis: int, groups: int) -> Array64:
    """W·c, [output channels]: what the bias gains when the input is lowered by c, [input channels], everywhere.

    axis: W's output axis, 0 for Conv ([out, in / groups, kernel…]) and a transposed Gemm, 1 for [in, out] matrices.
    """
    wide = weight.astype(np.float64)
    if axis:
        return np.asarray(c @ wide)
    flat = wide.reshape(groups, wide.shape[0] // groups, wide.shape[1], -1).sum(axis=3)
    return np.asarray(np.einsum("goi,gi->go", flat, c.reshape(groups, -1)).reshape(-1))
