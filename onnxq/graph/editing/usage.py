"""What is used, and by what: names that are taken, what the outputs depend on, what a tensor is made from."""

from __future__ import annotations

from onnx import GraphProto, ModelProto

from onnxq.graph.editing.wiring import Held, Wiring
from onnxq.graph.scopes import all_graphs
from onnxq.sites import TensorId


def all_names(proto: ModelProto) -> set[str]:
    """Every name the model uses for a tensor, node, value_info or function, in any scope."""
    names: set[str] = {function.name for function in proto.functions}
    for _, graph in all_graphs(proto):
        if isinstance(graph, GraphProto):
            for values in (graph.input, graph.output, graph.value_info, graph.initializer):
                names.update(value.name for value in values)
            names.update(sparse.values.name for sparse in graph.sparse_initializer)
        else:
            names.update((*graph.input, *graph.output))
        for node in graph.node:
            names.update((node.name, *node.input, *node.output))
    names.discard("")
    return names


def producers(wiring: Wiring) -> dict[TensorId, Held]:
    """Which node makes which tensor."""
    return {TensorId(tensor.name, held.scope): held for held in wiring.nodes.values() for tensor in held.node.outputs}


def used(wiring: Wiring) -> tuple[set[str], set[TensorId]]:
    """The nodes and tensors that the model's outputs depend on. A node without outputs is there for its effect."""
    made_by = producers(wiring)
    nodes: set[str] = set()
    tensors: set[TensorId] = set()
    waiting = [wiring.resolve(value.name, "") for value in wiring.scopes[""].outputs]
    for held in wiring.nodes.values():
        if not any(tensor.name for tensor in held.node.outputs):
            nodes.add(held.node.name)
            waiting.extend(_needed_by(wiring, held))
    while waiting:
        t = waiting.pop()
        if t is None or t in tensors:
            continue
        tensors.add(t)
        maker = made_by.get(t)
        if maker is not None and maker.node.name not in nodes:
            nodes.add(maker.node.name)
            waiting.extend(_needed_by(wiring, maker))
    return nodes, tensors


def _needed_by(wiring: Wiring, held: Held) -> list[TensorId | None]:
    needed = [wiring.resolve(tensor.name, held.scope) for tensor in held.node.inputs]
    for body in held.bodies.values():
        needed.extend(wiring.resolve(value.name, body) for value in wiring.scopes[body].outputs)
    return needed


def leads_to(wiring: Wiring, target: TensorId, source: TensorId) -> set[str]:
    """The nodes that compute `target` (bodies included), without those that only come before `source`."""
    found: set[str] = set()
    waiting = [wiring.tensors[target]]
    seen: set[int] = {id(wiring.tensors[source])}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        stack = [wiring.nodes[node.name] for node in tensor.inputs]
        while stack:
            held = stack.pop()
            found.add(held.node.name)
            waiting.extend(held.node.inputs)
            for body in held.bodies.values():
                stack.extend(inner for inner in wiring.nodes.values() if inner.scope == body)
    return found
