"""Weights of a checkpoint found in a network: by their values, output channel by output channel, or by their names.

Channels are looked up one by one, so that a weight may be transposed, tied, joined with others along its channels, or have
them in another order. No list of any architecture is needed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from ml_dtypes import bfloat16

from onnxq.arrays import Array
from onnxq.errors import CalibrationError
from onnxq.graph import Graph, NodeRef
from onnxq.interop.checkpoints import Checkpoint, CheckpointWeight, WeightCodes
from onnxq.progress import Task, count_items
from onnxq.sites import Names, TensorId

# Exports hold a checkpoint's values in one of these types, or rounded through it.
_TYPES = (np.float32, np.float16, bfloat16)
# Values hashed at a time.
_CHUNK = 2**22
# Operators between a weight as it is stored and the node that multiplies by it.
_LAYOUT = frozenset({"Transpose", "Cast", "Identity", "Reshape"})
# Ends of names that say nothing of the module.
_PLAIN = frozenset({"weight", "weight_t", "MatMul", "Gemm", "Gather", "linear", "embedding"})
# Share of a weight that its dequantized values may differ by, where names alone found it: 2 bits differ by .4 or so.
_FAR = 0.7


@dataclass(frozen=True, eq=False)
class NetworkWeight:
    """A constant matrix of the network. axis: of its output channels, or rows of a table. nodes: its readers."""

    tensor: TensorId
    axis: int
    nodes: tuple[NodeRef, ...]
    shape: tuple[int, int]

    def list_rows(self, graph: Graph) -> Array:
        """Its values, a row for each output channel."""
        value = graph.find_constant(self.tensor)
        assert value is not None
        return value if self.axis == 0 else value.T


@dataclass(frozen=True, eq=False)
class FoundWeight:
    """A weight of the network with those of the checkpoint that its channels are. rows: of each, in their order there.

    places: where they stand in the network. by: "values" or "names".
    """

    weight: NetworkWeight
    sources: tuple[CheckpointWeight, ...]
    rows: tuple[Array, ...]
    places: tuple[Array, ...]
    by: str

    @property
    def names(self) -> Names:
        """The weights of the checkpoint."""
        return tuple(source.name for source in self.sources)

    def read(self) -> WeightCodes:
        """The codes of all channels. Raises CalibrationError where their forms cannot stand in one weight."""
        if len(self.sources) == 1 and len(self.rows[0]) == self.sources[0].shape[0] == self.weight.shape[0]:
            codes = self.sources[0].read()
            if (self.rows[0] == self.places[0]).all():
                return codes.settle()
        parts: list[WeightCodes] = []
        for source in self.sources:
            parts.append(source.read())
            if not _are_alike(parts[0], parts[-1]):
                forms = " and ".join(f"{source.name} ({source.form})" for source in self.sources[:2])
                cause = f"holds {forms}, or groups in another order: one operator has one form"
                raise CalibrationError(
                    str(self.weight.tensor), cause, "export them as weights of their own", code="Q515"
                )
        placed = {}
        for name in ("codes", "scale", "zero", "minimum"):
            arrays = [getattr(part, name) for part in parts]
            if arrays[0] is None:
                continue
            whole = np.empty((self.weight.shape[0], arrays[0].shape[1]), arrays[0].dtype)
            for array, rows, places in zip(arrays, self.rows, self.places, strict=True):
                whole[places] = array[rows]
            placed[name] = whole
        return replace(parts[0], **placed).settle()


def _are_alike(first: WeightCodes, other: WeightCodes) -> bool:
    same = (first.bits, first.size, first.minimum is None) == (other.bits, other.size, other.minimum is None)
    orders = first.order is other.order or (
        first.order is not None and other.order is not None and np.array_equal(first.order, other.order)
    )
    return same and orders


@dataclass(frozen=True, eq=False)
class WeightMatch:
    """The weights that were found. missing: why those of the checkpoint were not, by name."""

    found: tuple[FoundWeight, ...]
    missing: Mapping[str, str] = field(default_factory=dict)


def list_weights(graph: Graph) -> list[NetworkWeight]:
    """The constant matrices that MatMul, Gemm and lookups of rows read."""
    readers: dict[tuple[TensorId, int], list[NodeRef]] = {}
    for node in graph.nodes:
        if node.attrs.get("transA", 0):
            continue
        for k, axis in ((1, int(not node.is_transposed)),) if node.is_onnx("MatMul", "Gemm") else ((0, 0),):
            tensor = graph.find_input(node, k)
            looked_up = node.looks_up(0)
            if tensor is not None and (k or looked_up) and graph.is_constant(tensor):
                readers.setdefault((tensor, axis), []).append(node)
    weights = []
    for (tensor, axis), nodes in readers.items():
        shape = graph.find_shape(tensor) or ()
        if len(shape) == 2:
            weights.append(NetworkWeight(tensor, axis, tuple(nodes), (int(shape[axis]), int(shape[1 - axis]))))
    return weights


def match_weights(checkpoint: Checkpoint, graph: Graph, before: Graph, task: Task) -> WeightMatch:
    """Find the weights of a checkpoint. before: the graph as it came, whose names its modules may have."""
    weights = list_weights(graph)
    table = _RowTable(graph, weights)
    counted = count_items(checkpoint.weights, task)
    for k, source in enumerate(counted):
        table.look_up(k, source.read().dequantize() if source.shape[1] in table.widths else None)
    found = [match for weight in range(len(weights)) if (match := table.collect(weight, checkpoint.weights))]
    used = {name for match in found for name in match.names}
    left = [source for source in checkpoint.weights if source.name not in used]
    known = {match.weight.tensor for match in found}
    free = [weight for weight in weights if weight.tensor not in known]
    reasons = dict(checkpoint.refused)
    words = {id(weight): _list_words(weight, graph, before) for weight in free}
    for source in left:
        named = [weight for weight in free if any(_is_tail(_split(source.name), word) for word in words[id(weight)])]
        result = _match_name(source, named, graph)
        if isinstance(result, str):
            reasons[source.name] = result or table.explain(source.name)
        else:
            found += result
    return WeightMatch(tuple(found), reasons)


class _RowTable:
    """Digests of all channels of a network, and for each the channels of a checkpoint that have the same."""

    def __init__(self, graph: Graph, weights: Sequence[NetworkWeight]) -> None:
        self.weights = weights
        self.starts = np.cumsum([0, *(weight.shape[0] for weight in weights)])
        # By number of columns: sorted digests, and the place of each among all channels.
        self.widths: dict[int, tuple[Array, Array]] = {}
        by_width: defaultdict[int, list[int]] = defaultdict(list)
        for k, weight in enumerate(weights):
            by_width[weight.shape[1]].append(k)
        for width, members in by_width.items():
            keys = np.concatenate([hash_rows(weights[k].list_rows(graph)) for k in members])
            places = np.concatenate([np.arange(self.starts[k], self.starts[k + 1]) for k in members])
            order = np.argsort(keys, kind="stable")
            self.widths[width] = keys[order], places[order]
        # By weight of the network: (weight of the checkpoint, its rows, places).
        self.hits: defaultdict[int, list[tuple[int, Array, Array]]] = defaultdict(list)
        self.partial: dict[str, str] = {}

    def look_up(self, source: int, values: Array | None) -> None:
        """Note where the channels of a weight of the checkpoint stand."""
        best: tuple[Array, Array] | None = None
        for kind in _TYPES if values is not None else ():
            assert values is not None
            keys, places = self.widths[values.shape[1]]
            own, rows = np.unique(hash_rows(values.astype(kind).astype(np.float32)), return_index=True)
            first, last = (np.searchsorted(keys, own, side) for side in ("left", "right"))
            counts = last - first
            if best is None or counts.sum() > len(best[0]):
                at = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
                best = np.repeat(rows, counts), places[at]
            if counts.all():
                break
        if best is None or not len(best[0]):
            return
        owners = np.searchsorted(self.starts, best[1], "right") - 1
        for weight in np.unique(owners):
            mine = owners == weight
            self.hits[int(weight)].append((source, best[0][mine], best[1][mine] - self.starts[weight]))

    def collect(self, weight: int, sources: Sequence[CheckpointWeight]) -> FoundWeight | None:
        """The weight of the network, where all its channels were found."""
        left = np.ones(self.weights[weight].shape[0], bool)
        chosen = []
        # The one with the most channels first: single ones, of zeros, are anywhere.
        for source, rows, places in sorted(self.hits.get(weight, ()), key=lambda hit: -len(hit[1])):
            mine = left[places]
            if mine.any():
                order = np.argsort(places[mine])
                chosen.append((sources[source], rows[mine][order], places[mine][order]))
                left[places] = False
        if left.any():
            for source, rows, _ in self.hits.get(weight, ()):
                note = (
                    f"{len(rows)} of its {sources[source].shape[0]} channels stand in {self.weights[weight].tensor}, "
                )
                self.partial[sources[source].name] = (
                    note + f"{left.sum()} others there are of no weight of the checkpoint"
                )
            return None
        parts = zip(*chosen, strict=True)
        return FoundWeight(self.weights[weight], *(tuple(part) for part in parts), by="values")

    def explain(self, name: str) -> str:
        """Why a weight of the checkpoint was not found."""
        return self.partial.get(name, "no weight of the network has its values or its name")


def hash_rows(values: Array) -> Array:
    """A 64-bit digest of each row, the same for equal values."""
    rows, columns = values.shape
    factors = np.random.default_rng(0).integers(0, 2**63, columns, np.uint64) * np.uint64(2) + np.uint64(1)
    digests = np.empty(rows, np.uint64)
    step = max(1, _CHUNK // max(1, columns))
    for k in range(0, rows, step):
        # -0 and 0 are equal, and so are their sums with 0.
        part = np.ascontiguousarray(values[k : k + step], np.float32) + np.float32(0)
        digests[k : k + step] = part.view(np.uint32).astype(np.uint64) @ factors
    return digests


def _match_name(source: CheckpointWeight, named: Sequence[NetworkWeight], graph: Graph) -> Sequence[FoundWeight] | str:
    """The weights of this name, or why there are none; "" where no name fits."""
    if not named:
        return ""
    values, found = source.read().dequantize(), []
    for weight in named:
        if weight.shape != source.shape:
            return f"{weight.tensor} has its name, and {weight.shape} channels and inputs where it has {source.shape}"
        own = weight.list_rows(graph).astype(np.float32)
        error = np.linalg.norm(own - values) / max(float(np.linalg.norm(own)), 1e-30)
        if not error < _FAR:
            return f"{weight.tensor} has its name and other values ({error:.0%} off): of another network, or permuted"
        every = np.arange(source.shape[0])
        found.append(FoundWeight(weight, (source,), (every,), (every,), by="names"))
    return found


def _list_words(weight: NetworkWeight, graph: Graph, before: Graph) -> list[Names]:
    """The names that say which module a weight is of, in parts."""
    names = [weight.tensor.name]
    came = {node.name: node for node in before.nodes}
    for node in weight.nodes:
        names.append(node.name)
        if (old := came.get(node.name)) is not None:
            edge = before.find_input(old, 0 if old.looks_up(0) else 1)
            names += [tensor.name for tensor in before.walk_back(edge, _LAYOUT)]
    return [_split(name) for name in dict.fromkeys(names)]


def _split(name: str) -> Names:
    parts = [part for part in re.split(r"[./]", name) if part]
    while parts and parts[-1] in _PLAIN:
        parts.pop()
    return tuple(parts)


def _is_tail(first: Names, other: Names) -> bool:
    """True where one name ends with the other, which has two parts at least or is the whole of it."""
    short, long = sorted((first, other), key=len)
    return bool(short) and long[len(long) - len(short) :] == short and (len(short) > 1 or len(long) == 1)


def iterate_sources(found: Sequence[FoundWeight]) -> Iterator[CheckpointWeight]:
    """Each weight of the checkpoint that was found, once."""
    yield from {source.name: source for match in found for source in match.sources}.values()
