"""A graph as placement, passes and reports ask about it; models of ONNX and traces of torch answer alike."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxq.arrays import Array, Integers, Interval, Shape, as_int64
from onnxq.sites import Edge, Edges, MaybeTensor, Names, Site, TensorId

QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"
# Quantizes on a scale that it computes from the values it reads.
DYNAMIC = "DynamicQuantizeLinear"
# The domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"
# Element types of ONNX that are floats of 16 bits and more: FLOAT, FLOAT16, DOUBLE, BFLOAT16.
FLOAT_TENSORS = frozenset({1, 10, 11, 16})
# Operators whose output holds the values of input 0 in other places or another shape.
LAYOUT_OPS = frozenset({"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity"})
# Those, and operators whose output holds some of the values of input 0, as integers where these are.
MOVING_OPS = LAYOUT_OPS.union(
    ("Slice", "Split", "Gather", "Expand", "MaxPool", "Resize", "DepthToSpace", "SpaceToDepth")
)
# Exact functions of whole numbers, which positions are computed by.
COUNTING_OPS = frozenset(
    {"Add", "Sub", "Mul", "Div", "Floor", "Ceil", "Round", "Min", "Max", "Clip", "Mod", "Cast"}
)
# Operators that draw numbers anew in every run.
RANDOM_OPS = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
# Operators whose results are not below zero.
POSITIVE_OPS = frozenset(
    {"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Exp", "Sqrt", "Softplus"}
)
# Of a node, by their names.
Attrs = Mapping[str, Any]
# Of each axis its size, its symbol, or None for an unknown one.
Dims = tuple[int | str | None, ...]


@dataclass(frozen=True)
class ValueInfo:
    """A tensor's name and declared type."""

    name: str
    # Of onnx.TensorProto, 0 unknown.
    dtype: int
    # None if the rank is unknown.
    shape: Dims | None

    @property
    def dims(self) -> Dims:
        """The sizes; () where the rank is unknown."""
        return self.shape or ()

    @property
    def rank(self) -> int:
        """The number of axes; 0 where it is unknown."""
        return len(self.dims)


ValueInfos = tuple[ValueInfo, ...]


@dataclass(frozen=True)
class NodeRef:
    """One node."""

    name: str
    op_type: str
    # "" for ONNX's own, which files may also call ai.onnx.
    domain: str
    # "" where an optional one is left out, as in the file.
    inputs: Names
    outputs: Names
    # int, float, str, tuples of these, or read-only arrays, decoded when asked for; subgraphs are not among them.
    attrs: Attrs = field(compare=False, repr=False)
    scope: str
    # Position in the order the model runs in, all scopes together: a subgraph's nodes come before its parent.
    order: int = field(compare=False)

    @property
    def title(self) -> str:
        """Its name and its operator, for messages."""
        return f"{self.name} ({self.op_type})"

    @property
    def result(self) -> TensorId:
        """The tensor of the first output."""
        return TensorId(self.outputs[0], self.scope)

    @property
    def results(self) -> tuple[TensorId, ...]:
        """The tensors of all outputs that are not left out."""
        return tuple(TensorId(name, self.scope) for name in self.outputs if name)

    @property
    def is_transposed(self) -> bool:
        """True for a Gemm that transposes its second input."""
        return bool(self.attrs.get("transB", 0))

    @property
    def padding_mode(self) -> str:
        """The attribute auto_pad, which some exporters write empty where they mean none."""
        return str(self.attrs.get("auto_pad") or "NOTSET")

    @property
    def transposes_data(self) -> bool:
        """True for a Gemm that transposes its first input."""
        return bool(self.attrs.get("transA", 0))

    @property
    def groups(self) -> int:
        """Of a convolution."""
        return self.read_int("group", 1)

    def read_int(self, name: str, default: int) -> int:
        """An attribute that is a whole number, or the default that ONNX gives it."""
        return int(self.attrs.get(name, default))

    def read_float(self, name: str, default: float) -> float:
        """An attribute that is a number, or the default that ONNX gives it."""
        return float(self.attrs.get(name, default))

    def name_input(self, k: int) -> str:
        """The name of input k; "" for one that is left out."""
        return self.inputs[k] if k < len(self.inputs) else ""

    def make_result(self, k: int) -> TensorId:
        """The tensor of output k."""
        return TensorId(self.outputs[k], self.scope)

    def make_edge(self, k: int) -> Edge:
        """Input k as a site."""
        return Edge(self.name, k, self.scope)

    def list_edges(self) -> list[Edge]:
        """All inputs as sites, those that are left out too."""
        return [self.make_edge(k) for k in range(len(self.inputs))]

    def is_onnx(self, *op_types: str) -> bool:
        """True for one of these operators of ONNX itself, not for one of the same name in another domain."""
        return self.op_type in op_types and not self.domain

    def looks_up(self, k: int) -> bool:
        """True when input k is one of which the node gathers rows, along axis 0."""
        return self.is_onnx("Gather") and k == 0 and not self.attrs.get("axis", 0)


NodeRefs = tuple[NodeRef, ...]
# None for a node that is not there.
MaybeNode = NodeRef | None


class Graph(ABC):
    """Nodes in ONNX's operators and layouts, in the order in which they run.

    Where a tensor is asked about, None stands for one that is not there: nothing makes or reads it, nothing is known.
    """

    @property
    @abstractmethod
    def nodes(self) -> NodeRefs:
        """All nodes, in the order in which they run."""

    @property
    @abstractmethod
    def inputs(self) -> ValueInfos:
        """The tensors that callers feed."""

    @property
    @abstractmethod
    def scopes(self) -> Names:
        """The main graph, "", and the bodies inside it."""

    def is_looped(self, scope: str) -> bool:
        """True for a body that runs any number of times, whose tensors no run shows."""
        return False

    @abstractmethod
    def find_node(self, name: str) -> NodeRef:
        """The node of this name."""

    @abstractmethod
    def resolve_tensor(self, tensor: str, scope: str) -> MaybeTensor:
        """The tensor that this name means when read from `scope`; None for "" and for a name nobody defines."""

    @abstractmethod
    def find_producer(self, t: MaybeTensor) -> MaybeNode:
        """The node that makes the tensor; None for inputs, initializers and unknown tensors."""

    @abstractmethod
    def list_consumers(self, t: MaybeTensor) -> Edges:
        """Every node input that reads the tensor, also from inner scopes, in the order the model runs in."""

    @abstractmethod
    def is_output(self, t: MaybeTensor) -> bool:
        """True when the tensor is an output of the graph or subgraph it is defined in."""

    @abstractmethod
    def is_constant(self, t: MaybeTensor) -> bool:
        """True when the tensor has a value before the graph runs."""

    @abstractmethod
    def find_constant(self, t: MaybeTensor) -> Array | None:
        """The read-only value of a constant tensor, else None."""

    @abstractmethod
    def find_shape(self, t: MaybeTensor) -> Dims | None:
        """The declared or inferred shape; None when even the rank is unknown."""

    @abstractmethod
    def find_dtype(self, t: MaybeTensor) -> int:
        """The declared or inferred onnx.TensorProto dtype, 0 when unknown."""

    def find_input(self, node: MaybeNode, k: int = 0) -> MaybeTensor:
        """The tensor that a node reads at input k; None where it has none there."""
        return None if node is None else self.resolve_tensor(node.name_input(k), node.scope)

    def find_at(self, site: Site | None) -> MaybeTensor:
        """The tensor of a site; None for an input that is not connected."""
        if site is None or isinstance(site, TensorId):
            return site
        return self.find_input(self.find_node(site.node), site.index)

    def find_sizes(self, t: MaybeTensor) -> Shape | None:
        """The shape of a tensor whose sizes are all known as numbers; None for another."""
        shape = self.find_shape(t)
        sizes = tuple(size for size in shape or () if isinstance(size, int))
        return None if shape is None or len(sizes) < len(shape) else sizes

    def find_rank(self, t: MaybeTensor) -> int | None:
        """The rank of a tensor where it is known."""
        shape = self.find_shape(t)
        return None if shape is None else len(shape)

    def list_inputs(self, node: NodeRef) -> list[MaybeTensor]:
        """The tensor of each input of a node; None where one is left out."""
        return [self.resolve_tensor(name, node.scope) for name in node.inputs]

    def list_reads(self, node: NodeRef) -> list[TensorId]:
        """The tensors that a node reads, without the inputs that are left out."""
        return [tensor for tensor in self.list_inputs(node) if tensor is not None]

    def list_computed(self, node: NodeRef) -> dict[int, TensorId]:
        """The computed tensors that a node reads, by the number of the input."""
        tensors = enumerate(self.list_inputs(node))
        return {k: t for k, t in tensors if t is not None and not self.is_constant(t)}

    def input_value(self, node: MaybeNode, k: int) -> Array | None:
        """The value of a constant input k; None for another, and where there is none."""
        return self.find_constant(self.find_input(node, k))

    def read_integers(self, node: NodeRef, name: str, k: int) -> Integers | None:
        """Integers that are an attribute in older opsets and the constant input k in newer ones, as one flat array.

        None where they are computed, and where they are left out.
        """
        value = node.attrs.get(name)
        if value is None:
            value = self.input_value(node, k)
        return None if value is None else as_int64(value).ravel()

    def read_clip(self, node: NodeRef) -> Interval | None:
        """Both ends of a Relu or Clip, infinite where it has none; None where one is computed."""
        if node.op_type == "Relu":
            return 0.0, np.inf
        ends = []
        # Inputs from opset 11 on, attributes before.
        for k, name, missing in ((1, "min", -np.inf), (2, "max", np.inf)):
            if self.find_input(node, k) is None:
                # A call of torch has None where it has no end.
                end = node.attrs.get(name)
                ends.append(missing if end is None else float(end))
                continue
            value = self.input_value(node, k)
            if value is None or value.size != 1:
                return None
            ends.append(value.item())
        return ends[0], ends[1]

    def input_shape(self, node: MaybeNode, k: int = 0) -> Dims | None:
        """The shape of input k; None where even the rank is unknown, and where there is none."""
        return self.find_shape(self.find_input(node, k))

    def maker(self, node: MaybeNode, k: int = 0, *op_types: str) -> MaybeNode:
        """The node that makes input k; None for inputs of the model, initializers, and where there is none.

        op_types: None for a node of any other operator as well.
        """
        maker = self.find_producer(self.find_input(node, k))
        return None if op_types and maker is not None and maker.op_type not in op_types else maker

    def makers(self, node: NodeRef) -> list[NodeRef]:
        """The nodes that make what the node reads, in the order of its inputs."""
        makers = map(self.find_producer, self.list_reads(node))
        return [maker for maker in makers if maker is not None]

    def readers(self, t: MaybeTensor) -> list[NodeRef]:
        """The nodes that read the tensor, in the order the model runs in; one that reads it twice is there twice."""
        return [self.find_node(edge.node) for edge in self.list_consumers(t)]

    def is_kept(self, t: MaybeTensor) -> bool:
        """True when others than the nodes of its own graph see the tensor."""
        return self.is_output(t)

    def find_sole_reader(self, t: MaybeTensor) -> Edge | None:
        """The one input that reads the tensor, in the tensor's own graph, which does not give it out."""
        edges = self.list_consumers(t)
        return edges[0] if len(edges) == 1 and not self.is_kept(t) else None

    def find_reader(self, t: MaybeTensor, *op_types: str) -> tuple[NodeRef, int] | None:
        """Node and number of the input of `find_sole_reader`; None for another, and for a node of any other operator.

        op_types: of ONNX's own operators.
        """
        edge = self.find_sole_reader(t)
        if edge is None:
            return None
        node = self.find_node(edge.node)
        return None if op_types and not node.is_onnx(*op_types) else (node, edge.index)

    def find_follower(self, node: MaybeNode, *op_types: str) -> MaybeNode:
        """The node of `find_reader` for the first result of a node."""
        reader = None if node is None else self.find_reader(node.result, *op_types)
        return None if reader is None else reader[0]

    def walk_back(self, t: MaybeTensor, op_types: Container[str]) -> Iterator[TensorId]:
        """The tensor, then those that it was made of by ONNX's operators of these types, each through its input 0."""
        while t is not None:
            yield t
            maker = self.find_producer(t)
            if maker is None or maker.domain or maker.op_type not in op_types:
                return
            t = self.find_input(maker)

    def find_origin(self, t: MaybeTensor, op_types: Container[str]) -> MaybeTensor:
        """The last tensor of `walk_back`."""
        *_, origin = (None, *self.walk_back(t, op_types))
        return origin


def counts_in_floats(graph: Graph, node: NodeRef) -> bool:
    """True for a node between a Cast from integers and a Cast back, by which exporters count and compute positions."""
    passing = COUNTING_OPS | LAYOUT_OPS
    # The type 0 is not known.
    floats = {0, *FLOAT_TENSORS}
    if node.op_type not in passing:
        return False
    makers = [node]
    for maker in makers:
        for tensor in graph.list_computed(maker).values():
            if graph.find_dtype(tensor) in floats:
                source = graph.find_producer(tensor)
                if source is None or source.op_type not in passing:
                    return False
                makers += [source] if source not in makers else []
    readers = [node]
    for reader in readers:
        if graph.find_dtype(reader.result) not in floats:
            return True
        behind = graph.readers(reader.result)
        readers += [one for one in behind if one.op_type in passing and one not in readers]
    return False
