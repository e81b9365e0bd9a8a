"""Candidate placements that are timed: a handful of named ways to choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onnxq.planner.balance import find_balance
from onnxq.planner.choose import choose_all, decide_sides
from onnxq.planner.cut import CutProblem
from onnxq.planner.operators import KEPT, QuantizableOp, QuantizableOps
from onnxq.planner.problem import PlacementProblem


def _is_large_pointwise(units: QuantizableOps, unit: QuantizableOp) -> bool:
    weight = units.candidate(unit.node).shape(1)
    if unit.node.op_type != "Conv":
        return True
    return weight is not None and all(k == 1 for k in weight[2:]) and weight[0] >= 64 and weight[1] >= 64


def _is_grouped(units: QuantizableOps, unit: QuantizableOp) -> bool:
    return unit.node.op_type == "Conv" and int(unit.node.attrs.get("group", 1)) > 1


def _has_one_channel(units: QuantizableOps, unit: QuantizableOp) -> bool:
    weight = units.candidate(unit.node).shape(1)
    return unit.node.op_type == "Conv" and weight is not None and weight[1] == 1


def _has_tiny_map(units: QuantizableOps, unit: QuantizableOp) -> bool:
    shape = units.candidate(unit.node).output_shape()
    return unit.node.op_type == "Conv" and shape is not None and all(dim == 1 for dim in shape[2:])


def _is_among_first(count: int) -> Callable[[QuantizableOps, QuantizableOp], bool]:
    def test(units: QuantizableOps, unit: QuantizableOp) -> bool:
        compute = [other.name for other in units.units if other.rule.compute]
        return unit.name in compute[:count]

    return test


def _always(_: QuantizableOps, __: QuantizableOp) -> bool:
    return True


def _never(_: QuantizableOps, __: QuantizableOp) -> bool:
    return False


def _any(*tests: Callable[[QuantizableOps, QuantizableOp], bool]) -> Callable[[QuantizableOps, QuantizableOp], bool]:
    return lambda units, unit: any(test(units, unit) for test in tests)


def _is_matmul(_: QuantizableOps, unit: QuantizableOp) -> bool:
    return unit.node.op_type in ("MatMul", "Gemm")


@dataclass(frozen=True)
class Strategy:
    """A candidate placement: compute units that `quantize` and not `leave` go int8, the rest follows by cut."""

    name: str
    quantize: Callable[[QuantizableOps, QuantizableOp], bool]
    leave: Callable[[QuantizableOps, QuantizableOp], bool] = _never


STRATEGIES: tuple[Strategy, ...] = (
    Strategy("all", _always),
    Strategy("all-but-stem", _always, _is_among_first(1)),
    Strategy("all-but-first-two", _always, _is_among_first(2)),
    Strategy("all-but-first-three", _always, _is_among_first(3)),
    Strategy("no-one-channel-input", _always, _has_one_channel),
    Strategy("no-grouped-no-gates", _always, _any(_is_grouped, _has_tiny_map)),
    Strategy("large-pointwise-and-linear", _is_large_pointwise, _has_tiny_map),
    Strategy("linear-only", _is_matmul),
)


def list_strategies(problem: PlacementProblem) -> Mapping[str, frozenset[str]]:
    """Named candidate placements, without doubles, the deterministic one ("rules") and "none" among them.

    The person's decisions hold in all of them; the exclusion rules do not: there the clock decides.
    """
    if not problem.engine.costs:
        return _list_by_rules(problem)
    units, refused = problem.units, problem.refused
    sides, reasons = decide_sides(problem)
    cut = CutProblem(units)
    rules = find_balance(cut, sides, problem.config.cpu)
    found: dict[str, frozenset[str]] = {"rules": rules.chosen, "none": frozenset()}
    asked = {
        name: side
        for name, side in sides.items()
        if name in refused or name not in reasons or reasons[name].rule in ("configuration", "log-front-end", KEPT)
    }
    for strategy in STRATEGIES:
        fixed = {
            unit.name: strategy.quantize(units, unit) and not strategy.leave(units, unit)
            for unit in units.units
            if unit.rule.compute
        }
        chosen = cut.minimum_cut(rules.costs, {**fixed, **asked})
        if chosen not in found.values():
            found[strategy.name] = chosen
    return found


def _list_by_rules(problem: PlacementProblem) -> Mapping[str, frozenset[str]]:
    """The candidates of an engine whose rules quantize all that computes: with fewer operators, and with attention."""
    found: dict[str, frozenset[str]] = {"rules": choose_all(problem).chosen, "none": frozenset()}
    wanted = {"attention": choose_all(problem, attention=True).chosen} if problem.config.attention != "float" else {}
    for strategy in STRATEGIES:
        units = problem.units
        left = {unit.name for unit in units.units if not strategy.quantize(units, unit) or strategy.leave(units, unit)}
        wanted[strategy.name] = choose_all(problem, without=left).chosen
    for name, chosen in wanted.items():
        if chosen not in found.values():
            found[name] = chosen
    return found
