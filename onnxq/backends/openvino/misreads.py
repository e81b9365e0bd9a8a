"""Pairs that OpenVINO 2026.4 loses, moves or computes wrongly: products and moves that get none, with the reason."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from onnxq.arrays import Array
from onnxq.backends import surroundings
from onnxq.backends.base import Candidate, Reason
from onnxq.graph import NodeRef, walk_from
from onnxq.graph.base import POSITIVE_OPS, Graph
from onnxq.sites import MaybeTensor, Names, NameSet, TensorId

T = TypeVar("T")
# Activations that the kernel of a product computes on its result.
ACTIVATIONS = (
    "Relu",
    "Clip",
    "LeakyRelu",
    "HardSwish",
    "Sigmoid",
    "Gelu",
    "Elu",
    "Tanh",
    "Mish",
)
_GATES = ("Sigmoid", "HardSigmoid")
_CURVED = frozenset((*ACTIVATIONS, *_GATES)).difference(("Relu", "Clip", "LeakyRelu"))
_RECTIFIERS = ("Relu", "LeakyRelu", "PRelu")
_FACTORS = ("Mul", "Div", "BatchNormalization")
# What OpenVINO computes together with the pair behind it.
_JOINED = (
    *_FACTORS,
    "Add",
    "Sub",
    *ACTIVATIONS,
)
# Operators whose results have the sizes that they read, from this input on.
_SIZING = {"ConstantOfShape": 0, "Range": 0, "Reshape": 1, "Slice": 1}
_MATRIX_PRODUCTS = ("Gemm", "MatMul")
_PRODUCTS = ("Conv", "ConvTranspose", *_MATRIX_PRODUCTS)
_EXTREMES = ("ReduceMax", "ReduceMin", "ReduceProd", "GlobalMaxPool")
# What OpenVINO moves the scales of a convolution's channels past, as past constant factors.
_SCALED = (
    *_RECTIFIERS,
    "Clip",
    "MaxPool",
    "AveragePool",
    "Neg",
    "Pad",
    "Split",
    *surroundings.MOVES,
)
_PASSED = (*_SCALED, "Concat")
# Nodes whose results are values of what they read, or means of these.
_KEEPS_SIGN = ("Concat", "MaxPool", "AveragePool", "Split", *surroundings.MOVES)


def check_conv(c: Candidate) -> Reason:
    """As for any product; besides, OpenVINO 2026.4 loses or moves the scales of channels where there is no bias.

    It refuses the network then, or computes something else without a word. A bias keeps the scales where they are, but
    for one of zeros, which goes when OpenVINO loads the file.
    """
    bias = c.constant(2)
    bare = c.tensor(2) is None or (bias is not None and not bias.any())
    reason = (
        _explain_lost_scales(c) or _explain_moved_scales(c, c.node, rectified=False)
        if bare
        else None
    )
    misread = reason or _explain_read_sizes(c) or _explain_misread_data(c)
    return misread or surroundings.check_weighted(c)


def _find_once(find: Callable[[Graph], frozenset[T]]) -> Callable[[Graph], frozenset[T]]:
    """Keep what is found in a graph as long as that is there: every product of it asks."""
    by_graph: WeakKeyDictionary[Graph, frozenset[T]] = WeakKeyDictionary()

    @wraps(find)
    def find_first(index: Graph) -> frozenset[T]:
        if index not in by_graph:
            by_graph[index] = find(index)
        return by_graph[index]

    return find_first


def _explain_read_sizes(c: Candidate) -> Reason:
    """Why the scales get lost: sizes of a tensor beside or in front of it are read, and change from run to run."""
    # Those of one spatial axis keep their scales.
    if c.rank(0) == 3 or _is_curved(c):
        return None
    if c.node not in _find_sized_nodes(c.index):
        return None
    return (
        "OpenVINO loses the scales of integer convolutions around a tensor whose changing height or width is read; "
        "sizes of inputs that are fixed (`fix`) avoid it"
    )


def _is_curved(c: Candidate) -> bool:
    """True where activations that scales cannot be moved past are all that reads the result, or a multiple of it."""
    multiples = [
        node
        for node in c.index.readers(c.node.result)
        if node.op_type == "Mul" and _find_factor(Candidate(node, c.index, c.shapes)) is not None
    ]
    nodes = {reader for node in (c.node, *multiples) for reader in c.index.readers(node.result)}
    readers = [node for node in nodes.difference(multiples) if node.op_type != "Shape"]
    gates = {node.outputs[0] for node in readers if node.op_type in _GATES}
    return all(node.op_type in _CURVED or gates & set(node.inputs) for node in readers)


@_find_once
def _find_sized_nodes(index: Graph) -> frozenset[NodeRef]:
    """The nodes behind a tensor of which sizes are read that change and size others, and the products that make it."""
    sized = set()
    for node in index.nodes:
        maker = index.maker(node)
        if node.op_type != "Shape" or maker is None:
            continue
        readers = _find_sized_ops(index, node)
        shape = index.input_shape(node)
        # A Reshape may read the number of samples.
        sizes = (None,) if shape is None else shape[1:] if readers == {"Reshape"} else shape
        if readers and not all(isinstance(size, int) for size in sizes):
            makers = walk_from(
                [maker], lambda node: () if node.op_type in _PRODUCTS else index.makers(node)
            )
            sized |= walk_from(makers, lambda node: index.readers(node.result))
    return frozenset(sized)


def _find_sized_ops(index: Graph, shape: NodeRef) -> NameSet:
    """The kinds of operators that take what is computed from a shape for the sizes of their results."""
    numbers = walk_from([shape], partial(_list_numbers, index))
    edges = [edge for node in numbers for edge in index.list_consumers(node.result)]
    ops = [(index.find_node(edge.node).op_type, edge.index) for edge in edges]
    return frozenset(op for op, at in ops if at >= _SIZING.get(op, math.inf))


def _list_numbers(index: Graph, node: NodeRef) -> Iterator[NodeRef]:
    """The readers of a node that compute vectors and numbers of it, as sizes are."""
    for reader in index.readers(node.result):
        shape = index.find_shape(reader.result)
        if shape is not None and len(shape) <= 1:
            yield reader


def explain_multiplied(tensor: MaybeTensor, index: Graph) -> Reason:
    """Why a tensor takes no pair: a product of activations reads it, moved or rectified, as its other operand is read.

    Where both come from pairs whose zero point is that of no shift (128), OpenVINO 2026.4 multiplies in integers. Its
    sums of 16 bits overflow with AVX2 then, and the values of a Pad in between are unset.
    """
    if tensor not in _find_multiplied(index):
        return None
    return "OpenVINO multiplies activations from two pairs in sums of 16 bits, which overflow with AVX2"


@_find_once
def _find_multiplied(index: Graph) -> frozenset[TensorId]:
    """The tensors that come to the first operand of products of activations, where pairs may stand before both."""
    tensors = set()
    for product in index.nodes:
        operands = surroundings.list_computed_inputs(index, product)[:2]
        if product.op_type not in _MATRIX_PRODUCTS or len(operands) < 2:
            continue
        sources = [_walk_sources(index, operand, _PASSED) for operand in operands]
        if all(any(_may_be_paired(index, tensor) for tensor in source) for source in sources):
            tensors |= sources[0]
    return frozenset(tensors)


def _may_be_paired(index: Graph, tensor: TensorId) -> bool:
    """True where an operator reads the tensor that is no product of activations."""
    return any(
        reader.op_type not in _MATRIX_PRODUCTS or index.is_constant(index.find_input(reader, 1))
        for reader in index.readers(tensor)
    )


def _walk_sources(index: Graph, tensor: TensorId, ops: Names) -> set[TensorId]:
    """A tensor, and those that it comes from through these operators."""

    def list_sources(tensor: TensorId) -> Iterable[TensorId]:
        maker = index.find_producer(tensor)
        if maker is None or maker.op_type not in ops:
            return ()
        return index.list_computed(maker).values()

    return walk_from([tensor], list_sources)


def _walk_joined(c: Candidate) -> Iterator[Candidate]:
    """The operators in front of a product's data, to the first that OpenVINO does not compute with the pair behind."""
    tensor = c.tensor(0)
    while (maker := c.index.find_producer(tensor)) is not None:
        yield Candidate(maker, c.index, c.shapes)
        computed = surroundings.list_computed_inputs(c.index, maker)
        if maker.op_type not in _JOINED or len(computed) != 1:
            return
        tensor = computed[0]


def _explain_lost_scales(c: Candidate) -> Reason:
    """Why the scales get lost: sizes change from run to run, and several nodes read the result, but no one Swish."""
    readers = c.index.list_consumers(c.node.result)
    if c.index.find_sizes(c.tensor(0)) is not None or len(readers) < 2 or find_swish(c) is not None:
        return None
    return (
        "OpenVINO loses the scales of an integer convolution "
        "without a bias that several nodes read, while sizes change; sizes of inputs that are fixed (`fix`) avoid it"
    )


def _explain_moved_scales(c: Candidate, maker: NodeRef, rectified: bool) -> Reason:
    """Why the scales of the candidate, which come past `maker`, are misread. rectified: past an activation, too."""
    for node in c.index.readers(maker.result):
        reader = Candidate(node, c.index, c.shapes)
        op = reader.node.op_type
        if op == "Gather" and reader.attr("axis", 0) != 1 and reader.rank(1) != 1:
            return "OpenVINO computes a Gather of single places wrongly behind integer convolutions without a bias"
        factor = _find_factor(reader) if op in _FACTORS else None
        negative = factor is not None and bool((factor < 0).any())
        if rectified and (negative or op == "Neg"):
            return "OpenVINO moves negative factors in front of the activation of integer convolutions without a bias"
        if op in _SCALED or factor is not None:
            reason = _explain_moved_scales(c, reader.node, rectified or op in _RECTIFIERS)
            if reason is not None:
                return reason
    return None


def _find_factor(c: Candidate) -> Array | None:
    """The constant that values are multiplied or divided by."""
    factors = map(c.constant, (0, 1))
    return next((factor for factor in factors if factor is not None), None)


# Of the last axis; from the sources of 2026.4.
_MOST_STRIDE = 3


def check_transposed(c: Candidate) -> Reason:
    """Why a ConvTranspose is not computed in integers: groups, strides, operands, or data that may be negative.

    Where a stride is larger than its kernel, OpenVINO 2026.4 computes it wrongly between pairs (2 dB).
    """
    if c.node.groups != 1:
        return "transposed convolutions of several groups have no integer kernel"
    # A computed weight may be of unknown sizes.
    kernel = (c.shape(1) or ())[2:]
    strides = c.attr("strides", [1] * len(kernel))
    if max(strides[-1:], default=1) > _MOST_STRIDE or any(
        stride > size for size, stride in zip(kernel, strides, strict=False)
    ):
        return "transposed convolutions of such strides have no integer kernel"
    if not _is_positive(c.index, c.tensor(0)):
        return "a transposed convolution reads integers without a zero point, of data that are never negative"
    return surroundings.check_weighted(c)


def _is_positive(index: Graph, tensor: MaybeTensor) -> bool:
    """True where no value of a tensor is negative: those of activations, as they are moved, pooled and joined."""
    if tensor is None:
        return False
    makers = map(index.find_producer, _walk_sources(index, tensor, _KEEPS_SIGN))
    return all(
        maker is not None and (maker.op_type in _KEEPS_SIGN or _makes_positive(index, maker))
        for maker in makers
    )


def _makes_positive(index: Graph, node: NodeRef) -> bool:
    """True for an activation without negative results."""
    lowest = index.input_value(node, 1) if node.op_type == "Clip" else None
    return node.op_type in POSITIVE_OPS or (lowest is not None and bool((lowest >= 0).all()))


def check_gemm(c: Candidate) -> Reason:
    """Why a Gemm is no product in integers: its operands, or what OpenVINO makes of a pair on its data."""
    return _explain_misread_data(c) or surroundings.check_gemm(c)


def _explain_misread_data(c: Candidate) -> Reason:
    """Why a pair on the data would be misread, by what OpenVINO 2026.4 makes of the operators in front of it.

    A reduction to extremes takes the pair into its kernel, and is wrong. A mean without its axes, axis 1 among them,
    takes the factors of other channels.
    """
    parts = list(_walk_joined(c))
    if not parts:
        return None
    *between, last = parts
    kind = last.node.op_type
    if kind in _EXTREMES:
        return f"OpenVINO computes a pair wrongly behind a {kind}"
    if kind == "Concat" and c.node.op_type != "Conv":
        return _explain_concat(last, passed=bool(between))
    if kind == "MatMul" and between and between[-1].node.op_type == "Add":
        # Its bias.
        between = between[:-1]
    factors = map(_find_factor, between)
    scaled = any(factor is not None and factor.size > 1 for factor in factors)
    if scaled and kind.startswith("Reduce") and _drops_channels(last):
        return "OpenVINO computes a pair wrongly behind a mean and factors of channels"
    if scaled and kind in _MATRIX_PRODUCTS and _is_chain(c, last, between):
        return (
            "OpenVINO computes a pair wrongly, in one thread, "
            "behind a small product and factors or summands of channels"
        )
    return None


# Of products that OpenVINO 2026.4 computes in one kernel in one thread, channels and rows; measured.
_CHAIN_CHANNELS = 256
_CHAIN_ROWS = 15
_CHAINED = ("Relu", "Add", "Sub", *_FACTORS)


def _is_chain(c: Candidate, product: Candidate, between: Iterable[Candidate]) -> bool:
    """True where one kernel computes a product, what is between, and the candidate; of all else it makes several."""
    rows = c.index.find_sizes(c.tensor(0)) or ()
    small = len(rows) == 2 and rows[0] <= _CHAIN_ROWS
    weights = (
        size for part in (product, c) for size in part.index.find_sizes(part.tensor(1)) or ()
    )
    small = small and max(weights, default=math.inf) <= _CHAIN_CHANNELS
    return small and all(part.node.op_type in _CHAINED for part in between)


def _explain_concat(c: Candidate, passed: bool) -> Reason:
    """Why a pair behind a Concat is not for a product. passed: other operators stand between both.

    OpenVINO moves the pair to each part, and of rows each has a zero point of its own then, which the product refuses.
    """
    axis = c.attr("axis", 0)
    rank = c.rank(0)
    makers = (c.index.find_producer(c.tensor(k)) for k in range(len(c.node.inputs)))
    # Values of one sign have no zero point.
    signed = passed or any(maker is None or maker.op_type not in POSITIVE_OPS for maker in makers)
    if signed and (rank is None or axis % rank < rank - 1):
        return "OpenVINO refuses a network with a pair between a Concat of rows and a product"
    if passed and len(c.index.list_consumers(c.node.result)) > 1:
        return "OpenVINO crashes at a pair behind a Concat, what computes each of its values, and another pair"
    return None


def _drops_channels(c: Candidate) -> bool:
    """True for a reduction that leaves out axis 1."""
    axes = c.attr("axes", c.constant(1))
    rank = c.rank(0)
    if c.attr("keepdims", 1):
        return False
    return axes is None or rank is None or 1 in {int(axis) % rank for axis in axes}


def check_matmul(c: Candidate) -> Reason:
    """Why a MatMul is no product of data and a constant matrix, in integers as OpenVINO reads them."""
    if c.is_constant(0):
        return "the constant stands on the left"
    if not c.is_constant(1):
        return "both operands are activations: integers on both sides have no zero point, and gain little"
    return _explain_misread_data(c) if c.rank(1) == 2 else "its weight is not a matrix"


# The rewrite that makes one node of it writes an operator of ONNX Runtime's own.
def find_swish(c: Candidate) -> MaybeTensor:
    """The tensor x * gate(x) where x is the result, and nothing else reads it: the kernel computes that as well."""
    readers = c.index.readers(c.node.result)
    gate = next((node for node in readers if node.op_type in _GATES), None)
    product = next((node for node in readers if node.op_type == "Mul"), None)
    if len(readers) != 2 or gate is None or product is None:
        return None
    return product.result if set(product.inputs) == {gate.outputs[0], c.node.outputs[0]} else None
