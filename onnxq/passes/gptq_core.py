"""Rounding by second moments (GPTQ), least-squares re-fit, and bias correction, on arrays.

round_by_moments   Frantar et al. 2022, "GPTQ" (arXiv 2210.17323), with the scales given: columns in descending order of
                   their second moment, each column's rounding error spread over those still to come. Damping 0.1 of
                   the mean diagonal (measured on 8-bit CNNs: .01 28.9 dB, .03 29.7, .1 30.1).
refit              W' = W (C + l I) (H + l I)^-1: the weights that, on the quantized model's inputs, come nearest to
                   what the float weights make of the float inputs. chosen_ridge takes l, in units of mean(diag H), by
                   the error of weights fitted to half of the samples on the other half, both ways; no re-fit where
                   that does not fall on both. (With a fixed l it took 100 positions a column not to fit the samples,
                   17 to 20 dB where 23 were possible.) EfficientNet-Lite0, int8 symmetric, 24 samples: 19.1 dB with
                   l = 0.1 and 100 positions a column, 20.0 so.
corrected_bias     b' = b + f (W mean(x) - W^ mean(y)): the mean error of each output channel goes into the bias, as far
                   as samples agree on it: f = max(0, 1 - variance of that mean / its square), James and Stein 1961.
                   8 samples on EfficientNet-Lite0 17.9 -> 18.5 dB, PP-OCRv4's recogniser 16.6 -> 18.1; nothing at 28.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.passes.moments_core import Moments

Array = NDArray[Any]

DAMPING = 0.1
RIDGES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
POSITIONS_PER_COLUMN = 30
# A mean over a hundred is known to a tenth of its spread. Less shows a few moments of one recording, and what is fitted
# to those is wrong for the next (silero_vad, 24 frames, 24 to 96 positions: 12 to 20 dB by chance, 18 without).
FEWEST_POSITIONS = 100
_BLOCK = 128
_SMALL = 256
_ENOUGH = 0.01


def nearest(w: Array, scale: Array, zero: Array, limits: tuple[int, int]) -> NDArray[np.int32]:
    """Each weight to its nearest level; as `numerics.quantize` rounds."""
    steps = np.rint(np.asarray(w, np.float32) / scale)
    return np.asarray(np.clip(steps, limits[0] - zero, limits[1] - zero).astype(np.int32) + zero, np.int32)


@dataclass(frozen=True, eq=False)
class Spreading:
    """What rounding needs of H, found once for any number of scales: the damped H, the order of columns and back, and
    how an error in one column is spread over the later ones."""

    damped: NDArray[np.float64]
    order: NDArray[np.int64]
    inverse: NDArray[np.int64]
    spread: NDArray[np.float32]


def spreading(h: Array, *, damping: float = DAMPING) -> Spreading:
    """h: [groups, K, K], positive semidefinite."""
    damped = damped_moments(h, damping)
    order = np.argsort(-np.einsum("gii->gi", damped), axis=1, kind="stable")
    inverse = np.argsort(order, axis=1, kind="stable")
    sorted_h = np.take_along_axis(np.take_along_axis(damped, order[:, :, None], 1), order[:, None, :], 2)
    return Spreading(damped, order, inverse, _spread(sorted_h, damping))


def round_by_moments(
    w: Array, h: Array, scale: Array, zero: Array, limits: tuple[int, int], *, damping: float = DAMPING
) -> NDArray[np.int32]:
    """Levels of w that keep tr((W - W^) H (W - W^)^T) small; no row's is larger than with nearest rounding.

    w, scale, zero: [groups, rows, K], one scale and zero point for every weight (per tensor, channel or block alike).
    h: [groups, K, K], positive semidefinite. limits: (qmin, qmax). Result: int32 [groups, rows, K].
    """
    return round_spreading(w, spreading(h, damping=damping), scale, zero, limits)


def round_spreading(w: Array, seen: Spreading, scale: Array, zero: Array, limits: tuple[int, int]) -> NDArray[np.int32]:
    """`round_by_moments` with what it needs of H found already."""
    plain = nearest(w, scale, zero, limits)
    at = seen.order[:, None, :]
    found = _columns(
        np.take_along_axis(np.asarray(w, np.float32), at, 2),
        seen.spread,
        np.take_along_axis(np.asarray(scale, np.float32), at, 2),
        np.take_along_axis(np.asarray(zero, np.int32), at, 2),
        limits,
    )
    found = np.take_along_axis(found, seen.inverse[:, None, :], 2)
    worse = layer_error(w, found, scale, zero, seen.damped) > layer_error(w, plain, scale, zero, seen.damped)
    return np.where(worse[:, :, None], plain, found)


def damped_moments(h: Array, damping: float) -> NDArray[np.float64]:
    """H with `damping` of its mean diagonal added to the diagonal (1 where H is all zero: nothing is known there)."""
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


def refit(w: Array, moments: Moments, *, ridge: float) -> NDArray[np.float32]:
    """W (C + l I) (H + l I)^-1, l = ridge * mean(diag H), group by group; w: [groups, rows, K]."""
    size = moments.h.shape[-1]
    mean = np.einsum("gii->gi", moments.h).mean(axis=1)
    extra = np.where(mean > 0, ridge * mean, 1.0)[:, None, None] * np.eye(size)
    right = np.asarray(w, np.float64) @ (moments.c + extra)
    solved = np.linalg.solve(moments.h + extra, right.transpose(0, 2, 1))
    return np.asarray(solved.transpose(0, 2, 1), np.float32)


def chosen_ridge(w: Array, one: Moments, other: Moments) -> float | None:
    """The ridge whose weights, fitted to either half of the samples, are the best on the other; None: leave w.

    w: [groups, rows, K]. A re-fit must help both halves, and each must have `POSITIONS_PER_COLUMN` / 2 a column.
    """
    if not may_refit(one) or not may_refit(other):
        return None
    wide = np.asarray(w, np.float64)
    gains = np.array([[_gain(wide, a, b, ridge) for a, b in ((one, other), (other, one))] for ridge in RIDGES])
    totals = np.where((gains > 0).all(axis=1), gains.sum(axis=1), 0.0)
    best = int(np.argmax(totals))
    return RIDGES[best] if totals[best] > 0 else None


def _gain(w: NDArray[np.float64], fitted: Moments, judged: Moments, ridge: float) -> float:
    """By how much weights re-fitted to the one lower E|W x - W' y|^2 on the other."""
    step = refit(w, fitted, ridge=ridge).astype(np.float64) - w
    crossed = w @ (judged.c - judged.h)
    return float(2.0 * np.sum(step * crossed) - np.sum((step @ judged.h) * step))


def may_refit(half: Moments) -> bool:
    """True with enough positions in one of two halves to fit weights to them."""
    return bool(half.c.size) and 2 * half.count >= POSITIONS_PER_COLUMN * half.h.shape[-1]


def corrected_bias(bias: Array, w: Array, rounded: Array, moments: Moments) -> NDArray[np.float64]:
    """b + f (W mean(x) - W^ mean(y)): [groups, rows]; w, rounded: [groups, rows, K]."""
    wide, levels = np.asarray(w, np.float64), np.asarray(rounded, np.float64)
    mean = _mean_error(wide, levels, moments.mean_x, moments.mean_y)
    shares = np.array([count for count, _, _ in moments.parts], np.float64) / max(moments.count, 1)
    shrink: Array | float = 1.0
    if len(shares) > 1:
        gaps = np.stack([_mean_error(wide, levels, x, y) - mean for _, x, y in moments.parts])
        spread = np.einsum("s,sgr->gr", shares**2, gaps**2) * len(shares) / (len(shares) - 1)
        shrink = np.maximum(1.0 - spread / np.maximum(mean**2, np.finfo(np.float64).tiny), 0.0)
    return np.asarray(np.asarray(bias, np.float64) + shrink * mean)


def _mean_error(w: Array, rounded: Array, x: Array, y: Array) -> Array:
    return np.asarray(np.einsum("grk,gk->gr", w, x) - np.einsum("grk,gk->gr", rounded, y))


def _spread(h: NDArray[np.float64], damping: float) -> NDArray[np.float32]:
    """Upper triangular U with U^T U = H^-1: row i says how an error in column i is spread over the later ones.

    Damping bounds the condition number by K / damping: float32 will do from 0.01 on.
    """
    if damping >= _ENOUGH:
        h = h / np.einsum("gii->g", h)[:, None, None]
    kind = np.float32 if damping >= _ENOUGH else np.float64
    h = h.astype(kind, copy=False)
    lower = np.linalg.cholesky(h[:, ::-1, ::-1])
    inverse = _inverse_of_lower(lower)[:, ::-1, ::-1]
    return np.ascontiguousarray(np.triu(inverse), np.float32)


def _inverse_of_lower(lower: Array) -> Array:
    """By halves, a sixth of the work of a general inverse, and nearly all of it matrix products."""
    size = lower.shape[-1]
    if size <= _SMALL:
        return np.asarray(np.linalg.inv(lower))
    half = size // 2
    first, last = _inverse_of_lower(lower[:, :half, :half]), _inverse_of_lower(lower[:, half:, half:])
    whole = np.zeros_like(lower)
    whole[:, :half, :half], whole[:, half:, half:] = first, last
    whole[:, half:, :half] = -last @ (lower[:, half:, :half] @ first)
    return whole


def _columns(w: Array, spread: Array, scale: Array, zero: Array, limits: tuple[int, int]) -> NDArray[np.int32]:
    """GPTQ's loop over columns, all rows and groups at once; later blocks are updated once a block."""
    rest = w.copy()
    levels = np.empty(w.shape, np.int32)
    size = w.shape[-1]
    for first in range(0, size, _BLOCK):
        last = min(first + _BLOCK, size)
        errors = np.empty((*w.shape[:2], last - first), np.float32)
        for k in range(first, last):
            column = rest[:, :, k]
            levels[:, :, k] = nearest(column, scale[:, :, k], zero[:, :, k], limits)
            gap = column - (levels[:, :, k] - zero[:, :, k]).astype(np.float32) * scale[:, :, k]
            gap /= spread[:, k, k][:, None]
            rest[:, :, k + 1 : last] -= gap[:, :, None] * spread[:, None, k, k + 1 : last]
            errors[:, :, k - first] = gap
        rest[:, :, last:] -= errors @ spread[:, first:last, last:]
    return levels
