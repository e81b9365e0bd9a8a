"""Lists of operators, nodes and tensors as rules of our configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxq.compat.options import PLACED, name_value, warn_meaningless
from onnxq.graph import load_model
from onnxq.graph.scopes import walk_all_graphs
from onnxq.nearest import suggest_names
from onnxq.report import Report
from onnxq.report.model import group_reasons
from onnxq.report.summary import format_forced
from onnxq.sites import Caution, Refusal, Unquantized
from onnxq.targets import Target

Rule = dict[str, Any]
_FLOAT: Rule = {"float": True}
# Code of operators that a rule leaves float: here those that the caller did not want.
_BY_RULE = "F101"
_FORCE = "those that have a kernel are forced by nodes_to_quantize and op_types_to_quantize"
# Names of each reason, and reasons, that a warning lists.
_SHOWN = 3
# Keys of a tensor's override that are numbers, or of graphs that onnxq does not make.
_NUMBERS = ("scale", "zero_point", "rmin", "rmax")
_SIGNED = {"QInt8": (8, True), "QUInt8": (8, False), "QInt16": (16, True), "QUInt16": (16, False),
           "QInt4": (4, True), "QUInt4": (4, False)}  # fmt: skip


@dataclass(frozen=True)
class Selection:
    """The lists of a call that say what to quantize; None or empty: everything."""

    op_types: Sequence[str] | None = None
    nodes: Sequence[str] | None = None
    excluded: Sequence[str] | None = None
    tensors: Mapping[str, Sequence[Mapping[str, Any]]] | None = None


def make_rules(
    model: str | Path | onnx.ModelProto, selection: Selection, engine: Target
) -> tuple[list[Rule], list[Caution]]:
    """Make rules that force what the lists want and leave float the rest, and warnings for names that mean nothing.

    Those are names that the model does not have, and operators that the engine's rules know nothing of.
    """
    if not (selection.op_types or selection.nodes or selection.excluded or selection.tensors):
        return [], []
    graphs = [graph for _, graph in walk_all_graphs(load_model(model).proto)]
    nodes = [node for graph in graphs for node in graph.node]
    names, ops = {node.name for node in nodes}, {node.op_type for node in nodes}
    constants = {tensor.name for graph in graphs for tensor in getattr(graph, "initializer", ())}
    tensors = {name for node in nodes for name in (*node.input, *node.output) if name}
    cautions: list[Caution] = []
    rules: list[Rule] = []
    if excluded := _keep_known("nodes_to_exclude", selection.excluded, names, cautions):
        rules.append({"node": _match_any(excluded), "set": _FLOAT})
    if selection.nodes:
        wanted = _keep_known("nodes_to_quantize", selection.nodes, names, cautions)
        rules += [{"node": _match_none(wanted), "set": _FLOAT}] if names - {*wanted} else []
    if selection.op_types and ops - {*selection.op_types}:
        rules.append({"op": _match_none(selection.op_types), "set": _FLOAT})
    # Who names operators wants them quantized, whether they get faster or not.
    chosen = [node for node in nodes if _is_wanted(selection, node)]
    listed = "nodes_to_quantize" if selection.nodes else "op_types_to_quantize" if selection.op_types else ""
    force = {"quantize": True} if chosen and listed else {}
    unknown = {node.op_type for node in chosen} - _list_known_ops(engine)
    if force and unknown:
        cautions.append(warn_meaningless(f"{listed}: {', '.join(sorted(unknown))}", PLACED))
    overrides = selection.tensors or {}
    for name in _keep_known("TensorQuantOverrides", overrides, tensors, cautions):
        changes = _convert_override(name, overrides[name], name in constants, cautions)
        rules += [{"tensor": _match_any([name]), "set": changes | force}] if changes else []
    if force:
        by_name = {"node": _match_any(node.name for node in chosen)}
        by_op = {"op": sorted({node.op_type for node in chosen})}
        rules.append({**(by_name if selection.nodes else by_op), "set": force})
    return rules, cautions


def _list_known_ops(engine: Target) -> set[str]:
    """Operators that the engine runs in integers, that fold into these, or of which it says why it does not."""
    ops = {op for rule in engine.rules for op in (*rule.ops, *rule.fuses)}
    return ops | {*engine.no_kernel, *engine.no_gain}


def _is_wanted(selection: Selection, node: onnx.NodeProto) -> bool:
    named = not selection.nodes or node.name in selection.nodes
    return named and (not selection.op_types or node.op_type in selection.op_types)


def describe_floats(report: Report) -> Iterator[Caution]:
    """Yield a warning for the operators that stay float though no argument says so, and one for the cost of forcing."""
    left: list[Unquantized] = [*report.refusals, *report.left_float]
    groups = group_reasons([one for one in left if one.code != _BY_RULE])
    if groups:
        lines = [_describe_group(reason, members) for reason, members in groups[:_SHOWN]]
        if len(groups) > _SHOWN:
            lines.append(f"{len(groups) - _SHOWN} more reasons stand in result.report")
        count = sum(len(members) for _, members in groups)
        many = "1 operator stays" if count == 1 else f"{count} operators stay"
        yield Caution("W135", f"{many} float: {'; '.join(lines)}")
    if report.forced is not None and report.forced.slowdown > 1:
        yield Caution("W136", f"forced into integers: {format_forced(report.forced)}")


def _describe_group(reason: str, members: Sequence[Unquantized]) -> str:
    names = ", ".join(one.subject for one in members[:_SHOWN])
    more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
    fixes = {one.fix if isinstance(one, Refusal) else _FORCE for one in members} - {""}
    return "; ".join((f"{len(members)} x {reason} ({names}{more})", *sorted(fixes)))


def _keep_known(argument: str, given: Iterable[str] | None, known: set[str], cautions: list[Caution]) -> list[str]:
    """The names that the model has; a warning for each other one."""
    for name in given or ():
        if name not in known:
            reason = f"the model has no {name!r}; {suggest_names(name, known)}"
            cautions.append(warn_meaningless(f"{argument}: {name!r}", reason))
    return [name for name in given or () if name in known]


def _match_any(names: Iterable[str]) -> list[str]:
    """Patterns that match these names and no others."""
    return [
        name if re.fullmatch(r"[^*?\[/][^*?\[]*|/[^*?\[]*[^*?\[/]", name) else f"/^{re.escape(name)}$/"
        for name in names
    ]


def _match_none(names: Iterable[str]) -> str:
    return f"/^(?!(?:{'|'.join(map(re.escape, names))})$)/"


def _convert_override(name: str, given: Sequence[Mapping[str, Any]], constant: bool, cautions: list[Caution]) -> Rule:
    """Make the `set` of a rule from a tensor's overrides, of which the first entry speaks for all channels."""
    override = dict(given[0]) if given else {}
    changes: Rule = {}
    kind = name_value(override.pop("quant_type", None))
    if kind in _SIGNED:
        changes["bits"], changes["signed"] = _SIGNED[kind]
    if (symmetric := override.pop("symmetric", None)) is not None:
        changes["scheme"] = "symmetric" if symmetric else "asymmetric"
    elif kind in _SIGNED and constant:
        changes["scheme"] = "symmetric" if changes["signed"] else "asymmetric"
    if override.pop("axis", None) is not None:
        changes["granularity"] = "channel"
    for key in override:
        reason = "onnxq chooses it"
        if key in _NUMBERS:
            reason = "numbers belong into a plan: `onnxq plan`, edit it, `onnxq apply`"
        cautions.append(warn_meaningless(f"TensorQuantOverrides: {key!r} of {name!r}", reason))
    return changes
