"""Rounding strategies: a table of how one weight gets its codes, and the problem that they all solve.

`STRATEGIES` is asked in its order, and the first strategy that applies rounds the weight. A weight whose input has no
second moments is rounded to nearest, as calibration leaves it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from onnxq.arrays import Array, Integers, Shape, as_float32
from onnxq.numerics import align_qparams, floor_weight_scale, needs_bound, weight_qparams
from onnxq.passes.rounding.gptq_core import (
    RoundedWeight,
    RoundingProblem,
    correct_bias,
    find_partner_columns,
    round_with_feedback,
    round_within_sums,
)
from onnxq.passes.rounding.low_bit_core import FACTORS, NARROW_BITS, WHOLE, round_low_bit
from onnxq.passes.rounding.operators import Operator
from onnxq.passes.rounding.statistics import OperatorStatistics
from onnxq.plan import SitePlan
from onnxq.spec import PerBlock, PerChannel, QParams

# Where the scale of a weight is from that is not its observer's.
SEARCHED = "weights, rounded with scales searched"


@dataclass(frozen=True)
class Strategy:
    """A way to round a weight.

    applies: True for the weights that it rounds, by their operator and site. round: solves the problem of one weight.
    searches: the scales of rows are searched together with the codes, so that they start as they would be without
    16-bit sums to keep. agreed: by the part of the second moments that both halves of the samples agree on.
    """

    name: str
    applies: Callable[[Operator, SitePlan], bool]
    round: Callable[[RoundingProblem], RoundedWeight]
    searches: bool = False
    agreed: bool = False


def searches_scales(operator: Operator, site: SitePlan) -> bool:
    """True where scales are searched together with codes: few bits, and every row has scales of its own."""
    return site.spec.bits <= NARROW_BITS and _has_row_scales(operator, site)


def _shares_sums(operator: Operator, site: SitePlan) -> bool:
    """True where 16-bit sums may overflow, and the scale of each row can make up for it."""
    return bool(site.sum_orders) and needs_bound(site.spec) and _has_row_scales(operator, site)


# Sums come first, since a strategy that ignores them would write integers that overflow.
STRATEGIES: tuple[Strategy, ...] = (
    Strategy("within_sums", _shares_sums, round_within_sums, searches=True),
    Strategy("low_bit", searches_scales, round_low_bit, agreed=True),
    Strategy("gptq", lambda operator, site: True, round_with_feedback),
)


@dataclass(frozen=True, eq=False)
class PosedWeight:
    """The problem of one weight, and what its solution becomes part of.

    site: of the weight. qparams: those whose scales the problem has.
    """

    operator: Operator
    site: SitePlan
    qparams: QParams
    strategy: Strategy
    problem: RoundingProblem

    def make_site(self, rounded: RoundedWeight) -> SitePlan:
        """The site with the codes, and the scales found for them."""
        qparams = self.qparams
        if rounded.factors is not None:
            scale = qparams.scale * self._shape_factors(rounded.factors)
            # A scale that is the observer's still is not called another.
            if not np.array_equal(scale, qparams.scale):
                qparams = replace(qparams, scale=scale, origin=SEARCHED)
        origin = SEARCHED if qparams.origin == SEARCHED else "weights, rounded"
        codes = self.operator.to_stored(rounded.codes).astype(self.site.spec.numpy_storage)
        return replace(self.site, qparams=replace(qparams, origin=origin), values=codes)

    def _shape_factors(self, factors: Array) -> Array:
        """One factor a row, shaped to multiply the site's scales."""
        flat = factors.ravel()
        # Their scale is [channels]; in blocks it has the rank of the weight, and a factor counts
        # for all blocks of a row.
        if self.site.spec.has_channels:
            return flat
        axes = range(self.operator.weight.ndim)
        return flat.reshape([-1 if axis == self.operator.output_axis else 1 for axis in axes])


def pose_weight(
    operator: Operator,
    site: SitePlan,
    input_qparams: QParams | None,
    target: Array,
    statistics: OperatorStatistics,
    damping: float,
    *,
    refitted: bool,
    thorough: bool,
) -> PosedWeight:
    """The problem of rounding a weight, with the strategy that will solve it.

    site: of the weight. input_qparams: of the operator's input, where the bias is in integers. target: [groups, rows,
    K], the weight or the re-fitted one. thorough: a longer search for codes of few bits.
    """
    strategy = next(strategy for strategy in STRATEGIES if strategy.applies(operator, site))
    # Observers know weights as the file has them.
    stored = operator.to_stored(as_float32(target))
    qparams = site.qparams
    blocked = site.spec.has_blocks
    # Otherwise calibration's scale is still that of this very weight.
    if qparams is None or refitted or strategy.searches or blocked:
        orders = () if strategy.searches else site.sum_orders
        # The search has one factor for all blocks of a row; here each is by itself, by its columns' power.
        # An error in a column counts by the power of the input that meets it.
        importance = (
            _weigh_columns(operator, statistics.moments.h, target.shape) if blocked else None
        )
        qparams = weight_qparams(
            stored, site.spec, observer=site.observer, orders=orders, importance=importance
        )
    # Least scale with which the bias fits into int32, on the scale of its input times the weight's.
    least = np.zeros_like(qparams.scale)
    if input_qparams is not None:
        weight = operator.to_rows(operator.weight)
        bias = correct_bias(
            operator.bias.reshape(target.shape[:2]), weight, target, statistics.moments
        )
        largest = np.maximum(abs(bias.ravel()), abs(operator.bias))
        least = floor_weight_scale(least, input_qparams.scale, largest)
        # A bias beyond int32 would wrap or be clipped, whatever the weight.
        qparams = replace(qparams, scale=np.maximum(qparams.scale, least))
    aligned = align_qparams(qparams, site.spec, stored.shape, np.float32)
    scale, zero = (operator.to_rows(np.broadcast_to(part, stored.shape)) for part in aligned)
    rows_have_scales = least.ndim == 1 and _has_row_scales(operator, site)
    problem = RoundingProblem(
        weight=target,
        scale=scale,
        zero=zero,
        limits=(site.spec.qmin, site.spec.qmax),
        feedback=statistics.factor_moments(damping, agreed=strategy.agreed),
        partner=_find_partners(operator, site),
        # As factors of the present scale, which is what strategies search over.
        least=(least / qparams.scale).reshape(target.shape[:2]) if rows_have_scales else None,
        factors=WHOLE if blocked else FACTORS,
        thorough=thorough,
    )
    return PosedWeight(operator, site, qparams, strategy, problem)


def _weigh_columns(operator: Operator, h: Array, shape: Shape) -> Array:
    """The power of each column, of mean 1, for every row of a weight, as it is stored; none is 0.

    shape: of its matrix form, [groups, rows, K].
    """
    power = np.diagonal(h, axis1=1, axis2=2)[:, None, :]
    # A column that no sample reaches keeps a thousandth, so that its weights are not free to be
    # anything.
    weighed = np.broadcast_to(power / max(float(power.mean()), 1e-30) + 1e-3, shape)
    return operator.to_stored(weighed)


def _find_partners(operator: Operator, site: SitePlan) -> Integers | None:
    """[K]: the column that a 16-bit sum adds to each; None where no sum can overflow."""
    if not site.sum_orders or not needs_bound(site.spec):
        return None
    places = np.arange(operator.weight.size).reshape(operator.weight.shape)
    # All rows are laid out alike, so the first tells the order of all.
    return find_partner_columns(
        operator.to_rows(places)[0, 0], operator.weight.shape, site.sum_orders[0]
    )


def _has_row_scales(operator: Operator, site: SitePlan) -> bool:
    """True when every row of the matrix form has scales of its own."""
    grain = site.spec.granularity
    axis = operator.output_axis
    if axis is None or not isinstance(grain, PerChannel | PerBlock):
        return False
    return (grain.axis % operator.weight.ndim == axis) is isinstance(grain, PerChannel)
