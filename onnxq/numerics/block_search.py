"""Scale and integer zero point of each block or channel by weighted least squares, from the weights alone.

For given quantized values q (counted from the zero point z) the best scale, and the error that it leaves, are known:

    q = clip(rint(w / step), qmin - z, qmax - z)    scale = <w, q> / <q, q>    error = <w, w> - <w, q>^2 / <q, q>

Candidates for step and z are ranges cut at either end, then neighbours of the best, which is at last rounded again on
its own scale. HQQ (Badri and Shaji 2023) and k-quant (make_qkx2 of llama.cpp) choose a real zero point, which the first
stores as a float and the second rounds in the end. Student weights (5 degrees) with 4 bits in blocks of 32: 0.4 dB
better than the range, 0.5 than k-quant, 0.2 worse than HQQ, whose zero points take 0.9 bits a weight more. In blocks of
128, or with 2, 3 or 8 bits, better than all three.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from onnxq.arrays import Array, Floats, as_float32, as_int32
from onnxq.numerics.machine import map_parts
from onnxq.numerics.ranges import scale_floor, symmetric_steps
from onnxq.numerics.rounding import fake_quant
from onnxq.spec import QParams, QuantSpec

# Widest range that is tried, as a share of the weights' own: its ends may fall between two quantized values.
_WIDEST = 1.08
# Ratio of one share to the next, and shares around the best; at many bits rounding errors change within a few percent.
_RATIO = 0.93
_NEIGHBOURS = (0.95, 0.97, 0.985, 1.015, 1.03, 1.05)
_ROUNDS = 2
# Shares in turn that are the best of no column, after which the search ends.
_MISSES = 5
# From here on the error is so small a part of the power that float32 does not show it.
_WIDE_BITS = 7
# Values per step, so many that threads wait little for one another; rows up to the second length are turned to columns.
_SLAB = 1 << 19
_SHORT = 1 << 10
# Of many bits: values per step, in rows; shares around the best.
_WIDE_SLAB = 1 << 17
_NEAREST = (0.97, 0.985, 1.015, 1.03)


def search_numbers(
    groups: Floats,
    spec: QuantSpec,
    start: QParams,
    weighting: Floats | None,
    *,
    signed_scales: bool,
) -> QParams:
    """Search scale and zero point of each row of `groups`, [rows, values], for the least squared error.

    spec: with one scale a row. start: of the rows' ranges; it stays where nothing better is found. weighting: of the
    squared error of each value, above 0, of the same shape; None for equal weights. signed_scales: symmetric scales may
    be negative, so that the larger side of a block can have the level more that signed integers have below 0.
    """
    count, length = groups.shape
    if spec.bits >= _WIDE_BITS and spec.symmetric and length > _SHORT:
        return _search_wide(groups, spec, start)
    scale = start.scale.copy()
    zero = start.zero_point.copy()
    rows = max(1, _SLAB // max(length, 1))
    # Rows as columns: what broadcasts is then contiguous, however short a row is.
    arrange = np.ascontiguousarray if length <= _SHORT else np.asarray

    def search(part: slice) -> None:
        weights = None if weighting is None else arrange(weighting[part].T)
        columns = arrange(groups[part].T)
        # Of equal errors the first stays.
        tried = [(scale[part], zero[part]), _search_columns(columns, spec, weights)]
        if signed_scales and spec.symmetric:
            # With a negative scale the lowest integer, which has no positive counterpart, stands
            # for the largest value.
            mirrored, middle = _search_columns(-columns, spec, weights)
            tried.append((-mirrored, middle))
        errors = [_measure_error(groups[part], QParams(*one), spec, weights) for one in tried]
        best = np.argmin(errors, axis=0)
        scale[part], zero[part] = (np.choose(best, numbers) for numbers in zip(*tried, strict=True))

    map_parts(search, count, rows, elements=groups.size)
    return replace(start, scale=scale, zero_point=zero)


def _search_wide(groups: Floats, spec: QuantSpec, start: QParams) -> QParams:
    """The same for many bits in long rows, where little is to be gained: shares of the range, by the plain error."""
    count, length = groups.shape
    scale = start.scale.copy()
    steps = symmetric_steps(spec)

    def search(part: slice) -> None:
        rows = np.ascontiguousarray(groups[part])
        zero = start.zero_point[part]
        best = start.scale[part]
        least = _measure_error(rows, QParams(start.scale[part], zero), spec, sums=np.float32)
        for ratios in (_list_shares(length, steps), _NEAREST):
            # The second row of ratios goes around the best of the first.
            base = best
            for ratio in ratios:
                tried = np.maximum(base * np.float32(ratio), np.float32(scale_floor(spec)))
                error = _measure_error(rows, QParams(tried, zero), spec, sums=np.float32)
                best = np.where(error < least, tried, best)
                least = np.minimum(error, least)
        scale[part] = best

    map_parts(search, count, max(1, _WIDE_SLAB // max(length, 1)), elements=groups.size)
    return replace(start, scale=scale)


def _measure_error(
    rows: Array,
    qparams: QParams,
    spec: QuantSpec,
    u: Array | None = None,
    sums: type[np.floating[Any]] = np.float64,
) -> Array:
    """Measure the squared error of each row, in `sums`; u: its weighting, [values, rows]."""
    gap = fake_quant(rows, qparams, spec)
    gap -= rows
    return np.asarray(np.einsum("rk,rk->r", gap, gap if u is None else gap * u.T, dtype=sums))


def _search_columns(w: Array, spec: QuantSpec, u: Array | None) -> tuple[Array, Array]:
    """Scale and zero point of each column of w, [values, columns]."""
    low = w.min(axis=0, initial=0.0)
    high = w.max(axis=0, initial=0.0)
    steps = symmetric_steps(spec)
    floor = np.float32(scale_floor(spec))
    unit = np.maximum(-low, high)
    unit = np.maximum(unit, floor)
    low = low / unit
    high = high / unit
    shares = _list_shares(len(w), steps if spec.symmetric else spec.qmax - spec.qmin)
    with np.errstate(under="ignore"):
        # In units of each column's largest value, so that no power overflows.
        best = _Best(w / unit, spec, u)
        missed = 0
        for share in (1.0, *shares):
            if spec.symmetric:
                step = np.full(low.shape, share / steps, np.float32)
                missed = (
                    0 if best.try_step(step, np.full(low.shape, spec.qmax - steps)) else missed + 1
                )
                # Behind the best of each column, errors only grow.
                if missed == _MISSES:
                    break
                continue
            for left, right in dict.fromkeys([(share, share), (1.0, share), (share, 1.0)]):
                step = np.maximum(high * right - low * left, 1e-6) / (spec.qmax - spec.qmin)
                best.try_step(step, spec.qmin - np.rint(low * left / step))
        for ratio in _NEIGHBOURS:
            for shift in (0,) if spec.symmetric else (0, -1, 1):
                best.try_step(best.scale * ratio, best.zero + shift)
        for _ in range(_ROUNDS):
            best.try_step(best.scale, best.zero)
    return np.maximum(best.scale * unit, floor), as_int32(best.zero)


def _list_shares(length: int, steps: int) -> list[float]:
    """Shares of the range that are worth a trial, but 1 itself.

    Cutting a range to its share s adds at least (1 - s)^2 of its square to the error, and removes at most that of all
    values, length / 12 / steps^2.
    """
    least = max(0.04, 1 - (length / 12) ** 0.5 / steps)
    count = int(np.ceil(np.log(least / _WIDEST) / np.log(_RATIO)))
    return [_WIDEST * _RATIO**k for k in range(count + 1)]


class _Best:
    """The best scale and zero point of each column so far, and the power <w, q>^2 / <q, q> that they explain."""

    def __init__(self, w: Array, spec: QuantSpec, u: Array | None) -> None:
        self.w = w
        self.spec = spec
        self.u = u
        self.weighted = w if u is None else w * u
        self.sums = np.float64 if spec.bits >= _WIDE_BITS else np.float32
        self.scale, self.zero, self.power = (
            np.zeros(w.shape[1:], kind) for kind in (np.float32, np.float32, self.sums)
        )
        self._q = np.empty_like(w)
        self._product = np.empty_like(w)

    def try_step(self, step: Array, zero: Array) -> bool:
        """Round to steps of this size, with this zero point, and keep the scales of columns that explain more.

        True where there are any.
        """
        zero = as_float32(np.clip(zero, self.spec.qmin, self.spec.qmax))
        q = np.divide(self.w, np.maximum(step, np.float32(1e-9)), out=self._q)
        np.rint(q, out=q)
        np.clip(q, self.spec.qmin - zero, self.spec.qmax - zero, out=q)
        squared = q if self.u is None else np.multiply(q, self.u, out=self._product)
        towards = np.einsum("kr,kr->r", self.weighted, q, dtype=self.sums)
        # The scale of least squared error for these integers: Σ w·q / Σ q².
        scale = towards / np.maximum(
            np.einsum("kr,kr->r", squared, q, dtype=self.sums), np.float32(1e-30)
        )
        # What it explains of the values' power: (Σ w·q)² / Σ q².
        power = towards * scale
        better = (power > self.power) & (scale > 0)
        self.scale = as_float32(np.where(better, scale, self.scale))
        self.zero = np.where(better, zero, self.zero)
        self.power = np.where(better, power, self.power)
        return bool(better.any())
