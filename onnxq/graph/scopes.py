"""Scopes: the main graph "" and the subgraphs of If/Loop/Scan inside it, and the order nodes run in.

A subgraph's scope is its parent's scope, node name and attribute: "If_0.else_branch/Loop_3.body".
"""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    ValueInfoProto,
    helper,
)

from onnxq.errors import ModelError

Stored = TensorProto | SparseTensorProto
T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

# Both are names of ONNX's own domain.
OWN_DOMAINS = ("", "ai.onnx")
ScopedGraphs = Iterator[tuple[str, GraphProto]]


def declare_opset(proto: ModelProto, opset: int) -> None:
    """Write an opset of ONNX's own operators into a model, in place, and the IR version that it needs."""
    for entry in proto.opset_import:
        if entry.domain in OWN_DOMAINS:
            entry.CopyFrom(helper.make_opsetid(entry.domain, opset))
    needed = helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, needed)


def iterate_subgraphs(node: NodeProto) -> ScopedGraphs:
    """Yield a node's subgraphs as (attribute label, graph); a list attribute's members are labelled name[i]."""
    for attr in node.attribute:
        if attr.type == AttributeProto.GRAPH:
            yield attr.name, attr.g
        elif attr.type == AttributeProto.GRAPHS:
            for i, graph in enumerate(attr.graphs):
                yield f"{attr.name}[{i}]", graph


def join_scope(scope: str, node_name: str, label: str) -> str:
    """Return the scope of subgraph `label_node` of the node `node_name`, which itself lies in `scope`."""
    return f"{scope}/{node_name}.{label}" if scope else f"{node_name}.{label}"


def walk_graphs(graph: GraphProto, scope: str = "") -> ScopedGraphs:
    """Yield every (scope, graph) from the outside in, parents in file order."""
    yield scope, graph
    yield from _walk_bodies(graph, scope)


def _walk_bodies(graph: GraphProto | FunctionProto, scope: str) -> ScopedGraphs:
    for node in graph.node:
        for label, subgraph in iterate_subgraphs(node):
            yield from walk_graphs(subgraph, join_scope(scope, node.name, label))


def has_bodies(graph: GraphProto) -> bool:
    """True where a node, such as If, Loop or Scan, holds a graph of its own."""
    return any(scope for scope, _ in walk_graphs(graph))


def drop_absent_inputs(node: NodeProto) -> None:
    """Take out, in place, empty names of inputs at the end: the node has none there."""
    while node.input and not node.input[-1]:
        del node.input[-1]


def drop_absent_biases(graph: GraphProto) -> None:
    """Take out, in place, empty names of biases, at which OpenVINO and the NPU give up the whole network."""
    for node in walk_nodes(graph):
        if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            drop_absent_inputs(node)


def walk_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield every node of a graph and of the subgraphs in it, a graph's own nodes before those inside them."""
    for _, inner in walk_graphs(graph):
        yield from inner.node


def walk_all_graphs(proto: ModelProto) -> Iterator[tuple[str, GraphProto | FunctionProto]]:
    """Yield every graph of the model, and every function with its subgraphs; a function's scope is "domain::name"."""
    yield from walk_graphs(proto.graph)
    for function in proto.functions:
        scope = name_function(function)
        yield scope, function
        yield from _walk_bodies(function, scope)


def walk_all_nodes(proto: ModelProto) -> Iterator[NodeProto]:
    """Yield every node of the model, those of functions and of subgraphs too."""
    for _, graph in walk_all_graphs(proto):
        yield from graph.node


def name_function(function: FunctionProto) -> str:
    """Return a function's identity: "domain::name", with its overload when it has one."""
    text = f"{function.domain}::{function.name}"
    return f"{text}:{function.overload}" if function.overload else text


def map_stored(graph: GraphProto) -> dict[str, Stored]:
    """Return the stored tensors of this very scope by name, dense ones first."""
    dense = {tensor.name: tensor for tensor in graph.initializer}
    return dense | {sparse.values.name: sparse for sparse in graph.sparse_initializer}


def store_tensor(graph: GraphProto, tensor: Stored) -> None:
    """Add a stored tensor to a graph, in place."""
    sparse = isinstance(tensor, SparseTensorProto)
    (graph.sparse_initializer if sparse else graph.initializer).append(tensor)


def collect_names(items: Iterable[Any]) -> set[str]:
    """The names of nodes, tensors or other messages that have one."""
    return {item.name for item in items}


def list_declared(graph: GraphProto) -> list[ValueInfoProto]:
    """The inputs, outputs and inner tensors that a graph declares."""
    return [*graph.input, *graph.output, *graph.value_info]


def map_end_types(graph: GraphProto) -> dict[str, int]:
    """The element type of each input and output, by name; 0 for one that is no tensor."""
    values = (*graph.input, *graph.output)
    return {value.name: int(value.type.tensor_type.elem_type) for value in values}


def list_defined(graph: GraphProto) -> set[str]:
    """Return the tensors defined in this very scope: inputs, initializers, node outputs."""
    names = collect_names(graph.input).union(map_stored(graph))
    names.update(output for node in graph.node for output in node.output)
    # Outputs that are left out.
    names.discard("")
    return names


def list_captures(graph: GraphProto) -> list[str]:
    """Return the tensors a subgraph reads from outside (nested ones and outputs included), once each, in order."""
    own = list_defined(graph)
    reads = [name for node in graph.node for name in list_reads(node)]
    # A body may give an outer tensor out as it is.
    reads += [value.name for value in graph.output if value.name]
    return list(dict.fromkeys(name for name in reads if name not in own))


def collect_reads(graph: GraphProto) -> set[str]:
    """Return every name that a node of the graph or of a subgraph in it reads, or that is an output of one of them."""
    reads: set[str] = set()
    for _, inner in walk_graphs(graph):
        reads.update(value.name for value in inner.output)
        for node in inner.node:
            reads.update(node.input)
    return reads


def list_reads(node: NodeProto) -> list[str]:
    """Return the tensors a node needs before it can run: its inputs and the captures of its subgraphs."""
    names = [name for name in node.input if name]
    for _, subgraph in iterate_subgraphs(node):
        names.extend(list_captures(subgraph))
    return names


def rename_reads(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Let nodes, also those of subgraphs, read other tensors of this graph, in place: old name -> new."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for _, subgraph in iterate_subgraphs(node):
            own = list_defined(subgraph)
            # A tensor of the subgraph's own hides the outer one of the same name.
            outer = {old: new for old, new in names.items() if old not in own}
            rename_reads(subgraph, outer)
            rename_items(subgraph.output, outer)


def walk_from(start: Iterable[H], follow: Callable[[H], Iterable[H]]) -> set[H]:
    """Everything that is reached from some things, themselves included. follow: the things behind one, or before it."""
    reached = set(start)
    waiting = list(reached)
    while waiting:
        new = set(follow(waiting.pop())) - reached
        reached |= new
        waiting += new
    return reached


def rename_tensors(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Let the results and initializers of a graph, and what reads them, have other names, in place: old -> new."""
    rename_reads(graph, names)
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
    rename_items(graph.initializer, names)


def rename_items(field: Any, names: Mapping[str, str]) -> None:
    """Give messages of a repeated field other names, in place: old -> new."""
    for item in field:
        item.name = names.get(item.name, item.name)


def replace_items(field: Any, items: Iterable[Any]) -> None:
    """Put other messages into a repeated field of a message, in place; they may be some of its own."""
    # protobuf has no assignment to a field of messages. The list keeps those alive that the field lets go of.
    messages = list(items)
    del field[:]
    field.extend(messages)


def keep_named(field: Any, names: Container[str]) -> None:
    """Take out, in place, the messages of a repeated field that have none of these names."""
    replace_items(field, [item for item in field if item.name in names])


def drop_named(field: Any, names: Container[str], by: str = "name") -> None:
    """Take out, in place, the messages of a repeated field that have one of these names. by: their field with it."""
    replace_items(field, [item for item in field if getattr(item, by) not in names])


def map_entries(entries: Iterable[Any]) -> dict[str, str]:
    """The metadata of a model or node, by key."""
    return {entry.key: entry.value for entry in entries}


def sort_topologically(
    nodes: list[T], needs: list[list[str]], makes: list[list[str]], labels: list[str]
) -> list[T]:
    """Sort nodes so that producers come first, otherwise in the given order (a sorted list comes back as it is).

    Raises ModelError naming a node when they form a cycle. Iterative: deep chains must not exhaust the stack.
    """
    producer = {name: i for i, outputs in enumerate(makes) for name in outputs if name}
    # 0 untouched, 1 on the stack, 2 placed.
    state = bytearray(len(nodes))
    order = []
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            i = stack[-1]
            if state[i] == 2:
                stack.pop()
                continue
            waiting = [
                producer[name]
                for name in needs[i]
                if name in producer and state[producer[name]] != 2
            ]
            # Back at a node whose producers were all put above it: one of them waits for the node.
            if state[i] == 1 and waiting:
                cause = "the node depends on its own output"
                raise ModelError(labels[i], cause, "break the cycle in the graph", code="Q103")
            if not waiting:
                state[i] = 2
                order.append(i)
                stack.pop()
            else:
                state[i] = 1
                stack.extend(reversed(list(dict.fromkeys(waiting))))
    return [nodes[i] for i in order]


def sort_nodes(graph: GraphProto) -> list[NodeProto]:
    """The nodes in an order they can run in, as close to the file's as possible. Raises ModelError on a cycle."""
    nodes = list(graph.node)
    needs = [list_reads(node) for node in nodes]
    makes = [list(node.output) for node in nodes]
    return sort_topologically(nodes, needs, makes, [label_node(node) for node in nodes])


def find_result(node: NodeProto) -> str:
    """Return the first output that is not left out; "" for a node without any."""
    return next(filter(None, node.output), "")


def label_node(node: NodeProto) -> str:
    """Return a name for a node in messages, whether it has one or not."""
    if node.name:
        return node.name
    result = find_result(node)
    return f"{node.op_type} producing {result!r}" if result else f"an unnamed {node.op_type}"


def embed_bytes(tensor: TensorProto, raw: bytes) -> None:
    """Store in a tensor, in place, the bytes that lay elsewhere."""
    del tensor.external_data[:]
    tensor.ClearField("data_location")
    tensor.raw_data = raw


def set_location(tensor: TensorProto, **entries: object) -> None:
    """Say, in place, where the bytes of a tensor lie. entries: of its external data."""
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
