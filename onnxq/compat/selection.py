"""Lists of operators, nodes and tensors as rules of our configuration."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx

from onnxq.compat.options import PLACED, CallLists, Unasked, warn_meaningless
from onnxq.compat.overrides import OverriddenGraph, Rule
from onnxq.errors import suggest_names
from onnxq.graph import ModelSource, load_model, name_nodes
from onnxq.graph.scopes import walk_all_graphs, walk_nodes
from onnxq.pipeline.finalize import Result
from onnxq.report.sentences import format_forced
from onnxq.sites import Caution, LeftFloat, Refusal, Unquantized
from onnxq.wording import group_by_text, join_names

_FLOAT: Rule = {"float": True}
# Code of operators that a rule leaves float: here those that the caller did not want.
_BY_RULE = "F101"
# Names of each reason, and reasons, that a warning lists.
_SHOWN = 3


@dataclass(frozen=True)
class Wish:
    """The lists of a call as rules.

    named: the nodes that they force. cautions: for names that the model does not have.
    """

    rules: Sequence[Rule] = ()
    named: Sequence[onnx.NodeProto] = ()
    cautions: Sequence[Caution] = ()


def read_selection(model: ModelSource, selection: CallLists) -> Wish:
    """Make rules that force what the lists name, and leave float the rest."""
    if not (selection.op_types or selection.nodes or selection.excluded or selection.tensors):
        return Wish()
    # Under the names that they have in reports.
    graphs = [graph for _, graph in walk_all_graphs(name_nodes(load_model(model).proto))]
    nodes = [node for graph in graphs for node in graph.node]
    names = {node.name for node in nodes}
    constants = frozenset(
        tensor.name for graph in graphs for tensor in getattr(graph, "initializer", ())
    )
    tensors = {name for node in nodes for name in (*node.input, *node.output) if name}
    cautions: list[Caution] = []
    rules = []
    # Who names operators wants them quantized, whether they get faster or not.
    lists_types = not isinstance(selection.op_types, Unasked)
    lists = selection.nodes or (selection.op_types if lists_types else None)
    chosen = [node for node in nodes if _is_named(selection, node)]
    named = chosen if lists else []
    force = {"quantize": True} if named else {}
    excluded = _keep_known("nodes_to_exclude", selection.excluded, names, cautions)
    if selection.tensors is not None:
        entries = selection.tensors.entries
        known = {
            name: entries[name]
            for name in _keep_known("TensorQuantOverrides", entries, tensors, cautions)
        }
        own = replace(selection.tensors, entries=known)
        graph = OverriddenGraph(nodes, constants, own, cautions)
        quantized = {node.name for node in chosen} - {*excluded}
        for rule in graph.make_rules():
            selectors: Rule = {
                key: match_any(rule[key]) for key in ("node", "tensor") if key in rule
            }
            if lists or quantized < names:
                # In front of the lists, at the nodes that these leave: they would leave the tensor float for all.
                at = [node for node in rule.get("node", ()) if node in quantized]
                for name in rule["tensor"] if "node" not in rule else ():
                    makers = graph.find_makers(name)
                    at += [node for node in graph.find_readers(name) if node in quantized]
                    at += makers if quantized & {*makers} else ()
                if not at:
                    continue
                selectors["node"] = match_any(dict.fromkeys(at))
            rules.append({**rule, **selectors, "set": rule["set"] | force})
    if excluded:
        rules.append({"node": match_any(excluded), "set": _FLOAT})
    if selection.nodes:
        listed = _keep_known("nodes_to_quantize", selection.nodes, names, cautions)
        if names - {*listed}:
            rules.append({"node": _match_none(listed), "set": _FLOAT})
    # Types that stand nowhere but at excluded nodes are none that a caller took out.
    ops = {node.op_type for node in nodes if lists_types or node.name not in excluded}
    if selection.op_types and ops - {*selection.op_types}:
        rules.append({"op": _match_none(selection.op_types), "set": _FLOAT})
    if named and selection.nodes:
        rules.append({"node": match_any(node.name for node in named), "set": force})
    elif named:
        rules.append({"op": sorted({node.op_type for node in named}), "set": force})
    return Wish(rules, named, cautions)


def _is_named(selection: CallLists, node: onnx.NodeProto) -> bool:
    chosen = not selection.nodes or node.name in selection.nodes
    return chosen and (not selection.op_types or node.op_type in selection.op_types)


def describe_floats(result: Result, named: Sequence[onnx.NodeProto]) -> Iterator[Caution]:
    """Yield a warning for operators that stay float though no argument says so, and one for the cost of forcing others.

    named: the nodes that the caller forces.
    """
    report = result.report
    floats: list[Unquantized] = [*report.refusals, *report.left_float]
    known = {entry.subject for entry in floats}
    # Preparation may have folded some of the named nodes into their neighbours.
    there = {node.name for node in walk_nodes(result.light.graph)}
    sites = result.plan.all_sites
    paired = {site.tensor.name for site in sites if site.tensor is not None}
    # Tensors that passes made, e.g. scaled ones, have readers whose own inputs have no pair.
    readers = {edge.node for site in sites for edge in site.named_consumers}
    floats += (
        LeftFloat(node.name, PLACED)
        for node in named
        if node.name in there - known - readers and not paired & {*node.input, *node.output}
    )
    refusals = [entry for entry in floats if entry.code != _BY_RULE]
    groups = group_by_text(refusals, lambda entry: entry.reason)
    if groups:
        lines = []
        for reason, members in groups[:_SHOWN]:
            names = join_names([entry.subject for entry in members], _SHOWN)
            fixes = {entry.fix for entry in members if isinstance(entry, Refusal) and entry.fix}
            lines.append("; ".join((f"{len(members)} x {reason} ({names})", *sorted(fixes))))
        if len(groups) > _SHOWN:
            lines.append(f"{len(groups) - _SHOWN} more reasons stand in result.report")
        count = sum(len(members) for _, members in groups)
        many = "1 operator stays" if count == 1 else f"{count} operators stay"
        fix = (
            ""
            if named
            else "; nodes_to_quantize and op_types_to_quantize force those that have a kernel"
        )
        yield Caution("W135", f"{many} float: {'; '.join(lines)}{fix}")
    if report.forced is not None and report.forced.slowdown > 1:
        yield Caution("W136", f"forced into integers: {format_forced(report.forced)}")


def _keep_known(
    argument: str, names: Iterable[str] | None, known: set[str], cautions: list[Caution]
) -> list[str]:
    """The names that the model has; a warning for each other one."""
    present = []
    for name in names or ():
        if name in known:
            present.append(name)
        else:
            reason = f"the model has no {name!r}; {suggest_names(name, known)}"
            cautions.append(warn_meaningless(f"{argument}: {name!r}", reason))
    return present


def match_any(names: Iterable[str]) -> list[str]:
    """Patterns that match these names and no others."""
    return [
        name
        # Names that no pattern could mean: without wildcards or brackets, and not between slashes.
        if re.fullmatch(r"[^*?\[/][^*?\[]*|/[^*?\[]*[^*?\[/]", name)
        else f"/^{re.escape(name)}$/"
        for name in names
    ]


def _match_none(names: Iterable[str]) -> str:
    return f"/^(?!(?:{'|'.join(map(re.escape, names))})$)/"
