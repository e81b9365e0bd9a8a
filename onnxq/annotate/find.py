"""Every quantize/dequantize pair of every scope, of any tool, and the name of its site.

x -> [Clip ->] QuantizeLinear -> [Clip ->] DequantizeLinear       (the second Clip on integers: QCDQ)
x -> DynamicQuantizeLinear -> DequantizeLinear                    (scale and zero point computed at each run)
constant -> [Clip ->] DequantizeLinear
packed constant -> Cast -> DequantizeLinear                       (4 bits in the file, a byte where it is computed)
table of rows -> Transpose -> DequantizeLinear                   (a weight that is the transpose of a table)
constant table -> Gather -> Cast -> Mul by gathered scales        (rows of int8)
constant table -> GatherBlockQuantized                            (rows of 4 bits in blocks)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from onnx import TensorProto

from onnxq.arrays import Array
from onnxq.graph import GraphIndex, MaybeNode, NodeRef
from onnxq.graph.base import DEQUANTIZE, DYNAMIC, QUANTIZE, NodeRefs
from onnxq.sites import Edge, MaybeTensor, Names, Role, Site, TensorId, drop_repeats, split_scope

# ONNX Runtime has operators of these names in a domain of its own.
_DOMAINS = ("", "com.microsoft")
# ONNX Runtime's Gather of rows in few bits.
LOOKUP = "GatherBlockQuantized"
# Endings that tools give to the names of a dequantize node and of a weight's stored integers, those of onnxq first.
_NODE_ENDINGS = (f"/{DEQUANTIZE}", f"_{DEQUANTIZE}")
_STORED_ENDINGS = ("/quantized", "_quantized", "/packed")
_PACKED = (TensorProto.INT4, TensorProto.UINT4)
# An input as a site: node, number of the input.
_EDGE = re.compile(r"(.+)/in(\d+)")


@dataclass(frozen=True)
class Chain:
    """The nodes of one pair, and the float (or stored integer) tensor in front of them.

    outer: a float Clip that feeds nothing but the quantize node; inner: an integer Clip behind it, the Cast that
    unpacks a constant of 4 bits, or the Gather in front of a Mul that dequantizes rows.
    """

    source: MaybeTensor
    outer: MaybeNode
    quantize: MaybeNode
    inner: MaybeNode
    dequantize: MaybeNode

    @property
    def last(self) -> NodeRef:
        """The dequantize node, or the quantize node of a pair without one."""
        node = self.dequantize or self.quantize
        # find_chains makes none without both.
        assert node is not None
        return node

    @property
    def lookup(self) -> MaybeNode:
        """The node that gathers the rows of a table; None for other pairs."""
        if self.dequantize is None or is_dequantize(self.dequantize):
            return None
        return self.inner or self.dequantize

    @property
    def nodes(self) -> NodeRefs:
        """The nodes of the pair, in the order in which they run."""
        return tuple(filter(None, (self.outer, self.quantize, self.inner, self.dequantize)))

    @property
    def names(self) -> list[str]:
        """The names of the nodes, the last one first: of several notes that of the dequantize node counts."""
        return [node.name for node in reversed(self.nodes)]

    @property
    def inner_op(self) -> str:
        """The operator of `inner`; "" without one."""
        return "" if self.inner is None else self.inner.op_type


def is_quantize(node: MaybeNode) -> bool:
    """QuantizeLinear of ONNX or of com.microsoft."""
    return _is_op(node, QUANTIZE)


def is_dynamic(node: MaybeNode) -> bool:
    """DynamicQuantizeLinear."""
    return _is_op(node, DYNAMIC)


def is_dequantize(node: MaybeNode) -> bool:
    """DequantizeLinear of ONNX or of com.microsoft."""
    return _is_op(node, DEQUANTIZE)


def _is_op(node: MaybeNode, *op_types: str) -> bool:
    return node is not None and node.op_type in op_types and node.domain in _DOMAINS


def find_chains(index: GraphIndex) -> Iterator[Chain]:
    """One chain for each dequantize node, and for each quantize node without one, in the order of execution."""
    paired = set()
    quantizers = []
    chains = []
    for node in index.nodes:
        if _is_op(node, QUANTIZE, DYNAMIC):
            quantizers.append(node)
        chains += _find_lookup(index, node)
        if not is_dequantize(node):
            continue
        stored = index.find_input(node)
        # A Max stands for a Clip where only the lowest level is left out.
        inner = _find_producer(index, stored, "Clip", "Max")
        source = stored if inner is None else index.find_input(inner)
        quantize = _find_producer(index, source, QUANTIZE, DYNAMIC)
        # A Clip in front of a DequantizeLinear is the pair's only behind a QuantizeLinear or a constant.
        if quantize is None and not index.is_constant(source):
            inner = None
            source = stored
        if inner is None and quantize is None:
            inner, source = _find_packed(index, source)
        if quantize is not None:
            # One quantize node may feed several dequantize nodes, each a chain of its own.
            paired.add(quantize.name)
        chains.append(_make_chain(index, quantize, inner, node, source))
    chains += [
        _make_chain(index, node, None, None, None) for node in quantizers if node.name not in paired
    ]
    # Pairs stand where they begin, and those without a dequantize node were added last.
    yield from sorted(chains, key=lambda chain: (chain.quantize or chain.last).order)


def _find_lookup(index: GraphIndex, node: NodeRef) -> list[Chain]:
    """The chain that ends at a node which dequantizes rows of a constant table; [] at any other."""
    gather = node if node.op_type == LOOKUP else None
    if node.op_type == "Mul" and read_row_scale(index, node) is not None:
        gather = index.maker(index.maker(node, 0, "Cast"))
    table = index.find_input(gather)
    if gather is None or not index.is_constant(table):
        return []
    if gather is node:
        return [Chain(table, None, None, None, node)]
    rows = gather.looks_up(0) and index.find_dtype(table) == TensorProto.INT8
    return [Chain(table, None, None, gather, node)] if rows else []


def read_row_scale(index: GraphIndex, node: NodeRef) -> Array | None:
    """The scales that a Mul's second factor is gathered from, one a row; None for other factors."""
    gather = index.maker(index.maker(node, 1, "Unsqueeze"))
    scale = index.input_value(gather, 0) if gather is not None and gather.looks_up(0) else None
    return scale if scale is not None and scale.ndim == 1 and scale.dtype.kind == "f" else None


def _make_chain(
    index: GraphIndex,
    quantize: MaybeNode,
    inner: MaybeNode,
    dequantize: MaybeNode,
    stored: MaybeTensor,
) -> Chain:
    if quantize is None:
        return Chain(stored, None, None, inner, dequantize)
    source = index.find_input(quantize)
    # A Clip with other readers belongs to the network.
    outer = _find_producer(index, source, "Clip")
    if outer is not None and is_read_once(index, source):
        return Chain(index.find_input(outer), outer, quantize, inner, dequantize)
    return Chain(source, None, quantize, inner, dequantize)


def is_read_once(index: GraphIndex, tensor: MaybeTensor) -> bool:
    """True where one input alone reads the tensor, in any scope, and its graph does not give it out."""
    return len(index.list_consumers(tensor)) == 1 and not index.is_output(tensor)


def _find_packed(index: GraphIndex, stored: MaybeTensor) -> tuple[MaybeNode, MaybeTensor]:
    """(Cast or Transpose, constant) for one of 4 bits behind a Cast, or integers that are turned; else (None, it)."""
    maker = _find_producer(index, stored, "Cast", "Transpose")
    source = index.find_input(maker)
    if maker is None or not index.is_constant(source):
        return None, stored
    packed = maker.op_type == "Transpose" or index.find_dtype(source) in _PACKED
    return (maker, source) if packed else (None, stored)


def _find_producer(index: GraphIndex, tensor: MaybeTensor, *op_types: str) -> MaybeNode:
    node = index.find_producer(tensor)
    return node if _is_op(node, *op_types) else None


def list_operators(index: GraphIndex, chain: Chain) -> Names:
    """Operators that read the dequantized tensor, each once; without readers, the one that makes it."""
    if chain.lookup is not None:
        return ("Gather",)
    readers = index.readers(chain.last.result)
    producer = index.find_producer(chain.source)
    if not readers and producer is not None:
        readers = [producer]
    return drop_repeats(reader.op_type for reader in readers)


def find_role(index: GraphIndex, chain: Chain, storage: str) -> Role:
    """The role of the chain's tensor; any constant but an int32 one is a weight."""
    # Integers of 32 bits are only ever biases, in the units of an accumulator.
    if storage == "int32":
        return Role.BIAS
    if index.is_constant(chain.source):
        return Role.WEIGHT
    return (
        Role.OUTPUT
        if chain.dequantize is not None and index.is_output(chain.last.result)
        else Role.ACTIVATION
    )


def find_site(index: GraphIndex, chain: Chain, noted: str | None) -> Site:
    """The identity of the chain's site: as noted by onnxq, else found from the graph.

    noted: the text of the site in a note, None without one. A pair with one reader, beside other pairs of the same
    tensor, is that reader's edge. A model output is called by the name of the dequantized tensor. The float name of a
    stored weight is not in the file; it is guessed from the names of its node and its integers.
    """
    result = chain.last.result
    if noted:
        return _parse_site(index, noted)
    if chain.quantize is None:
        return TensorId(_guess_site_name(chain), chain.last.scope)
    if chain.dequantize is not None and index.is_output(result):
        return result
    if chain.source is None:
        return TensorId(chain.quantize.inputs[0], chain.quantize.scope)
    edges = index.list_consumers(result)
    if len(edges) == 1 and _count_pairs(index, chain.source) > 1:
        return edges[0]
    return chain.source


def _count_pairs(index: GraphIndex, tensor: TensorId) -> int:
    """Number of quantize nodes that read the tensor, also through a Clip."""
    edges = list(index.list_consumers(tensor))
    for edge in index.list_consumers(tensor):
        node = index.find_node(edge.node)
        if node.op_type == "Clip" and edge.index == 0:
            edges += index.list_consumers(node.result)
    return sum(
        edge.index == 0 and _is_op(index.find_node(edge.node), QUANTIZE, DYNAMIC) for edge in edges
    )


def _guess_site_name(chain: Chain) -> str:
    node = chain.last
    for ending in _NODE_ENDINGS:
        # A node that had no name got one from its own output, which says nothing of the site.
        if node.name.endswith(ending) and node.name != node.outputs[0] + ending:
            return node.name.removesuffix(ending)
    name = chain.source.name if chain.source is not None else node.inputs[0]
    for ending in _STORED_ENDINGS:
        name = name.removesuffix(ending)
    return name


def _parse_site(index: GraphIndex, text: str) -> Site:
    scope, name = split_scope(text, index.scopes)
    edge = _EDGE.fullmatch(name)
    # A tensor may be called like an input of a node.
    if edge is not None and edge[1] in index.named:
        return Edge(edge[1], int(edge[2]), scope)
    return TensorId(name, scope)
