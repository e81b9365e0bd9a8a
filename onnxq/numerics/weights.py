"""Scale and zero point of constants: per tensor, channel or block, by range or by least squared error.

The squared error of the weight alone is a good criterion at 2 to 6 bits; at 8 bits the range is as good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxq.errors import CalibrationError, ConfigError
from onnxq.nearest import suggest_names
from onnxq.numerics.ranges import qparams_from_range
from onnxq.numerics.rounding import compute_block_shape, fake_quant
from onnxq.numerics.saturation import SumOrder, choose_widening, find_channel_axis, needs_bound, pair_neighbours
from onnxq.numerics.threads import map_parts
from onnxq.spec import ObserverSpec, PerBlock, PerChannel, PerTensor, QParams, QuantSpec

# (low, high) of each group.
Ends = tuple[NDArray[np.float64], NDArray[np.float64]]

# Shares of the range, tried from wide to narrow; then finer factors around the best.
_COARSE = np.geomspace(1.0, 0.04, 30)
_FINE = np.geomspace(1.1, 1 / 1.1, 9)
# Values per step: 1 MiB of float32, which stays in the cache.
_SLAB = 1 << 18
# Of the smallest and of the largest values of a row, those that bound the error of a narrow range.
_OUTER = 64


def weight_qparams(
    w: ArrayLike, spec: QuantSpec, *, observer: ObserverSpec | None = None, orders: Sequence[SumOrder] = ()
) -> QParams:
    """Choose scale and zero point of the constant `w`, of the shape of the spec's granularity.

    observer: "minmax" (default), or "mse": for each channel or block the share of its range, and for asymmetric
        specs of each end of it, with the least squared error.
    orders: the 16-bit sums that the weights must satisfy, see `numerics.saturation`. Scales are then widened channel
        by channel as far as this lowers the squared error of weights rounded within these sums.
    Raises CalibrationError on NaN or inf, ConfigError for another observer or an option.
    """
    name = observer.name if observer is not None else "minmax"
    fit = _FITS.get(name)
    if fit is None:
        raise ConfigError(
            f"weight observer {name!r}", "is not one that weights have", suggest_names(name, _FITS), code="Q310"
        )
    if observer is not None and observer.options:
        raise ConfigError(
            f"weight observer {name!r}", f"takes no option {observer.options[0][0]!r}", "remove it", code="Q311"
        )
    values = np.asarray(w, np.float32)
    widest = _find_ends(values, spec)
    if not (np.isfinite(widest[0]).all() and np.isfinite(widest[1]).all()):
        raise CalibrationError("weight", "holds NaN or inf", "repair the float model", code="Q503")
    if fit is _fit_minmax and not isinstance(spec.granularity, PerBlock):  # `widest` is the answer
        numbers = qparams_from_range(*widest, spec, origin=f"weights, {name}")
        return _widen_scales(values, numbers, spec, orders)
    groups, shape = _group_values(values, spec)
    lo, hi = fit(groups, replace(spec, granularity=PerChannel(0)))
    numbers = qparams_from_range(lo.reshape(shape), hi.reshape(shape), spec, origin=f"weights, {name}")
    return _widen_scales(values, numbers, spec, orders)


def _widen_scales(
    values: NDArray[np.float32], numbers: QParams, spec: QuantSpec, orders: Sequence[SumOrder]
) -> QParams:
    """Widen the scales for weights that share a 16-bit sum, by expected squared error."""
    grain = spec.granularity
    if not orders or not needs_bound(spec) or isinstance(grain, PerBlock):
        return numbers
    factors = np.ones(numbers.scale.shape, np.float32)
    for order in orders:
        two, scale = pair_neighbours(values, order), numbers.scale
        if isinstance(grain, PerTensor):
            two, scale = two.reshape(1, -1, 2), scale.reshape(1)
        elif grain.axis % values.ndim != find_channel_axis(order):
            continue  # a row of sums has no scale of its own
        # Both neighbours change by half the excess, so a sum costs half its square.
        found = choose_widening(two[..., 0], two[..., 1], scale, np.full(len(two), two[0].size), 0.5)
        factors = np.maximum(factors, found.reshape(factors.shape))
    return replace(numbers, scale=np.asarray(numbers.scale * factors, np.float32))


def _group_values(values: NDArray[np.float32], spec: QuantSpec) -> tuple[NDArray[np.float32], tuple[int, ...]]:
    """Arrange values in rows that share a scale; return these and the shape of the scales.

    A short last block is filled with zeros, which lie in every range and quantize without error.
    """
    grain = spec.granularity
    if not isinstance(grain, (PerChannel, PerBlock)):
        return values.reshape(1, -1), ()
    if not -values.ndim <= grain.axis < values.ndim:
        raise ConfigError(
            f"axis {grain.axis}", f"is outside a weight of shape {values.shape}", "use an axis it has", code="Q313"
        )
    axis = grain.axis % values.ndim
    if isinstance(grain, PerChannel):
        count = values.shape[axis]
        return np.moveaxis(values, axis, 0).reshape(count, values.size // max(count, 1)), (count,)
    shape = compute_block_shape(values.shape, axis, grain.size)
    gap = [(0, shape[axis] * grain.size - dim if k == axis else 0) for k, dim in enumerate(values.shape)]
    filled = np.pad(values, gap).reshape(*shape[: axis + 1], grain.size, *shape[axis + 1 :])
    return np.moveaxis(filled, axis + 1, -1).reshape(-1, grain.size), shape


def _find_ends(values: NDArray[np.float32], spec: QuantSpec) -> Ends:
    """Find the smallest and largest value, or 0, of each channel; of all values for blocks. NaN propagates."""
    axis = spec.granularity.axis if isinstance(spec.granularity, PerChannel) else None
    if axis is not None and not -values.ndim <= axis < values.ndim:
        raise ConfigError(
            f"axis {axis}", f"is outside a weight of shape {values.shape}", "use an axis it has", code="Q313"
        )
    others = None if axis is None else tuple(k for k in range(values.ndim) if k != axis % values.ndim)
    low, high = values.min(axis=others, initial=0.0), values.max(axis=others, initial=0.0)
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def _fit_minmax(groups: NDArray[np.float32], spec: QuantSpec) -> Ends:
    return groups.min(axis=1, initial=0.0).astype(np.float64), groups.max(axis=1, initial=0.0).astype(np.float64)


def _fit_mse(groups: NDArray[np.float32], spec: QuantSpec) -> Ends:
    lo, hi = np.empty(len(groups)), np.empty(len(groups))

    def search(part: slice) -> None:
        lo[part], hi[part] = _search_ends(np.ascontiguousarray(groups[part]), spec)

    map_parts(search, len(groups), max(1, _SLAB // max(groups.shape[1], 1)), elements=groups.size)
    return lo, hi


def _search_ends(rows: NDArray[np.float32], spec: QuantSpec) -> Ends:
    """Search both ends together, coarse then fine; for asymmetric specs then each end by itself, in turns."""
    widest = np.stack(_fit_minmax(rows, spec))
    ends, least = widest.copy(), _measure_error(rows, widest, spec)
    outer = _find_outer(rows)
    both, low, high = (np.array(which)[:, None] for which in ([True, True], [True, False], [False, True]))
    moves = [(_COARSE, both), (_FINE, both)]
    if not spec.symmetric:
        moves = [(_COARSE, which) for which in (both, low, high, low, high)] + [(_FINE, low), (_FINE, high)]
    for factors, which in moves:
        fixed = ends.copy()
        # Coarse factors are shares of the whole range, fine ones of the best so far.
        start = widest if factors is _COARSE else fixed
        for factor in factors:
            tried = np.clip(np.where(which, start * factor, fixed), widest[:1], widest[1:])
            may_win = (tried != ends).any(axis=0)
            if outer is not None:
                may_win &= _bound_error(outer, tried, spec) < least
            at = np.flatnonzero(may_win)
            if not at.size:
                continue
            # A copy of few rows costs less than a look at those that cannot win.
            at = at if 2 * at.size < len(rows) else np.arange(len(rows))
            part, some = (rows[at], tried[:, at]) if at.size < len(rows) else (rows, tried)
            error = _measure_error(part, some, spec)
            better = error < least[at]
            ends[:, at[better]], least[at[better]] = some[:, better], error[better]
    return ends[0], ends[1]


def _find_outer(rows: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """The smallest and largest values of each row, which a narrow range cuts off; None for short rows."""
    if rows.shape[1] <= 8 * _OUTER:
        return None
    parted = np.partition(rows, (_OUTER, rows.shape[1] - _OUTER), axis=1)
    return np.concatenate([parted[:, :_OUTER], parted[:, -_OUTER:]], axis=1)


def _bound_error(outer: NDArray[np.float32], ends: NDArray[np.float64], spec: QuantSpec) -> NDArray[np.float64]:
    """A bound from below on the squared error of each row in its range [lo, hi]: that of the values cut off."""
    low, high = ends
    # A zero point moves the ends by half a step, and the lowest level of a symmetric spec lies a step further out.
    step = 2.0 * (high - low) / max(spec.qmax - spec.qmin, 1)
    gap = np.maximum(outer - (high + step)[:, None], (low - step)[:, None] - outer)
    np.maximum(gap, 0.0, out=gap)
    # Sums of squares are rounded.
    return np.asarray(np.einsum("ij,ij->i", gap, gap) * (1.0 - 1e-3))


def _measure_error(rows: NDArray[np.float32], ends: NDArray[np.float64], spec: QuantSpec) -> NDArray[np.float64]:
    """Measure the squared error of each row quantized to its range [lo, hi]."""
    numbers = qparams_from_range(ends[0], ends[1], spec)
    total = np.zeros(len(rows))
    for first in range(0, rows.shape[1], _SLAB):
        part = rows[:, first : first + _SLAB]
        # In place: the rounded values are not needed.
        gap = fake_quant(part, numbers, spec)
        gap -= part
        total += np.einsum("ij,ij->i", gap, gap, dtype=np.float64)
    return total


_FITS: dict[str, Callable[[NDArray[np.float32], QuantSpec], Ends]] = {"minmax": _fit_minmax, "mse": _fit_mse}
