"""OpenVINO on the CPU: which pairs become integer kernels, measured on 2026.4.

A pair on the data and on the constant weight of a product is all that its kernel needs: bias, activation and the
QuantizeLinear behind it follow into the kernel, and without one it writes float. Data are uint8 with any zero point;
int8 data with one, and weights in uint8, are dequantized in front. docs/engines.md has the kernel of each pattern.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from onnxq.arrays import Array, Shape
from onnxq.backends import surroundings
from onnxq.backends.base import (
    ATTENTION,
    FUSED_PRODUCTS,
    Candidate,
    Capability,
    Output,
    PlacementRule,
    Target,
)
from onnxq.backends.cpu_costs import read_costs
from onnxq.graph import NodeRef
from onnxq.graph.base import POSITIVE_OPS, Graph
from onnxq.graph.scopes import walk_from
from onnxq.numerics import SumOrder
from onnxq.sites import Indices, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, PerTensor

# Activations that the kernel of a product computes on its result.
_ACTIVATIONS = (
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
_CURVED = frozenset((*_ACTIVATIONS, *_GATES)).difference(("Relu", "Clip", "LeakyRelu"))
_RECTIFIERS = ("Relu", "LeakyRelu", "PRelu")
_FACTORS = ("Mul", "Div", "BatchNormalization")
# What OpenVINO computes together with the pair behind it.
_JOINED = (
    *_FACTORS,
    "Add",
    "Sub",
    *_ACTIVATIONS,
)
# Operators whose results have the sizes that they read, from this input on.
_SIZING = {"ConstantOfShape": 0, "Range": 0, "Reshape": 1, "Slice": 1}
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
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


def _check_conv(c: Candidate) -> str | None:
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


# Of each graph as long as it is there: every convolution of it asks.
_sized_nodes: WeakKeyDictionary[Graph, frozenset[NodeRef]] = WeakKeyDictionary()


def _explain_read_sizes(c: Candidate) -> str | None:
    """Why the scales get lost: sizes of a tensor beside or in front of it are read, and change from run to run."""
    # Those of one spatial axis keep their scales.
    if c.rank(0) == 3 or _is_curved(c):
        return None
    if c.index not in _sized_nodes:
        _sized_nodes[c.index] = _find_sized_nodes(c.index)
    if c.node not in _sized_nodes[c.index]:
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


def _find_sized_nodes(index: Graph) -> frozenset[NodeRef]:
    """The nodes behind a tensor of which sizes are read that change and size others, and the products that make it."""
    sized: set[NodeRef] = set()
    for node in index.nodes:
        maker = index.maker(node)
        if node.op_type != "Shape" or maker is None:
            continue
        readers = _find_sized_ops(index, node)
        shape = index.find_shape(index.find_input(node, 0))
        # A Reshape may read the number of samples.
        sizes = (None,) if shape is None else shape[1:] if readers == {"Reshape"} else shape
        if readers and not all(isinstance(size, int) for size in sizes):
            makers = walk_from([maker], partial(_list_makers, index))
            sized |= walk_from(makers, lambda node: index.readers(node.result))
    return frozenset(sized)


def _find_sized_ops(index: Graph, shape: NodeRef) -> frozenset[str]:
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


def _list_makers(index: Graph, node: NodeRef) -> Iterator[NodeRef]:
    """The nodes that make what a node reads; none of a product."""
    for tensor in () if node.op_type in _PRODUCTS else index.list_inputs(node):
        maker = index.find_producer(tensor)
        if maker is not None:
            yield maker


def _walk_joined(c: Candidate) -> Iterator[Candidate]:
    """The operators in front of a product's data, to the first that OpenVINO does not compute with the pair behind."""
    tensor = c.tensor(0)
    while (maker := c.index.find_producer(tensor)) is not None:
        yield Candidate(maker, c.index, c.shapes)
        computed = surroundings.list_computed_inputs(c.index, maker)
        if maker.op_type not in _JOINED or len(computed) != 1:
            return
        tensor = computed[0]


def _explain_lost_scales(c: Candidate) -> str | None:
    """Why the scales get lost: sizes change from run to run, and several nodes read the result, but no one Swish."""
    data = c.tensor(0)
    shape = c.index.find_shape(data)
    readers = c.index.list_consumers(c.node.result)
    fixed = shape is not None and all(isinstance(size, int) for size in shape)
    if fixed or len(readers) < 2 or find_swish(c) is not None:
        return None
    return (
        "OpenVINO loses the scales of an integer convolution "
        "without a bias that several nodes read, while sizes change"
    )


def _explain_moved_scales(c: Candidate, maker: NodeRef, rectified: bool) -> str | None:
    """Why the scales of the candidate, which come past `maker`, are misread. rectified: past an activation, too."""
    for edge in c.index.list_consumers(maker.result):
        reader = Candidate(c.index.find_node(edge.node), c.index, c.shapes)
        op = reader.node.op_type
        of_places = op == "Gather" and reader.attr("axis", 0) != 1
        if of_places and reader.rank(1) != 1:
            return "OpenVINO computes a Gather of single places wrongly behind integer convolutions without a bias"
        factor = _find_factor(reader) if op in _FACTORS else None
        negative = factor is not None and bool((factor < 0).any())
        if rectified and (negative or op == "Neg"):
            return "OpenVINO moves negative factors in front of the activation of integer convolutions without a bias"
        if op in _SCALED or factor is not None:
            behind = rectified or op in _RECTIFIERS
            reason = _explain_moved_scales(c, reader.node, behind)
            if reason is not None:
                return reason
    return None


def _find_factor(c: Candidate) -> Array | None:
    """The constant that values are multiplied or divided by."""
    factors = (c.constant(k) for k in (0, 1))
    return next((factor for factor in factors if factor is not None), None)


def _check_gemm(c: Candidate) -> str | None:
    return _explain_misread_data(c) or surroundings.check_gemm(c)


def _explain_misread_data(c: Candidate) -> str | None:
    """Why a pair on the data would be misread, by what OpenVINO 2026.4 makes of the operators in front of it.

    A reduction to extremes takes the pair into its kernel, and is wrong. A mean without its axes, axis 1 among them,
    takes the factors of other channels.
    """
    parts = list(_walk_joined(c))
    kind = parts[-1].node.op_type if parts else ""
    if kind in _EXTREMES:
        return f"OpenVINO computes a pair wrongly behind a {kind}"
    if kind == "Concat" and c.node.op_type != "Conv":
        return _explain_concat(parts[-1], passed=len(parts) > 1)
    factors = map(_find_factor, parts[:-1])
    scaled = any(factor is not None and factor.size > 1 for factor in factors)
    if scaled and kind.startswith("Reduce") and _drops_channels(parts[-1]):
        return "OpenVINO computes a pair wrongly behind a mean and factors of channels"
    return None


def _explain_concat(c: Candidate, passed: bool) -> str | None:
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


def _check_matmul(c: Candidate) -> str | None:
    if c.is_constant(0):
        return "the constant stands on the left"
    if not c.is_constant(1):
        return "both operands are activations: integers on both sides have no zero point, and gain little"
    return _explain_misread_data(c) if c.rank(1) == 2 else "its weight is not a matrix"


# The rewrite that makes one node of it writes an operator of ONNX Runtime's own.
def find_swish(c: Candidate) -> TensorId | None:
    """The tensor x * gate(x) where x is the result, and nothing else reads it: the kernel computes that as well."""
    readers = c.index.readers(c.node.result)
    gate = next((node for node in readers if node.op_type in _GATES), None)
    product = next((node for node in readers if node.op_type == "Mul"), None)
    if len(readers) != 2 or gate is None or product is None:
        return None
    return product.result if set(product.inputs) == {gate.outputs[0], c.node.outputs[0]} else None


def _list_sum_inputs(c: Candidate) -> Indices:
    """Both inputs, but not the result of a convolution that nothing else reads: behind a pair it computes the sum too.

    It does not round in between then, unlike the file.
    """
    skip = surroundings.find_skip_input(c.index, c.node)
    if skip is None:
        return 0, 1
    branch = surroundings.list_computed_inputs(c.index, c.node)[1 - skip]
    maker = c.index.find_producer(branch)
    alone = (
        maker is not None and maker.op_type == "Conv" and len(c.index.list_consumers(branch)) == 1
    )
    return (skip,) if alone else (0, 1)


# EfficientNet-Lite0: 26.3 -> 26.8 dB, and no slower.
def _explain_behind_stem(c: Candidate, maker: Candidate | None) -> str | None:
    """The reader of the depthwise convolution of a stem, which stays float."""
    data = None if maker is None else maker.tensor(0)
    name = None if data is None else surroundings.find_backbone(c.index, data)
    if maker is None or name is None:
        return None
    stem = Candidate(c.index.find_node(name), c.index, c.shapes)
    if surroundings.explain_stem_depthwise(maker, stem) is None:
        return None
    return "right behind the float depthwise of a stem: quantizing its large map takes what int8 saves, and adds noise"


# A kernel writes float where nothing asks for integers, and requantizes in passing where something does.
_rule = partial(PlacementRule, output=Output.FOLLOWS)
_product = partial(_rule, weight=1, bias=2, fuses=_ACTIVATIONS, compute=True, closes=find_swish)
_FUSED = "pairs on data and weight; bias, activation and the pair behind follow into the kernel"
_MOVED = "moves integers: both sides share one scale"

# In the order of precedence.
RULES: tuple[PlacementRule, ...] = (
    _product(name="conv", ops=("Conv",), kernel="Convolution", why=_FUSED, check=_check_conv),
    _product(name="gemm", ops=("Gemm",), kernel="FullyConnected", why=_FUSED, check=_check_gemm),
    _product(
        name="matmul",
        ops=("MatMul",),
        kernel="FullyConnected",
        why=_FUSED,
        bias=None,
        check=_check_matmul,
        # Integers of matrices are slower than floats with AVX2 (.7 to .85), those of a Conv twice as fast.
        pointwise=("any", "avx2"),
    ),
    _rule(
        name="residual-add",
        ops=("Add",),
        kernel="Eltwise",
        why="a pair on the skip branch, and on the other unless a convolution makes it for the sum alone",
        inputs=_list_sum_inputs,
        fuses=_ACTIVATIONS,
        check=surroundings.check_two_activations,
    ),
    _rule(
        name="gate-mul",
        ops=("Mul",),
        kernel="Eltwise",
        why="a squeeze-excite gate between integer convolutions",
        data=(0, 1),
        fuses=_ACTIVATIONS,
        check=surroundings.check_gate,
    ),
    _rule(
        name="concat",
        ops=("Concat",),
        kernel="Concatenation",
        why="pairs on all inputs",
        data=(),
        check=surroundings.check_all_computed,
        output=Output.PAIR,
    ),
    _rule(
        name="average-pool",
        ops=("GlobalAveragePool", "AveragePool"),
        kernel="Pooling",
        why="sums integers",
    ),
    _rule(
        name="max-pool",
        ops=("MaxPool",),
        kernel="Pooling",
        why=_MOVED,
        shares=True,
        check=surroundings.check_max_pool,
        output=Output.PAIR,
    ),
    _rule(
        name="move",
        ops=surroundings.MOVES,
        kernel="",
        why=_MOVED,
        shares=True,
        check=surroundings.check_data,
        output=Output.PAIR,
    ),
    _rule(
        name="resize-nearest",
        ops=("Resize",),
        kernel="Interpolate",
        why=_MOVED,
        shares=True,
        check=surroundings.check_resize,
        output=Output.PAIR,
    ),
)

# Widths that a byte stores.
_NARROW = (2, 3, 4, 5, 6, 7, 8)
_weight = partial(Capability, role=Role.WEIGHT, symmetric=(True,), storage=("int8",))
_channel = partial(_weight, granularity=(PerTensor, PerChannel))
CAPABILITIES: tuple[Capability, ...] = (
    Capability(role=Role.ACTIVATION, storage=("uint8",)),
    # With a zero point these are dequantized in front of the kernel.
    Capability(role=Role.ACTIVATION, storage=("int8",), symmetric=(True,)),
    _channel(ops=("Conv", "Gemm", "MatMul"), bits=_NARROW),
    _weight(ops=("Gather",), granularity=(PerChannel,)),
)
# Beside float data only the kernel of matrices reads integers; others have their weights dequantized at every run.
WEIGHT_ONLY: tuple[Capability, ...] = (
    Capability(
        role=Role.WEIGHT,
        ops=("MatMul", "Gemm"),
        bits=_NARROW,
        storage=("int8", "uint8"),
        granularity=(PerTensor, PerChannel, PerBlock),
    ),
    Capability(
        role=Role.WEIGHT,
        ops=("MatMul", "Gemm"),
        bits=(2, 3, 4),
        storage=("int4", "uint4"),
        granularity=(PerTensor, PerChannel, PerBlock),
        opset=21,
    ),
    Capability(
        role=Role.WEIGHT,
        ops=("Conv",),
        bits=_NARROW,
        storage=("int8", "uint8"),
        granularity=(PerTensor, PerChannel),
        warning="OpenVINO dequantizes the weights of Conv at every run: a smaller file for a slower model",
    ),
    _weight(ops=("Gather",), granularity=(PerChannel,)),
)

_NO_KERNEL = {
    **FUSED_PRODUCTS,
    "com.microsoft.QuickGelu": "an operator of ONNX Runtime's own",
    "LSTM": "OpenVINO has no integer LSTM kernel for weights in pairs",
    "GRU": "OpenVINO has no integer GRU kernel for weights in pairs",
    "RNN": "OpenVINO has no integer RNN kernel",
    "Einsum": "OpenVINO has no integer Einsum kernel",
    **dict.fromkeys(ATTENTION, "attention in one node: export its parts"),
}
_NO_GAIN = {
    "ConvTranspose": "integers are read by the transposed convolution only without a zero point"
}


def find_sum_order(node: NodeRef, shape: Shape) -> SumOrder | None:
    """The order of axes in which u8 x s8 kernels for AVX2 read a node's weight, adding two products to a 16-bit sum.

    Conv: input channels of one tap; an odd one is added alone, so that kernels of one channel a group are exact.
    Measured on 2026.4 with weights of two positions.
    """
    if node.op_type == "Conv" and len(shape) > 2:
        # A flat order would let a sum cross from one tap to the next where channels are odd.
        taps = range(2, len(shape))
        if shape[1] % 2:
            return ((0, *taps), 1) if shape[1] > 1 else None
        return (0, *taps, 1)
    if node.op_type == "Gemm" and len(shape) == 2:
        return (0, 1) if node.is_transposed else (1, 0)
    return (1, 0) if node.op_type == "MatMul" and len(shape) == 2 else None


_BASE = Target(
    name="openvino",
    rules=RULES,
    capabilities=CAPABILITIES,
    no_kernel=_NO_KERNEL,
    no_gain=_NO_GAIN,
    costs=read_costs(__package__),
    # Products compute a Gelu, but not one whose factor of a half went into weights.
    skips=("layernorm", "residual", "prelu", "pool"),
    exclusions={
        "stem": surroundings.explain_stem,
        "stem-depthwise": surroundings.explain_stem_depthwise,
        "stem-project": _explain_behind_stem,
        "log-front-end": surroundings.explain_log_front_end,
    },
)
OPENVINO = replace(_BASE, sum_order=find_sum_order)
# 2026.4 multiplies by scales of blocks as they are; NNCF, which makes its files, writes negative ones, too.
OPENVINO_WEIGHT_ONLY = replace(_BASE, capabilities=WEIGHT_ONLY, signed_scales=True)
