"""GraphIndex: look-ups of nodes, tensors, types and constants by name and scope, without searching.

Read-only. Built once per model, which must not change while the index is in use.
"""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TypeVar

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
)

from onnxq.arrays import Array, is_float
from onnxq.errors import ModelError, suggest_names
from onnxq.graph.base import Dims, Graph, MaybeNode, NodeRef, NodeRefs, ValueInfo, ValueInfos
from onnxq.graph.light import (
    SAME_LAYOUT,
    LightModel,
    ModelLike,
    bare_proto,
    cache_on_model,
    find_provider,
    list_libraries,
    store_of,
)
from onnxq.graph.names import check_names
from onnxq.graph.scopes import (
    OWN_DOMAINS,
    Stored,
    collect_names,
    iterate_subgraphs,
    join_scope,
    list_declared,
    map_stored,
    name_function,
    sort_nodes,
)
from onnxq.graph.storage import StoredArray, is_stub
from onnxq.graph.values import (
    Attributes,
    decode_constant,
    decode_sparse,
    decode_tensor,
    find_constant_attribute,
    read_constant_type,
    read_declared_type,
)
from onnxq.sites import Edge, Edges, MaybeTensor, Names, TensorId

_T = TypeVar("_T")
# Without shape inference these still say something about the rank of what they write.
_LEAST_RANK = {
    **dict.fromkeys(
        ("Conv", "ConvTranspose", "AveragePool", "MaxPool", "GlobalAveragePool", "GlobalMaxPool"), 3
    ),
    **dict.fromkeys(("Gemm", "Flatten"), 2),
}


class GraphIndex(Graph):
    """Look-ups over the main graph and the subgraphs of If/Loop/Scan. Functions are opaque (see inline_functions).

    Raises ModelError when nodes are unnamed or share a name (see name_nodes), or form a cycle.
    """

    nodes: NodeRefs = ()
    inputs: ValueInfos = ()
    scopes: Names = ()

    def __init__(self, model: ModelLike) -> None:
        self.proto = proto = bare_proto(model)
        check_names(proto)
        self._weights = store_of(model)
        self._libraries = list_libraries(model)
        self._provider = find_provider(model)
        self.opset: int = find_opset(proto)
        self.functions: Names = tuple(map(name_function, proto.functions))
        # By scope: the scope around it.
        self._outer: dict[str, str] = {}
        self._parent_node: dict[str, str] = {}
        self._subgraphs: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        self._graphs: dict[str, GraphProto] = {}
        self._defined: dict[str, set[str]] = {}
        # The same nodes, by name.
        self.named: dict[str, NodeRef] = {}
        # Of Constant nodes, by their output.
        self._literals: dict[TensorId, AttributeProto] = {}
        self._producer: dict[MaybeTensor, str] = {}
        self._consumers: defaultdict[MaybeTensor, list[Edge]] = defaultdict(list)
        self._outputs: set[MaybeTensor] = set()
        # Read from inner scopes.
        self._captured: set[MaybeTensor] = set()
        self._initializers: dict[TensorId, Stored] = {}
        self._types: dict[MaybeTensor, tuple[int, Dims | None]] = {}
        # Set by identity.py: structural ids, which cost several passes over the graph.
        self.colours: dict[TensorId, str] | None = None
        # By the tensor that stores it: all that Identity makes of one share its array.
        self._decoded: dict[TensorId, Array] = {}
        self._visit_graph(proto.graph, "")
        self.nodes = tuple(self.named.values())
        self.scopes = tuple(self._graphs)
        # Files before IR version 4 list initializers as inputs too; nobody has to feed them.
        stored = map_stored(proto.graph)
        self.inputs = tuple(
            ValueInfo(value.name, *read_declared_type(value))
            for value in proto.graph.input
            if value.name not in stored
        )
        self.outputs: ValueInfos = tuple(
            self._describe_value(value.name) for value in proto.graph.output
        )

    @property
    def model(self) -> ModelLike:
        """The model: a light one with the same arrays where a light one was indexed."""
        # Not the very object: that holds this index, and a cycle would keep the arrays until Python looks for cycles.
        if self._weights is None:
            return self.proto
        return LightModel(self.proto, self._weights, self._libraries, self._provider)

    @property
    def has_ranked_branches(self) -> bool:
        """True where both branches of an If give tensors of one rank, as they must before opset 11."""
        return self.opset < 11

    def find_node(self, name: str) -> NodeRef:
        """The node of this name. Raises ModelError with the nearest names."""
        return look_up(self.named, name, "node of this name")

    def resolve_tensor(self, tensor: str, scope: str) -> MaybeTensor:
        """The tensor that this name means when read from `scope`: defined there or in the nearest scope around it.

        None for "" and for a name nobody defines.
        """
        # A loop, not the generator below: every look-up of an input comes here.
        at = scope if tensor else None
        while at is not None:
            if tensor in self._defined.get(at, ()):
                return TensorId(tensor, at)
            at = self._outer.get(at)
        return None

    def list_outwards(self, scope: str) -> Iterator[str]:
        """The scope and those around it, inside out."""
        at: str | None = scope
        while at is not None:
            yield at
            at = self._outer.get(at)

    def find_producer(self, t: MaybeTensor) -> MaybeNode:
        """The node that makes the tensor; None for inputs, initializers and unknown tensors."""
        return self.named.get(self._producer.get(t, ""))

    def list_consumers(self, t: MaybeTensor) -> Edges:
        """Every node input that reads the tensor, also from inner scopes, in the order the model runs in."""
        return tuple(self._consumers.get(t, ()))

    def is_output(self, t: MaybeTensor) -> bool:
        """True when the tensor is an output of the graph or subgraph it is defined in."""
        return t in self._outputs

    def captured(self, t: MaybeTensor) -> bool:
        """True when an inner scope reads the tensor, as a node input or as that subgraph's output."""
        return t in self._captured

    def is_kept(self, t: MaybeTensor) -> bool:
        """True when somebody outside the node list sees the tensor: a (sub)graph output or a body that captures it."""
        return self.is_output(t) or self.captured(t)

    def are_private(self, tensors: Iterable[TensorId], nodes: Container[str]) -> bool:
        """True when only `nodes` read these tensors."""
        return all(
            not self.is_kept(t) and all(edge.node in nodes for edge in self.list_consumers(t))
            for t in tensors
        )

    def is_owned(self, t: MaybeTensor) -> bool:
        """True for an initializer that one node input alone reads, so that it may take another value."""
        return self.find_producer(t) is None and self.find_sole_reader(t) is not None

    def find_onnx_producer(self, t: MaybeTensor, *op_types: str) -> MaybeNode:
        """The node that makes a tensor, when it is an operator of ONNX of one of these types (any, if none given)."""
        node = self.find_producer(t)
        if node is None or node.domain or (op_types and node.op_type not in op_types):
            return None
        return node

    def has_constant(self, node: NodeRef, k: int) -> bool:
        """True when input k is there and constant; its value is not decoded."""
        return self.is_constant(self.find_input(node, k))

    def read_scalar(self, node: NodeRef, k: int) -> tuple[float, int] | None:
        """(value, rank) of a constant input of one float that is finite."""
        tensor = self.find_input(node, k)
        # By the shape first, so that no large weight is decoded for this.
        sides = self.find_shape(tensor) or ()
        if not self.is_constant(tensor) or any(side != 1 for side in sides):
            return None
        value = self.find_constant(tensor)
        if value is None or value.size != 1 or not is_float(value):
            return None
        number = float(value.reshape(()))
        # Formulas with inf or NaN in them are not those of the patterns.
        return (number, value.ndim) if math.isfinite(number) else None

    def read_operands(self, node: NodeRef) -> tuple[int, tuple[float, int] | None]:
        """(k, scalar): the constant number beside input k of a node of two inputs, as `read_scalar` has it."""
        k = 1 if self.read_scalar(node, 0) is not None else 0
        return k, self.read_scalar(node, 1 - k)

    def find_least_rank(self, t: MaybeTensor) -> int:
        """The rank of a tensor, or its known minimum."""
        node = self.find_onnx_producer(t)
        least = 0 if node is None else _LEAST_RANK.get(node.op_type, 0)
        return least if (rank := self.find_rank(t)) is None else rank

    def is_constant(self, t: MaybeTensor) -> bool:
        """True for an initializer that no caller can override, a Constant node's output, or Identity of one."""
        return self._constant_source(t) is not None

    def find_constant(self, t: MaybeTensor) -> Array | None:
        """The read-only value of a constant tensor (bfloat16, float8 and sub-byte types as ml_dtypes), else None."""
        source = self._constant_source(t)
        if source is None:
            return None
        origin, stored = source
        if origin not in self._decoded:
            if isinstance(stored, AttributeProto):
                value = decode_constant(stored)
            elif isinstance(stored, SparseTensorProto):
                value = decode_sparse(stored)
            else:
                value = decode_tensor(stored, self._weights)
                # The store keeps it, or maps it anew: a model may have more weights than memory.
                if is_stub(stored):
                    return value
            self._decoded[origin] = value
        return self._decoded[origin]

    def locate_constant(self, t: MaybeTensor) -> Array | StoredArray | None:
        """As `constant`, but of a value that lies in a file where that is: nothing of it is read."""
        _, stored = self._constant_source(t) or (None, None)
        if self._weights is None or not isinstance(stored, TensorProto) or not is_stub(stored):
            return self.find_constant(t)
        plain = stored.data_type in SAME_LAYOUT
        return self._weights.locate(stored) if plain else self.find_constant(t)

    def find_shape(self, t: MaybeTensor) -> Dims | None:
        """The declared or inferred shape: ints, symbolic names, None for an unknown dim; None when nothing is known."""
        return self._types.get(t, (0, None))[1]

    def find_dtype(self, t: MaybeTensor) -> int:
        """The declared or inferred onnx.TensorProto dtype, 0 when unknown."""
        return self._types.get(t, (0, None))[0]

    def parent(self, scope: str) -> MaybeNode:
        """The node whose subgraph this scope is; None for the main graph."""
        return self.named.get(self._parent_node.get(scope, ""))

    def is_looped(self, scope: str) -> bool:
        """True for a body that runs any number of times, whose tensors no run shows."""
        parents = map(self.parent, self.list_outwards(scope))
        return any(node is not None and node.op_type != "If" for node in parents)

    @property
    def input_names(self) -> set[str]:
        """The names of the model's inputs."""
        return collect_names(self.inputs)

    @property
    def output_names(self) -> set[str]:
        """The names of the model's outputs."""
        return collect_names(self.outputs)

    def subgraphs(self, node: str) -> tuple[tuple[str, str], ...]:
        """(label, scope) of the subgraphs a node holds, sorted by label; () for most nodes."""
        return tuple(sorted(self._subgraphs.get(node, ())))

    def scope_inputs(self, scope: str) -> Names:
        """The input names of a subgraph (or of the main graph)."""
        return tuple(value.name for value in self._find_graph(scope).input)

    def scope_outputs(self, scope: str) -> Names:
        """The output names of a subgraph (or of the main graph); a subgraph's may be captured from outside."""
        return tuple(value.name for value in self._find_graph(scope).output)

    def _find_graph(self, scope: str) -> GraphProto:
        return look_up(self._graphs, scope, "such scope")

    def _visit_graph(self, graph: GraphProto, scope: str) -> None:
        self._graphs[scope] = graph
        self._define_tensors(graph, scope)
        for node in sort_nodes(graph):
            # Before the node itself: its subgraphs run first, and a node's order says so.
            for label, subgraph in iterate_subgraphs(node):
                inner = join_scope(scope, node.name, label)
                self._outer[inner] = scope
                self._parent_node[inner] = node.name
                self._subgraphs[node.name].append((label, inner))
                self._visit_graph(subgraph, inner)
            self._add_node(node, scope)
        for value in graph.output:
            tensor = self.resolve_tensor(value.name, scope)
            if tensor is not None:
                (self._outputs if tensor.scope == scope else self._captured).add(tensor)

    def _define_tensors(self, graph: GraphProto, scope: str) -> None:
        names = self._defined[scope] = collect_names(graph.input)
        stored = map_stored(graph)
        for name, tensor in stored.items():
            key = TensorId(name, scope)
            values = tensor.values if isinstance(tensor, SparseTensorProto) else tensor
            self._types[key] = (values.data_type, tuple(tensor.dims))
            # One that is an input, too, is a default: ORT folds it into nothing when the caller may feed another value.
            if scope or name not in names:
                self._initializers[key] = tensor
        names.update(stored)
        for node in graph.node:
            for output in filter(None, node.output):
                names.add(output)
                self._producer[TensorId(output, scope)] = node.name
            constant = (
                node.op_type == "Constant" and node.domain in OWN_DOMAINS and len(node.output) == 1
            )
            literal = find_constant_attribute(node) if constant else None
            if literal is not None:
                key = TensorId(node.output[0], scope)
                self._literals[key] = literal
                self._types[key] = read_constant_type(literal)
        for value in list_declared(graph):
            if value.name in names:
                self._learn_type(TensorId(value.name, scope), *read_declared_type(value))

    def _learn_type(self, key: TensorId, dtype: int, shape: Dims | None) -> None:
        # A tensor may be declared twice, as an output and in value_info: each may know dims that the other does not.
        old_dtype, old_shape = self._types.get(key, (0, None))
        if shape is not None and old_shape is not None and len(shape) == len(old_shape):
            shape = tuple(
                old if isinstance(old, int) or new is None else new
                for old, new in zip(old_shape, shape, strict=True)
            )
        self._types[key] = (old_dtype or dtype, old_shape if shape is None else shape)

    def _add_node(self, node: NodeProto, scope: str) -> None:
        ref = NodeRef(
            name=node.name,
            op_type=node.op_type,
            domain="" if node.domain == "ai.onnx" else node.domain,
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            attrs=Attributes(node),
            scope=scope,
            order=len(self.named),
        )
        self.named[node.name] = ref
        for k, name in enumerate(node.input):
            tensor = self.resolve_tensor(name, scope)
            if tensor is not None:
                self._consumers[tensor].append(Edge(node.name, k, scope))
                if tensor.scope != scope:
                    self._captured.add(tensor)

    def _constant_source(self, t: MaybeTensor) -> tuple[TensorId, Stored | AttributeProto] | None:
        # No endless walk: nodes that read their own results are refused when they are sorted.
        while t is not None:
            stored = self._initializers.get(t) or self._literals.get(t)
            if stored is not None:
                return t, stored
            maker = self.find_producer(t)
            t = self.find_input(maker) if maker is not None and maker.is_onnx("Identity") else None
        return None

    def _describe_value(self, name: str) -> ValueInfo:
        key = self.resolve_tensor(name, "") or TensorId(name)
        return ValueInfo(name, self.find_dtype(key), self.find_shape(key))


@cache_on_model
def get_index(model: ModelLike) -> GraphIndex:
    """Return the index of a model that is changed no more: of a light one, that made before."""
    return GraphIndex(model)


def find_opset(proto: ModelLike | FunctionProto) -> int:
    """The version of ONNX's own operators that a model or function imports; 0 when it does not."""
    return next((entry.version for entry in proto.opset_import if entry.domain in OWN_DOMAINS), 0)


def look_up(table: Mapping[str, _T], name: str, kind: str) -> _T:
    """The entry of a model's table. Raises ModelError with the nearest names. kind: of entry, for the message."""
    if name not in table:
        raise ModelError(name, f"the model has no {kind}", suggest_names(name, table), code="Q116")
    return table[name]
