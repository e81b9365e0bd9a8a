"""Rounding by second moments (GPTQ), least-squares re-fit, and bias correction, on arrays.

round_with_feedback Frantar et al. 2022, "GPTQ" (arXiv 2210.17323), with given scales: columns in descending order of
                   their second moment, each column's rounding error compensated in the columns after it. Written with
                   the factors of H in place of those of its inverse (Chee et al. 2023, "QuIP", arXiv 2307.13304,
                   theorem 6: the same result). Damping 0.1 of the mean diagonal (8-bit CNNs: .01 28.9 dB, .03 29.7,
                   .1 30.1).
refit_weight       W' = W (C + l I) (H + l I)^-1: the weights whose outputs for the quantized model's inputs are nearest
                   to the float outputs. choose_ridge chooses l, in units of mean(diag H), by the error of weights
                   fitted to half of the samples on the other half, both ways; no re-fit unless both errors fall. (With
                   a fixed l, 100 positions per column were needed to avoid overfitting, 17 to 20 dB where 23 were
                   possible.) EfficientNet-Lite0, int8 symmetric, 24 samples: 19.1 dB with l = 0.1 and 100 positions
                   per column, 20.0 so.
correct_bias       b' = b + f (W mean(x) - W^ mean(y)): the mean error of each output channel goes into the bias, as far
                   as samples agree on it: f = max(0, 1 - variance of that mean / its square), James and Stein 1961.
                   8 samples on EfficientNet-Lite0 17.9 -> 18.5 dB, PP-OCRv4's recognizer 16.6 -> 18.1; no change at 28.
round_within_sums  GPTQ for weights whose 16-bit sums may overflow. Weights that share a sum (numerics.weights) limit
                   each other, the less the wider the steps are: scales of rows whose sums would overflow are widened by
                   `numerics.widening`, each column's error weighted by its cost for the layer. EfficientNet-Lite0 at 8
                   bits, mean of three seeds: 26.5 dB without the limit, 26.1 so; with one bit less, 23.6.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from onnxq.arrays import Array, Array64, Codes, Floats, Integers, Shape, as_float32, as_float64
from onnxq.numerics import SumOrder, choose_widening, find_partners, round_within_sum
from onnxq.numerics.machine import map_parts
from onnxq.numerics.weights import MOST
from onnxq.passes.rounding.second_moments import ROWS_AT_ONCE, Moments

# Of the mean diagonal of H; see above.
DAMPING = 0.1
# Candidates, in the same unit, half a decade apart.
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
# Positions for each column of a weight, in both halves of the samples together, from which on a re-fit is tried.
POSITIONS_PER_COLUMN = 30
# The mean of a hundred values has an error of a tenth of their spread. With fewer, weights are fitted to a short part
# of one recording and are wrong for the next (silero_vad, 24 frames, 24 to 96 positions: 12 to 20 dB by chance, 18
# without).
FEWEST_POSITIONS = 100
# Columns that are rounded before their errors are added to the others, and columns of a panel of the factorization:
# with fewer the products are too small for BLAS, with more too much is done one by one.
_BLOCK = 32
_PANEL = 96
# Damping from which on float32 is exact enough for the factorization.
_ENOUGH = 0.01
# Relative difference below which two errors are compared in float64.
_NEAR = 1e-3


@dataclass(frozen=True, eq=False)
class ErrorFeedback:
    """The factorization of H for error feedback, computed once for any number of weights and scales.

    damped: H with its damping. order: columns by ascending diagonal, rounded from the last on. lower: unit lower
    triangular L [groups, K, K] of L D L^T = damped in that order. weights: D [groups, K]; the error of a row is the sum
    of the squared remainders of its columns, weighted by D.
    """

    damped: Array64
    order: Integers
    lower: Array
    weights: Array


@dataclass(frozen=True, eq=False)
class RoundingProblem:
    """One weight to be rounded, as a matrix for each group.

    weight: [groups, rows, K], as stored or re-fitted. scale, zero: one for every weight, of the same shape, whether per
    tensor, channel or block. limits: (qmin, qmax). feedback: the factorization of the second moments of the input.
    partner: [K], the column that shares a 16-bit sum with each, or -1; None: no sum can overflow. least: [groups,
    rows], the least factor allowed for the scale of a row; None: any. factors: of scales, for a strategy that searches
    them, the first of which is allowed for every row. thorough: a longer search.
    """

    weight: Array
    scale: Array
    zero: Array
    limits: tuple[int, int]
    feedback: ErrorFeedback
    partner: Integers | None = None
    least: Array | None = None
    factors: Sequence[float] = (1.0,)
    thorough: bool = False


# Quantized values of a weight.


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """codes: int32 [groups, rows, K]. factors: of the scales, float32 [groups, rows]; None: the scales stay."""

    codes: Codes
    factors: Floats | None = None


def round_to_nearest(problem: RoundingProblem) -> RoundedWeight:
    """Weights rounded to nearest, as by `numerics.quantize_weight`."""
    zero = problem.zero
    low, high = problem.limits
    partner = problem.partner
    steps = as_float32(problem.weight) / problem.scale
    codes = np.rint(steps).clip(low - zero, high - zero).astype(np.int32) + zero
    if partner is not None:
        # Each sum once, from its first column.
        first = np.flatnonzero(partner > np.arange(len(partner)))
        total = codes[:, :, first] + codes[:, :, partner[first]]
        # Both are of one sign, else they would not add up to so much. Few sums overflow.
        group, row, k = np.nonzero(abs(total) > MOST)
        left = (group, row, first[k])
        right = (group, row, partner[first[k]])
        aims = [steps[at] + zero[at] for at in (left, right)]
        codes[left], codes[right] = round_within_sum(codes[left], codes[right], *aims)
    return RoundedWeight(codes)


def factor_hessian(h: Array, *, damping: float = DAMPING) -> ErrorFeedback:
    """The factorization of h, [groups, K, K], positive semidefinite.

    Damping bounds the condition number by K / damping, so float32 is enough from 0.01 on.
    """
    damped = damp_moments(h, damping)
    kind = np.float32 if damping >= _ENOUGH else np.float64
    # Columns of large second moments are rounded first, while all others can still make up for
    # their errors.
    order = np.einsum("gii->gi", damped).argsort(axis=1, kind="stable")
    unit = np.einsum("gii->g", damped) / damped.shape[-1]
    scaled = np.empty(damped.shape, kind)

    def scale_rows(part: slice) -> None:
        # With a mean of 1 on the diagonal, float32 neither overflows nor underflows.
        rows = (_reorder(damped, order[:, part]) / unit[:, None, None]).astype(kind)
        scaled[:, part] = _reorder(rows.transpose(0, 2, 1), order).transpose(0, 2, 1)

    map_parts(scale_rows, damped.shape[1], ROWS_AT_ONCE, elements=damped.size)
    lower = _cholesky(scaled)
    diagonal = np.einsum("gii->gi", lower).copy()
    lower /= diagonal[:, None, :]
    return ErrorFeedback(damped, order, lower, diagonal**2 * unit[:, None].astype(kind))


def _cholesky(h: Array) -> Array:
    """Lower triangular L of L L^T = h; overwrites h."""
    # By panels, so that nearly all work is in matrix products: numpy's own copies whole matrices transposed, and takes
    # four times as long for 1536 columns.
    size = h.shape[-1]
    if size <= 2 * _PANEL:
        return np.linalg.cholesky(h)
    lower = np.zeros_like(h)
    for first in range(0, size, _PANEL):
        here = slice(first, min(first + _PANEL, size))
        later = slice(first + _PANEL, size)
        lower[:, here, here] = corner = np.linalg.cholesky(h[:, here, here])
        panel = h[:, later, here] @ np.linalg.inv(corner).transpose(0, 2, 1)
        lower[:, later, here] = panel
        # Products of whole matrices would spend their time on memory for twice as much as is read.
        subtract = partial(_subtract_square, h[:, later, later], panel)
        map_parts(subtract, panel.shape[1], ROWS_AT_ONCE, elements=panel.shape[1] ** 2)
    return lower


def _subtract_square(h: Array, panel: Array, part: slice) -> None:
    """Subtract P P^T from some rows of h, up to its diagonal."""
    h[:, part, : part.stop] -= panel[:, part] @ panel[:, : part.stop].transpose(0, 2, 1)


def round_with_feedback(problem: RoundingProblem) -> RoundedWeight:
    """Codes by GPTQ, for a small tr((W - W^) H (W - W^)^T); no row's is larger than rounded to nearest.

    From the last column to the first, all rows and groups at once: to a column the errors of the columns behind it are
    added, E L, and then it is rounded. That takes one matrix product per block and one per column inside it.
    """
    feedback = problem.feedback
    # [groups, K, rows], columns in the order of the factorization.
    arrays = (problem.weight, problem.scale, problem.zero)
    w, scale, zero = (_reorder(array.transpose(0, 2, 1), feedback.order) for array in arrays)
    sums = None if problem.partner is None else _SharedSums(problem.partner, feedback.order, zero)
    lower = as_float32(feedback.lower)
    low, high = (as_float32(limit - zero) for limit in problem.limits)
    codes = np.empty_like(w)
    errors = np.empty_like(w)
    left = np.empty_like(w)
    for last in range(w.shape[1], 0, -_BLOCK):
        first = max(last - _BLOCK, 0)
        upper = np.ascontiguousarray(lower[:, first:, first:last].transpose(0, 2, 1))
        later = upper[:, :, last - first :]
        shifted = w[:, first:last] + later @ errors[:, last:]
        for k in reversed(range(first, last)):
            column = shifted[:, k - first]
            if k + 1 < last:
                inside = upper[:, k - first : k - first + 1, k + 1 - first : last - first]
                column = column + (inside @ errors[:, k + 1 : last])[:, 0]
            code = np.rint(column / scale[:, k])
            np.maximum(np.minimum(code, high[:, k], out=code), low[:, k], out=codes[:, k])
            if sums is not None:
                codes[:, k] = sums.limit_column(codes[:, k], codes, k)
            value = codes[:, k] * scale[:, k]
            # `left` measures the row, with the errors of others in it; `errors` is what the value
            # itself lost, which the columns to come make up for.
            np.subtract(column, value, out=left[:, k])
            np.subtract(w[:, k], value, out=errors[:, k])
    # Of each row, [groups, rows].
    error = as_float64(np.einsum("gkr,gk->gr", np.square(left, out=left), feedback.weights))
    return RoundedWeight(_take_better_rows(problem, codes.astype(np.int32) + zero, error))


def _take_better_rows(problem: RoundingProblem, ordered: Array, error: Array64) -> Codes:
    """The rows by GPTQ, [groups, K, rows] as of `_reorder`, or those rounded to nearest where their error is less."""
    feedback = problem.feedback
    w = problem.weight
    scale = problem.scale
    zero = problem.zero
    codes = np.empty_like(ordered)
    np.put_along_axis(codes, feedback.order[:, :, None], ordered, axis=1)
    codes = codes.transpose(0, 2, 1)
    nearest = round_to_nearest(problem).codes
    gap = _reorder((w - as_float32(nearest - zero) * scale).transpose(0, 2, 1), feedback.order)
    # gapᵀ H gap, where H = L · diag(weights) · Lᵀ.
    upper = feedback.lower.transpose(0, 2, 1)
    remainders = np.empty_like(gap)

    def square_remainders(part: slice) -> None:
        behind = slice(part.start, None)
        np.square(upper[:, part, behind] @ gap[:, behind], out=remainders[:, part])

    map_parts(square_remainders, gap.shape[1], ROWS_AT_ONCE, elements=gap.size * gap.shape[1])
    simple = np.einsum("gkr,gk->gr", remainders, feedback.weights)
    worse = error > simple
    close = (abs(error - simple) <= _NEAR * simple).any(axis=0)
    # Errors of float32 cannot tell them apart, and "no row's is larger" is promised.
    if close.any():
        exact, exact_nearest = (
            layer_error(
                w[:, close], some[:, close], scale[:, close], zero[:, close], feedback.damped
            )
            for some in (codes, nearest)
        )
        worse[:, close] = exact > exact_nearest
    return np.where(worse[:, :, None], nearest, codes)


def _reorder(array: Array, order: Integers) -> Array:
    """[groups, K, ...] reordered along the second axis."""
    # Plain indexing is several times as fast, and most operators have one group.
    alone = len(order) == 1
    return array[:, order[0]] if alone else np.take_along_axis(array, order[:, :, None], axis=1)


def damp_moments(h: Array, damping: float) -> Array64:
    """H with `damping` times its mean diagonal added to the diagonal; 1 for groups whose H is all zero."""
    mean = np.einsum("gii->gi", h).mean(axis=1)
    # Zeros alone could not be factorized.
    extra = np.where(mean > 0, damping * mean, 1.0)
    size = h.shape[-1]
    damped = np.array(h, np.float64)
    damped[:, np.arange(size), np.arange(size)] += extra[:, None]
    return damped


def layer_error(w: Array, codes: Array, scale: Array, zero: Array, h: Array) -> Array64:
    """e H e^T of every row, e = W - W^: [groups, rows], float64."""
    errors = np.empty(w.shape[:2])

    def measure_rows(part: slice) -> None:
        steps = as_float64(codes[:, part]) - zero[:, part]
        gap = as_float64(w[:, part]) - steps * as_float64(scale[:, part])
        np.einsum("grk,grk->gr", gap @ h, gap, out=errors[:, part])

    map_parts(measure_rows, w.shape[1], ROWS_AT_ONCE, elements=h.size)
    return errors


def refit_weight(w: Array, moments: Moments, *, ridge: float) -> Floats:
    """W (C + l I) (H + l I)^-1, l = ridge * mean(diag H), group by group; w: [groups, rows, K]."""
    wide = as_float64(w)
    return as_float32(wide + _find_step(wide @ (moments.c - moments.h), moments.h, ridge))


def _find_step(crossed: Array64, h: Array, ridge: float) -> Array64:
    """W' - W = W (C - H) (H + l I)^-1; crossed: W (C - H)."""
    # H is symmetric: X (H + l I) = B is (H + l I) X^T = B^T.
    solved = np.linalg.solve(damp_moments(h, ridge), crossed.transpose(0, 2, 1))
    return as_float64(solved.transpose(0, 2, 1))


def choose_ridge(w: Array, even: Moments, odd: Moments) -> float | None:
    """The ridge whose weights, fitted to either half of the samples, are best on the other; None: do not re-fit.

    w: [groups, rows, K]. A re-fit must help on both halves, and each must have `POSITIONS_PER_COLUMN` / 2 per column.
    """
    if not may_refit(even) or not may_refit(odd):
        return None
    wide = as_float64(w)
    halves = [(wide @ (half.c - half.h), half.h) for half in (even, odd)]
    best = 0.0
    chosen = None
    # From the strongest on: once a weaker one gains less than the best, all weaker ones do.
    for ridge in RIDGES[::-1]:
        gains = [
            _measure_gain(_find_step(*fitted, ridge), *judged)
            for fitted, judged in (halves, halves[::-1])
        ]
        if min(gains) <= 0 or sum(gains) <= best:
            break
        best = sum(gains)
        chosen = ridge
    return chosen


def _measure_gain(step: Array64, crossed: Array64, h: Array) -> float:
    """Decrease of E|W x - W' y|^2 for W' = W + step. crossed: W (C - H), of the same samples as h."""
    return float((step * (2.0 * crossed - step @ h)).sum())


def may_refit(half: Moments) -> bool:
    """True if one of two halves has enough positions to fit weights to them."""
    return bool(half.c.size) and 2 * half.count >= POSITIONS_PER_COLUMN * half.h.shape[-1]


def correct_bias(bias: Array, w: Array, rounded: Array, moments: Moments) -> Array64:
    """b + f (W mean(x) - W^ mean(y)): [groups, rows]; w, rounded: [groups, rows, K]."""
    # The mean over everything first, then those of the samples.
    means = [(moments.count, moments.mean_x, moments.mean_y), *moments.parts]
    x, y = (np.stack([part[k] for part in means], axis=2) for k in (1, 2))
    errors = as_float64(w) @ x - as_float64(rounded) @ y
    mean = errors[:, :, 0]
    shares = as_float64([count for count, _, _ in moments.parts]) / max(moments.weight, 1)
    shrink: Array | float = 1.0
    # One sample says nothing of how far samples agree: its mean counts whole.
    if len(shares) > 1:
        gaps = np.square(errors[:, :, 1:] - mean[:, :, None])
        # The variance of a weighted mean, from how far the samples lie around it.
        spread = gaps @ np.square(shares) * len(shares) / (len(shares) - 1)
        shrink = np.maximum(1.0 - spread / np.maximum(mean**2, np.finfo(np.float64).tiny), 0.0)
    return as_float64(bias + shrink * mean)


class _SharedSums:
    """Limits of each column by the partners of its sums that were rounded before it; arrays as of `_reorder`.

    Columns are rounded from the last to the first, so column 0 is never rounded before another: 0 stands for none.
    """

    def __init__(self, partner: Integers, order: Integers, zero: Array) -> None:
        places = order.argsort(axis=1)
        ordered = partner[order]
        at = np.where(ordered >= 0, np.take_along_axis(places, np.maximum(ordered, 0), axis=1), 0)
        before = np.where(at > np.arange(order.shape[1]), at, 0)
        self.groups = np.arange(len(before))
        self.before = before
        self.there = np.logical_or.reduce(before).tolist()
        self.only = before[0].tolist() if len(before) == 1 else None
        # Sums are of stored integers, zero points among them.
        self.zeros = as_float32(zero) if zero.any() else None

    def limit_column(self, column: Array, codes: Array, k: int) -> Array:
        """The codes of column k, clipped to the rest of their sums; [groups, rows], without zero points."""
        # Integers of different signs never add up to more than MOST, so clipping changes only sums of one sign.
        if not self.there[k]:
            return column
        at = self.before[:, k]
        paired = (at > 0)[:, None]
        if self.only is not None:
            beside = codes[:, self.only[k]]
        else:
            # Column 0 is not rounded yet where it stands for none, and its memory may hold NaN.
            beside = np.where(paired, codes[self.groups, at], np.float32(0))
        if self.zeros is not None:
            zeros = self.zeros[:, k] + self.zeros[self.groups, at]
            beside = beside + zeros * paired
        total = column + beside
        np.minimum(total, MOST, out=total)
        np.maximum(total, -MOST, out=total)
        total -= beside
        return total


def find_partner_columns(rows: Integers, shape: Shape, order: SumOrder) -> Integers:
    """[K]: the column that shares a 16-bit sum with each column of a weight's matrix form, or -1.

    rows: flat indices into the weight of `shape`, in the order of a row of its matrix form.
    """
    beside = find_partners(shape, order).ravel()[rows]
    sort = rows.argsort()
    at = np.minimum(np.searchsorted(rows, beside, sorter=sort), len(rows) - 1)
    columns = sort[at]
    return np.where((beside >= 0) & (rows[columns] == beside), columns, -1)


def round_within_sums(problem: RoundingProblem) -> RoundedWeight:
    """Codes that keep every sum and, for each row, a factor of at least 1 for its scale. The problem has a partner."""
    feedback = problem.feedback
    w = problem.weight
    scale = problem.scale
    partner = problem.partner
    assert partner is not None
    first = np.flatnonzero(partner > np.arange(len(partner)))
    second = partner[first]
    # A column's error costs the part that later columns cannot compensate. Of two neighbours the one rounded last gives
    # way; sharing the excess between them gained .01 dB.
    places = feedback.order.argsort(axis=1)
    costs = np.empty_like(feedback.weights)
    np.put_along_axis(costs, feedback.order, feedback.weights, axis=1)
    earlier = places[:, first] < places[:, second]
    cost = np.where(earlier, costs[:, first], costs[:, second])
    steps = scale.max(axis=2)
    noise = np.broadcast_to(costs.sum(axis=1)[:, None], w.shape[:2])
    factors = np.stack(
        [
            choose_widening(w[g][:, first], w[g][:, second], steps[g], noise[g], cost[g])
            for g in range(len(w))
        ]
    )
    wider = as_float32(scale * factors[:, :, None])
    return RoundedWeight(round_with_feedback(replace(problem, scale=wider)).codes, factors)
