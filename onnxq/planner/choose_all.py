"""Targets without a cost model: every unit their rules take, and what follows from those."""

from __future__ import annotations

from collections.abc import Mapping

from onnxq.planner.choose import Choice, settle
from onnxq.planner.operators import Unit, Units
from onnxq.planner.requests import Wishes
from onnxq.sites import LeftFloat, Refusal, TensorId, Unquantized


def choose_all(
    units: Units, wishes: Wishes, target: str, refused: Mapping[str, Unquantized], *, attention: bool = False
) -> Choice:
    """All compute units but those a keep rule or the person leaves float; opt-in rules only where forced.

    attention: the rules for it are on.

    A unit whose kernel needs others goes with them or not at all. Then the followers: those whose rule says so, and
    those that join pairs which are there.
    """
    settled, reasons = settle(units, wishes, target, refused)
    for unit in units.units:
        if unit.name in units.complete:
            continue
        if not unit.rule.compute and not _left_float(unit, refused, reasons):
            settled.pop(unit.name, None)
            reasons.pop(unit.name, None)
    chosen = set(units.complete)
    for unit in units.units:
        side = settled.get(unit.name)
        on = attention and unit.rule.name.startswith("attention")
        if unit.rule.opt_in and side is None and not on:
            reasons[unit.name] = LeftFloat(unit.name, unit.rule.opt_in, unit.rule.name, "F104")
        elif side is not False and unit.rule.compute:
            chosen.add(unit.name)
    _keep_together(units, chosen, reasons)
    for unit in units.units:
        if unit.rule.compute or unit.rule.joins or settled.get(unit.name) is False:
            continue
        if unit.rule.follow(units.candidate(unit.node), frozenset(chosen)):
            chosen.add(unit.name)
    chosen |= _joining(units, settled, frozenset(chosen))
    order = [unit.name for unit in units.units if unit.name in reasons]
    return Choice(frozenset(chosen), tuple(reasons[name] for name in order))


def _left_float(unit: Unit, refused: Mapping[str, Unquantized], reasons: Mapping[str, Unquantized]) -> bool:
    """True for a follower that may not follow: the target or the person says so. Forcing one means nothing."""
    return unit.name in refused or (unit.name in reasons and reasons[unit.name].rule == "configuration")


def _keep_together(units: Units, chosen: set[str], reasons: dict[str, Unquantized]) -> None:
    """Drop units that need others which are not chosen, until nothing changes."""
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


def _joining(units: Units, settled: Mapping[str, bool], chosen: frozenset[str]) -> frozenset[str]:
    """Followers with a pair behind them and one in front: what they read and write then has one scale."""
    joined: set[str] = set()
    paired = {tensor for unit in units.units if unit.name in chosen for _, tensor in unit.data}
    for unit in units.units:
        if unit.rule.joins and settled.get(unit.name) is not False and unit.out in paired and _reads(unit, paired):
            joined.add(unit.name)
    return frozenset(joined)


def _reads(unit: Unit, paired: set[TensorId]) -> bool:
    return any(tensor in paired for _, tensor in unit.data)
