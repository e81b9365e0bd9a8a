"""Parts of a model made models of their own: the one place that cuts.

A part is some nodes of the main graph. Stored tensors that they, or subgraphs inside them, read go with them, as do
Constant nodes and the model-local functions they call; any other tensor read from outside becomes an input.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Generic, Protocol

import numpy as np
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
)

from onnxq.arrays import Shape
from onnxq.graph.light import LightModel, M, ModelLike, bare_proto, copy_proto, copy_store, rebuild
from onnxq.graph.names import choose_name, list_names
from onnxq.graph.scopes import (
    Stored,
    collect_names,
    drop_named,
    iterate_subgraphs,
    keep_named,
    list_defined,
    list_reads,
    map_stored,
    rename_items,
    rename_tensors,
    replace_items,
    sort_nodes,
    store_tensor,
    walk_from,
)
from onnxq.sites import NameSet


class Cutter(Generic[M]):
    """Cuts parts out of the main graph of one model whose nodes are named.

    computed: nodes that depend on stored tensors alone (weights behind DequantizeLinear) go along with their readers.
    """

    def __init__(self, model: M, *, computed: bool = False) -> None:
        self._model = model
        self._proto = bare_proto(model)
        graph = self._proto.graph
        # By name. Sorted: a file need not list its nodes in an order that runs.
        self.nodes: dict[str, NodeProto] = {node.name: node for node in sort_nodes(graph)}
        self._stored = map_stored(graph)
        self._producer = {
            tensor: name for name, node in self.nodes.items() for tensor in node.output if tensor
        }
        self._types = {value.name: (k, value) for k, value in enumerate(graph.value_info)}
        # Their values do not tell them from tensors, which operators of opset 17 and before do.
        self._optional = {
            v.name: v for v in (*graph.input, *graph.value_info) if v.type.HasField("optional_type")
        }
        # Names of the nodes that go along with their readers, those of operator Constant among them.
        self.constants: set[str] = set()
        for name, node in self.nodes.items():
            if node.op_type == "Constant" or (
                computed and all(map(self.is_constant, list_reads(node)))
            ):
                self.constants.add(name)

    def is_constant(self, tensor: str) -> bool:
        """True for a stored tensor and for an output of one of `constants`."""
        return tensor in self._stored or self._producer.get(tensor) in self.constants

    def find_producer(self, tensor: str) -> str | None:
        """The node that computes a tensor; None for inputs and constants."""
        name = self._producer.get(tensor)
        return None if name in self.constants else name

    def list_tensors(self) -> list[str]:
        """The tensors that nodes compute from inputs of the model, as they run."""
        return [tensor for tensor, name in self._producer.items() if name not in self.constants]

    def list_constant_reads(self, tensor: str) -> list[str]:
        """The tensors that the node behind a constant reads; none for a stored one."""
        name = self._producer.get(tensor)
        return list_reads(self.nodes[name]) if name in self.constants else []

    def list_between(self, outputs: Iterable[str], known: Collection[str]) -> list[str]:
        """The nodes that these tensors are computed by from the known ones, as they run."""

        def list_makers(tensors: Iterable[str]) -> list[str]:
            return self._list_makers(tensor for tensor in tensors if tensor not in known)

        return self.sort_names(
            walk_from(list_makers(outputs), lambda name: list_makers(list_reads(self.nodes[name])))
        )

    def list_sources(self, node: str) -> list[str]:
        """The nodes whose outputs a node, or a subgraph in it, reads; without constants."""
        return self._list_makers(list_reads(self.nodes[node]))

    def _list_makers(self, tensors: Iterable[str]) -> list[str]:
        return [name for tensor in tensors if (name := self.find_producer(tensor)) is not None]

    def list_needed(self, outputs: Iterable[str], among: Collection[str]) -> list[str]:
        """Those of the nodes `among` that these tensors are computed from without leaving them, as they run."""
        allowed = set(among)
        start = allowed.intersection(self._list_makers(outputs))
        return self.sort_names(
            walk_from(start, lambda name: allowed.intersection(self.list_sources(name)))
        )

    def sort_names(self, names: Collection[str]) -> list[str]:
        """The names in the order the nodes run in."""
        wanted = set(names)
        return [name for name in self.nodes if name in wanted]

    def list_inputs(self, names: Collection[str]) -> list[str]:
        """The tensors that these nodes read from outside and that a caller must feed, in the order of reading."""
        return [
            tensor
            for tensor in _list_reads(self._select_nodes(names))
            if not self.is_constant(tensor)
        ]

    def cut(
        self,
        names: Collection[str],
        inputs: Iterable[ValueInfoProto],
        outputs: Iterable[ValueInfoProto],
        *,
        changed: Mapping[str, NodeProto] | None = None,
        tensors: Mapping[str, TensorProto] | None = None,
    ) -> M:
        """These nodes as a model, with types of inner tensors as the model declares them.

        inputs: one for each of `list_inputs`, by `declare_input` where values are known, and any other to be given in
        place of a tensor that the nodes make or the model stores. outputs: of these nodes. changed: nodes to take in
        place of the model's, by name. tensors: stored tensors that they read.
        """
        declared_inputs = [self._optional.get(value.name, value) for value in inputs]
        fed = collect_names(declared_inputs)
        nodes = [
            _hide_outputs((changed or {}).get(node.name, node), fed)
            for node in self._select_nodes(names)
        ]
        stored = {name: tensor for name, tensor in self._stored.items() if name not in fed}
        part = assemble_model(
            self._proto, nodes, declared_inputs, outputs, {**stored, **(tensors or {})}
        )
        declared = fed | collect_names(part.graph.output)
        inner = {tensor for node in nodes for tensor in node.output} - declared
        # In the order of the file: the same part has the same bytes in every process, though sets have no order.
        types = [self._types[name] for name in inner if name in self._types]
        part.graph.value_info.extend(value for _, value in sorted(types, key=lambda item: item[0]))
        return rebuild(self._model, part)

    def _select_nodes(self, names: Collection[str]) -> list[NodeProto]:
        """The nodes with the constants they read, in the order they run in."""

        def list_constants(name: str) -> list[str]:
            makers = (self._producer.get(tensor, "") for tensor in list_reads(self.nodes[name]))
            return [maker for maker in makers if maker in self.constants]

        return [self.nodes[name] for name in self.sort_names(walk_from(names, list_constants))]


def assemble_model(
    like: ModelProto,
    nodes: Sequence[NodeProto],
    inputs: Iterable[ValueInfoProto],
    outputs: Iterable[ValueInfoProto],
    stored: Mapping[str, Stored],
) -> ModelProto:
    """A model of these nodes, sorted, with those of the stored tensors that they read or that are outputs.

    like: gives the IR version, the opsets and the functions that the nodes call.
    """
    model = ModelProto(ir_version=like.ir_version, opset_import=like.opset_import)
    graph = model.graph
    # onnx.checker asks for a name.
    graph.name = "part"
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    for name in dict.fromkeys((*_list_reads(nodes), *(value.name for value in graph.output))):
        if name in stored:
            store_tensor(graph, stored[name])
    model.functions.extend(_list_functions(like, nodes))
    return model


class Valued(Protocol):
    """An array, or a stand-in for one."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        ...

    @property
    def shape(self) -> Shape:
        """Sizes of the axes."""
        ...


def declare_input(
    name: str, values: Sequence[Valued | Sequence[Valued]], dtype: int = 0
) -> ValueInfoProto:
    """An input of a part with the rank, or of vectors the size, that its values share; lists are those of a sequence.

    dtype: the ONNX type, 0 for that of the values (float32 for sequences that are all empty).
    ORT takes no Resize unless it knows how many sizes that is given, and no Scan whose body gives tensors of unknown
    rank: in the whole model it knows them from tensors in front of the part.
    """
    sequence = isinstance(values[0], Sequence)
    arrays = [
        array for value in values for array in (value if isinstance(value, Sequence) else (value,))
    ]
    kind = dtype or (
        helper.np_dtype_to_tensor_dtype(arrays[0].dtype) if arrays else TensorProto.FLOAT
    )
    tensor = helper.make_tensor_type_proto(kind, _share_sizes([array.shape for array in arrays]))
    return helper.make_value_info(
        name, helper.make_sequence_type_proto(tensor) if sequence else tensor
    )


def _share_sizes(shapes: Sequence[Shape]) -> list[int | None] | None:
    """The size of vectors that all have it, the rank of others, with None for each size; None where ranks differ.

    Sizes of other tensors would be held against branches that these values never take (of a net for two sample rates).
    """
    if len({len(shape) for shape in shapes}) != 1:
        return None
    known = len(shapes[0]) == 1 and len(set(shapes)) == 1
    return list(shapes[0]) if known else [None] * len(shapes[0])


def _hide_outputs(node: NodeProto, fed: Collection[str]) -> NodeProto:
    """The node with other names for those of its outputs that are fed instead.

    It stays for the sake of another output, and no tensor may be made twice.
    """
    if not any(name in fed for name in node.output):
        return node
    copy = deepcopy(node)
    copy.output[:] = [
        f"{name}/computed by {node.name}" if name in fed else name for name in node.output
    ]
    return copy


def _list_reads(nodes: Sequence[NodeProto]) -> list[str]:
    """The tensors that the nodes read and none of them makes, in the order of reading."""
    results = {tensor for node in nodes for tensor in node.output}
    return list(
        dict.fromkeys(
            tensor for node in nodes for tensor in list_reads(node) if tensor not in results
        )
    )


def _list_functions(like: ModelProto, nodes: Iterable[NodeProto]) -> list[FunctionProto]:
    """The functions of a model that these nodes call, or that such functions call, in the model's order."""
    known = {(f.domain, f.name, f.overload): k for k, f in enumerate(like.functions)}
    called = set()
    # Most models have no functions, and looking into all subgraphs takes time.
    waiting = list(nodes) if known else []
    while waiting:
        node = waiting.pop()
        waiting.extend(inner for _, subgraph in iterate_subgraphs(node) for inner in subgraph.node)
        k = known.get((node.domain, node.op_type, node.overload))
        if k is not None and k not in called:
            called.add(k)
            waiting.extend(like.functions[k].node)
    return [like.functions[k] for k in sorted(called)]


def find_needed(graph: GraphProto, order: Sequence[NodeProto]) -> set[str]:
    """The tensors that the outputs of a graph depend on, themselves included. order: its nodes, as they run."""
    needed = collect_names(graph.output)
    # Backwards, so that all readers of a tensor are seen before its maker.
    for node in reversed(order):
        if needed.intersection(node.output):
            needed.update(list_reads(node))
    return needed


def remove_unneeded(graph: GraphProto) -> None:
    """Take out, in place, the nodes and initializers that no output of the graph depends on: ORT computes them all."""
    order = sort_nodes(graph)
    needed = find_needed(graph, order)
    replace_items(graph.node, [node for node in order if needed.intersection(node.output)])
    keep_named(graph.initializer, needed)


def list_behind(model: ModelLike, stops: Collection[str]) -> NameSet:
    """The nodes of the main graph named in `stops`, and those that anything they make goes into."""
    names = set()
    tensors: set[str] = set()
    for node in sort_nodes(bare_proto(model).graph):
        if node.name in stops or not tensors.isdisjoint(list_reads(node)):
            names.add(node.name)
            # Outputs that are left out have the empty name, as have inputs.
            tensors.update(filter(None, node.output))
    return frozenset(names)


def cut_front(model: M, behind: Collection[str], types: Mapping[str, ValueInfoProto]) -> M:
    """The model without the nodes `behind`, which no other node depends on; it gives the tensors that they read.

    It has all inputs of the model, the outputs that it makes, and behind these the tensors computed for `behind`.
    types: declarations of these, by name; one that has none is given without a type.
    """
    cutter = Cutter(model, computed=True)
    read = set(cutter.list_inputs(behind))
    border = [
        name
        for name in cutter.list_tensors()
        if name in read and cutter.find_producer(name) not in behind
    ]
    lost = {tensor for name in behind for tensor in cutter.nodes[name].output}
    out = copy_proto(model)
    graph = out.graph
    own = [value for value in graph.output if value.name not in lost]
    shown = collect_names(own)
    new = [types.get(name, ValueInfoProto(name=name)) for name in border if name not in shown]
    drop_named(graph.node, behind)
    replace_items(graph.output, own + new)
    remove_unneeded(graph)
    drop_named(graph.value_info, lost)
    return rebuild(model, out)


def give_outputs(model: M, names: Collection[str]) -> M:
    """The model with these of its outputs alone, and without what only others need."""
    out = copy_proto(model)
    keep_named(out.graph.output, names)
    remove_unneeded(out.graph)
    return rebuild(model, out)


def join_rest(front: M, whole: M, behind: Collection[str]) -> M:
    """A changed `cut_front` of `whole`, with the nodes `behind` as they are in `whole`, and its outputs.

    Tensors and nodes of the front that took a name from behind get another.
    """
    cutter = Cutter(whole, computed=True)
    rest = cutter.cut(
        behind,
        (),
        [value for value in whole.graph.output if cutter.find_producer(value.name) in behind],
    )
    part = copy_proto(rest)
    out = copy_proto(front)
    store = copy_store(front)
    # Whoever changed the front named new tensors without knowing those that were cut off.
    _settle_clashes(out, part)
    if store is not None and isinstance(rest, LightModel):
        store.adopt_arrays(rest.weights)
    graph = out.graph
    own = list_defined(part.graph)
    outputs = {value.name: value for value in (*graph.output, *part.graph.output)}
    declared = [
        value for value in whole.graph.value_info if value.name in own or value.name in outputs
    ]
    graph.node.extend(part.graph.node)
    graph.initializer.extend(part.graph.initializer)
    graph.sparse_initializer.extend(part.graph.sparse_initializer)
    graph.value_info.extend(declared)
    replace_items(graph.output, [outputs[value.name] for value in whole.graph.output])
    imported = {entry.domain for entry in out.opset_import}
    out.opset_import.extend(entry for entry in whole.opset_import if entry.domain not in imported)
    return rebuild(front, out, store)


def _settle_clashes(front: ModelProto, part: ModelProto) -> None:
    """Take out of `part` what `front` has as well, and give what `front` has by a name of `part` another, in place."""
    graph = front.graph
    both = {_identify(item) for item in (*graph.node, *graph.initializer)}
    for items in (part.graph.node, part.graph.initializer):
        replace_items(items, [item for item in items if _identify(item) not in both])
    taken = list_names(front) | list_names(part)
    names = {
        name: choose_name(name, taken) for name in list_defined(graph) & list_defined(part.graph)
    }
    nodes = collect_names(part.graph.node)
    rename_tensors(graph, names)
    for node in graph.node:
        node.name = choose_name(node.name, taken) if node.name in nodes else node.name
    rename_items(graph.value_info, names)


def _identify(item: NodeProto | TensorProto) -> bytes:
    # Maps in protobuf have no order of their own.
    return bytes(item.SerializeToString(deterministic=True))
