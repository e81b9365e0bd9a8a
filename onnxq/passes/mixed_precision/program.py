"""The integer programme of precisions: one for each operator, so that one cost is least and others keep their limits.

Some costs are an operator's own: the noise and the bytes of its weight, the time of its kernel. Others are shared, and
paid once: the noise of a tensor's pair as soon as one operator reads or makes it in integers, the time of a
QuantizeLinear where a maker in float meets a reader in integers, and of a DequantizeLinear the other way round. Noise
adds up, as errors of different roundings do (Yao et al., "HAWQ-V3: Dyadic Neural Network Quantization", ICML 2021).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from onnxq.sites import NameSet

# Distance from the optimum at which the solver stops, as a share of it, and nodes that it visits at most: both the same
# on every machine, where a time limit would not be.
_GAP = 1e-3
_NODES = 20_000
# Of what is not minimized, so that of two solutions alike the cheaper one is taken.
_TIE = 1e-4
# Largest share of a limit, or of what is usual, that counts: solvers lose digits where numbers are far apart.
_BEYOND = 1e4
# Smallest share that counts: HiGHS refuses a row with a coefficient below.
_LEAST = 1e-9
# Beside a limit: sums of floats in another order.
_SLACK = 1e-9


class Costs(NamedTuple):
    """noise: power at the outputs over theirs. size: bytes in the file. time: predicted microseconds."""

    noise: float = 0.0
    size: float = 0.0
    time: float = 0.0


QUANTITIES = Costs._fields
_FREE = Costs()
# The name of the precision that each operator has, by the name of the operator.
Precisions = Mapping[str, str]


@dataclass(frozen=True)
class Condition:
    """An operator that has one of these precisions."""

    operator: str
    precisions: NameSet

    def is_met(self, chosen: Precisions) -> bool:
        """True with these precisions, by operator."""
        return chosen[self.operator] in self.precisions


@dataclass(frozen=True)
class SharedCosts:
    """Costs that are paid once if any condition holds, and `given` too where there is one."""

    costs: Costs
    any_of: tuple[Condition, ...]
    given: Condition | None = None

    def is_paid(self, chosen: Precisions) -> bool:
        """True where they are paid."""
        given = self.given is None or self.given.is_met(chosen)
        return given and any(condition.is_met(chosen) for condition in self.any_of)


@dataclass(frozen=True)
class Implication:
    """Where all of the conditions hold, the other one does."""

    all_of: tuple[Condition, ...]
    then: Condition


@dataclass(frozen=True)
class PrecisionProgram:
    """The choice. operators: the costs of each precision that one may have. fixed: of what has no choice."""

    operators: Mapping[str, Mapping[str, Costs]]
    shared: Sequence[SharedCosts] = ()
    ties: Sequence[Implication] = ()
    fixed: Costs = _FREE

    def add_costs(self, chosen: Precisions) -> Costs:
        """The costs of all with these precisions."""
        parts = [self.fixed]
        parts += [options[chosen[name]] for name, options in self.operators.items()]
        parts += [shared.costs for shared in self.shared if shared.is_paid(chosen)]
        return Costs(*map(math.fsum, zip(*parts, strict=True)))

    def sum_noise(self, chosen: Precisions, precision: str) -> float:
        """The noise of the operators that have one of the precisions."""
        having = (name for name, other in chosen.items() if other == precision)
        return sum(self.operators[name][precision].noise for name in having)

    def scale_noise(self, factors: Mapping[str, float], shared: float) -> PrecisionProgram:
        """The programme with the noise of operators times a factor by precision, and that of shared costs by one."""

        def scale(costs: Costs, factor: float) -> Costs:
            return costs._replace(noise=costs.noise * factor)

        operators = {
            name: {one: scale(costs, factors.get(one, 1.0)) for one, costs in options.items()}
            for name, options in self.operators.items()
        }
        shares = [replace(share, costs=scale(share.costs, shared)) for share in self.shared]
        return replace(self, operators=operators, shared=shares)

    def solve(self, minimized: str, limits: Mapping[str, float]) -> Precisions | None:
        """The precisions at which one of `QUANTITIES` is least and others are at most as given; None where none are."""
        solver = _open_solver()
        chosen = {
            (name, precision): solver.addBinary()
            for name, options in self.operators.items()
            for precision in options
        }
        for name, options in self.operators.items():
            solver.addConstr(_sum(chosen[name, precision] for precision in options) == 1)

        def count(condition: Condition) -> Any:
            options = self.operators[condition.operator]
            return _sum(
                chosen[condition.operator, one] for one in options if one in condition.precisions
            )

        for tie in self.ties:
            solver.addConstr(
                count(tie.then) >= _sum(map(count, tie.all_of)) - (len(tie.all_of) - 1)
            )
        paid = []
        # Continuous: the least that the conditions allow is 0 or 1 in any case.
        for shared in self.shared:
            variable = solver.addVariable(0, 1)
            for condition in shared.any_of:
                both = (
                    count(condition)
                    if shared.given is None
                    else count(condition) + count(shared.given) - 1
                )
                solver.addConstr(variable >= both)
            paid.append((variable, shared.costs))
        paid += [
            (variable, self.operators[name][precision])
            for (name, precision), variable in chosen.items()
        ]

        def total(name: str, unit: float) -> Any:
            parts = ((variable, getattr(costs, name) / unit) for variable, costs in paid)
            # One that is far beyond the limit alone is no more impossible if it is further.
            return _sum(choice * min(share, _BEYOND) for choice, share in parts if share > _LEAST)

        for name, limit in limits.items():
            left = limit - getattr(self.fixed, name)
            if left < 0:
                return None
            # A limit of nothing allows no cost, however far below the solver's tolerance.
            solver.addConstr(total(name, left or sys.float_info.min) <= bool(left) + _SLACK)
        units = self.find_units()
        # Noise of zero beside a precision that is free would take float everywhere.
        others = [_TIE * total(name, units[name]) for name in QUANTITIES if name != minimized]
        solver.minimize(total(minimized, units[minimized]) + _sum(others))
        if solver.getInfo().primal_solution_status != _FEASIBLE:
            return None
        # Integers of a solver are nearly so.
        values = solver.allVariableValues()
        return {
            name: one for (name, one), variable in chosen.items() if values[variable.index] > 0.5
        }

    def find_units(self) -> dict[str, float]:
        """Of each quantity, about what a good choice has: noise may be of 1e-6, and bytes of 1e9."""
        # All operators at one precision, or the first that they have.
        precisions = dict.fromkeys(one for options in self.operators.values() for one in options)
        uniform = [
            self.add_costs(
                {
                    name: one if one in options else next(iter(options))
                    for name, options in self.operators.items()
                }
            )
            for one in precisions
        ]
        return {
            name: min((cost for cost in costs if cost > 0), default=1.0)
            for name, *costs in zip(QUANTITIES, *uniform, strict=True)
        }


# Of `HighsInfo`: the point found keeps all limits.
_FEASIBLE = 2


def _sum(parts: Iterable[Any]) -> Any:
    """The sum as an expression of the solver, which an empty one is, too."""
    import highspy

    return highspy.Highs.qsum(parts)


@contextmanager
def _silence_stdout() -> Iterator[None]:
    """Let libraries print nothing."""
    sys.stdout.flush()
    # Of the process, not of Python: native libraries do not write through sys.stdout.
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _open_solver() -> Any:
    import highspy

    # Its releases from 1.14 on print their name as they start, and stdout is for results.
    with _silence_stdout():
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": _GAP,
        "mip_abs_gap": 1e-9,
        "mip_max_nodes": _NODES,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    return solver
