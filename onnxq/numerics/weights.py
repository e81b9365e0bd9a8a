"""Integers and scales of weights, kept within the 16-bit sums of kernels that need it.

On x86 without VNNI, ONNX Runtime multiplies uint8 activations by int8 weights with `vpmaddubsw`: two neighbouring
products are added in 16 bits and saturate. An activation is at most 255, and 255 * 128 <= 32767 < 255 * 129, so

    max(w0, 0) + max(w1, 0) <= 128    and    min(w0, 0) + min(w1, 0) >= -128

keeps the sum of neighbours w0 and w1 exact for every input. Weights of different signs always satisfy it, and so do
those of 7 bits. A zero point changes nothing: the kernel multiplies the stored integers and subtracts it afterwards.

An order of axes defines the neighbours: the output channel first, then the axes along which products are added, slowest
first. A Conv's weight [M, C, kh, kw] with the order (0, 2, 3, 1) is M rows of kh * kw * C weights, with neighbours 0
and 1, 2 and 3, …; the last of an odd number is alone. Several axes in the place of the first are channels that no sum
crosses: an LSTM's weight [D, M, C] with the order ((1, 0), 2) is M rows of D times C weights, each with neighbours.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxq.arrays import (
    Array,
    Floats,
    Integers,
    Mask,
    Shape,
    are_finite,
    as_float32,
    as_float64,
    list_other_axes,
)
from onnxq.errors import CalibrationError, ConfigError, suggest_names
from onnxq.numerics.block_search import search_numbers
from onnxq.numerics.ranges import qparams_from_range
from onnxq.numerics.rounding import (
    align_qparams,
    choose_float,
    compute_block_shape,
    dequantize,
    fake_quant,
    quantize,
)
from onnxq.spec import (
    WEIGHT_OBSERVERS,
    ObserverSpec,
    PerBlock,
    PerChannel,
    PerTensor,
    QParams,
    QuantSpec,
)

SumOrder = tuple[int | tuple[int, ...], ...]
SumOrders = tuple[SumOrder, ...]


# Largest sum of the weights of one sign in one 16-bit sum.
MOST = 128
# Weights of fewer bits cannot exceed it.
_FEWEST_BITS = 8
# From 1 in steps of 3 % to 2, at which even two weights of 127 have room.
_FACTORS = tuple(1.03**k for k in range(24))
_INT8 = np.iinfo(np.int8)


def pair_neighbours(values: ArrayLike, order: SumOrder) -> Array:
    """Arrange weights as [rows, sums, 2], one entry per 16-bit sum; 0 beside the last of an odd number."""
    rows = _to_rows(np.asarray(values), order)
    if rows.shape[1] % 2:
        rows = np.pad(rows, [(0, 0), (0, 1)])
    return rows.reshape(len(rows), -1, 2)


def find_saturating_sums(values: ArrayLike, order: SumOrder) -> Mask:
    """Find the sums, [rows, sums], that overflow for some input. values: the stored int8 weights."""
    # In int8 the sum itself would overflow.
    two = pair_neighbours(values, order).astype(np.int16)
    # The worst input is 255 at weights of one sign and 0 at the others; those of two signs never add up to more than
    # one of them.
    return abs(two[..., 0] + two[..., 1]) > MOST


def find_partners(shape: Shape, order: SumOrder) -> Integers:
    """Find the flat index of each weight's neighbour in a tensor of `shape`; -1 for a weight without one."""
    # Counted from 1: 0 stands beside those that are alone.
    places = np.arange(1, math.prod(shape) + 1, dtype=np.int64).reshape(shape)
    two = pair_neighbours(places, order)
    partners = np.zeros(places.size + 1, np.int64)
    partners[two] = two[..., ::-1]
    return partners[places] - 1


def needs_bound(spec: QuantSpec) -> bool:
    """True for weights wide enough to overflow a sum. Kernels for unsigned weights are exact."""
    return spec.storage == "int8" and spec.bits >= _FEWEST_BITS


def quantize_weight(
    w: ArrayLike, qparams: QParams, spec: QuantSpec, orders: Sequence[SumOrder] = ()
) -> Array:
    """Quantize to the nearest integers, sum by sum, with which every sum of `orders` fits into 16 bits.

    w: as for `quantize`. orders: several if different readers of one weight add differently; all are satisfied.
    """
    values = np.asarray(w)
    codes = quantize(values, qparams, spec)
    if not orders or not needs_bound(spec):
        return codes
    scale, zero = align_qparams(qparams, spec, values.shape, choose_float(values))
    return limit_sums(codes, as_float32(values) / scale + zero, orders)


def fake_quant_weight(
    w: ArrayLike, qparams: QParams, spec: QuantSpec, orders: Sequence[SumOrder]
) -> NDArray[np.floating[Any]]:
    """Apply `quantize_weight`, then `dequantize`. Returns float16 for float16, else float32."""
    values = np.asarray(w)
    if not orders or not needs_bound(spec):
        return fake_quant(values, qparams, spec)
    return dequantize(
        quantize_weight(values, qparams, spec, orders), qparams, spec, choose_float(values)
    )


def limit_sums(values: Array, wanted: ArrayLike, orders: Sequence[SumOrder]) -> Array:
    """Change integers whose sum can overflow to the nearest ones whose sum cannot.

    values: int8. wanted: the unrounded values, of the same shape, in units of the scale. Of the integers that satisfy a
    sum, those nearest to `wanted` (least squares) are taken, so that both neighbours change alike. No magnitude grows,
    so satisfying one order never breaks another.
    """
    codes = np.array(values)
    for order in orders:
        # Reshaping copies unless the order is that in memory; hence an explicit copy, written back below.
        rows = _to_rows(codes, order).copy()
        aims = _to_rows(as_float32(wanted), order)
        even = rows.shape[1] // 2 * 2
        first = rows[:, :even:2]
        second = rows[:, 1:even:2]
        first[:], second[:] = round_within_sum(first, second, aims[:, :even:2], aims[:, 1:even:2])
        codes = _from_rows(rows, codes.shape, order)
    return codes


def choose_widening(
    first: Array, second: Array, scale: Array, noise: ArrayLike, cost: ArrayLike
) -> Floats:
    """Choose a factor of 1 to 2 for the scale of each row: wider steps round coarser and leave sums more room.

    It minimises the expected error of a row: noise * (f * scale)^2 / 12 for rounding, plus cost * excess^2 for each
    sum that must still be reduced by `excess`. The closed form needs no trials: the squared error of rounded weights
    and of layers is within 1 % of the best of ten trials.

    first, second: float neighbours [rows, sums]. scale: [rows]. noise: [rows], in units of `cost`. cost: one number per
    sum.
    """
    steps = as_float64(scale)
    # Weights of unlike signs add up to less than the larger one alone.
    total = np.where(np.sign(first) == np.sign(second), abs(first + second), 0.0)
    # The other sums have no excess at any factor.
    rows, sums = np.nonzero(total > MOST * steps[:, None])
    factors = np.ones(len(steps), np.float32)
    if not len(rows):
        return factors
    wide = as_float64(total[rows, sums])
    room = MOST * steps[rows]
    each = np.broadcast_to(as_float64(cost), total.shape)[rows, sums]
    coarse = as_float64(noise) * steps**2 / 12
    least = np.full(len(steps), np.inf)
    for factor in _FACTORS:
        excess = np.maximum(wide - room * factor, 0.0)
        error = coarse * factor**2 + np.bincount(rows, each * excess**2, minlength=len(steps))
        better = error < least
        factors = np.where(better, np.float32(factor), factors)
        least = np.where(better, error, least)
    return factors


def round_within_sum(
    first: Array, second: Array, aim: ArrayLike, other: ArrayLike
) -> tuple[Array, Array]:
    """Move both neighbours of every sum to the nearest integers that satisfy it; arrays of one shape.

    first, second: integers. aim, other: their unrounded values.
    """
    moved_first = np.array(first)
    moved_second = np.array(second)
    wide = moved_first.astype(np.int32), moved_second.astype(np.int32)
    # Weights of two signs never add up to so much.
    over = abs(wide[0] + wide[1]) > MOST
    if not over.any():
        return moved_first, moved_second
    sign = np.where(wide[0][over] > 0, 1, -1)
    most = wide[0][over] * sign, wide[1][over] * sign
    aims = [np.clip(as_float32(wanted)[over] * sign, 0, -_INT8.min) for wanted in (aim, other)]
    # The point of the line first + second = MOST nearest to (aim, other).
    share = np.rint((aims[0] - aims[1] + MOST) / 2).astype(np.int32)
    share = np.minimum(np.maximum(share, MOST - most[1]), most[0])
    moved_first[over] = share * sign
    moved_second[over] = np.minimum(MOST - share, most[1]) * sign
    return moved_first, moved_second


def _split_axes(order: SumOrder) -> tuple[list[int], int]:
    """The axes in order, and the number of those that no sum crosses."""
    axes = [list(axis) if isinstance(axis, tuple) else [axis] for axis in order]
    return [axis for group in axes for axis in group], len(axes[0])


def _to_rows(array: Array, order: SumOrder) -> Array:
    """[rows, weights]; where a row holds several runs of an odd number, a 0 ends each."""
    axes, apart = _split_axes(order)
    moved = array.transpose(axes)
    runs = moved.reshape(*moved.shape[:apart], -1)
    if apart > 1 and runs.shape[-1] % 2:
        runs = np.pad(runs, [(0, 0)] * apart + [(0, 1)])
    return runs.reshape(len(runs), -1)


def _from_rows(rows: Array, shape: Shape, order: SumOrder) -> Array:
    """Invert `_to_rows`."""
    axes, apart = _split_axes(order)
    sizes = [shape[axis] for axis in axes]
    runs = rows.reshape(*sizes[:apart], -1)[..., : math.prod(sizes[apart:])]
    return np.ascontiguousarray(runs.reshape(sizes).transpose(np.argsort(axes)))


# Scale and zero point of constants: per tensor, channel or block, by range or by least squared error.
# The squared error of the weight alone is a good criterion at 2 to 6 bits; at 8 bits per channel the range is as
# good.


def weight_qparams(
    w: ArrayLike,
    spec: QuantSpec,
    *,
    observer: ObserverSpec | None = None,
    orders: Sequence[SumOrder] = (),
    importance: ArrayLike | None = None,
) -> QParams:
    """Choose scale and zero point of the constant `w`, of the shape of the spec's granularity.

    observer: "minmax" (default), or "mse": the scale, and for asymmetric specs the zero point, of each channel or block
        with the least squared error, see `numerics.block_search`. Its option signed_scales lets symmetric scales be
        negative where that is nearer; not every engine reads them.
    orders: the 16-bit sums that the weights must satisfy. Scales are then widened channel
        by channel as far as this lowers the squared error of weights rounded within these sums.
    importance: weighting of the squared errors, above 0, that broadcasts to `w`; None for equal weights.
    Raises CalibrationError on NaN or inf, ConfigError for another observer or an option.
    """
    observer = ObserverSpec() if observer is None else observer
    check_weight_observer(observer)
    name = observer.name
    options = dict(observer.options)
    values = as_float32(w)
    groups, shape = _group_values(values, spec)
    others = list_other_axes(groups, 0)
    # NaN propagates.
    ends = groups.min(axis=others, initial=0.0), groups.max(axis=others, initial=0.0)
    if not are_finite(ends):
        raise CalibrationError("weight", "holds NaN or inf", "repair the float model", code="Q503")
    qparams = qparams_from_range(*ends, spec, origin=f"weights, {name}")
    if name == "mse" and not spec.is_float:
        weighting = None
        if importance is not None:
            spread = np.broadcast_to(as_float32(importance), values.shape)
            weighting = _flatten_groups(_group_values(spread, spec)[0])
        signed = bool(options.get("signed_scales", False))
        rows = replace(spec, granularity=PerChannel(0))
        qparams = search_numbers(
            _flatten_groups(groups), rows, qparams, weighting, signed_scales=signed
        )
    qparams = replace(
        qparams, scale=qparams.scale.reshape(shape), zero_point=qparams.zero_point.reshape(shape)
    )
    return _widen_scales(values, qparams, spec, orders)


def check_weight_observer(observer: ObserverSpec) -> None:
    """Raise ConfigError for an observer that weights do not have, or an option that it does not take."""
    name = observer.name
    if name not in WEIGHT_OBSERVERS:
        raise ConfigError(
            f"weight observer {name!r}",
            "is not one that weights have",
            suggest_names(name, WEIGHT_OBSERVERS),
            code="Q310",
        )
    for unknown in dict(observer.options).keys() - {*WEIGHT_OBSERVERS[name]}:
        raise ConfigError(
            f"weight observer {name!r}", f"takes no option {unknown!r}", "remove it", code="Q311"
        )


def _widen_scales(
    values: Floats, qparams: QParams, spec: QuantSpec, orders: Sequence[SumOrder]
) -> QParams:
    """Widen the scales for weights that share a 16-bit sum, by expected squared error."""
    grain = spec.granularity
    if not orders or not needs_bound(spec) or isinstance(grain, PerBlock):
        return qparams
    factors = np.ones(qparams.scale.shape, np.float32)
    for order in orders:
        two = pair_neighbours(values, order)
        scale = qparams.scale
        if isinstance(grain, PerTensor):
            two = two.reshape(1, -1, 2)
            scale = scale.reshape(1)
        elif grain.axis % values.ndim != _split_axes(order)[0][0]:
            continue  # a row of sums has no scale of its own
        # Both neighbours change by half the excess, so a sum costs half its square.
        wider = choose_widening(
            two[..., 0], two[..., 1], scale, np.full(len(two), two[0].size), 0.5
        )
        factors = np.maximum(factors, wider.reshape(factors.shape))
    return replace(qparams, scale=as_float32(qparams.scale * factors))


def _group_values(values: Floats, spec: QuantSpec) -> tuple[Floats, Shape]:
    """Arrange values so that those along axis 0 share a scale; return these and the shape of the scales.

    A short last block is filled with zeros, which lie in every range and quantize without error.
    """
    grain = spec.granularity
    if not isinstance(grain, (PerChannel, PerBlock)):
        return values[None], ()
    axis = _find_axis(values, grain)
    if isinstance(grain, PerChannel):
        return np.moveaxis(values, axis, 0), (values.shape[axis],)
    shape = compute_block_shape(values.shape, axis, grain.size)
    gap = [
        (0, shape[axis] * grain.size - dim if k == axis else 0)
        for k, dim in enumerate(values.shape)
    ]
    filled = np.pad(values, gap).reshape(*shape[: axis + 1], grain.size, *shape[axis + 1 :])
    return np.moveaxis(filled, axis + 1, -1).reshape(-1, grain.size), shape


def _flatten_groups(groups: Floats) -> Floats:
    """[groups, values]; there may be no group."""
    return groups.reshape(len(groups), math.prod(groups.shape[1:]))


def _find_axis(values: Floats, grain: PerChannel | PerBlock) -> int:
    """The axis of channels or blocks, counted from 0. Raises ConfigError where the values have no such axis."""
    if not -values.ndim <= grain.axis < values.ndim:
        cause = f"is outside a weight of shape {values.shape}"
        raise ConfigError(f"axis {grain.axis}", cause, "use an axis it has", code="Q313")
    return grain.axis % values.ndim
