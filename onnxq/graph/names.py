"""Node names that hold: stable, unique, and never made from a position.

A node keeps its own name when no other node of the model (subgraphs and functions included) has it. Otherwise its name
is "<first output tensor>/<op type>", which survives reordering and other nodes coming and going; where two nodes would
have the same one (sibling subgraphs may reuse tensor names) the scope goes in front, and names that are still the same
are numbered in the order of the nodes' own content.
"""

from collections import Counter, defaultdict
from copy import deepcopy
from pathlib import Path

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from onnxq.errors import ModelError
from onnxq.graph import scopes
from onnxq.graph.light import keep_weights

# A graph with its scope.
_Scoped = tuple[str, GraphProto | FunctionProto]


@keep_weights
def name_nodes(proto: ModelProto) -> ModelProto:
    """A copy in which every node of every scope has a unique, deterministic name (idempotent)."""
    named = deepcopy(proto)
    assign_names(named)
    return named


def has_unique_names(proto: ModelProto) -> bool:
    """True when every node of every scope and function has a name of its own."""
    counts = _count_names(proto)
    return not counts[""] and all(count == 1 for name, count in counts.items() if name)


def check_names(proto: ModelProto) -> None:
    """Raise ModelError for a model with unnamed nodes or nodes that share a name."""
    if not has_unique_names(proto):
        cause = "has unnamed nodes or nodes that share a name"
        raise ModelError("the model", cause, "call name_nodes first", code="Q117")


def assign_names(proto: ModelProto) -> None:
    """Give every node of every scope a unique, deterministic name, in place, unless all have one of their own."""
    if has_unique_names(proto):
        return
    counts = _count_names(proto)
    taken = {name for name, count in counts.items() if name and count == 1}
    level: list[_Scoped] = [("", proto.graph)]
    level.extend((scopes.name_function(function), function) for function in proto.functions)
    # Outside in, one nesting level at a time: a subgraph's scope contains its parent's final name.
    while level:
        _name_level(level, counts, taken)
        level = [
            (scopes.join_scope(scope, node.name, label), subgraph)
            for scope, graph in level
            for node in graph.node
            for label, subgraph in scopes.iterate_subgraphs(node)
        ]


def _count_names(proto: ModelProto) -> Counter[str]:
    return Counter(node.name for node in scopes.walk_all_nodes(proto))


def _name_level(level: list[_Scoped], counts: Counter[str], taken: set[str]) -> None:
    waiting = [
        (scope, node)
        for scope, graph in level
        for node in graph.node
        if not node.name or counts[node.name] > 1
    ]
    for candidate in (_propose_short, _propose_scoped):
        groups = defaultdict(list)
        for scope, node in waiting:
            groups[candidate(scope, node)].append((scope, node))
        waiting = []
        for name, members in groups.items():
            if len(members) == 1 and name not in taken:
                members[0][1].name = name
                taken.add(name)
            else:
                waiting.extend(members)
    # Only nodes without outputs, or whose natural name another node already bears, come here. Numbers follow their
    # content, since the order of the nodes in the file is not part of the network.
    for scope, node in sorted(
        waiting, key=lambda item: (_propose_scoped(*item), _serialize_unnamed(item[1]))
    ):
        base = _propose_scoped(scope, node)
        number = 1
        while f"{base}_{number}" in taken:
            number += 1
        node.name = f"{base}_{number}"
        taken.add(node.name)


def _propose_short(_scope: str, node: NodeProto) -> str:
    result = scopes.find_result(node)
    return f"{result}/{node.op_type}" if result else f"{node.op_type}({','.join(node.input)})"


def _propose_scoped(scope: str, node: NodeProto) -> str:
    short = _propose_short(scope, node)
    return f"{scope}/{short}" if scope else short


def _serialize_unnamed(node: NodeProto) -> bytes:
    bare = deepcopy(node)
    bare.ClearField("name")
    return bytes(bare.SerializeToString(deterministic=True))


def name_file(model: object) -> str:
    """The path of a model; "" for one in memory."""
    return str(model) if isinstance(model, (str, Path)) else ""


def choose_name(base: str, taken: set[str]) -> str:
    """Return `base`, or base_1, base_2 …: the first that is not taken; it is added to `taken`."""
    name = base
    number = 0
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def list_names(proto: ModelProto) -> set[str]:
    """Every name the model uses for a tensor, node, value_info or function, in any scope."""
    names = scopes.collect_names(proto.functions)
    for _, graph in scopes.walk_all_graphs(proto):
        if isinstance(graph, GraphProto):
            for values in (graph.input, graph.output, graph.value_info):
                names |= scopes.collect_names(values)
            names.update(scopes.map_stored(graph))
        else:
            names.update((*graph.input, *graph.output))
        for node in graph.node:
            names.update((node.name, *node.input, *node.output))
    names.discard("")
    return names
