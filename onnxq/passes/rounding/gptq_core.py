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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics import round_within_sum
from onnxq.numerics.saturation import MOST
from onnxq.passes.rounding.second_moments import Moments

Array = NDArray[Any]

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
_BLOCK, _PANEL = 32, 96
# Damping from which on float32 is exact enough for the factorization.
_ENOUGH = 0.01
# Relative difference below which two errors are compared in float64.
_NEAR = 1e-3


def round_to_nearest(
    w: Array, scale: Array, zero: Array, limits: tuple[int, int], partner: NDArray[np.int64] | None = None
) -> NDArray[np.int32]:
    """Weights rounded to nearest, as by `numerics.quantize_weight`.

    w, scale, zero: [groups, rows, K]. partner: [K], the column that shares a 16-bit sum with each, or -1; None: no sum
    can overflow.
    """
    steps = np.asarray(w, np.float32) / scale
    found = np.clip(np.rint(steps), limits[0] - zero, limits[1] - zero).astype(np.int32) + zero
    if partner is not None:
        first = np.flatnonzero(partner > np.arange(len(partner)))
        total = found[:, :, first] + found[:, :, partner[first]]
        # Both are of one sign, else they would not add up to so much. Few sums overflow.
        group, row, k = np.nonzero(abs(total) > MOST)
        one, two = (group, row, first[k]), (group, row, partner[first[k]])
        aims = [steps[at] + zero[at] for at in (one, two)]
        found[one], found[two] = round_within_sum(found[one], found[two], *aims)
    return np.asarray(found, np.int32)


@dataclass(frozen=True, eq=False)
class ErrorFeedback:
    """The factorization of H for error feedback, computed once for any number of weights and scales.

    damped: H with its damping. order: columns by ascending diagonal, rounded from the last on. lower: unit lower
    triangular L [groups, K, K] of L D L^T = damped in that order. weights: D [groups, K]; the error of a row is the sum
    of the squared remainders of its columns, weighted by D.
    """

    damped: NDArray[np.float64]
    order: NDArray[np.int64]
    lower: Array
    weights: Array


def factor_hessian(h: Array, *, damping: float = DAMPING) -> ErrorFeedback:
    """The factorization of h, [groups, K, K], positive semidefinite.

    Damping bounds the condition number by K / damping, so float32 is enough from 0.01 on.
    """
    damped = damp_moments(h, damping)
    kind = np.float32 if damping >= _ENOUGH else np.float64
    order = np.argsort(np.einsum("gii->gi", damped), axis=1, kind="stable")
    unit = np.einsum("gii->g", damped) / damped.shape[-1]
    scaled = (damped / unit[:, None, None]).astype(kind)
    lower = _cholesky(_reorder(_reorder(scaled, order).transpose(0, 2, 1), order))
    diagonal = np.einsum("gii->gi", lower).copy()
    lower /= diagonal[:, None, :]
    return ErrorFeedback(damped, order, lower, diagonal**2 * unit[:, None].astype(kind))


def _cholesky(h: Array) -> Array:
    """Lower triangular L of L L^T = h; overwrites h."""
    # By panels, so that nearly all work is in matrix products: numpy's own copies whole matrices transposed, and takes
    # four times as long for 1536 columns.
    size = h.shape[-1]
    if size <= 2 * _PANEL:
        return np.asarray(np.linalg.cholesky(h))
    lower = np.zeros_like(h)
    for first in range(0, size, _PANEL):
        here, later = slice(first, min(first + _PANEL, size)), slice(first + _PANEL, size)
        lower[:, here, here] = corner = np.linalg.cholesky(h[:, here, here])
        panel = h[:, later, here] @ np.linalg.inv(corner).transpose(0, 2, 1)
        lower[:, later, here] = panel
        h[:, later, later] -= panel @ panel.transpose(0, 2, 1)
    return lower


def round_with_feedback(
    w: Array,
    seen: ErrorFeedback,
    scale: Array,
    zero: Array,
    limits: tuple[int, int],
    partner: NDArray[np.int64] | None = None,
) -> NDArray[np.int32]:
    """Quantized values of w by GPTQ, for a small tr((W - W^) H (W - W^)^T); no row's is larger than rounded to nearest.

    w, scale, zero: [groups, rows, K], one scale and zero point for every weight (per tensor, channel or block alike).
    seen: of H. limits: (qmin, qmax). partner: as of `round_to_nearest`. Result: int32 [groups, rows, K].
    """
    weights, scales, zeros = (_reorder(array.transpose(0, 2, 1), seen.order) for array in (w, scale, zero))
    beside = None if partner is None else _Beside(partner, seen.order, zeros)
    found, error = _columns(weights, scales, zeros, seen, limits, beside)
    levels = np.empty_like(found)
    np.put_along_axis(levels, seen.order[:, :, None], found, axis=1)
    levels, plain = levels.transpose(0, 2, 1), round_to_nearest(w, scale, zero, limits, partner)
    gap = _reorder((w - (plain - zero).astype(np.float32) * scale).transpose(0, 2, 1), seen.order)
    simple = np.einsum("gkr,gk->gr", np.square(seen.lower.transpose(0, 2, 1) @ gap), seen.weights)
    worse = error > simple
    close = (abs(error - simple) <= _NEAR * simple).any(axis=0)
    # Errors of float32 cannot tell them apart, and "no row's is larger" is promised.
    if close.any():
        one, other = (
            layer_error(w[:, close], some[:, close], scale[:, close], zero[:, close], seen.damped)
            for some in (levels, plain)
        )
        worse[:, close] = one > other
    return np.where(worse[:, :, None], plain, levels)


def _reorder(array: Array, order: NDArray[np.int64]) -> Array:
    """[groups, K, ...] reordered along the second axis."""
    # Plain indexing is several times as fast, and most operators have one group.
    alone = len(order) == 1
    return np.asarray(array[:, order[0]] if alone else np.take_along_axis(array, order[:, :, None], axis=1))


def damp_moments(h: Array, damping: float) -> NDArray[np.float64]:
    """H with `damping` times its mean diagonal added to the diagonal; 1 for groups whose H is all zero."""
    mean = np.einsum("gii->gi", h).mean(axis=1)
    extra = np.where(mean > 0, damping * mean, 1.0)
    size = h.shape[-1]
    damped: NDArray[np.float64] = np.array(h, np.float64)
    damped[:, np.arange(size), np.arange(size)] += extra[:, None]
    return damped


def layer_error(w: Array, levels: Array, scale: Array, zero: Array, h: Array) -> NDArray[np.float64]:
    """e H e^T of every row, e = W - W^: [groups, rows], float64."""
    gap = np.asarray(w, np.float64) - (np.asarray(levels, np.float64) - zero) * np.asarray(scale, np.float64)
    return np.asarray(np.einsum("grk,grk->gr", gap @ h, gap), np.float64)


def refit_weight(w: Array, moments: Moments, *, ridge: float) -> NDArray[np.float32]:
    """W (C + l I) (H + l I)^-1, l = ridge * mean(diag H), group by group; w: [groups, rows, K]."""
    wide = np.asarray(w, np.float64)
    return np.asarray(wide + _step(wide @ (moments.c - moments.h), moments.h, ridge), np.float32)


def _step(crossed: NDArray[np.float64], h: Array, ridge: float) -> NDArray[np.float64]:
    """W' - W = W (C - H) (H + l I)^-1; crossed: W (C - H)."""
    solved = np.linalg.solve(damp_moments(h, ridge), crossed.transpose(0, 2, 1))
    return np.asarray(solved.transpose(0, 2, 1), np.float64)


def choose_ridge(w: Array, one: Moments, other: Moments) -> float | None:
    """The ridge whose weights, fitted to either half of the samples, are best on the other; None: do not re-fit.

    w: [groups, rows, K]. A re-fit must help on both halves, and each must have `POSITIONS_PER_COLUMN` / 2 per column.
    """
    if not may_refit(one) or not may_refit(other):
        return None
    wide = np.asarray(w, np.float64)
    halves = [(wide @ (half.c - half.h), half.h) for half in (one, other)]
    best, found = 0.0, None
    # From the strongest on: once a weaker one gains less than the best, all weaker ones do.
    for ridge in RIDGES[::-1]:
        gains = [_gain(_step(*fitted, ridge), *judged) for fitted, judged in (halves, halves[::-1])]
        if min(gains) <= 0 or sum(gains) <= best:
            break
        best, found = sum(gains), ridge
    return found


def _gain(step: NDArray[np.float64], crossed: NDArray[np.float64], h: Array) -> float:
    """Decrease of E|W x - W' y|^2 for W' = W + step. crossed: W (C - H), of the same samples as h."""
    return float(np.sum(step * (2.0 * crossed - step @ h)))


def may_refit(half: Moments) -> bool:
    """True if one of two halves has enough positions to fit weights to them."""
    return bool(half.c.size) and 2 * half.count >= POSITIONS_PER_COLUMN * half.h.shape[-1]


def correct_bias(bias: Array, w: Array, rounded: Array, moments: Moments) -> NDArray[np.float64]:
    """b + f (W mean(x) - W^ mean(y)): [groups, rows]; w, rounded: [groups, rows, K]."""
    wide, levels = np.asarray(w, np.float64), np.asarray(rounded, np.float64)
    means = [(moments.count, moments.mean_x, moments.mean_y), *moments.parts]
    x, y = (np.stack([part[k] for part in means], axis=2) for k in (1, 2))
    errors = wide @ x - levels @ y
    mean = errors[:, :, 0]
    shares = np.array([count for count, _, _ in moments.parts], np.float64) / max(moments.weight, 1)
    shrink: Array | float = 1.0
    # One sample says nothing of how far samples agree: its mean counts whole.
    if len(shares) > 1:
        gaps = np.square(errors[:, :, 1:] - mean[:, :, None])
        spread = gaps @ np.square(shares) * len(shares) / (len(shares) - 1)
        shrink = np.maximum(1.0 - spread / np.maximum(mean**2, np.finfo(np.float64).tiny), 0.0)
    return np.asarray(np.asarray(bias, np.float64) + shrink * mean)


def _columns(
    w: Array,
    scale: Array,
    zero: Array,
    seen: ErrorFeedback,
    limits: tuple[int, int],
    beside: _Beside | None,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """(quantized values [groups, K, rows], error of each row [groups, rows]), arrays as of `_reorder`.

    From the last column to the first, all rows and groups at once: to a column the errors of the columns behind it are
    added, E L, and then it is rounded. That takes one matrix product per block and one per column inside it.
    """
    lower = seen.lower.astype(np.float32, copy=False)
    low, high = (np.asarray(limit - zero, np.float32) for limit in limits)
    levels, errors, left = np.empty_like(w), np.empty_like(w), np.empty_like(w)
    size = w.shape[1]
    for last in range(size, 0, -_BLOCK):
        first = max(last - _BLOCK, 0)
        upper = np.ascontiguousarray(lower[:, first:, first:last].transpose(0, 2, 1))
        shifted = w[:, first:last] + upper[:, :, last - first :] @ errors[:, last:]
        for k in reversed(range(first, last)):
            column = shifted[:, k - first]
            if k + 1 < last:
                inside = upper[:, k - first : k - first + 1, k + 1 - first : last - first]
                column = column + (inside @ errors[:, k + 1 : last])[:, 0]
            level = np.rint(column / scale[:, k])
            np.maximum(np.minimum(level, high[:, k], out=level), low[:, k], out=levels[:, k])
            if beside is not None:
                levels[:, k] = beside.keep(levels[:, k], levels, k)
            worth = levels[:, k] * scale[:, k]
            np.subtract(column, worth, out=left[:, k])
            np.subtract(w[:, k], worth, out=errors[:, k])
    error = np.einsum("gkr,gk->gr", np.square(left, out=left), seen.weights)
    return levels.astype(np.int32) + zero, np.asarray(error, np.float64)


class _Beside:
    """Limits of each column by the partners of its sums that were rounded before it; arrays as of `_reorder`.

    Columns are rounded from the last to the first, so column 0 is never rounded before another: 0 stands for none.
    """

    def __init__(self, partner: NDArray[np.int64], order: NDArray[np.int64], zero: Array) -> None:
        places, found = np.argsort(order, axis=1), partner[order]
        at = np.where(found >= 0, np.take_along_axis(places, np.maximum(found, 0), axis=1), 0)
        before = np.where(at > np.arange(order.shape[1]), at, 0)
        self.groups, self.before = np.arange(len(before)), before
        self.there = before.any(axis=0).tolist()
        self.only = before[0].tolist() if len(before) == 1 else None
        # Sums are of stored integers, zero points among them.
        self.zeros = zero.astype(np.float32) if zero.any() else None

    def keep(self, level: Array, levels: Array, k: int) -> Array:
        """The quantized values of column k, clipped to the rest of their sums; [groups, rows], without zero points."""
        # Integers of different signs never add up to more than MOST, so clipping changes only sums of one sign.
        if not self.there[k]:  # type: ignore[index]
            return level
        at = self.before[:, k]
        if self.only is not None:
            beside = levels[:, self.only[k]]
        else:
            # Column 0 is not rounded yet where it stands for none, and its memory may hold NaN.
            beside = np.where((at > 0)[:, None], levels[self.groups, at], np.float32(0))
        if self.zeros is not None:
            beside = beside + (self.zeros[:, k] + self.zeros[self.groups, at]) * (at > 0)[:, None]
        total = level + beside
        np.minimum(total, MOST, out=total)
        np.maximum(total, -MOST, out=total)
        total -= beside
        return total
