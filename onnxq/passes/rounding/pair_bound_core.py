"""GPTQ for weights whose 16-bit sums may overflow: scales are chosen together with the integers; arrays only.

Weights that share a sum (see numerics.saturation) limit each other, the less the wider the steps are: scales of rows
whose sums would overflow are widened by `numerics.widening`, each column's error weighted by its cost for the layer.
EfficientNet-Lite0 at 8 bits, mean of three seeds: 26.5 dB without the limit, 26.1 so; with one bit less, 23.6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics import SumOrder, choose_widening, find_partners
from onnxq.passes.rounding.gptq_core import ErrorFeedback, round_with_feedback
from onnxq.passes.rounding.low_bit_core import LowBitRounding

Array = NDArray[Any]


def partner_columns(rows: NDArray[np.int64], shape: tuple[int, ...], order: SumOrder) -> NDArray[np.int64]:
    """[K]: the column that shares a 16-bit sum with each column of a weight's matrix form, or -1.

    rows: flat indices into the weight of `shape`, in the order of a row of its matrix form.
    """
    beside = find_partners(shape, order).reshape(-1)[rows]
    sort = np.argsort(rows)
    at = np.minimum(np.searchsorted(rows, beside, sorter=sort), len(rows) - 1)
    found = sort[at]
    return np.asarray(np.where((beside >= 0) & (rows[found] == beside), found, -1), np.int64)


def round_within_sums(
    w: Array,
    seen: ErrorFeedback,
    scale: Array,
    zero: Array,
    limits: tuple[int, int],
    partner: NDArray[np.int64],
) -> LowBitRounding:
    """Quantized values of w that keep every sum and, for each row, a factor of at least 1 for its scale.

    Arguments as of `round_with_feedback`.
    """
    first = np.flatnonzero(partner > np.arange(len(partner)))
    second = partner[first]
    # A column's error costs the part that later columns cannot compensate. Of two neighbours the one rounded last gives
    # way; sharing the excess between them gained .01 dB.
    places = np.argsort(seen.order, axis=1)
    costs = np.empty_like(seen.weights)
    np.put_along_axis(costs, seen.order, seen.weights, axis=1)
    cost = np.where(places[:, first] < places[:, second], costs[:, first], costs[:, second])
    steps, noise = scale.max(axis=2), np.broadcast_to(costs.sum(axis=1)[:, None], w.shape[:2])
    each = [choose_widening(w[g][:, first], w[g][:, second], steps[g], noise[g], cost[g]) for g in range(len(w))]
    factors = np.stack(each)
    wider = np.asarray(scale * factors[:, :, None], np.float32)
    return LowBitRounding(round_with_feedback(w, seen, wider, zero, limits, partner), factors)
