"""One file for several engines: a target that does what each can take, keeps what any needs, and counts all costs.

A field in which the engines differ is joined by the function that stands in front of its name; without one, or where
nothing is left in common, there is no such rule, row or target.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar

from onnxq.backends.base import Candidate, Capability, Output, PlacementRule, Target
from onnxq.sites import Indices, JsonObject, drop_repeats

_Part = TypeVar("_Part", PlacementRule, Capability, Target)
# A field of several rules, rows or targets.
_Fields = Sequence[tuple[Any, ...]]
_Joiner = Callable[[Sequence[Any]], Any]
# From what asks most of the file to what asks least: a kernel without a pair behind it reads one all the same.
_OUTPUTS = (Output.PAIR, Output.EITHER, Output.FLOAT, Output.FOLLOWS)


def _intersect(values: _Fields) -> tuple[Any, ...]:
    return tuple(entry for entry in values[0] if all(entry in value for value in values))


def _intersect_named(values: _Fields) -> tuple[Any, ...] | None:
    """The values in common, None where there are none; () stands for any."""
    named = [value for value in values if value]
    if not named:
        return ()
    return _intersect(named) or None


def unite_entries(values: _Fields) -> tuple[Any, ...]:
    """The entries of all, each once, in their order."""
    return drop_repeats(entry for value in values for entry in value)


def _merge(values: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return {key: entry for value in reversed(values) for key, entry in value.items()}


def _ask_each(asks: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The first reason that one of them gives."""
    return lambda *case: next(filter(None, (ask(*case) for ask in asks)), None)


def _share_inputs(rules: Sequence[Any]) -> Sequence[Any]:
    """Rules of one operator, all with a pair on every input on which one of them has one."""
    if not isinstance(rules[0], PlacementRule) or all(
        (r.data, r.inputs) == (rules[0].data, None) for r in rules
    ):
        return rules

    def unite(candidate: Candidate) -> Indices:
        return tuple(sorted({k for rule in rules for k in rule.list_inputs(candidate)}))

    return [replace(rule, data=rules[0].data, inputs=unite) for rule in rules]


def _join_rows(tables: Sequence[Sequence[_Part]]) -> tuple[_Part, ...]:
    """The rows that each combination of rows has in common, in the order of the first table, then the second …"""
    return tuple(filter(None, (_join_fields(_share_inputs(rows)) for rows in product(*tables))))


_first: _Joiner = operator.itemgetter(0)
_JOINERS: Mapping[type, Mapping[_Joiner, str]] = {
    PlacementRule: {
        _first: "name kernel why",
        _intersect_named: "ops",
        lambda outputs: min(outputs, key=_OUTPUTS.index): "output",
        _intersect: "fuses pointwise",
        _ask_each: "check unpaid",
        # None where one of them has no use for it.
        min: "footroom",
        # Right behind the node, where the kernel of each finds the pair.
        lambda _: PlacementRule.closes: "closes",
    },
    Capability: {
        _intersect_named: "ops bits storage symmetric granularity dynamic blocks",
        _ask_each: "shape",
        max: "opset",
        lambda warnings: "; ".join(drop_repeats(filter(None, warnings))): "warning",
    },
    Target: {
        _intersect: "looped_ops",
        _first: "name costs times_itself advice sum_order",
        _join_rows: "rules capabilities",
        all: "zero_points int32_bias bounds_integers signed_scales",
        any: "quantizes_alone strict",
        unite_entries: "skips dynamic_ops yielding",
        _merge: "exclusions no_kernel no_gain",
        _ask_each: "refuse_narrow refuse_float",
        lambda _: Target.fits_matrix: "fits_matrix",
    },
}


def _join_fields(parts: Sequence[_Part]) -> _Part | None:
    """The rule, row or target that serves all parts; None where none does."""
    joiners = {
        name: joiner for joiner, names in _JOINERS[type(parts[0])].items() for name in names.split()
    }
    changes: JsonObject = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        if any(value != values[0] for value in values):
            changes[field.name] = joiners[field.name](values) if field.name in joiners else None
            if changes[field.name] is None:
                return None
    return replace(parts[0], **changes)


def join_targets(targets: Sequence[Target], weights: Mapping[str, float]) -> Target | None:
    """The target of several engines; None where no file can serve all of them.

    weights: of each by its name, 0 for all: by the worst of their costs.
    """
    joined = _join_fields(targets)
    if joined is None:
        return None
    tables = {f"{kind} {part.name}": (part, kind) for part in targets for kind in part.costs}
    costs = {table: part.costs[kind] for table, (part, kind) in tables.items()}
    stated = {
        table: (weights[part.name] or 1.0) / len(part.costs) for table, (part, _) in tables.items()
    }
    name = ",".join(part.name for part in targets)
    # One of them is judged beside the others, and not by itself.
    return replace(
        joined,
        name=name,
        costs=costs,
        weights=stated if any(weights.values()) else {},
        parts=(*targets,),
        times_itself=False,
    )


def explain_alone(target: Target) -> str:
    """Why a target shares no file with others; "" where it may."""
    if target.whole:
        return "takes a whole graph in integers, where others take only what is faster in them"
    if not target.costs:
        return "has no costs by which a placement could be weighed against that of another engine"
    return ""
