"""One placement for several kinds of CPU: no slower than float on any, and close to the best on each.

A weighted sum of the kinds' times is again the energy of a minimum cut. The weights move towards the kind that loses
most beside a placement of its own until all lose alike (a supported point of the Pareto front: Ehrgott,
"Multicriteria Optimization", 2005, chapter 3); the cut that loses least on its worst kind is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from onnxq.backends import find_reference
from onnxq.backends.costs import Cost, MachineCosts
from onnxq.planner.cut import CutProblem, PlacementCosts, add_costs
from onnxq.sites import Caution

ANY = "any"
# A placement for all kinds may be predicted so much slower than one kind's own.
TOLERATED = 1.03
# Change of the logarithm of the weights, halved from step to step; both ends lie 2.9 to 1 or more from equal weights.
_STEPS = (2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)
# Difference below which two losses, or two times in microseconds, are one: sums of floats in another order.
_EQUAL = 1e-9
# Microseconds that no model takes, and that still leave float64 the digits to tell two placements apart.
_PROHIBITIVE_US = 1e9


@dataclass(frozen=True)
class Forecast:
    """Predicted microseconds of all operators on a kind of CPU: in float, as placed, as placed for that kind alone."""

    cpu: str
    float_us: float
    placed_us: float
    own_us: float

    @property
    def speedup(self) -> float:
        """Float time over the placement's."""
        return self.float_us / self.placed_us if self.placed_us else 1.0

    @property
    def loss(self) -> float:
        """The placement's time over that of the kind's own; 1 is the best."""
        return self.placed_us / self.own_us if self.own_us else 1.0


@dataclass(frozen=True)
class Balance:
    """A placement, the costs it is the minimum cut of, and its gain on each kind of CPU."""

    chosen: frozenset[str]
    costs: PlacementCosts
    forecasts: tuple[Forecast, ...]

    def warnings(self) -> tuple[Caution, ...]:
        """A line for each kind of CPU that could be better served."""
        return tuple(_warn_of_kind(one) for one in self.forecasts if one.loss > TOLERATED)


def find_balance(
    problem: CutProblem, fixed: Mapping[str, bool], cpu: str = ANY, tables: Mapping[str, MachineCosts] | None = None
) -> Balance:
    """The placement for one kind of CPU, or for all that have a table.

    tables: of costs by kind of CPU; None for those of ONNX Runtime. fixed: operators whose side is given. Operators
    forced into integers count as part of the float model.
    """
    tables = find_reference().usual.costs if tables is None else tables
    costs = {name: problem.costs(table) for name, table in tables.items()}
    own = {name: problem.minimum_cut(costs[name], fixed) for name in costs}

    def weigh(chosen: frozenset[str], blend: PlacementCosts) -> Balance:
        def forecast(name: str, one: PlacementCosts) -> Forecast:
            return Forecast(name, *(problem.time_us(one, some) for some in (frozenset(), chosen, own[name])))

        return Balance(chosen, blend, tuple(forecast(name, one) for name, one in costs.items()))

    if cpu != ANY:
        return weigh(own[cpu], costs[cpu])
    own_us = {name: problem.time_us(costs[name], own[name]) for name in costs}
    found = _cut_sums(problem, costs, own_us, fixed, weigh)
    equal = found[0].costs
    # The smallest placement: the operators that the person forces and those they cannot do without.
    dear = {name: Cost(cost.float_us, cost.float_us + _PROHIBITIVE_US) for name, cost in equal.ops.items()}
    least = problem.minimum_cut(replace(equal, ops=dear), fixed)
    found += [weigh(chosen, equal) for chosen in (*own.values(), least)]
    # No kind may lose by what is not forced.
    bounds = {name: problem.time_us(one, least) + _EQUAL for name, one in costs.items()}
    allowed = [one for one in found if all(each.placed_us <= bounds[each.cpu] for each in one.forecasts)]
    return min(allowed, key=_rank_losses)


def _warn_of_kind(one: Forecast) -> Caution:
    own = one.float_us / one.own_us
    text = (
        f"on CPUs of kind {one.cpu} this placement is predicted {one.loss - 1:.0%} slower than one made for them "
        f"({one.speedup:.2f}x the speed of float instead of {own:.2f}x): more int8 would cost another kind "
        f"of CPU its gain. Choose `cpu={one.cpu!r}` if the model runs only there"
    )
    return Caution("W103", text)


def _rank_losses(balance: Balance) -> tuple[float, float]:
    """The worst kind's loss, then the sum of all; rounded, so that the order of floating-point sums decides nothing."""
    losses = [one.loss for one in balance.forecasts]
    return round(max(losses), 9), round(sum(losses), 9)


def _cut_sums(
    problem: CutProblem,
    costs: Mapping[str, PlacementCosts],
    own_us: Mapping[str, float],
    fixed: Mapping[str, bool],
    weigh: Callable[[frozenset[str], PlacementCosts], Balance],
) -> list[Balance]:
    """Cuts of weighted sums, that of equal weights first, until no kind loses anything or the steps are spent.

    own_us: the time of each kind's own placement.
    """
    logs = dict.fromkeys(costs, 0.0)
    found: list[Balance] = []
    for step in _STEPS:
        # Times count in those of the kind's own placement, so that slow machines weigh no more than fast ones.
        total, scale = sum(math.exp(log) for log in logs.values()), max(own_us.values())
        parts = [(costs[name], math.exp(logs[name]) / total * scale / (own_us[name] or 1.0)) for name in costs]
        blend = add_costs(parts)
        found.append(weigh(problem.minimum_cut(blend, fixed), blend))
        losses = {one.cpu: one.loss for one in found[-1].forecasts}
        least, most = min(losses.values()), max(losses.values())
        if most - least < _EQUAL or most <= 1 + _EQUAL:
            break
        # From -1 to 1: the kind that loses most gains the whole step, the one that loses least gives it.
        logs = {name: logs[name] + step * 2 * (losses[name] - (most + least) / 2) / (most - least) for name in logs}
    return found
