"""AWQ: finer steps for weights that meet large inputs, where only weights are quantized: arithmetic on arrays.

Lin et al. 2023 (https://arxiv.org/abs/2306.00978): X·W = (X/s)·(s·W) with s_c = mean|X_c| ** alpha, here divided by its
geometric mean; rounding errors of s·W are divided by s. alpha is chosen by the error of the layers' outputs, each
weight rounded by its spec. Channels without values get the smallest s.

MiniLM, int4 in blocks of 32, every group scaled: nearest rounding 13.2 -> 15.1 dB, GPTQ 17.6 -> 17.8 dB: it reaches
most of the gain of scaling by itself. So a Mul is inserted only where the layer's error falls by 4 dB, as for
SmoothQuant.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnxq.evaluation.layer_noise import sum_squares
from onnxq.passes.equalization.smoothquant_core import Choice, Reader, choose_exponent

ALPHAS = (0.15, 0.25, 0.35, 0.5, 0.65)
# Floor of a channel's mean magnitude, as a share of the largest.
_DEAD = 1e-4


def compute_scaling(rows: NDArray[np.float32], alpha: float) -> NDArray[np.float32]:
    """s, [channels]; rows: [n, channels] of the activation."""
    size = np.abs(rows).mean(axis=0, dtype=np.float64)
    if not size.max(initial=0.0) > 0:
        return np.ones(size.size, np.float32)
    logs = alpha * np.log(np.maximum(size, _DEAD * size.max()))
    return np.asarray(np.exp(logs - logs.mean()), np.float32)


def outputs_error(rows: NDArray[np.float32], readers: Sequence[Reader], s: NDArray[np.float32]) -> float:
    """Mean noise-to-signal ratio of the readers' outputs, with only the weights quantized."""
    gaps = (reader.rounded(s) / s[:, None] - reader.weight for reader in readers)
    signals = (max(sum_squares(rows @ reader.weight), 1e-30) for reader in readers)
    return float(np.mean([sum_squares(rows @ gap) / signal for gap, signal in zip(gaps, signals, strict=True)]))


def search_exponent(rows: NDArray[np.float32], readers: Sequence[Reader]) -> Choice:
    """The best of ALPHAS for some rows [n, channels] of the activation."""
    return choose_exponent(
        rows.shape[1], ALPHAS, lambda alpha: compute_scaling(rows, alpha), lambda s: outputs_error(rows, readers, s)
    )
