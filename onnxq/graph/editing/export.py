"""From the wiring back to a ModelProto: graphsurgeon exports the names, the records give back all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, ValueInfoProto, helper

from onnxq.errors import ModelError
from onnxq.graph.editing.surgeon import gs
from onnxq.graph.editing.wiring import BODY_TYPES, NodeRecord, ScopeRecord, Wiring
from onnxq.graph.scopes import sort_topologically
from onnxq.graph.weights import copy_fields
from onnxq.sites import TensorId

Anchors = Mapping[str, list[str]]


def export_wiring(
    wiring: Wiring, source: ModelProto, before: Anchors, after: Anchors, metadata: Mapping[str, str]
) -> ModelProto:
    """The model of the wiring. Raises ModelError for outputs without a producer and inputs that nobody defines."""
    # From the inside out: sorting a scope reads the node lists of the subgraphs in it.
    for scope in reversed(list(wiring.scopes.values())):
        scope.graph.nodes = [record.node for record in _sort_nodes(wiring, scope, before, after)]
        scope.graph.outputs = [_find_output(wiring, scope, value.name) for value in scope.outputs]
    exported = gs.export_onnx(
        wiring.scopes[""].graph, do_type_check=False, opset_imports=source.opset_import, ir_version=source.ir_version
    )
    # graphsurgeon's own model is only asked for the nodes and their order.
    model = ModelProto()
    copy_fields(source, model, ("graph", "functions", "opset_import", "metadata_props"))
    model.opset_import.extend(source.opset_import)
    model.opset_import.extend(_list_missing_domains(wiring, source))
    helper.set_model_props(model, {**{p.key: p.value for p in source.metadata_props}, **metadata})
    model.functions.extend(source.functions)
    _restore_graph(wiring, wiring.scopes[""], exported.graph, model.graph)
    return model


def _sort_nodes(wiring: Wiring, scope: ScopeRecord, before: Anchors, after: Anchors) -> list[NodeRecord]:
    """The scope's nodes: base order with insertions at their anchors, then moved as far as running asks."""
    names: list[str] = []
    stack = [(name, False) for name in reversed(scope.order)]
    while stack:
        name, opened = stack.pop()
        if opened:
            names.append(name)
            continue
        stack.extend((follower, False) for follower in reversed(after.get(name, [])))
        stack.append((name, True))
        stack.extend((leader, False) for leader in reversed(before.get(name, [])))
    # A name twice: the node was taken out, and another has its name.
    nodes = [wiring.nodes[name] for name in dict.fromkeys(names) if name in wiring.nodes]
    needs = [_list_needs(wiring, record, scope.name) for record in nodes]
    makes = [[tensor.name for tensor in record.node.outputs] for record in nodes]
    return sort_topologically(nodes, needs, makes, [record.node.name for record in nodes])


def _list_needs(wiring: Wiring, record: NodeRecord, scope: str) -> list[str]:
    """The tensors of `scope` that a node or a subgraph in it reads. Raises ModelError for undefined ones."""
    found: list[str] = []
    stack = [record]
    while stack:
        at = stack.pop()
        for k, tensor in enumerate(at.node.inputs):
            if not tensor.name:
                continue
            source = wiring.resolve(tensor.name, at.scope)
            # The object that it reads was taken out; a tensor of that name further out is another one.
            if source is None or wiring.tensors[source] is not tensor:
                cause = f"reads {tensor.name!r}, which nothing makes"
                raise ModelError(f"{at.node.name}, input {k}", cause, "rewire the node", code="Q103")
            if source.scope == scope:
                found.append(source.name)
        for subgraph in at.subgraphs.values():
            stack.extend(wiring.nodes[node.name] for node in wiring.scopes[subgraph].graph.nodes)
            outs = (wiring.resolve(value.name, subgraph) for value in wiring.scopes[subgraph].outputs)
            found.extend(out.name for out in outs if out is not None and out.scope == scope)
    return found


def _find_output(wiring: Wiring, scope: ScopeRecord, name: str) -> object:
    found = wiring.resolve(name, scope.name)
    if found is None:
        cause = f"is an output{f' of {scope.name}' if scope.name else ''} that nothing makes"
        raise ModelError(name, cause, "give a node or initializer this output name", code="Q103")
    return wiring.tensors[found]


def _list_missing_domains(wiring: Wiring, source: ModelProto) -> list[object]:
    # Both are names of ONNX's own domain.
    known = {"" if entry.domain == "ai.onnx" else entry.domain for entry in source.opset_import}
    used = {record.node.domain or "" for record in wiring.nodes.values()}
    return [helper.make_opsetid(domain, 1) for domain in sorted(used - known - {"ai.onnx"})]


def _restore_graph(wiring: Wiring, scope: ScopeRecord, exported: GraphProto, target: GraphProto) -> None:
    copy_fields(
        scope.source,
        target,
        ("node", "initializer", "sparse_initializer", "input", "output", "value_info", "quantization_annotation"),
    )
    for node in exported.node:
        _restore_node(wiring, wiring.nodes[node.name], node, target.node.add())
    target.input.extend(scope.inputs)
    target.output.extend(scope.outputs)
    for tensor in scope.initializers.values():
        (target.sparse_initializer if isinstance(tensor, SparseTensorProto) else target.initializer).append(tensor)
    # Inputs and outputs carry their types themselves.
    declared = {value.name for value in (*scope.inputs, *scope.outputs)}
    for name, value in scope.value_info.items():
        if name not in declared and wiring.resolve(name, scope.name) is not None:
            target.value_info.append(value)
    for annotation in scope.source.quantization_annotation:
        name = scope.annotated.get(annotation.tensor_name, "")
        if TensorId(name, scope.name) in wiring.tensors:
            target.quantization_annotation.add().CopyFrom(annotation)
            target.quantization_annotation[-1].tensor_name = name


def _restore_node(wiring: Wiring, record: NodeRecord, exported: NodeProto, target: NodeProto) -> None:
    copy_fields(record.source, target, ("input", "output", "name", "op_type", "domain", "attribute"))
    copy_fields(exported, target, ("attribute",))
    waiting = dict(record.attributes)
    made = {attr.name: attr.g for attr in exported.attribute}
    # In the order of the file, so that an untouched node comes back as it was.
    for attr in record.source.attribute:
        if attr.type in BODY_TYPES:
            _restore_subgraphs(wiring, record, attr, made, target.attribute.add())
        elif attr.name in waiting:
            target.attribute.add().CopyFrom(waiting.pop(attr.name))
    target.attribute.extend(waiting.values())


def _restore_subgraphs(
    wiring: Wiring, record: NodeRecord, source: AttributeProto, made: Mapping[str, GraphProto], target: AttributeProto
) -> None:
    copy_fields(source, target, ("g", "graphs"))
    if source.type == AttributeProto.GRAPH:
        _restore_graph(wiring, wiring.scopes[record.subgraphs[source.name]], made[source.name], target.g)
        return
    for i in range(len(source.graphs)):
        label = f"{source.name}[{i}]"
        _restore_graph(wiring, wiring.scopes[record.subgraphs[label]], made[label], target.graphs.add())


def rename_value(value: ValueInfoProto, name: str) -> ValueInfoProto:
    """A copy of the value's type under another name."""
    copy = deepcopy(value)
    copy.name = name
    return copy
