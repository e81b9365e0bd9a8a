"""Scale and zero point of constants: per tensor, channel or block, by range or by least squared error.

The squared error of the weight alone is a good criterion at 2 to 6 bits; at 8 bits per channel the range is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from onnxq.arrays import Array64, Floats
from onnxq.errors import CalibrationError, ConfigError
from onnxq.nearest import suggest_names
from onnxq.numerics.block_search import search_numbers
from onnxq.numerics.ranges import qparams_from_range
from onnxq.numerics.rounding import compute_block_shape
from onnxq.numerics.saturation import SumOrder, choose_widening, find_channel_axis, needs_bound, pair_neighbours
from onnxq.spec import WEIGHT_OBSERVERS, ObserverSpec, PerBlock, PerChannel, PerTensor, QParams, QuantSpec

# (low, high) of each group.
Ends = tuple[Array64, Array64]


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
    orders: the 16-bit sums that the weights must satisfy, see `numerics.saturation`. Scales are then widened channel
        by channel as far as this lowers the squared error of weights rounded within these sums.
    importance: weighting of the squared errors, above 0, that broadcasts to `w`; None for equal weights.
    Raises CalibrationError on NaN or inf, ConfigError for another observer or an option.
    """
    observer = ObserverSpec() if observer is None else observer
    check_weight_observer(observer)
    name, options = observer.name, dict(observer.options)
    values = np.asarray(w, np.float32)
    widest = _find_ends(values, spec)
    if not (np.isfinite(widest[0]).all() and np.isfinite(widest[1]).all()):
        raise CalibrationError("weight", "holds NaN or inf", "repair the float model", code="Q503")
    if name == "minmax" and not isinstance(spec.granularity, PerBlock):  # `widest` is the answer
        qparams = qparams_from_range(*widest, spec, origin=f"weights, {name}")
        return _widen_scales(values, qparams, spec, orders)
    groups, shape = _group_values(values, spec)
    ends = groups.min(axis=1, initial=0.0), groups.max(axis=1, initial=0.0)
    qparams = qparams_from_range(*ends, spec, origin=f"weights, {name}")
    if name == "mse" and not spec.is_float:
        spread = None if importance is None else np.broadcast_to(np.asarray(importance, np.float32), values.shape)
        weighting = None if spread is None else _group_values(spread, spec)[0]
        signed, rows = bool(options.get("signed_scales", False)), replace(spec, granularity=PerChannel(0))
        qparams = search_numbers(groups, rows, qparams, weighting, signed_scales=signed)
    qparams = replace(qparams, scale=qparams.scale.reshape(shape), zero_point=qparams.zero_point.reshape(shape))
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
        raise ConfigError(f"weight observer {name!r}", f"takes no option {unknown!r}", "remove it", code="Q311")


def _widen_scales(values: Floats, qparams: QParams, spec: QuantSpec, orders: Sequence[SumOrder]) -> QParams:
    """Widen the scales for weights that share a 16-bit sum, by expected squared error."""
    grain = spec.granularity
    if not orders or not needs_bound(spec) or isinstance(grain, PerBlock):
        return qparams
    factors = np.ones(qparams.scale.shape, np.float32)
    for order in orders:
        two, scale = pair_neighbours(values, order), qparams.scale
        if isinstance(grain, PerTensor):
            two, scale = two.reshape(1, -1, 2), scale.reshape(1)
        elif grain.axis % values.ndim != find_channel_axis(order):
            continue  # a row of sums has no scale of its own
        # Both neighbours change by half the excess, so a sum costs half its square.
        wider = choose_widening(two[..., 0], two[..., 1], scale, np.full(len(two), two[0].size), 0.5)
        factors = np.maximum(factors, wider.reshape(factors.shape))
    return replace(qparams, scale=np.asarray(qparams.scale * factors, np.float32))


def _group_values(values: Floats, spec: QuantSpec) -> tuple[Floats, tuple[int, ...]]:
    """Arrange values in rows that share a scale; return these and the shape of the scales.

    A short last block is filled with zeros, which lie in every range and quantize without error.
    """
    grain = spec.granularity
    if not isinstance(grain, (PerChannel, PerBlock)):
        return values.reshape(1, -1), ()
    axis = _find_axis(values, grain)
    if isinstance(grain, PerChannel):
        count = values.shape[axis]
        return np.moveaxis(values, axis, 0).reshape(count, values.size // max(count, 1)), (count,)
    shape = compute_block_shape(values.shape, axis, grain.size)
    gap = [(0, shape[axis] * grain.size - dim if k == axis else 0) for k, dim in enumerate(values.shape)]
    filled = np.pad(values, gap).reshape(*shape[: axis + 1], grain.size, *shape[axis + 1 :])
    return np.moveaxis(filled, axis + 1, -1).reshape(-1, grain.size), shape


def _find_ends(values: Floats, spec: QuantSpec) -> Ends:
    """Find the smallest and largest value, or 0, of each channel; of all values for blocks. NaN propagates."""
    others = None
    if isinstance(spec.granularity, PerChannel):
        axis = _find_axis(values, spec.granularity)
        others = tuple(k for k in range(values.ndim) if k != axis)
    low, high = values.min(axis=others, initial=0.0), values.max(axis=others, initial=0.0)
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def _find_axis(values: Floats, grain: PerChannel | PerBlock) -> int:
    """The axis of channels or blocks, counted from 0. Raises ConfigError where the values have no such axis."""
    if not -values.ndim <= grain.axis < values.ndim:
        cause = f"is outside a weight of shape {values.shape}"
        raise ConfigError(f"axis {grain.axis}", cause, "use an axis it has", code="Q313")
    return grain.axis % values.ndim
