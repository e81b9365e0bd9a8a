"""Which operators to run in integers: by rules and predicted time, by rules alone, or weights alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from onnxq.config import Rule
from onnxq.planner.balance import ANY, find_balance
from onnxq.planner.cut import CutProblem
from onnxq.planner.exclusions import find_excluded
from onnxq.planner.operators import KEPT, QuantizableOp, QuantizableOps, list_roles
from onnxq.planner.problem import PlacementProblem
from onnxq.sites import Caution, LeftFloat, Refusal, Role, TensorId, Unquantized
from onnxq.targets import Output
from onnxq.targets.costs import Cost

_FORCE = "force what it reads as well, or take `quantize: true` from its rule"


@dataclass(frozen=True)
class Choice:
    """The operators that run in integers, why the others do not, and the warnings."""

    chosen: frozenset[str]
    reasons: tuple[Unquantized, ...] = ()
    warnings: tuple[Caution, ...] = ()


def choose_ops(problem: PlacementProblem, *, attention: bool = False, sized: bool = True) -> Choice:
    """The choice of the deterministic rules.

    attention: with the rules for it, where the target has them. sized: the shapes are those of the deployment; False:
    every operator that computes is worth its integers, whatever its size.
    """
    if problem.config.mode == "weight-only":
        return choose_weights(problem)
    return choose_by_cost(problem, sized=sized) if problem.engine.costs else choose_all(problem, attention=attention)


def choose_by_cost(problem: PlacementProblem, *, sized: bool = True) -> Choice:
    """Exclusion rules, then the person's rules, then the minimum cut, on the times of the kinds of CPU asked for."""
    units, cpu = problem.units, problem.config.cpu
    sides, reasons = decide_sides(problem)
    if not sized:
        sides = {**{unit.name: True for unit in units.units if unit.rule.compute}, **sides}
    balance = find_balance(CutProblem(units), sides, cpu)
    for unit in units.units:
        if unit.rule.compute and unit.name not in balance.chosen and unit.name not in reasons:
            reasons[unit.name] = _explain_size(unit, balance.costs.units[unit.name])
    order = [unit.name for unit in units.units if unit.name in reasons]
    warnings = balance.warnings() if cpu == ANY else ()
    return Choice(balance.chosen, tuple(reasons[name] for name in order), warnings)


def choose_all(problem: PlacementProblem, *, attention: bool = False, without: Collection[str] = frozenset()) -> Choice:
    """All operators that compute, but those an exclusion rule or the person leaves float; opt-in rules where forced.

    attention: the rules for it are on. without: names of others to leave float, but those the person forces.

    An operator whose kernel needs others goes with them or not at all. Then the followers: those whose rule says so,
    and those that join pairs which are there.
    """
    units, refused = problem.units, problem.refused
    sides, reasons = decide_sides(problem)
    for unit in units.units:
        if unit.name in units.complete:
            continue
        if not unit.rule.compute and not _left_float(unit, refused, reasons):
            sides.pop(unit.name, None)
            reasons.pop(unit.name, None)
    chosen = set(units.complete)
    for unit in units.units:
        side = sides.get(unit.name)
        on = attention and unit.rule.attention
        if unit.rule.opt_in and side is None and not on:
            reasons[unit.name] = LeftFloat(unit.name, unit.rule.opt_in, unit.rule.name, "F104")
        elif side is not False and unit.rule.compute and (side or unit.name not in without):
            chosen.add(unit.name)
    _drop_incomplete(units, chosen, reasons)
    for unit in units.units:
        if unit.rule.compute or unit.rule.joins or sides.get(unit.name) is False:
            continue
        if unit.rule.follow(units.candidate(unit.node), frozenset(chosen)):
            chosen.add(unit.name)
    chosen |= _find_joining(units, sides, frozenset(chosen))
    order = [unit.name for unit in units.units if unit.name in reasons]
    return Choice(frozenset(chosen), tuple(reasons[name] for name in order))


def choose_weights(problem: PlacementProblem) -> Choice:
    """Weight-only mode: every weight the target can read packed, but those a rule leaves float."""
    units, refused = problem.units, problem.refused
    reasons: list[Unquantized] = []
    chosen: set[str] = set()
    for unit in units.units:
        weights = [(role, tensor) for role, tensor in list_roles(units, unit) if role is Role.WEIGHT]
        rule = problem.requests.find_float_rule(unit.node, weights)
        if not weights or unit.name in units.complete:
            continue
        if unit.name in refused:
            reasons.append(refused[unit.name])
        elif unit.name in units.partial:
            continue
        elif rule is not None:
            reasons.append(LeftFloat(unit.name, f"left float by {rule.describe()}", "configuration", "F101"))
        else:
            chosen.add(unit.name)
    return Choice(frozenset(chosen), tuple(reasons))


def decide_sides(problem: PlacementProblem) -> tuple[dict[str, bool], dict[str, Unquantized]]:
    """Operators whose side is given: those that rules and the person keep float, those that the person forces."""
    units, requests, refused = problem.units, problem.requests, problem.refused
    reasons: dict[str, Unquantized] = dict(find_excluded(units, problem.engine.name))
    sides = dict.fromkeys(reasons, False)
    for unit in units.units:
        roles = list_roles(units, unit)
        rule = requests.find_float_rule(unit.node, roles)
        if unit.name in refused:
            sides[unit.name] = False
            reasons[unit.name] = refused[unit.name]
        elif rule is not None:
            sides[unit.name] = False
            reasons[unit.name] = LeftFloat(unit.name, f"left float by {rule.describe()}", "configuration", "F101")
        elif requests.is_forced(unit.node, roles):
            if unit.rule.compute or _is_fed(units, unit, sides):
                sides[unit.name] = True
                reasons.pop(unit.name, None)
            else:
                reason = (
                    f"a {unit.node.op_type} is quantized only between quantized nodes, and what it reads stays float"
                )
                sides[unit.name] = False
                reasons[unit.name] = Refusal(unit.name, reason, _FORCE, unit.rule.name, "R105")
        _decide_existing(units, unit, rule, sides, reasons)
    return sides, reasons


def _decide_existing(
    units: QuantizableOps,
    unit: QuantizableOp,
    rule: Rule | None,
    sides: dict[str, bool],
    reasons: dict[str, Unquantized],
) -> None:
    """Pairs that the model came with decide for their operators. rule: the person's, that would leave one float."""
    if unit.name in units.complete:
        sides[unit.name] = True
        reasons.pop(unit.name, None)
        if rule is not None:
            reason = f"already quantized in the model, and kept so, though {rule.describe()} leaves it float"
            reasons[unit.name] = Refusal(unit.name, reason, "quantize the float model", KEPT, "R115")
    elif unit.name in units.partial:
        sides[unit.name] = False
        reason = "its weight is already quantized in the model, and its other tensors are not: kept as it is"
        reasons[unit.name] = LeftFloat(unit.name, reason, KEPT, "F107")
    elif unit.out in units.existing.by_tensor and units.index.is_output(unit.out):
        sides[unit.name] = False
        reason = "the model gives its result out in float beside a pair that is kept"
        reasons[unit.name] = LeftFloat(unit.name, reason, KEPT, "F107")


def _is_fed(units: QuantizableOps, unit: QuantizableOp, sides: Mapping[str, bool]) -> bool:
    """Every tensor it reads can have a pair that is not there for its sake."""
    for _, tensor in unit.data:
        maker = units.by_out.get(tensor)
        made = maker is not None and maker.rule.output is not Output.FLOAT and sides.get(maker.name) is not False
        read = any(
            other.rule.compute and sides.get(other.name) is not False
            for _, other in units.consumers(tensor)
            if other is not None
        )
        if not made and not read:
            return False
    return True


def _explain_size(unit: QuantizableOp, cost: Cost) -> LeftFloat:
    if cost.int8_us < cost.float_us:
        reason = "int8 would not pay: quantizing what it reads and dequantizing what it writes costs more than it saves"
    else:
        reason = "int8 would not pay: at this size its int8 kernel is predicted no faster than the float one"
    return LeftFloat(unit.name, reason, "size")


def _left_float(unit: QuantizableOp, refused: Mapping[str, Unquantized], reasons: Mapping[str, Unquantized]) -> bool:
    """True for a follower that may not follow: the target or the person says so. Forcing one means nothing."""
    return unit.name in refused or (unit.name in reasons and reasons[unit.name].rule == "configuration")


def _drop_incomplete(units: QuantizableOps, chosen: set[str], reasons: dict[str, Unquantized]) -> None:
    """Drop operators that need others which are not chosen, until nothing changes."""
    while True:
        broken = {}
        for unit in units.units:
            missing = [name for name in unit.rule.together(units.candidate(unit.node)) if name not in chosen]
            if unit.name in chosen - units.complete and missing:
                broken[unit.name] = missing[0]
        if not broken:
            return
        for name, partner in broken.items():
            rule = units.by_name[name].rule
            reason = f"its kernel exists only together with {partner}, which stays float"
            reasons[name] = Refusal(name, reason, f"force {partner} as well", rule.name, "R105")
        chosen.difference_update(broken)


def _find_joining(units: QuantizableOps, sides: Mapping[str, bool], chosen: frozenset[str]) -> frozenset[str]:
    """Followers with a pair behind them and one in front: their inputs and outputs then have one scale."""
    joined: set[str] = set()
    paired = {tensor for unit in units.units if unit.name in chosen for _, tensor in unit.data}
    for unit in units.units:
        if unit.rule.joins and sides.get(unit.name) is not False and unit.out in paired and _reads(unit, paired):
            joined.add(unit.name)
    return frozenset(joined)


def _reads(unit: QuantizableOp, paired: set[TensorId]) -> bool:
    return any(tensor in paired for _, tensor in unit.data)
