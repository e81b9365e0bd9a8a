"""The wiring of a model as graphsurgeon objects, and everything graphsurgeon would lose kept beside it.

graphsurgeon 0.6 keeps nodes and tensors linked both ways, and that is all it is trusted with. It loses node, graph and
model metadata, doc strings, quantization annotations and unused initializers; it cannot export empty list attributes,
types, sparse tensors or touched sub-byte weights; it writes captured constants into the subgraphs that read them. So it
is given names only, and attributes, types and weights stay in the records here until export.

Its nodes and tensors are unhashable and compare by name: they are found through these records by name and scope, and
never put in a set or removed from a list by value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto

from onnxq.graph.editing.surgeon import gs
from onnxq.graph.scopes import iterate_subgraphs, join_scope, list_defined
from onnxq.sites import TensorId

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
    """One graph: its graphsurgeon twin and its records."""

    name: str
    parent: str | None
    graph: Any
    source: GraphProto
    # Base order of node names, removed ones included: new nodes may be anchored to them.
    order: list[str] = field(default_factory=list)
    inputs: list[ValueInfoProto] = field(default_factory=list)
    outputs: list[ValueInfoProto] = field(default_factory=list)
    initializers: dict[str, TensorProto | SparseTensorProto] = field(default_factory=dict)
    value_info: dict[str, ValueInfoProto] = field(default_factory=dict)
    # Tensors with a quantization annotation: the name in the file -> the name now.
    annotated: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Wiring:
    """All scopes, nodes and tensors of a model, by name."""

    scopes: dict[str, ScopeRecord] = field(default_factory=dict)
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    tensors: dict[TensorId, Any] = field(default_factory=dict)
    # Tensors whose node was taken out: who read them reads the next tensor made under that name.
    orphans: dict[TensorId, Any] = field(default_factory=dict)

    def resolve(self, tensor: str, scope: str) -> TensorId | None:
        """Return the tensor that a name means when read from `scope`; None for "" and for undefined names."""
        at: str | None = scope
        while tensor and at is not None:
            if TensorId(tensor, at) in self.tensors:
                return TensorId(tensor, at)
            at = self.scopes[at].parent
        return None

    def define(self, t: TensorId) -> Any:
        """The graphsurgeon object of a tensor that is new, or new again."""
        orphan = self.orphans.pop(t, None)
        self.tensors[t] = gs.Variable(t.name) if orphan is None else orphan
        return self.tensors[t]


def import_wiring(proto: ModelProto) -> Wiring:
    """graphsurgeon's view of the model (names only) with the records. The proto is only referred to, never changed."""
    skeleton = ModelProto(ir_version=proto.ir_version)
    # Without weights and attributes, of which graphsurgeon would make copies.
    skeleton.opset_import.extend(proto.opset_import)
    _copy_names(proto.graph, skeleton.graph)
    wiring = Wiring()
    _record_graph(wiring, gs.import_onnx(skeleton), proto.graph, "", None)
    return wiring


def _copy_names(source: GraphProto, target: GraphProto) -> None:
    target.name = source.name
    target.input.extend(ValueInfoProto(name=value.name) for value in source.input)
    target.output.extend(ValueInfoProto(name=value.name) for value in source.output)
    for node in source.node:
        copy = target.node.add(name=node.name, op_type=node.op_type, input=node.input, output=node.output)
        if node.HasField("domain"):
            copy.domain = node.domain
        for label, subgraph in iterate_subgraphs(node):
            # One attribute for each subgraph: graphsurgeon knows no lists of them.
            attr = copy.attribute.add(name=label, type=AttributeProto.GRAPH)
            _copy_names(subgraph, attr.g)


def _record_graph(wiring: Wiring, graph: Any, source: GraphProto, name: str, parent: str | None) -> None:
    scope = ScopeRecord(name, parent, graph, source)
    scope.inputs.extend(source.input)
    scope.outputs.extend(source.output)
    scope.initializers.update((tensor.name, tensor) for tensor in source.initializer)
    scope.initializers.update((sparse.values.name, sparse) for sparse in source.sparse_initializer)
    scope.value_info.update((value.name, value) for value in source.value_info)
    scope.annotated.update((a.tensor_name, a.tensor_name) for a in source.quantization_annotation)
    wiring.scopes[name] = scope
    _record_tensors(wiring, graph, source, name)
    for node, proto in zip(graph.nodes, source.node, strict=True):
        record = NodeRecord(node, name, proto, {a.name: a for a in proto.attribute if a.type not in BODY_TYPES})
        scope.order.append(proto.name)
        wiring.nodes[proto.name] = record
        for label, subgraph in iterate_subgraphs(proto):
            record.subgraphs[label] = join_scope(name, proto.name, label)
            _record_graph(wiring, node.attrs[label], subgraph, record.subgraphs[label], name)
        _relink_inputs(wiring, record)


def _record_tensors(wiring: Wiring, graph: Any, source: GraphProto, scope: str) -> None:
    found = {tensor.name: tensor for tensor in graph.inputs}
    found.update((tensor.name, tensor) for node in graph.nodes for tensor in node.outputs)
    for name in sorted(list_defined(source)):
        wiring.tensors[TensorId(name, scope)] = found[name] if name in found else gs.Variable(name)


def _relink_inputs(wiring: Wiring, record: NodeRecord) -> None:
    """Make every input the very object of the tensor its name means.

    graphsurgeon makes a second object where a subgraph reads an outer tensor it has not met yet.
    """
    for k, tensor in enumerate(list(record.node.inputs)):
        found = wiring.resolve(tensor.name, record.scope)
        if found is not None and wiring.tensors[found] is not tensor:
            record.node.inputs[k] = wiring.tensors[found]


def find_used(wiring: Wiring) -> tuple[set[str], set[TensorId]]:
    """The nodes and tensors that the model's outputs depend on. A node without outputs is there for its effect."""
    made_by: dict[TensorId, NodeRecord] = {}
    nodes: set[str] = set()
    tensors: set[TensorId] = set()
    waiting = [wiring.resolve(value.name, "") for value in wiring.scopes[""].outputs]
    for record in wiring.nodes.values():
        made_by.update((TensorId(tensor.name, record.scope), record) for tensor in record.node.outputs)
        if not any(tensor.name for tensor in record.node.outputs):
            nodes.add(record.node.name)
            waiting.extend(_list_needed(wiring, record))
    while waiting:
        t = waiting.pop()
        if t is None or t in tensors:
            continue
        tensors.add(t)
        # An initializer or an input has none.
        maker = made_by.get(t)
        if maker is not None and maker.node.name not in nodes:
            nodes.add(maker.node.name)
            waiting.extend(_list_needed(wiring, maker))
    return nodes, tensors


def _list_needed(wiring: Wiring, record: NodeRecord) -> list[TensorId | None]:
    needed = [wiring.resolve(tensor.name, record.scope) for tensor in record.node.inputs]
    for subgraph in record.subgraphs.values():
        needed.extend(wiring.resolve(value.name, subgraph) for value in wiring.scopes[subgraph].outputs)
    return needed


def find_nodes_between(wiring: Wiring, target: TensorId, source: TensorId) -> set[str]:
    """The nodes that compute `target` (subgraphs included), without those that only come before `source`."""
    found: set[str] = set()
    waiting = [wiring.tensors[target]]
    # By id: graphsurgeon's tensors have no hash. The source counts as seen, so the walk ends there.
    seen: set[int] = {id(wiring.tensors[source])}
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        stack = [wiring.nodes[node.name] for node in tensor.inputs]
        while stack:
            record = stack.pop()
            found.add(record.node.name)
            waiting.extend(record.node.inputs)
            for subgraph in record.subgraphs.values():
                stack.extend(inner for inner in wiring.nodes.values() if inner.scope == subgraph)
    return found
