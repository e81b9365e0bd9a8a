"""The check that a graph is legal: names, order, quantize/dequantize pairs, then onnx.checker."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from onnx import ModelProto

from onnxq.errors import ModelError, VerificationError
from onnxq.graph.index import GraphIndex, NodeRef
from onnxq.graph.light import ModelLike, bare_proto
from onnxq.graph.load import check_structure
from onnxq.graph.scopes import iterate_subgraphs, join_scope, label_node, list_defined, list_reads, walk_graphs
from onnxq.sites import TensorId

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
# ORT has its own forms of them for types the model's opset does not know.
_DOMAINS = ("", "com.microsoft")


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
    for scope, graph in walk_graphs(proto.graph):
        outer = known.get(scope, set())
        own = list_defined(graph) - {name for node in graph.node for name in node.output}
        seen = outer | own
        for node in graph.node:
            for name in list_reads(node):
                if name not in seen:
                    raise VerificationError(
                        label_node(node), f"reads {name!r}, which is not made before it", "sort the nodes", code="Q701"
                    )
            for name in filter(None, node.output):
                if name in seen:
                    raise VerificationError(
                        label_node(node), f"makes {name!r}, which is there already", "use a fresh name", code="Q701"
                    )
            for inner, _ in iterate_subgraphs(node):
                known[join_scope(scope, node.name, inner)] = set(seen)
            seen.update(filter(None, node.output))
        for value in graph.output:
            if value.name not in seen:
                raise VerificationError(
                    value.name, "is an output that nothing makes", "give a node this output name", code="Q701"
                )


def _check_quantize(index: GraphIndex, node: NodeRef) -> None:
    made = TensorId(node.outputs[0], node.scope)
    readers = [index.node(edge.node) for edge in index.consumers(made)]
    pairs = [reader for reader in readers if reader.op_type == DEQUANTIZE]
    if not readers and not index.is_output(made) and not index.captured(made):
        raise VerificationError(node.name, "feeds nothing", "remove it, or give it its DequantizeLinear", code="Q701")
    for pair in pairs:
        difference = _find_difference(index, node, pair)
        if difference:
            raise VerificationError(
                node.name,
                f"and its DequantizeLinear {pair.name!r} differ in {difference}",
                "let them share it",
                code="Q701",
            )
        if pairs and _is_quantized_again(index, node):
            raise VerificationError(
                node.name, "quantizes again what was quantized with the same numbers", "drop a pair", code="Q701"
            )


def _is_quantized_again(index: GraphIndex, node: NodeRef) -> bool:
    source = index.resolve(node.inputs[0], node.scope)
    before = index.producer(source) if source is not None else None
    if before is None or before.op_type != DEQUANTIZE or _find_difference(index, node, before):
        return False
    origin = index.resolve(before.inputs[0], before.scope)
    maker = index.producer(origin) if origin is not None else None
    return maker is not None and maker.op_type == QUANTIZE and not _find_difference(index, maker, before)


def _find_difference(index: GraphIndex, a: NodeRef, b: NodeRef) -> str:
    """Name the first difference between two nodes of a pair: "scale", "zero point", "axis", "block_size", or ""."""
    for k, what in ((1, "scale"), (2, "zero point")):
        if not _is_same_input(index, a, b, k):
            return what
    rank = len(_read_dims(index, a, 1) or ())
    for name, default in (("axis", 1), ("block_size", 0)):
        if rank and a.attrs.get(name, default) != b.attrs.get(name, default):
            return name
    return ""


def _is_same_input(index: GraphIndex, a: NodeRef, b: NodeRef, k: int) -> bool:
    ids = [index.resolve(node.inputs[k], node.scope) if k < len(node.inputs) else None for node in (a, b)]
    if ids[0] == ids[1]:
        return True
    values = [index.constant(t) if t is not None else None for t in ids]
    # A zero point left out is zero (of uint8, unless output_dtype says otherwise).
    filled = [np.zeros(()) if value is None and t is None else value for value, t in zip(values, ids, strict=True)]
    if filled[0] is None or filled[1] is None:
        return False
    left, right = (np.asarray(value, dtype=np.float64) for value in filled)
    if left.shape != right.shape and k == 2 and None in ids:
        return bool(np.all(left == right))
    return bool(np.array_equal(left, right))


def _read_dims(index: GraphIndex, node: NodeRef, k: int) -> tuple[int | str | None, ...] | None:
    found = index.resolve(node.inputs[k], node.scope) if k < len(node.inputs) else None
    return index.shape(found) if found is not None else None


def _check_qparams(index: GraphIndex, node: NodeRef) -> None:
    scale_id = index.resolve(node.inputs[1], node.scope)
    scale = index.constant(scale_id) if scale_id is not None else None
    if scale is None:
        return
    numbers = scale.astype(np.float64)
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise VerificationError(
            node.name, "has a scale that is not a positive, finite number", "calibrate it again", code="Q701"
        )
    zero = index.resolve(node.inputs[2], node.scope) if len(node.inputs) > 2 else None
    if zero is not None and index.shape(zero) is not None and index.shape(zero) != scale.shape:
        raise VerificationError(
            node.name, "has a scale and a zero point of different shapes", "give them one shape", code="Q701"
        )
    wrong = next(_list_wrong_lengths(index, node, scale.shape), "")
    if wrong:
        raise VerificationError(node.name, wrong, "give one scale for each entry of the axis", code="Q701")


def _list_wrong_lengths(index: GraphIndex, node: NodeRef, scale: tuple[int, ...]) -> Iterator[str]:
    dims = _read_dims(index, node, 0)
    if dims is None or not scale or scale == (1,):
        return
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
    if not -len(dims) <= axis < len(dims):
        yield f"has axis {axis}, its tensor rank {len(dims)}"
        return
    axis %= len(dims)
    if not block:
        size = dims[axis]
        if len(scale) != 1 or (isinstance(size, int) and size != scale[0]):
            yield f"has {list(scale)} scales, axis {axis} of its tensor has {size} entries"
        return
    wanted = [-(-d // block) if k == axis and isinstance(d, int) else d for k, d in enumerate(dims)]
    if len(scale) != len(dims) or any(isinstance(w, int) and w != s for w, s in zip(wanted, scale, strict=True)):
        yield f"has scales of shape {list(scale)}, its blocks need {wanted}"
