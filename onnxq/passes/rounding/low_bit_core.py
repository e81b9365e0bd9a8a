"""Rounding at few bits: shrunk second moments, a search for scales, coordinate descent on the rounding; arrays only.

shrink_moments     H with its off-diagonal part reduced by the share on which the two halves of the samples disagree:
                   delta = |H1 - H2|^2 / 4 / |H|^2, off the diagonal (Ledoit and Wolf 2004, Schaefer and Strimmer 2005,
                   with the variance from halves, since positions of one sample are no independent draws).
                   EfficientNet-Lite0, all weights at 4 bits, 24 samples: 7.0 -> 7.5 dB.
round_low_bit      GPTQ with the row's scale times each of FACTORS; the one with the least error is taken. That shrinks
                   the row's output a little, in every layer, so the scale is then raised until
                   <W^, W>_H = <W, W>_H. A ResNet with weights of 4 bits: 34.7 dB without either, 33.6 without the last
                   step, 34.9 so; EfficientNet-Lite0 7.5, 8.8 and 9.2.
descend_values     AdaRound's objective (Nagel et al. 2020, arXiv 2004.10568: the error of the layer's output over all
                   roundings), which for a linear layer is tr((W - W^) H (W - W^)^T): it needs H, no samples. In place
                   of its relaxation, coordinate descent: the best change of one integer by 1 per row, until none helps.
"""

from dataclasses import replace

import numpy as np

from onnxq.arrays import Array, Array64, Codes, as_float32, as_float64, as_int32
from onnxq.numerics.machine import map_parts
from onnxq.passes.rounding.gptq_core import (
    RoundedWeight,
    RoundingProblem,
    layer_error,
    round_with_feedback,
)
from onnxq.passes.rounding.second_moments import ROWS_AT_ONCE

# Up to so many bits everything hangs on the rounding of a weight, and its scales are searched together with it; above,
# the whole range is best.
NARROW_BITS = 6
# Steps of .1 leave .2 dB of a layer's error, of narrow layers' more.
FACTORS = tuple(1.0 - 0.025 * k for k in range(21))
# Scales of blocks are searched block by block before: a decoder with 4 bits in blocks of 32 has a KL of .0006 with one
# factor, three, or all, of which 21 take as many times as long.
WHOLE = (1.0,)
# Most that the last step may change a scale: beyond it the row is mostly rounding error.
_GAIN = 1.25
# A step must lower a row's error by this share of it; smaller changes are floating-point noise.
_STEP = 1e-7


def shrink_moments(h: Array, even: Array, odd: Array) -> Array64:
    """H with its off-diagonal part shrunk. even, odd: H of either half of the samples. All [groups, K, K]."""
    noise = np.empty(h.shape[:2])
    signal = np.empty_like(noise)
    columns = np.arange(h.shape[-1])

    def add_squares(part: slice) -> None:
        # Half the difference of two halves is as large as the error of their mean.
        gap = (even[:, part] - odd[:, part]) / 2.0
        for sums, values in ((noise, gap), (signal, np.array(h[:, part], np.float64))):
            values[:, columns[part] - part.start, columns[part]] = 0.0
            sums[:, part] = np.einsum("grk,grk->gr", values, values)

    map_parts(add_squares, len(columns), ROWS_AT_ONCE, elements=h.size)
    share = np.minimum(
        noise.sum(axis=1) / np.maximum(signal.sum(axis=1), np.finfo(np.float64).tiny), 1.0
    )
    shrunk: Array64 = h * (1.0 - share[:, None, None])
    shrunk[:, columns, columns] = h[:, columns, columns]
    return shrunk


def round_low_bit(problem: RoundingProblem) -> RoundedWeight:
    """Codes and, for each row, a factor for its scale; where the problem is thorough, with `descend_values`."""
    w = problem.weight
    zero = problem.zero
    damped = problem.feedback.damped
    nothing = np.zeros(w.shape[:2])
    least = nothing if problem.least is None else as_float64(problem.least)
    several = len(problem.factors) > 1
    codes = np.zeros(w.shape, np.int32)
    error = np.full_like(nothing, np.inf)
    best = nothing
    for k, factor in enumerate(problem.factors):
        scale = as_float32(problem.scale * np.float32(factor))
        tried = round_with_feedback(replace(problem, scale=scale)).codes
        if problem.thorough:
            tried = descend_values(w, tried, damped, scale, zero, problem.limits)
        now = layer_error(w, tried, scale, zero, damped) if several else nothing
        # The first, the whole range, is allowed to every row, and of equal errors it stays.
        better = ((now < error) & (factor >= least)) | (k == 0)
        codes = np.where(better[:, :, None], tried, codes)
        error = np.where(better, now, error)
        best = np.where(better, factor, best)
    best = best * _measure_shrinkage(w, (codes - zero) * problem.scale * best[:, :, None], damped)
    return RoundedWeight(as_int32(codes), as_float32(np.maximum(best, least)))


def _measure_shrinkage(w: Array, rounded: Array, damped: Array) -> Array:
    """<W, W>_H / <W^, W>_H of every row, within 1 / _GAIN and _GAIN."""
    exact = np.empty(w.shape[:2])
    shrunk = np.empty_like(exact)

    def project_rows(part: slice) -> None:
        towards = as_float64(w[:, part]) @ damped
        np.einsum("grk,grk->gr", towards, w[:, part], out=exact[:, part])
        np.einsum("grk,grk->gr", towards, rounded[:, part], out=shrunk[:, part])

    map_parts(project_rows, w.shape[1], ROWS_AT_ONCE, elements=damped.size)
    ratio = np.divide(exact, shrunk, out=np.ones_like(exact), where=(shrunk > 0) & (exact > 0))
    return np.clip(ratio, 1 / _GAIN, _GAIN)


def descend_values(
    w: Array, codes: Array, damped: Array, scale: Array, zero: Array, limits: tuple[int, int]
) -> Codes:
    """Quantized values after coordinate descent: the best change by 1 per row, until none lowers the row's error.

    No row's error is larger than before. damped: of `damp_moments`. At most K steps per row.
    """
    descended = np.array(codes, np.int32)
    for group in zip(w, descended, damped, scale, zero, strict=True):
        _descend_group(*group, limits)
    return descended


def _descend_group(
    w: Array, codes: Array, h: Array, scale: Array, zero: Array, limits: tuple[int, int]
) -> None:
    """`descend_values` of one group, in place. The gradient is updated, not recomputed: a step is K products a row."""
    moments = as_float32(h)
    steps = as_float32(scale)
    curve = np.diag(moments)
    gap = (codes - zero) * steps - as_float32(w)
    slope = gap @ moments
    floor = -_STEP * np.einsum("rk,rk->r", slope, gap)
    rows = np.arange(len(codes))
    # A bound that rows seldom reach: a step moves one integer, and most of them are right from the start.
    for _ in range(codes.shape[1]):
        step = steps[rows]
        slopes = slope[rows]
        at = codes[rows]
        # A step of an integer changes the error by ±2 · step · slope + step² · h_kk.
        bend = step * step * curve
        tilt = 2 * step * slopes
        up = np.where(at < limits[1], tilt + bend, np.inf)
        down = np.where(at > limits[0], bend - tilt, np.inf)
        least = np.minimum(up, down)
        column = least.argmin(axis=1)
        every = np.arange(len(rows))
        rising = up[every, column] <= down[every, column]
        helps = least[every, column] < floor[rows]
        rows = rows[helps]
        column = column[helps]
        rising = rising[helps]
        if not len(rows):
            return
        sign = np.where(rising, 1, -1)
        codes[rows, column] += sign
        slope[rows] += (sign * steps[rows, column])[:, None] * moments[column]
