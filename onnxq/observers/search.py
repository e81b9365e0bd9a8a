"""Search for the part of a range whose quantization costs least; shared by every observer that minimises something."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Cost = Callable[[Array, Array], Array]


def best_range(
    low: float, high: float, symmetric: bool, cost: Cost, *, least: float, coarse: int, fine: Sequence[int]
) -> tuple[float, float]:
    """The [lo, hi] inside [low, high], widened to hold 0, of least cost; among equals the widest.

    cost: lo [n], hi [n] -> [n]. symmetric: ranges are [-t, t]. Else both ends shrink by the same factor first, and
    then each by itself, in turns; an end on its own side of 0 (one-sided data) stays.
    least: smallest factor tried; coarse: number of factors from 1 to it, in equal ratios; fine: for each round of
    refinement the number of factors between the neighbours of the best one.
    """
    top = max(-low, high)
    low, high = (-top, top) if symmetric else (min(low, 0.0), max(high, 0.0))
    steps = np.geomspace(1.0, least, coarse)
    ratio = float(steps[0] / steps[1])
    free = np.array([low < 0.0, high > 0.0])
    widest = np.array([low, high])
    turns = [free] if symmetric or not free.all() else [free, *([np.array([True, False]), np.array([False, True])] * 2)]
    ends, least_cost = widest, float(cost(widest[:1], widest[1:])[0])
    for which in turns:
        ends, least_cost = _try(np.where(which, steps[:, None] * widest, ends), ends, least_cost, cost)
    for count in fine:
        near = np.geomspace(ratio, 1 / ratio, count)
        for which in turns[:1] if len(turns) == 1 else turns[1:3]:
            tried = np.clip(np.where(which, near[:, None] * ends, ends), widest[0], widest[1])
            ends, least_cost = _try(tried, ends, least_cost, cost)
        ratio **= 2.0 / (count - 1)
    return float(ends[0]), float(ends[1])


def _try(tried: Array, ends: Array, least_cost: float, cost: Cost) -> tuple[Array, float]:
    costs = cost(tried[:, 0], tried[:, 1])
    best = int(np.argmin(costs))
    return (tried[best], float(costs[best])) if costs[best] < least_cost else (ends, least_cost)
