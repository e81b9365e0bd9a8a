"""SmoothQuant and AWQ: factors that move outlier channels between activations and weights: arithmetic on arrays.

X·W = (X/s)·(s·W). SmoothQuant, Xiao et al. 2022 (https://arxiv.org/abs/2211.10438), equation 4, where activations are
quantized: s_c = max|X_c| ** alpha / max_j |W_cj| ** (1 - alpha). Channels without values or without weights keep 1.
Powers of two for s lose nearly two decibels, so they are not used. AWQ, Lin et al. 2023
(https://arxiv.org/abs/2306.00978), where only weights are, so that rounding errors of s·W are divided by s:
s_c = mean|X_c| ** alpha. Channels without values get the smallest s. Both are divided by their geometric mean, and
alpha is chosen by the error of the layers' outputs, with all rounded that the plan rounds.

AWQ for MiniLM, int4 in blocks of 32, every group scaled: nearest rounding 13.2 -> 15.1 dB, GPTQ 17.6 -> 17.8 dB: it
reaches most of the gain of scaling by itself. So a Mul is inserted only where the layer's error falls by 4 dB, as for
SmoothQuant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxq.arrays import Array, Array64, Floats, are_finite, as_float32, as_float64, list_other_axes
from onnxq.evaluation.accumulator import relative_noise, sum_squares
from onnxq.numerics import SumOrders, fake_quant, fake_quant_weight, weight_qparams
from onnxq.numerics.ranges import qparams_from_range
from onnxq.spec import PerTensor, QuantSpec

# SmoothQuant's own strength is .5: MiniLM, weights and activations of 8 bits, has 17.4 dB with it,
# 23.7 with .65 and 24.7 with .8.
SMOOTHING_ALPHAS = (0.5, 0.65, 0.8, 0.9)
AWQ_ALPHAS = (0.15, 0.25, 0.35, 0.5, 0.65)
# Share of the largest channel below which a channel counts as empty, of its largest value and of its mean magnitude.
_DEAD_PEAK = 1e-6
_DEAD_MEAN = 1e-4
Array32 = Floats
# (s [channels], alpha, error with them, error without scaling); errors are noise over signal.
Choice = tuple[Array32, float, float, float]


@dataclass(frozen=True, eq=False)
class SmoothedWeight:
    """A weight [inputs, outputs] with its spec transposed likewise: channels along axis 1, blocks along axis 0.

    orders: the 16-bit sums that its integers must keep.
    """

    weight: Array32
    spec: QuantSpec
    orders: SumOrders = ()

    def round_scaled(self, s: Array32) -> Array32:
        """The weight times s [inputs], quantized and dequantized."""
        # Rows are inputs here, so a factor a channel goes along axis 0.
        weight = self.weight * s[:, None]
        qparams = weight_qparams(weight, self.spec, orders=self.orders)
        return as_float32(fake_quant_weight(weight, qparams, self.spec, self.orders))


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Statistics of an activation: low, high [channels] over all samples, and some of its rows [n, channels]."""

    low: Array64
    high: Array64
    rows: Array32

    @property
    def largest(self) -> Array64:
        """max |X_c|, [channels]."""
        return np.maximum(np.abs(self.low), np.abs(self.high))


class RunningStatistics:
    """Statistics of an activation so far: `extend_range` and `keep_rows` sample by sample, then `finish`."""

    def __init__(self, channels: int, rows: int) -> None:
        self.low = np.full(channels, np.inf)
        self.high = np.full(channels, -np.inf)
        self.rows: list[Floats] = []
        self.left = rows

    def extend_range(self, value: Array, axis: int) -> None:
        """value: channels along `axis`."""
        others = list_other_axes(value, axis % value.ndim)
        self.low = np.minimum(self.low, value.min(axis=others))
        self.high = np.maximum(self.high, value.max(axis=others))

    def keep_rows(self, values: Array, share: int) -> None:
        """Keep up to `share` rows, evenly spread, of values [positions, channels] without padding."""
        take = min(share, self.left, len(values))
        if take:
            picked = np.linspace(0, len(values) - 1, take).astype(int)
            self.rows.append(as_float32(values[picked]))
            self.left -= take

    def finish(self) -> ChannelStatistics | None:
        """The statistics; None where values were NaN or inf."""
        # Also where no sample reached it: the ends are still infinite.
        if not (are_finite(self.low) and are_finite(self.high)):
            return None
        rows = np.concatenate(self.rows) if self.rows else np.zeros((0, self.low.size), np.float32)
        return ChannelStatistics(self.low, self.high, rows)


def compute_smoothing(largest: Array64, weights: Sequence[Array], alpha: float) -> Array32:
    """SmoothQuant's s, [channels]. largest: max |X_c|; weights: [channels, outputs] each."""
    # All layers that read the activation share s, so the largest weight of any of them counts.
    columns = as_float64(np.max([np.abs(w).max(axis=1) for w in weights], axis=0))
    alive = (largest > _DEAD_PEAK * largest.max(initial=0.0)) & (
        columns > _DEAD_PEAK * columns.max(initial=0.0)
    )
    logs = alpha * np.log(largest[alive]) - (1.0 - alpha) * np.log(columns[alive])
    s = np.ones_like(largest)
    # In logarithms the geometric mean is a mean, and no power overflows. Divided by it, s neither
    # grows the weights nor the activations as a whole.
    s[alive] = np.exp(logs - logs.mean()) if logs.size else 1.0
    return as_float32(s)


def compute_awq_scaling(rows: Array32, alpha: float) -> Array32:
    """AWQ's s, [channels]; rows: [n, channels] of the activation."""
    size = np.abs(rows).mean(axis=0, dtype=np.float64)
    if not size.max(initial=0.0) > 0:
        return np.ones(size.size, np.float32)
    # The floor keeps silent channels from a factor near 0, whose inverse would blow up their rows.
    logs = alpha * np.log(np.maximum(size, _DEAD_MEAN * size.max()))
    return as_float32(np.exp(logs - logs.mean()))


def measure_layer_error(
    statistics: ChannelStatistics,
    weights: Sequence[SmoothedWeight],
    spec: QuantSpec,
    s: Array32,
    exact: Sequence[Array] | None = None,
) -> float:
    """Mean noise-to-signal ratio of the layers' outputs, with activations (by `spec`) and weights quantized.

    exact: the float outputs; None: compute them.
    """
    exact = [statistics.rows @ layer.weight for layer in weights] if exact is None else exact
    # A range always holds zero, which quantizers keep exact.
    low = min(float(np.min(statistics.low / s)), 0.0)
    high = max(float(np.max(statistics.high / s)), 0.0)
    x = as_float32(fake_quant(statistics.rows / s, qparams_from_range(low, high, spec), spec))
    ratios = [
        relative_noise([sum_squares(x @ layer.round_scaled(s), output)], sum_squares(output))
        for layer, output in zip(weights, exact, strict=True)
    ]
    return float(np.mean(ratios))


def measure_weights_error(rows: Array32, weights: Sequence[SmoothedWeight], s: Array32) -> float:
    """Mean noise-to-signal ratio of the layers' outputs, with only the weights quantized."""
    ratios = []
    for layer in weights:
        # Activations divided by s stay float, so the error is that of the weights alone.
        gap = layer.round_scaled(s) / s[:, None] - layer.weight
        # Dead layers, whose outputs are all 0, have no signal to divide by.
        ratios.append(sum_squares(rows @ gap) / max(sum_squares(rows @ layer.weight), 1e-30))
    return float(np.mean(ratios))


def search_smoothing_exponent(
    statistics: ChannelStatistics, weights: Sequence[SmoothedWeight], spec: QuantSpec
) -> Choice:
    """The best of SMOOTHING_ALPHAS for an activation, quantized by `spec`, and the layers that read it."""
    largest = statistics.largest
    arrays = [layer.weight for layer in weights]
    exact = [statistics.rows @ weight for weight in arrays]
    return _choose_exponent(
        {alpha: compute_smoothing(largest, arrays, alpha) for alpha in SMOOTHING_ALPHAS},
        lambda s: measure_layer_error(statistics, weights, spec, s, exact),
    )


def search_awq_exponent(rows: Array32, weights: Sequence[SmoothedWeight]) -> Choice:
    """The best of AWQ_ALPHAS for some rows [n, channels] of the activation."""
    return _choose_exponent(
        {alpha: compute_awq_scaling(rows, alpha) for alpha in AWQ_ALPHAS},
        lambda s: measure_weights_error(rows, weights, s),
    )


def _choose_exponent(factors: dict[float, Array32], measure: Callable[[Array32], float]) -> Choice:
    """The exponent whose factors leave the least error; of equal ones the first."""
    # Plain rounding is no candidate but the mark that callers compare the gain with.
    plain = measure(np.ones_like(next(iter(factors.values()))))
    errors = {alpha: measure(s) for alpha, s in factors.items()}
    # `min` keeps the first of equals, the mildest exponent.
    best = min(errors, key=errors.__getitem__)
    return factors[best], best, errors[best], plain


def turn_spec(spec: QuantSpec) -> QuantSpec:
    """The spec of a weight transposed so that its outputs lie along axis 1 and its blocks along axis 0."""
    grain = spec.granularity
    if isinstance(grain, PerTensor):
        return spec
    return replace(spec, granularity=replace(grain, axis=1 if spec.has_channels else 0))
