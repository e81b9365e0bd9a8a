"""One operator's weight, rounded by the statistics of its input: scales, and the quantized values for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics import floor_weight_scale, needs_bound, weight_qparams
from onnxq.numerics.rounding import align_qparams
from onnxq.passes.rounding.gptq_core import correct_bias, round_with_feedback
from onnxq.passes.rounding.low_bit_core import FACTORS, NARROW_BITS, WHOLE, round_low_bit
from onnxq.passes.rounding.operators import Operator
from onnxq.passes.rounding.pair_bound_core import partner_columns, round_within_sums
from onnxq.passes.rounding.statistics import OperatorStatistics
from onnxq.plan import SitePlan
from onnxq.spec import PerBlock, PerChannel, QParams

Array = NDArray[Any]

# Where the scale of a weight is from that is not its observer's.
SEARCHED = "weights, rounded with scales searched"


def round_weight(
    one: Operator,
    site: SitePlan,
    x: QParams | None,
    target: Array,
    seen: OperatorStatistics,
    damping: float,
    *,
    refitted: bool,
    thorough: bool,
) -> SitePlan:
    """The site with scales for the target, and the quantized values found for them.

    site: of the weight. x: the numbers of its input, where the bias is in integers. target: [groups, rows, K], the
    weight or the re-fitted one. thorough: a longer search for values of few bits.
    """
    stored = one.stored(np.asarray(target, np.float32))
    qparams = site.qparams
    partner = _find_partners(one, site)
    alone = partner is not None and _row_by_row(one, site)
    blocked = isinstance(site.spec.granularity, PerBlock)
    if qparams is None or refitted or alone or blocked:
        # Where rows search their own, scales start as they would be without sums to keep.
        orders = () if alone else site.sum_orders
        # The search below has one factor for all blocks of a row; here each is by itself, by its columns' power.
        importance = one.stored(_weigh_columns(seen.moments.h, target.shape)) if blocked else None
        qparams = weight_qparams(stored, site.spec, observer=site.observer, orders=orders, importance=importance)
    # Least scale with which the bias fits into int32, on the scale of its input times the weight's.
    least = np.zeros_like(qparams.scale)
    if x is not None:
        bias = correct_bias(one.bias.reshape(target.shape[:2]), one.rows(one.weight), target, seen.moments)
        least = floor_weight_scale(least, x.scale, np.maximum(abs(bias.ravel()), abs(one.bias)))
        qparams = replace(qparams, scale=np.maximum(qparams.scale, least))
    aligned = align_qparams(qparams, site.spec, stored.shape, np.float32)
    scales, zeros = (one.rows(np.broadcast_to(part, stored.shape)) for part in aligned)
    limits = (site.spec.qmin, site.spec.qmax)
    if partner is not None and alone:
        within = round_within_sums(target, seen.spreading(damping), scales, zeros, limits, partner)
        levels = within.levels
        qparams = _mark_searched(qparams, qparams.scale * _shape_factors(within.factors, one, site))
    elif not searches_scales(one, site):
        levels = round_with_feedback(target, seen.spreading(damping), scales, zeros, limits, partner)
    else:
        share = (least / qparams.scale).reshape(target.shape[:2]) if least.ndim == 1 else None
        found = round_low_bit(
            target, seen.spreading(damping, agreed=True), scales, zeros, limits,
            lowest=share, factors=WHOLE if blocked else FACTORS, thorough=thorough,
        )  # fmt: skip
        levels = found.levels
        qparams = _mark_searched(qparams, qparams.scale * _shape_factors(found.factors, one, site))
    kind = np.dtype(site.spec.numpy_storage)
    origin = SEARCHED if qparams.origin == SEARCHED else "weights, rounded"
    return replace(site, qparams=replace(qparams, origin=origin), values=one.stored(levels).astype(kind))


def searches_scales(one: Operator, site: SitePlan) -> bool:
    """True where scales are searched together with values: few bits, and every row has scales of its own."""
    return site.spec.bits <= NARROW_BITS and _row_by_row(one, site)


def _weigh_columns(h: Array, shape: tuple[int, ...]) -> Array:
    """The power of each column, of mean 1, for every row of a weight of this shape, [groups, rows, K]; none is 0."""
    power = np.diagonal(h, axis1=1, axis2=2)[:, None, :]
    return np.broadcast_to(power / max(float(power.mean()), 1e-30) + 1e-3, shape)


def _find_partners(one: Operator, site: SitePlan) -> Array | None:
    """[K]: the column that a 16-bit sum adds to each; None where no sum can overflow."""
    if not site.sum_orders or not needs_bound(site.spec):
        return None
    flat = np.arange(one.weight.size).reshape(one.weight.shape)
    return partner_columns(one.rows(flat)[0, 0], one.weight.shape, site.sum_orders[0])


def _row_by_row(one: Operator, site: SitePlan) -> bool:
    """True when every row of the matrix form has scales of its own."""
    grain, axis = site.spec.granularity, one.output_axis
    if isinstance(grain, PerChannel):
        return axis is not None and grain.axis % one.weight.ndim == axis
    return isinstance(grain, PerBlock) and axis is not None and grain.axis % one.weight.ndim != axis


def _shape_factors(factors: Array, one: Operator, site: SitePlan) -> Array:
    """One factor a row, shaped to multiply the site's scales."""
    flat = factors.reshape(-1)
    if isinstance(site.spec.granularity, PerChannel):
        return flat
    return flat.reshape([-1 if k == one.output_axis else 1 for k in range(one.weight.ndim)])


def _mark_searched(qparams: QParams, scale: Array) -> QParams:
    """The numbers with a scale that the rounding found; marked so where it is not the observer's any more."""
    same = np.array_equal(scale, qparams.scale)
    return replace(qparams, scale=scale, origin=qparams.origin if same else SEARCHED)
