"""SmoothQuant: moving outlier channels from activations, which have one scale, into weights: arithmetic on arrays.

Xiao et al. 2022 (https://arxiv.org/abs/2211.10438), equation 4: X·W = (X/s)·(s·W) with
s_c = max|X_c| ** alpha / max_j |W_cj| ** (1 - alpha), here divided by its geometric mean. alpha is chosen among 0.5,
0.65, 0.8 and 0.9 by the error of the layers' outputs, activations and weights both rounded. Channels without values or
without weights keep 1. Powers of two for s lose nearly two decibels, so they are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.evaluation.layer_noise import relative_noise
from onnxq.numerics import SumOrder, fake_quant, fake_quant_weight, qparams_from_range, weight_qparams
from onnxq.passes.affine_core import Array64
from onnxq.spec import PerBlock, PerChannel, QuantSpec

ALPHAS = (0.5, 0.65, 0.8, 0.9)
# Share of the largest channel below which a channel counts as empty.
_DEAD = 1e-6
Outputs = Sequence[NDArray[Any]]
# (s [channels], alpha, error with them, error without scaling); errors are noise over signal.
Choice = tuple[NDArray[np.float32], float, float, float]


@dataclass(frozen=True, eq=False)
class Reader:
    """A weight [inputs, outputs] with its spec transposed likewise: channels along axis 1, blocks along axis 0.

    orders: the 16-bit sums that its integers must keep.
    """

    weight: NDArray[np.float32]
    spec: QuantSpec
    orders: tuple[SumOrder, ...] = ()

    def rounded(self, s: NDArray[np.float32]) -> NDArray[np.float32]:
        """The weight times s [inputs], quantized and dequantized."""
        weight = self.weight * s[:, None]
        qparams = weight_qparams(weight, self.spec, orders=self.orders)
        return np.asarray(fake_quant_weight(weight, qparams, self.spec, self.orders), np.float32)


@dataclass(frozen=True, eq=False)
class Seen:
    """Statistics of an activation: low, high [channels] over all samples, and some of its rows [n, channels]."""

    low: Array64
    high: Array64
    rows: NDArray[np.float32]


def compute_smoothing(largest: Array64, weights: Sequence[NDArray[Any]], alpha: float) -> NDArray[np.float32]:
    """s, [channels]. largest: max |X_c|; weights: [channels, outputs] each."""
    columns = np.max([np.abs(w).max(axis=1) for w in weights], axis=0).astype(np.float64)
    alive = (largest > _DEAD * largest.max(initial=0.0)) & (columns > _DEAD * columns.max(initial=0.0))
    logs = alpha * np.log(largest[alive]) - (1.0 - alpha) * np.log(columns[alive])
    s = np.ones_like(largest)
    s[alive] = np.exp(logs - logs.mean()) if logs.size else 1.0
    return s.astype(np.float32)


def layer_error(
    seen: Seen, readers: Sequence[Reader], spec: QuantSpec, s: NDArray[np.float32], exact: Outputs | None = None
) -> float:
    """Mean noise-to-signal ratio of the readers' outputs, with activations (by `spec`) and weights quantized.

    exact: the float outputs; None: compute them.
    """
    exact = [seen.rows @ reader.weight for reader in readers] if exact is None else exact
    low, high = (float(f(end / s)) for f, end in ((np.min, seen.low), (np.max, seen.high)))
    # A range always holds zero, which quantizers keep exact.
    qparams = qparams_from_range(min(low, 0.0), max(high, 0.0), spec)
    x = fake_quant(seen.rows / s, qparams, spec).astype(np.float32)
    pairs = zip(readers, exact, strict=True)
    return float(np.mean([relative_noise([wanted], [x @ reader.rounded(s)]) for reader, wanted in pairs]))


def search_alpha(seen: Seen, readers: Sequence[Reader], spec: QuantSpec) -> Choice:
    """The best of ALPHAS for an activation, quantized by `spec`, and the layers that read it."""
    largest = np.maximum(np.abs(seen.low), np.abs(seen.high))
    weights = [reader.weight for reader in readers]
    exact = [seen.rows @ weight for weight in weights]
    return choose_exponent(
        largest.size, ALPHAS, lambda alpha: compute_smoothing(largest, weights, alpha),
        lambda s: layer_error(seen, readers, spec, s, exact),
    )  # fmt: skip


def choose_exponent(
    channels: int,
    alphas: Sequence[float],
    scale: Callable[[float], NDArray[np.float32]],
    measure: Callable[[NDArray[np.float32]], float],
) -> Choice:
    """The exponent whose factors, of `scale`, leave the least error, of `measure`; of equal ones the first."""
    plain = measure(np.ones(channels, np.float32))
    scaled = {alpha: scale(alpha) for alpha in alphas}
    errors = {alpha: measure(s) for alpha, s in scaled.items()}
    best = min(errors, key=errors.__getitem__)
    return scaled[best], best, errors[best], plain


def along_outputs(spec: QuantSpec) -> QuantSpec:
    """The spec of a weight transposed so that its outputs lie along axis 1 and its blocks along axis 0."""
    grain = spec.granularity
    if isinstance(grain, PerChannel):
        return replace(spec, granularity=PerChannel(1))
    return replace(spec, granularity=PerBlock(0, grain.size)) if isinstance(grain, PerBlock) else spec
