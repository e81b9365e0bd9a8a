"""The wiring of a model as graphsurgeon's nodes and tensors, and everything it would lose kept beside it.

graphsurgeon 0.6 keeps nodes and tensors linked both ways, and that is all it is trusted with. Its import and export
lose node, graph and model metadata, doc strings, quantization annotations and unused initializers; it cannot export
empty list attributes, types, sparse tensors or touched sub-byte weights; it writes captured constants into the
subgraphs that read them. So its nodes and tensors have names only; attributes, types and weights stay in records here.

Its nodes and tensors are unhashable and compare by name: they are found through these records by name and scope, and
never put in a set or removed from a list by value.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, helper

from onnxq.errors import ModelError
from onnxq.graph.editing import gs
from onnxq.graph.scopes import (
    Stored,
    collect_names,
    iterate_subgraphs,
    join_scope,
    list_defined,
    map_entries,
    map_stored,
    sort_topologically,
    store_tensor,
    walk_from,
)
from onnxq.graph.storage import copy_around_bodies, copy_fields
from onnxq.sites import MaybeTensor, TensorId

BODY_TYPES = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


@dataclass(eq=False)
class NodeRecord:
    """One node: its graphsurgeon twin, and the parts that graphsurgeon does not carry."""

    node: Any
    scope: str
    # As it was in the file: doc string, metadata and the order of its attributes come from there.
    source: NodeProto
    # Bodies left out.
    attributes: dict[str, AttributeProto]
    # By label: the scope.
    subgraphs: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class ScopeRecord:
    """The records of one graph."""

    name: str
    parent: str | None
    source: GraphProto
    inputs: list[ValueInfoProto]
    outputs: list[ValueInfoProto]
    # Base order of node names, removed ones included: new nodes may be anchored to them.
    order: list[str] = field(default_factory=list)
    initializers: dict[str, Stored] = field(default_factory=dict)
    value_info: dict[str, ValueInfoProto] = field(default_factory=dict)
    # Tensors with a quantization annotation: the name in the file -> the name now.
    annotated: dict[str, str] = field(default_factory=dict)
    # In an order they can run in, from export on.
    nodes: list[NodeRecord] = field(default_factory=list)


@dataclass(eq=False)
class Wiring:
    """All scopes, nodes and tensors of a model, by name."""

    scopes: dict[str, ScopeRecord] = field(default_factory=dict)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    tensors: dict[TensorId, Any] = field(default_factory=dict)
    # Tensors whose node was taken out: who read them reads the next tensor made under that name.
    orphans: dict[TensorId, Any] = field(default_factory=dict)

    def resolve_tensor(self, tensor: str, scope: str) -> MaybeTensor:
        """Return the tensor that a name means when read from `scope`; None for "" and for undefined names."""
        at: str | None = scope
        while tensor and at is not None:
            if TensorId(tensor, at) in self.tensors:
                return TensorId(tensor, at)
            at = self.scopes[at].parent
        return None

    def define_tensor(self, t: TensorId) -> Any:
        """The graphsurgeon object of a tensor that is new, or new again."""
        tensor = self.orphans.pop(t, None) or gs.Variable(t.name)
        self.tensors[t] = tensor
        return tensor

    def find_object(self, tensor: str, scope: str) -> Any:
        """The graphsurgeon object that a name means when read from `scope`; one of its own for an undefined name."""
        t = self.resolve_tensor(tensor, scope)
        return gs.Variable(tensor) if t is None else self.tensors[t]


def import_wiring(proto: ModelProto) -> Wiring:
    """The wiring of a model with its records. The proto is only referred to, never changed."""
    wiring = Wiring()
    _record_graph(wiring, proto.graph, "", None)
    return wiring


def _record_graph(wiring: Wiring, source: GraphProto, name: str, parent: str | None) -> None:
    wiring.scopes[name] = scope = ScopeRecord(
        name, parent, source, inputs=[*source.input], outputs=[*source.output]
    )
    scope.initializers.update(map_stored(source))
    scope.value_info.update((value.name, value) for value in source.value_info)
    scope.annotated.update((a.tensor_name, a.tensor_name) for a in source.quantization_annotation)
    for defined in sorted(list_defined(source)):
        wiring.define_tensor(TensorId(defined, name))
    for proto in source.node:
        outputs = [wiring.find_object(tensor, name) for tensor in proto.output]
        domain = proto.domain if proto.HasField("domain") else None
        node = gs.Node(proto.op_type, name=proto.name, outputs=outputs, domain=domain)
        attributes = {a.name: a for a in proto.attribute if a.type not in BODY_TYPES}
        record = wiring.nodes[proto.name] = NodeRecord(node, name, proto, attributes)
        scope.order.append(proto.name)
        for label, subgraph in iterate_subgraphs(proto):
            record.subgraphs[label] = join_scope(name, proto.name, label)
            _record_graph(wiring, subgraph, record.subgraphs[label], name)
        # Behind those of its bodies, which run first.
        node.inputs.extend([wiring.find_object(tensor, name) for tensor in proto.input])


def find_used(wiring: Wiring) -> tuple[set[str], set[TensorId]]:
    """The nodes and tensors that the model's outputs depend on. A node without outputs is there for its effect."""
    makers = {}
    idle = []
    for record in wiring.nodes.values():
        results = [TensorId(tensor.name, record.scope) for tensor in record.node.outputs]
        makers.update(dict.fromkeys(results, record))
        if not any(tensor.name for tensor in results):
            idle.append(record)

    def list_needed(t: TensorId) -> list[TensorId]:
        # An initializer or an input has no maker.
        return _list_needed(wiring, makers[t]) if t in makers else []

    start = _resolve_all(wiring, wiring.scopes[""].outputs, "")
    start += [t for record in idle for t in _list_needed(wiring, record)]
    tensors = walk_from(start, list_needed)
    used = [*idle, *(makers[t] for t in tensors if t in makers)]
    return {record.node.name for record in used}, tensors


def _list_needed(wiring: Wiring, record: NodeRecord) -> list[TensorId]:
    needed = _resolve_all(wiring, record.node.inputs, record.scope)
    for subgraph in record.subgraphs.values():
        needed += _resolve_all(wiring, wiring.scopes[subgraph].outputs, subgraph)
    return needed


def _resolve_all(wiring: Wiring, tensors: Iterable[Any], scope: str) -> list[TensorId]:
    """The tensors that are meant by the names of these, which may be declarations; without those of no name."""
    found = (wiring.resolve_tensor(tensor.name, scope) for tensor in tensors)
    return [t for t in found if t is not None]


def find_nodes_between(wiring: Wiring, target: TensorId, source: TensorId) -> set[str]:
    """The nodes that compute `target` (subgraphs included), without those that only come before `source`."""
    end = wiring.tensors[source]

    def list_makers(tensors: Iterable[Any]) -> list[str]:
        return [node.name for tensor in tensors if tensor is not end for node in tensor.inputs]

    def list_needed(name: str) -> list[str]:
        record = wiring.nodes[name]
        bodies = record.subgraphs.values()
        # Nearly all nodes have none, and looking at all nodes of the model for each takes time.
        inner = (
            [key for key, other in wiring.nodes.items() if other.scope in bodies] if bodies else []
        )
        return inner + list_makers(record.node.inputs)

    return walk_from(list_makers([wiring.tensors[target]]), list_needed)


Anchors = Mapping[str, list[str]]


def export_wiring(
    wiring: Wiring, source: ModelProto, before: Anchors, after: Anchors, metadata: Mapping[str, str]
) -> ModelProto:
    """The model of the wiring. Raises ModelError for outputs without a producer and inputs that nobody defines."""
    # From the inside out: sorting a scope reads the node lists of the subgraphs in it.
    for scope in reversed(list(wiring.scopes.values())):
        scope.nodes = _sort_records(wiring, scope, before, after)
        _check_outputs(wiring, scope)
    model = ModelProto()
    copy_fields(source, model, ("graph",))
    # Both are names of ONNX's own domain.
    known = {"" if entry.domain == "ai.onnx" else entry.domain for entry in source.opset_import}
    used = {record.node.domain or "" for record in wiring.nodes.values()}
    model.opset_import.extend(
        helper.make_opsetid(domain, 1) for domain in sorted(used - known - {"ai.onnx"})
    )
    helper.set_model_props(model, map_entries(source.metadata_props) | dict(metadata))
    _restore_graph(wiring, wiring.scopes[""], model.graph)
    return model


def _sort_records(
    wiring: Wiring, scope: ScopeRecord, before: Anchors, after: Anchors
) -> list[NodeRecord]:
    """The scope's nodes: base order with insertions at their anchors, then moved as far as running asks."""
    names = []
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
    needs = []
    stack = [record]
    while stack:
        at = stack.pop()
        for k, tensor in enumerate(at.node.inputs):
            if not tensor.name:
                continue
            source = wiring.resolve_tensor(tensor.name, at.scope)
            # The object that it reads was taken out; a tensor of that name further out is another one.
            if source is None or wiring.tensors[source] is not tensor:
                cause = f"reads {tensor.name!r}, which nothing makes"
                raise ModelError(
                    f"{at.node.name}, input {k}", cause, "rewire the node", code="Q103"
                )
            if source.scope == scope:
                needs.append(source.name)
        for subgraph in at.subgraphs.values():
            stack.extend(wiring.scopes[subgraph].nodes)
            outs = _resolve_all(wiring, wiring.scopes[subgraph].outputs, subgraph)
            needs.extend(out.name for out in outs if out.scope == scope)
    return needs


def _check_outputs(wiring: Wiring, scope: ScopeRecord) -> None:
    for value in scope.outputs:
        if wiring.resolve_tensor(value.name, scope.name) is None:
            cause = f"is an output{f' of {scope.name}' if scope.name else ''} that nothing makes"
            fix = "give a node or initializer this output name"
            raise ModelError(value.name, cause, fix, code="Q103")


def _restore_graph(wiring: Wiring, scope: ScopeRecord, target: GraphProto) -> None:
    copy_fields(
        scope.source,
        target,
        (
            "node",
            "initializer",
            "sparse_initializer",
            "input",
            "output",
            "value_info",
            "quantization_annotation",
        ),
    )
    for record in scope.nodes:
        _restore_node(wiring, record, target.node.add())
    target.input.extend(scope.inputs)
    target.output.extend(scope.outputs)
    for tensor in scope.initializers.values():
        store_tensor(target, tensor)
    # Inputs and outputs carry their types themselves.
    declared = collect_names((*scope.inputs, *scope.outputs))
    for name, value in scope.value_info.items():
        if name not in declared and wiring.resolve_tensor(name, scope.name) is not None:
            target.value_info.append(value)
    for annotation in scope.source.quantization_annotation:
        name = scope.annotated.get(annotation.tensor_name, "")
        if TensorId(name, scope.name) in wiring.tensors:
            target.quantization_annotation.add().CopyFrom(annotation)
            target.quantization_annotation[-1].tensor_name = name


def _restore_node(wiring: Wiring, record: NodeRecord, target: NodeProto) -> None:
    copy_fields(record.source, target, ("input", "output", "domain", "attribute"))
    node = record.node
    target.name = node.name
    target.op_type = node.op
    target.input.extend(tensor.name for tensor in node.inputs)
    target.output.extend(tensor.name for tensor in node.outputs)
    if node.domain is not None:
        target.domain = node.domain
    waiting = dict(record.attributes)
    # In the order of the file, so that an untouched node comes back as it was.
    for attr in record.source.attribute:
        if attr.type in BODY_TYPES:
            copy_around_bodies(attr, target.attribute.add())
        elif attr.name in waiting:
            target.attribute.add().CopyFrom(waiting.pop(attr.name))
    target.attribute.extend(waiting.values())
    for label, body in iterate_subgraphs(target):
        _restore_graph(wiring, wiring.scopes[record.subgraphs[label]], body)


def rename_value(value: ValueInfoProto, name: str) -> ValueInfoProto:
    """A copy of the value's type under another name."""
    copy = deepcopy(value)
    copy.name = name
    return copy
