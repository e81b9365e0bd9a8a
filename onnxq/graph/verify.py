"""The check that a graph is legal: names, order, quantize/dequantize pairs, then onnx.checker."""

from collections.abc import Collection
from functools import partial

import numpy as np
from onnx import ModelProto

from onnxq.arrays import Shape, are_finite, as_float64, fits_dims
from onnxq.errors import ModelError, VerificationError
from onnxq.graph import scopes
from onnxq.graph.base import DEQUANTIZE, QUANTIZE, NodeRef
from onnxq.graph.index import GraphIndex
from onnxq.graph.light import ModelLike, bare_proto
from onnxq.graph.load import check_structure
from onnxq.numerics.rounding import shape_scales
from onnxq.spec import make_granularity

# ORT has its own forms of them for types the model's opset does not know.
_DOMAINS = ("", "com.microsoft")
_fault = partial(VerificationError, code="Q701")


def verify_graph(model: ModelLike, *, kept: Collection[str] = ()) -> None:
    """Raise VerificationError, naming the node, unless the graph is legal.

    Node names are unique and not empty; tensors are made before they are read, once, and by one node; a QuantizeLinear
    feeds a DequantizeLinear, with equal scale, zero point, axis and block size; scales are positive, finite and as many
    as the axis has entries; no edge is quantized twice in a row with the same numbers; onnx.checker agrees.
    kept: names of nodes exempt from the rules about pairs, because the model came with them.
    """
    proto = bare_proto(model)
    _check_order(proto)
    try:
        index = GraphIndex(model)
        for node in index.nodes:
            if node.domain in _DOMAINS and node.name not in kept:
                if node.op_type in (QUANTIZE, DEQUANTIZE):
                    _check_qparams(index, node)
                if node.op_type == QUANTIZE:
                    _check_quantize(index, node)
        check_structure(proto, "the model")
    except ModelError as error:
        raise VerificationError(error.subject, error.cause, error.fix, code="Q701") from error


def _check_order(proto: ModelProto) -> None:
    known: dict[str, set[str]] = {}
    for scope, graph in scopes.walk_graphs(proto.graph):
        outer = known.get(scope, set())
        # Inputs and initializers: they are there before any node runs.
        own = scopes.list_defined(graph) - {name for node in graph.node for name in node.output}
        visible = outer | own
        for node in graph.node:
            for name in scopes.list_reads(node):
                if name not in visible:
                    raise _fault(
                        scopes.label_node(node),
                        f"reads {name!r}, which is not made before it",
                        "sort the nodes",
                    )
            for name in filter(None, node.output):
                if name in visible:
                    raise _fault(
                        scopes.label_node(node),
                        f"makes {name!r}, which is there already",
                        "use a fresh name",
                    )
            # A body sees what is made before its node, not what follows it.
            for inner, _ in scopes.iterate_subgraphs(node):
                known[scopes.join_scope(scope, node.name, inner)] = set(visible)
            visible.update(filter(None, node.output))
        for value in graph.output:
            if value.name not in visible:
                raise _fault(
                    value.name, "is an output that nothing makes", "give a node this output name"
                )


def _check_quantize(index: GraphIndex, node: NodeRef) -> None:
    result = node.result
    readers = index.readers(result)
    if not readers and not index.is_kept(result):
        raise _fault(node.name, "feeds nothing", "remove it, or give it its DequantizeLinear")
    pairs = [reader for reader in readers if reader.op_type == DEQUANTIZE]
    for pair in pairs:
        difference = _find_difference(index, node, pair)
        if difference:
            cause = f"and its DequantizeLinear {pair.name!r} differ in {difference}"
            raise _fault(node.name, cause, "let them share it")
    # Integers that go on to another operator on integers are no pair, and may be quantized as they were before.
    if pairs and _is_quantized_again(index, node):
        raise _fault(
            node.name, "quantizes again what was quantized with the same numbers", "drop a pair"
        )


def _is_quantized_again(index: GraphIndex, node: NodeRef) -> bool:
    before = index.maker(node, 0, DEQUANTIZE)
    maker = index.maker(before, 0, QUANTIZE)
    if before is None or maker is None:
        return False
    return not any(_find_difference(index, half, before) for half in (node, maker))


def _find_difference(index: GraphIndex, a: NodeRef, b: NodeRef) -> str:
    """Name the first difference between two nodes of a pair: "scale", "zero point", "axis", "block_size", or ""."""
    for k, what in ((1, "scale"), (2, "zero point")):
        if not _is_same_input(index, a, b, k):
            return what
    single = not index.input_shape(a, 1)
    for name, default in (("axis", 1), ("block_size", 0)):
        # The axis of a single scale means nothing.
        if not single and a.attrs.get(name, default) != b.attrs.get(name, default):
            return name
    return ""


def _is_same_input(index: GraphIndex, a: NodeRef, b: NodeRef, k: int) -> bool:
    ids = [index.find_input(node, k) for node in (a, b)]
    if ids[0] == ids[1]:
        return True
    values = map(index.find_constant, ids)
    # A zero point left out is zero (of uint8, unless output_dtype says otherwise).
    filled = [
        np.zeros(()) if value is None and t is None else value
        for value, t in zip(values, ids, strict=True)
    ]
    if filled[0] is None or filled[1] is None:
        return False
    # In float64, which holds every value that a scale or zero point can have, whatever their types are.
    left, right = (np.asarray(value, np.float64) for value in filled)
    if left.shape != right.shape and k == 2 and None in ids:
        return bool((left == right).all())
    return bool(np.array_equal(left, right))


def _check_qparams(index: GraphIndex, node: NodeRef) -> None:
    scale = index.input_value(node, 1)
    # Computed in the graph, by DynamicQuantizeLinear for one.
    if scale is None:
        return
    values = as_float64(scale)
    # Scales of blocks may be negative: ONNX Runtime's own quantizer writes them so.
    blocks = bool(node.attrs.get("block_size", 0))
    if not (are_finite(values) and (values.all() if blocks else (values > 0).all())):
        raise _fault(
            node.name, "has a scale that is not a positive, finite number", "calibrate it again"
        )
    zero = index.input_shape(node, 2)
    if zero is not None and zero != scale.shape:
        raise _fault(
            node.name, "has a scale and a zero point of different shapes", "give them one shape"
        )
    wrong = _find_wrong_length(index, node, scale.shape)
    if wrong:
        raise _fault(node.name, wrong, "give one scale for each entry of the axis")


def _find_wrong_length(index: GraphIndex, node: NodeRef, scale: Shape) -> str:
    """The difference between the shape of the scales and that of the tensor; "" where they fit, as far as known."""
    dims = index.input_shape(node)
    # One scale fits any tensor: engines take [1] for [].
    if dims is None or not scale or scale == (1,):
        return ""
    axis = node.read_int("axis", 1)
    block = node.read_int("block_size", 0)
    if not -len(dims) <= axis < len(dims):
        return f"has axis {axis}, its tensor rank {len(dims)}"
    wanted = list(shape_scales(dims, make_granularity(axis, block)))
    if fits_dims(scale, wanted):
        return ""
    if block:
        return f"has scales of shape {list(scale)}, its blocks need {wanted}"
    return (
        f"has {list(scale)} scales, axis {axis % len(dims)} of its tensor has {wanted[0]} entries"
    )
