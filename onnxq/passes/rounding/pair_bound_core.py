"""Rounding by second moments where 16-bit sums bind: scales found together with the integers; arrays.

Weights that share a sum (see numerics.saturation) get in each other's way, the less the wider the steps are: scales of
rows whose sums bind are widened by `numerics.widening`, each column's error weighed by what it costs the layer.
EfficientNet-Lite0 at 8 bits, mean of three seeds: 26.5 dB unbound, 26.1 so; with one bit less, 23.6.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.numerics import SumOrder, partners, widening
from onnxq.passes.rounding.gptq_core import Spreading, round_spreading
from onnxq.passes.rounding.low_bit_core import Narrow

Array = NDArray[Any]


def partner_columns(rows: NDArray[np.int64], shape: tuple[int, ...], order: SumOrder) -> NDArray[np.int64]:
    """[K]: for each column of a weight's matrix form the one that shares its 16-bit sum, -1 where none does.

    rows: flat indices of the weight of `shape`, as a row of its matrix form has them.
    """
    beside = partners(shape, order).reshape(-1)[rows]
    sort = np.argsort(rows)
    at = np.minimum(np.searchsorted(rows, beside, sorter=sort), len(rows) - 1)
    found = sort[at]
    return np.asarray(np.where((beside >= 0) & (rows[found] == beside), found, -1), np.int64)


def round_within_sums(
    w: Array,
    seen: Spreading,
    scale: Array,
    zero: Array,
    limits: tuple[int, int],
    partner: NDArray[np.int64],
) -> Narrow:
    """Levels of w that keep every sum and, row by row, a factor of 1 or more for their scale.

    Arguments as of `round_spreading`.
    """
    first = np.flatnonzero(partner > np.arange(len(partner)))
    second = partner[first]
    # A column's error costs what those still to come cannot make up for. Of two the one rounded last gives way; sharing
    # the excess between them gained .01 dB.
    places = np.argsort(seen.order, axis=1)
    costs = np.empty_like(seen.weights)
    np.put_along_axis(costs, seen.order, seen.weights, axis=1)
    cost = np.where(places[:, first] < places[:, second], costs[:, first], costs[:, second])
    steps, noise = scale.max(axis=2), np.broadcast_to(costs.sum(axis=1)[:, None], w.shape[:2])
    each = [widening(w[g][:, first], w[g][:, second], steps[g], noise[g], cost[g]) for g in range(len(w))]
    factors = np.stack(each)
    wider = np.asarray(scale * factors[:, :, None], np.float32)
    return Narrow(round_spreading(w, seen, wider, zero, limits, partner), factors)
