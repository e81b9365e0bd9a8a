"""AWQ: making room for the weights that large inputs meet, where only weights are quantized: the numbers alone.

Lin et al. 2023 (https://arxiv.org/abs/2306.00978): X·W = (X/s)·(s·W) with s_c = mean|X_c| ** alpha, here divided by its
geometric mean; rounding errors of s·W come out divided by s. alpha is searched in the error of the layers' outputs,
each weight rounded as its spec says. Channels without values get the smallest s there is.

MiniLM, int4 in blocks of 32, every group scaled: nearest rounding 13.2 -> 15.1 dB, rounding by moments 17.6 -> 17.8: it
finds by itself most of what scaling gives. So a Mul is put in only where the layer's error falls by 4 dB, as in
smoothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnxq.evaluation.layer_noise import sum_squares
from onnxq.passes.equalization.smoothquant_core import Reader

ALPHAS = (0.15, 0.25, 0.35, 0.5, 0.65)
_DEAD = 1e-4


def scaling(rows: NDArray[np.float32], alpha: float) -> NDArray[np.float32]:
    """s, [channels]; rows: [n, channels] of the activation."""
    size = np.abs(rows).mean(axis=0, dtype=np.float64)
    if not size.max(initial=0.0) > 0:
        return np.ones(size.size, np.float32)
    logs = alpha * np.log(np.maximum(size, _DEAD * size.max()))
    return np.asarray(np.exp(logs - logs.mean()), np.float32)


def outputs_error(rows: NDArray[np.float32], readers: Sequence[Reader], s: NDArray[np.float32]) -> float:
    """Noise over signal of the readers' outputs, their mean, with only the weights rounded."""
    ratios = []
    for reader in readers:
        gap = reader.rounded(s) / s[:, None] - reader.weight
        ratios.append(sum_squares(rows @ gap) / max(sum_squares(rows @ reader.weight), 1e-30))
    return float(np.mean(ratios))


def search(rows: NDArray[np.float32], readers: Sequence[Reader]) -> tuple[NDArray[np.float32], float, float, float]:
    """(s, alpha, its error, the error without): the best alpha; ties go to the smaller."""
    plain = outputs_error(rows, readers, np.ones(rows.shape[1], np.float32))
    tried = []
    for alpha in ALPHAS:
        s = scaling(rows, alpha)
        tried.append((outputs_error(rows, readers, s), alpha, s))
    error, alpha, s = min(tried, key=lambda one: one[:2])
    return s, alpha, error, plain
