"""Engines whose build is the graph that ONNX Runtime optimizes a model into; its nodes are the kernels.

Fusions make new nodes under new names; only tensors keep theirs. So a kernel computes the
nodes that lie, in the model, between the tensors it reads and those it writes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import onnx

from onnxq.backends.engine import ENGINE, LOG, Engine, Kernel, Kernels, KernelWords, Tensor, Tensors
from onnxq.graph import DEQUANTIZE, QUANTIZE, GraphIndex, MaybeNode, ModelLike, NodeRef, name_nodes
from onnxq.graph.qoperators import INTEGER_OPERATORS
from onnxq.graph.scopes import walk_graphs
from onnxq.graph.values import name_type
from onnxq.sites import Caution, MaybeTensor, Names, TensorId

# Kernels on integers. Every other one computes in the type of its tensors, or moves them.
INT8_KERNELS = frozenset(INTEGER_OPERATORS).union(
    ("ConvInteger", "DynamicQuantizeLSTM", "QAttention", "QLinearReduceMean")
)
# On float data and weights in few bits.
PACKED_KERNELS = ("MatMulNBits", "GatherBlockQuantized", "MatMulBnb4")
# ONNX's names of types that a proof calls otherwise, as TensorRT's do.
_WORDS = {"float": "float32", "double": "float64", "float8e4m3fn": "float8"}


def read_optimized(model: ModelLike, optimized: onnx.ModelProto) -> Kernels:
    """The optimized graph's nodes as kernels, in the order they run in; a body's belong to the kernel around it."""
    index = GraphIndex(model)
    after = GraphIndex(name_nodes(optimized))
    finder = _NodeFinder(index, after)
    return tuple(_make_kernel(node, finder, index, after) for node in after.nodes)


class _NodeFinder:
    """Finds the nodes of the model that lie between tensors of the optimized graph.

    Where ORT moves a quantization over Transpose and Reshape, the tensors on the way get new names; the nodes there
    keep theirs. Those stand for their tensors then.
    """

    def __init__(self, index: GraphIndex, after: GraphIndex) -> None:
        self._index = index
        self._after = after
        self._scopes: dict[str, set[str]] = {}
        for node in index.nodes:
            for name in filter(None, node.outputs):
                self._scopes.setdefault(name, set()).add(node.scope)
        # Tensors of the model that the optimized graph still computes.
        self._live = set[TensorId]()
        for node in after.nodes:
            self._live.update(self._find_made(node))

    def _find_original(self, name: str, scope: str) -> MaybeTensor:
        """The model's tensor of this name, made by a node. ORT renames bodies: a name that is the only one will do."""
        scopes = self._scopes.get(name, set())
        if scope in scopes:
            return TensorId(name, scope)
        return TensorId(name, next(iter(scopes))) if len(scopes) == 1 else None

    def _find_twin(self, kernel: NodeRef) -> MaybeNode:
        """The model's node of this name, when the kernel is that node still, or a fused form of it."""
        node = self._index.named.get(kernel.name)
        # "Conv" is a part of "FusedConv" and "QLinearConv".
        return node if node is not None and node.op_type.lower() in kernel.op_type.lower() else None

    def _find_made(self, kernel: NodeRef) -> list[TensorId]:
        """The model's tensors that a kernel makes: those of its outputs' names, else those of its twin."""
        made = [self._find_original(name, kernel.scope) for name in kernel.outputs if name]
        twin = self._find_twin(kernel)
        own = () if twin is None else twin.results
        return [tensor for tensor in made if tensor is not None] or list(own)

    def find_nodes(self, kernel: NodeRef) -> Names:
        """Names of the model's nodes that a kernel computes, in the order they run in."""
        twin = self._find_twin(kernel)
        stack = self._find_made(kernel) or [
            tensor for output in kernel.results for tensor in self._find_behind(output)
        ]
        found = {} if twin is None else {twin.name: twin.order}
        own = {TensorId(name, kernel.scope) for name in kernel.inputs}
        first = set(stack)
        seen = set()
        while stack:
            tensor = stack.pop()
            maker = self._index.find_producer(tensor)
            if maker is None or maker.name in seen:
                continue
            # A kernel begins at the tensors that it reads and at those that another kernel makes. But each reader has
            # a DequantizeLinear of its own inside it, though the model's one may be there for others.
            passed = tensor in self._live and maker.op_type != DEQUANTIZE
            if tensor not in first and (tensor in own or passed):
                continue
            seen.add(maker.name)
            found[maker.name] = maker.order
            stack += self._index.list_reads(maker)
        return tuple(sorted(found, key=found.__getitem__))

    def _find_behind(self, tensor: TensorId) -> Iterator[TensorId]:
        """The model's tensors that a tensor of ORT's own becomes, behind kernels that only pass it on."""
        readers = self._after.readers(tensor)
        if len(readers) == 1 and readers[0].op_type in _RELAYS:
            for result in readers[0].results:
                original = self._find_original(result.name, result.scope)
                if original is None:
                    yield from self._find_behind(result)
                else:
                    yield original


# Kernels that ORT puts behind one of its own: a tensor with a new name only passes through them.
_RELAYS = (
    "Transpose",
    "Cast",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "QuantizeLinear",
    "DequantizeLinear",
)


# Kernels that lay out, copy or convert data and compute nothing.
_MOVES = (
    "Transpose",
    "Cast",
    "Reshape",
    "ReorderInput",
    "ReorderOutput",
    "MemcpyFromHost",
    "MemcpyToHost",
)


def _make_kernel(
    node: NodeRef, finder: _NodeFinder, index: GraphIndex, after: GraphIndex
) -> Kernel:
    def describe(tensors: Iterable[TensorId]) -> Tensors:
        return tuple(_describe_tensor(tensor, index, after) for tensor in tensors)

    weights = describe(filter(after.is_constant, after.list_reads(node)))
    if node.op_type in PACKED_KERNELS and node.attrs.get("bits"):
        # Integers of few bits are packed into bytes, and an attribute says how many they are.
        stored = f"uint{node.attrs['bits']}"
        weights = tuple(
            replace(one, dtype=stored) if one.dtype == "uint8" else one for one in weights
        )

    return Kernel(
        name=node.name,
        kind=node.op_type,
        nodes=finder.find_nodes(node),
        outputs=describe(node.results),
        inputs=describe(after.list_computed(node).values()),
        weights=weights,
        tactic=f"{node.domain or 'ai.onnx'}:{node.op_type}",
        moves=node.op_type in _MOVES,
    )


def _describe_tensor(tensor: TensorId, index: GraphIndex, after: GraphIndex) -> Tensor:
    """As the optimized graph declares it; where it does not, as the model does."""
    shape = after.find_shape(tensor) or index.find_shape(tensor) or ()
    dtype = after.find_dtype(tensor) or index.find_dtype(tensor)
    word = name_type(dtype) if dtype else ""
    dims = tuple(dim if isinstance(dim, int) else -1 for dim in shape)
    return Tensor(name=tensor.name, dtype=_WORDS.get(word, word), shape=dims)


# The graph with the names of the model's tensors, before they are laid out anew.
OPTIMIZED = "optimized.onnx"
_ACTIVATIONS = (
    "Relu",
    "Clip",
    "LeakyRelu",
    "HardSwish",
    "HardSigmoid",
    "Sigmoid",
    "Gelu",
    "Elu",
    "PRelu",
    "Tanh",
    "Mul",
    "Mish",
)
_SIGNED = (
    "its input is int8, which ONNX Runtime on x86 turns into uint8 one tensor at a time and not everywhere: quantize "
    "activations to uint8"
)
_DEQUANTIZED = "its weight alone is quantized, and dequantized in each run"
# Operators that ONNX Runtime 1.32 reads the integers of a weight beside float data in, and those that keep it from it.
_ALONE = ("MatMul", "Gemm")
_BOUNDS = ("Relu", "Clip")


class GraphEngine(Engine):
    """An engine that runs the optimized graph. Its build leaves the graph as it runs, and the one before layouts."""

    packs_weights = False
    words = KernelWords(
        products=("gemm", "conv", "attention"),
        pools=("maxpool",),
        int8=INT8_KERNELS,
        packed=PACKED_KERNELS,
    )
    no_kernel = ("ConvTranspose", "GRU", "RNN", "Einsum", "LpPool", "GlobalMaxPool")
    saved = MappingProxyType({LOG: "build.log", ENGINE: "optimized.onnx"})

    def read_kernels(self, model: ModelLike, folder: Path) -> Kernels:
        """The nodes of the optimized graph."""
        return read_optimized(model, self.read_optimized(folder))

    def read_optimized(self, folder: Path) -> onnx.ModelProto:
        """The graph that the kernels are nodes of."""
        return onnx.load(folder / OPTIMIZED)

    def list_warnings(self, folder: Path) -> Iterator[Caution]:
        """Kernels are found in the graph before tensors are laid out anew; warn when that changes them."""
        before, after = (
            _count_integer_kernels(onnx.load(folder / name)) for name in (OPTIMIZED, ENGINE)
        )
        if before != after:
            counts = ", ".join(
                f"{kind} {before[kind]} -> {after[kind]}" for kind in sorted(before | after)
            )
            text = f"the last step of ONNX Runtime's optimization changes the integer kernels: {counts}"
            yield Caution("W112", text)

    def explain_weight(self, index: GraphIndex, node: NodeRef) -> str:
        """Why the integers of a weight alone are not read."""
        if node.op_type not in _ALONE:
            return f"{_DEQUANTIZED}: ONNX Runtime reads integers beside float data in {' and '.join(_ALONE)} alone"
        readers = index.readers(node.result)
        if len(readers) == 1 and readers[0].op_type in _BOUNDS:
            # It looks for the QuantizeLinear of an int8 product behind these, and gives up where none is.
            return f"{_DEQUANTIZED}: ONNX Runtime makes no MatMulNBits with {readers[0].op_type} right behind it"
        return _DEQUANTIZED

    def explain_result(self, index: GraphIndex, node: NodeRef) -> str:
        """Most operators are fused only when their result is quantized too."""
        # A MatMul becomes MatMulIntegerToFloat instead, which writes floats.
        if node.op_type == "MatMul":
            return ""
        between = []
        while True:
            readers = index.readers(node.result)
            if any(reader.op_type == QUANTIZE for reader in readers):
                break
            if len(readers) != 1 or readers[0].op_type not in _ACTIVATIONS:
                return "its result is not quantized, and ONNX Runtime fuses it only then"
            node = readers[0]
            between.append(node.op_type)
        if between:
            return f"{' and '.join(between)} between it and QuantizeLinear changes what the pair saturates by itself"
        return ""

    def explain_data(self, dtype: str) -> str:
        """Signed data keeps many products in float."""
        return _SIGNED if dtype == "int8" else ""


def _count_integer_kernels(optimized: onnx.ModelProto) -> Counter[str]:
    """How many nodes compute on integers, by operator, all scopes together."""
    kinds = (node.op_type for _, graph in walk_graphs(optimized.graph) for node in graph.node)
    return Counter(kind for kind in kinds if kind in INT8_KERNELS)
