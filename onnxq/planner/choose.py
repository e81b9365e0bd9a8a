"""Which units to run in integers: by rules and predicted time, or a handful of candidates to be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onnxq.config import Rule
from onnxq.planner.balance import ANY, place
from onnxq.planner.cut import CutProblem
from onnxq.planner.exclusions import kept_float
from onnxq.planner.place import roles_of
from onnxq.planner.operators import KEPT, Unit, Units
from onnxq.planner.requests import Wishes
from onnxq.sites import Caution, LeftFloat, Refusal, Role, Unquantized
from onnxq.targets import Output
from onnxq.targets.costs import Cost

_FORCE = "force what it reads as well, or take `quantize: true` from its rule"


@dataclass(frozen=True)
class Choice:
    """The units that run in integers, why the others do not, and what to warn of."""

    chosen: frozenset[str]
    reasons: tuple[Unquantized, ...] = ()
    warnings: tuple[Caution, ...] = ()


def choose(units: Units, wishes: Wishes, target: str, refused: Mapping[str, Unquantized], *, cpu: str = ANY) -> Choice:
    """The deterministic default: keep rules, then the person's rules, then the minimum cut.

    cpu: the kind of CPU whose times the cut goes by; "any": all kinds that were measured.
    """
    settled, reasons = settle(units, wishes, target, refused)
    balance = place(CutProblem(units), settled, cpu)
    for unit in units.units:
        if unit.rule.compute and unit.name not in balance.chosen and unit.name not in reasons:
            reasons[unit.name] = _too_small(unit, balance.costs.units[unit.name])
    order = [unit.name for unit in units.units if unit.name in reasons]
    warnings = balance.warnings() if cpu == ANY else ()
    return Choice(balance.chosen, tuple(reasons[name] for name in order), warnings)


def choose_weights(units: Units, wishes: Wishes, target: str, refused: Mapping[str, Unquantized]) -> Choice:
    """Weight-only mode: every weight the target can read packed, but those a rule leaves float."""
    reasons: list[Unquantized] = []
    chosen: set[str] = set()
    for unit in units.units:
        weights = [(role, tensor) for role, tensor in roles_of(units, unit) if role is Role.WEIGHT]
        rule = wishes.unit(unit.node, weights)
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


def settle(
    units: Units, wishes: Wishes, target: str, refused: Mapping[str, Unquantized]
) -> tuple[dict[str, bool], dict[str, Unquantized]]:
    """Units whose side is given: what rules and the person keep float, what the person forces."""
    reasons: dict[str, Unquantized] = dict(kept_float(units, target))
    settled = dict.fromkeys(reasons, False)
    for unit in units.units:
        roles = roles_of(units, unit)
        rule = wishes.unit(unit.node, roles)
        if unit.name in refused:
            settled[unit.name] = False
            reasons[unit.name] = refused[unit.name]
        elif rule is not None:
            settled[unit.name] = False
            reasons[unit.name] = LeftFloat(unit.name, f"left float by {rule.describe()}", "configuration", "F101")
        elif wishes.forced(unit.node, roles):
            if unit.rule.compute or _fed(units, unit, settled):
                settled[unit.name] = True
                reasons.pop(unit.name, None)
            else:
                reason = (
                    f"a {unit.node.op_type} is quantized only between quantized nodes, and what it reads stays float"
                )
                settled[unit.name] = False
                reasons[unit.name] = Refusal(unit.name, reason, _FORCE, unit.rule.name, "R105")
        _settle_kept(units, unit, rule, settled, reasons)
    return settled, reasons


def _settle_kept(
    units: Units, unit: Unit, rule: Rule | None, settled: dict[str, bool], reasons: dict[str, Unquantized]
) -> None:
    """Pairs that the model came with decide for their units. rule: the person's, that would leave the unit float."""
    if unit.name in units.complete:
        settled[unit.name] = True
        reasons.pop(unit.name, None)
        if rule is not None:
            reason = f"already quantized in the model, and kept so, though {rule.describe()} leaves it float"
            reasons[unit.name] = Refusal(unit.name, reason, "quantize the float model", KEPT, "R115")
    elif unit.name in units.partial:
        settled[unit.name] = False
        reason = "its weight is already quantized in the model, and its other tensors are not: kept as it is"
        reasons[unit.name] = LeftFloat(unit.name, reason, KEPT, "F107")
    elif unit.out in units.existing.by_tensor and units.index.is_output(unit.out):
        settled[unit.name] = False
        reason = "the model gives its result out in float beside a pair that is kept"
        reasons[unit.name] = LeftFloat(unit.name, reason, KEPT, "F107")


def _fed(units: Units, unit: Unit, settled: Mapping[str, bool]) -> bool:
    """Every tensor it reads can have a pair that is not there for its sake."""
    for _, tensor in unit.data:
        maker = units.by_out.get(tensor)
        made = maker is not None and maker.rule.output is not Output.FLOAT and settled.get(maker.name) is not False
        read = any(
            other.rule.compute and settled.get(other.name) is not False
            for _, other in units.consumers(tensor)
            if other is not None
        )
        if not made and not read:
            return False
    return True


def _too_small(unit: Unit, cost: Cost) -> LeftFloat:
    if cost.int8_us < cost.float_us:
        reason = "int8 would not pay: quantizing what it reads and dequantizing what it writes costs more than it saves"
    else:
        reason = "int8 would not pay: at this size its int8 kernel is predicted no faster than the float one"
    return LeftFloat(unit.name, reason, "size")


def _large_pointwise(units: Units, unit: Unit) -> bool:
    weight = units.candidate(unit.node).shape(1)
    if unit.node.op_type != "Conv":
        return True
    return weight is not None and all(k == 1 for k in weight[2:]) and weight[0] >= 64 and weight[1] >= 64


def _grouped(units: Units, unit: Unit) -> bool:
    return unit.node.op_type == "Conv" and int(unit.node.attrs.get("group", 1)) > 1


def _one_channel(units: Units, unit: Unit) -> bool:
    weight = units.candidate(unit.node).shape(1)
    return unit.node.op_type == "Conv" and weight is not None and weight[1] == 1


def _tiny_map(units: Units, unit: Unit) -> bool:
    shape = units.candidate(unit.node).output_shape()
    return unit.node.op_type == "Conv" and shape is not None and all(dim == 1 for dim in shape[2:])


def _first(count: int) -> Callable[[Units, Unit], bool]:
    def test(units: Units, unit: Unit) -> bool:
        compute = [other.name for other in units.units if other.rule.compute]
        return unit.name in compute[:count]

    return test


def _always(_: Units, __: Unit) -> bool:
    return True


def _never(_: Units, __: Unit) -> bool:
    return False


def _any(*tests: Callable[[Units, Unit], bool]) -> Callable[[Units, Unit], bool]:
    return lambda units, unit: any(test(units, unit) for test in tests)


def _matmul(_: Units, unit: Unit) -> bool:
    return unit.node.op_type in ("MatMul", "Gemm")


@dataclass(frozen=True)
class Strategy:
    """A candidate placement: compute units that `quantize` and not `leave` go int8, the rest follows by cut."""

    name: str
    quantize: Callable[[Units, Unit], bool]
    leave: Callable[[Units, Unit], bool] = _never


STRATEGIES: tuple[Strategy, ...] = (
    Strategy("all", _always),
    Strategy("all-but-stem", _always, _first(1)),
    Strategy("all-but-first-two", _always, _first(2)),
    Strategy("all-but-first-three", _always, _first(3)),
    Strategy("no-one-channel-input", _always, _one_channel),
    Strategy("no-grouped-no-gates", _always, _any(_grouped, _tiny_map)),
    Strategy("large-pointwise-and-linear", _large_pointwise, _tiny_map),
    Strategy("linear-only", _matmul),
)


def strategies(
    units: Units, wishes: Wishes, target: str, refused: Mapping[str, Unquantized], *, cpu: str = ANY
) -> Mapping[str, frozenset[str]]:
    """Named candidate placements, without doubles, the deterministic one ("rules") and "none" among them.

    What the person settled holds in all of them; the keep rules do not: there the clock decides.
    """
    settled, reasons = settle(units, wishes, target, refused)
    problem = CutProblem(units)
    rules = place(problem, settled, cpu)
    found: dict[str, frozenset[str]] = {"rules": rules.chosen, "none": frozenset()}
    asked = {
        name: side
        for name, side in settled.items()
        if name in refused or name not in reasons or reasons[name].rule in ("configuration", "log-front-end", KEPT)
    }
    for strategy in STRATEGIES:
        fixed = {
            unit.name: strategy.quantize(units, unit) and not strategy.leave(units, unit)
            for unit in units.units
            if unit.rule.compute
        }
        chosen = problem.minimum_cut(rules.costs, {**fixed, **asked})
        if chosen not in found.values():
            found[strategy.name] = chosen
    return found
