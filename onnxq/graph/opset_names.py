"""Names for what the version converter adds.

It numbers its tensors ("_v_5") anew in every body, so that one may hide another of an outer scope, and leaves its nodes
unnamed. Here they are called after the node they serve: "conv1/Constant".
"""

from __future__ import annotations

from onnx import GraphProto, ModelProto, NodeProto

from onnxq.graph.editing.usage import all_names
from onnxq.graph.names import assign_names
from onnxq.graph.scopes import bodies, defined_names, walk


def settle_names(before: ModelProto, after: ModelProto) -> None:
    """Rename, in place, the tensors of `after` that `before` does not have in the same scope; name unnamed nodes.

    The nodes of `before` must have kept their names.
    """
    taken = all_names(before)
    graphs = dict(walk(before.graph))
    for scope, graph in walk(after.graph):
        _rename(graph, _new_names(graphs[scope], graph, taken))
    assign_names(after)


def _new_names(source: GraphProto, graph: GraphProto, taken: set[str]) -> dict[str, str]:
    old = defined_names(source)
    makers = {tensor.name: "Constant" for tensor in graph.initializer}
    makers.update((name, node.op_type) for node in graph.node for name in node.output)
    readers: dict[str, NodeProto] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, node)
    names: dict[str, str] = {}
    for name in (name for node in graph.node for name in (*node.input, *node.output)):
        if name and name in makers and name not in old and name not in names:
            base = fresh = f"{_owner(name, old, readers)}/{makers[name]}"
            number = 0
            while fresh in taken:
                number += 1
                fresh = f"{base}_{number}"
            taken.add(fresh)
            names[name] = fresh
    return names


def _owner(name: str, old: set[str], readers: dict[str, NodeProto]) -> str:
    """The named node that reads the tensor, or the first tensor of the original model that is made from it."""
    while (reader := readers.get(name)) is not None:
        if reader.name:
            return reader.name
        made = next((output for output in reader.output if output in old), "")
        if made or not reader.output:
            return made or name
        name = reader.output[0]
    return name


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for value in graph.output:
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for _, body in bodies(node):
            own = defined_names(body)
            _rename_reads(body, {old: new for old, new in names.items() if old not in own})


def _rename_reads(graph: GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for _, body in bodies(node):
            own = defined_names(body)
            _rename_reads(body, {old: new for old, new in names.items() if old not in own})
    for value in graph.output:
        value.name = names.get(value.name, value.name)
