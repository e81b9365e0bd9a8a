"""Which tensor of another export is this one: identity from structure, where names do not help.

Every tensor is coloured twice, as in Weisfeiler-Leman refinement, but in one pass each over the acyclic graph: from
what it is made of (operators, attributes, kinds and shapes of constants, back to the inputs by position) and from what
becomes of it (down to the outputs by position). Both together, refined once more, tell apart everything that is not an
exact symmetry of the network. Names, node order, and the values of floating-point weights have no part in it.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxq.arrays import hash_parts, view_content
from onnxq.graph.base import FLOAT_TENSORS, NodeRef
from onnxq.graph.index import GraphIndex, get_index
from onnxq.graph.light import ModelLike, bare_proto, cache_on_model, store_of
from onnxq.graph.names import has_unique_names, name_nodes
from onnxq.graph.scopes import name_function
from onnxq.graph.values import decode_tensor
from onnxq.sites import TensorId

# The second tells apart branches that are alike in themselves and differ only in what surrounds them.
_ROUNDS = 2
# Factors of a Resize and the like, which shapes follow from.
_SIZES = 8
# Integer constants up to this many entries are structure (axes, shapes, pads); larger ones are weights.
_STRUCTURAL = 64
# What tells the tensors of a graph apart, as hashes.
Colours = dict[TensorId, str]


@dataclass(frozen=True)
class Fingerprint:
    """A network's structure and its weights, each as a sha256."""

    # Free of names and order.
    topology: str
    # Of the values of all constants.
    weights: str


def compute_fingerprint(proto: ModelLike) -> Fingerprint:
    """Hash a network's structure, and its weights; the same for every export of the same network."""
    index = index_named(proto)
    ids = _colour_tensors(index)
    values = (
        hash_parts(ids[t], array.dtype.str, repr(array.shape), view_content(array))
        for t in ids
        if (array := index.find_constant(t)) is not None
    )
    return Fingerprint(hash_topology(index), hash_parts(*sorted(values)))


def hash_topology(index: GraphIndex) -> str:
    """The first half of a fingerprint, which takes no weight in hand."""
    ids = _colour_tensors(index)
    structure = [ids[t] for node in index.nodes for t in node.results]
    functions = sorted(
        hash_parts(name_function(f), *(n.SerializeToString(deterministic=True) for n in f.node))
        for f in index.proto.functions
    )
    interface = [f"{value.dtype}" for value in (*index.inputs, *index.outputs)]
    # Sorted, since exporters list the same nodes in other orders.
    return hash_parts(*sorted(structure), *interface, *functions)


def compute_structural_ids(model: ModelLike | GraphIndex) -> Colours:
    """Return an id for every tensor of every scope (functions are opaque): equal for the same tensor of another export.

    Tensors that are exact mirror images of each other share one. A changed operator or shape upstream or downstream
    changes an id; retrained weights do not.
    """
    return _colour_tensors(model if isinstance(model, GraphIndex) else index_named(model))


@cache_on_model
def hash_graph(model: ModelLike) -> str:
    """Hash the computation under its own names, without the values of floating-point weights.

    Much cheaper than a fingerprint, and for models of one run only.
    """
    proto = bare_proto(model)
    store = store_of(model)
    digest = hashlib.sha256()
    graph = proto.graph
    for part in (*graph.node, *graph.input, *graph.output, *proto.opset_import, *proto.functions):
        digest.update(part.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode())
        # Texts are told apart by their names alone, and floats but for a few are weights.
        weights = (
            tensor.data_type in FLOAT_TENSORS and np.prod(tensor.dims, dtype=np.int64) > _SIZES
        )
        if tensor.data_type != TensorProto.STRING and not weights:
            digest.update(decode_tensor(tensor, store).tobytes())
    return digest.hexdigest()


def index_named(proto: ModelLike) -> GraphIndex:
    """The index of a model, which is given names where it has none."""
    return get_index(proto if has_unique_names(bare_proto(proto)) else name_nodes(proto))


def _colour_tensors(index: GraphIndex) -> Colours:
    if index.colours is None:
        colours: Colours = {}
        for _ in range(_ROUNDS):
            origins = _colour_forward(index, colours)
            becomes = _colour_backward(index, origins)
            colours = {t: hash_parts(colour, becomes[t]) for t, colour in origins.items()}
        index.colours = colours
    # A copy: the index keeps its own.
    return dict(index.colours)


def _colour_forward(index: GraphIndex, known: Colours) -> Colours:
    # By position: exporters give inputs other names.
    colours = {
        TensorId(value.name): hash_parts("input", str(k), str(value.dtype))
        for k, value in enumerate(index.inputs)
    }

    def colour(name: str, scope: str) -> str:
        t = index.resolve_tensor(name, scope)
        if t is None:
            return "absent"
        if t not in colours:
            colours[t] = hash_parts(_hash_leaf(index, t, colours), known.get(t, ""))
        return colours[t]

    for node in index.nodes:
        parts = [_hash_operator(node), *(colour(name, node.scope) for name in node.inputs)]
        for label, subgraph in index.subgraphs(node.name):
            parts.append(label)
            parts.extend(colour(name, subgraph) for name in index.scope_outputs(subgraph))
        operation = hash_parts(*parts)
        for k, name in enumerate(node.outputs):
            t = TensorId(name, node.scope)
            if name and index.is_constant(t):
                # The same whether the exporter wrote an initializer or a Constant node.
                colour(name, node.scope)
            elif name:
                colours[t] = hash_parts(operation, str(k), known.get(t, ""))
    return colours


def _hash_leaf(index: GraphIndex, t: TensorId, colours: Colours) -> str:
    """A constant, or the input of a subgraph, which is known by its parent's inputs and its own position."""
    if index.is_constant(t):
        shape = index.find_shape(t) or ()
        sizes = index.find_sizes(t)
        content: bytes | memoryview = b""
        # Small integers, such as axes and shapes, are structure; floats are weights.
        if sizes is not None and np.prod(sizes) <= _STRUCTURAL:
            array = index.find_constant(t)
            content = (
                view_content(array) if array is not None and array.dtype.kind in "iub" else b""
            )
        return hash_parts("constant", str(index.find_dtype(t)), repr(shape), content)
    parent = index.parent(t.scope)
    names = index.scope_inputs(t.scope)
    if parent is None or t.name not in names:
        return "unknown"
    outer = index.list_inputs(parent)
    label = t.scope.rpartition(".")[2]
    return hash_parts(
        "body",
        _hash_operator(parent),
        label,
        str(names.index(t.name)),
        *(colours.get(o, "") if o else "" for o in outer),
    )


def _colour_backward(index: GraphIndex, origins: Colours) -> Colours:
    uses = defaultdict(list)
    for k, value in enumerate(index.outputs):
        t = index.resolve_tensor(value.name, "")
        if t is not None:
            uses[t].append(hash_parts("output", str(k)))
    for node in reversed(index.nodes):
        fate = hash_parts(
            _hash_operator(node),
            *(_hash_sorted(uses[t]) for t in node.results),
        )
        read = index.list_inputs(node)
        # The use of one input depends on the others: a sum with a constant is not one with data.
        around = [origins.get(t, "") if t else "" for t in read]
        for k, t in enumerate(read):
            if t is not None:
                uses[t].append(hash_parts(fate, str(k), *around))
        for label, subgraph in index.subgraphs(node.name):
            for k, name in enumerate(index.scope_outputs(subgraph)):
                t = index.resolve_tensor(name, subgraph)
                if t is not None:
                    uses[t].append(hash_parts(fate, label, str(k)))
    return {t: _hash_sorted(uses[t]) for t in origins}


def _hash_operator(node: NodeRef) -> str:
    attributes = (
        f"{key}={_hash_attribute(node.attrs[key])}"
        for key in sorted(node.attrs)
        if node.op_type != "Constant"
    )
    return hash_parts(node.domain, node.op_type, *attributes)


def _hash_attribute(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return hash_parts(value.dtype.str, repr(value.shape), view_content(value))
    return repr(value)


def _hash_sorted(parts: Iterable[str]) -> str:
    return hash_parts(*sorted(parts))
