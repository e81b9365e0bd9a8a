"""Search for the part of a range whose quantization costs least, for all observers that minimise a cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Cost = Callable[[Array, Array], Array]


def find_best_range(
    low: float, high: float, symmetric: bool, cost: Cost, *, least: float, coarse: int, fine: Sequence[int]
) -> tuple[float, float]:
    """Find the [lo, hi] of least cost inside [low, high] extended to contain 0; among equals the widest.

    cost: lo [n], hi [n] -> [n]. symmetric: ranges are [-t, t]. Otherwise both ends first shrink by the same factor,
    then each by itself, in turns; an end at 0 (one-sided data) stays.
    least: smallest factor tried. coarse: number of factors from 1 to it, in equal ratios. fine: for each round of
    refinement the number of factors between the neighbours of the best one.
    """
    top = max(-low, high)
    low, high = (-top, top) if symmetric else (min(low, 0.0), max(high, 0.0))
    steps = np.geomspace(1.0, least, coarse)
    ratio = float(steps[0] / steps[1])
    free = np.array([low < 0.0, high > 0.0])
    widest = np.array([low, high])
    # Each end twice: the best low end depends on the high one.
    turns = [free]
    if not symmetric and free.all():
        turns += [np.array([True, False]), np.array([False, True])] * 2
    ends, least_cost = widest, float(cost(widest[:1], widest[1:])[0])
    for which in turns:
        ends, least_cost = _keep_better(np.where(which, steps[:, None] * widest, ends), ends, least_cost, cost)
    for count in fine:
        near = np.geomspace(ratio, 1 / ratio, count)
        for which in turns[:1] if len(turns) == 1 else turns[1:3]:
            tried = np.clip(np.where(which, near[:, None] * ends, ends), widest[0], widest[1])
            ends, least_cost = _keep_better(tried, ends, least_cost, cost)
        # The next round searches between the neighbours of the best factor.
        ratio **= 2.0 / (count - 1)
    return float(ends[0]), float(ends[1])


def _keep_better(tried: Array, ends: Array, least_cost: float, cost: Cost) -> tuple[Array, float]:
    costs = cost(tried[:, 0], tried[:, 1])
    best = int(np.argmin(costs))
    return (tried[best], float(costs[best])) if costs[best] < least_cost else (ends, least_cost)
