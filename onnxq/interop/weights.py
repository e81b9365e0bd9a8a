"""Weights of a checkpoint found in a network: by their values, channel by channel, or by their names.

A weight may be transposed, tied, joined with others along its output channels, or have these in another order: each
channel is looked up by itself. No list of any architecture is needed.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from ml_dtypes import bfloat16

from onnxq.arrays import Array, as_float32
from onnxq.errors import CalibrationError
from onnxq.graph import Graph, GraphIndex, NodeRefs, walk_all_nodes
from onnxq.interop.checkpoints import Checkpoint, CheckpointWeight, WeightCodes
from onnxq.progress import Task, count_items
from onnxq.sites import Causes, Names, NameSet, TensorId

# Exports hold a checkpoint's values in one of these types, or rounded through it.
_TYPES = (np.float32, np.float16, bfloat16)
# Values hashed at a time.
_CHUNK = 2**22
# Operators between a weight as it is stored and the node that multiplies by it.
_LAYOUT = frozenset({"Transpose", "Cast", "Identity", "Reshape"})
# Ends of names that say nothing of the module.
_PLAIN = ("weight", "MatMul", "Gemm", "Gather")
# Metadata of nodes that torch.onnx writes: a list of names, the outermost module first.
_SCOPES = "pkg.torch.onnx.name_scopes"
# Share of a weight that its values may be off by where only its name was found; rounding to 2 bits takes .4 or so.
_FAR = 0.7


@dataclass(frozen=True, eq=False)
class NetworkWeight:
    """A constant matrix of the network. axis: of its output channels, or rows of a table. nodes: its readers."""

    tensor: TensorId
    axis: int
    nodes: NodeRefs
    shape: tuple[int, int]

    @property
    def ops(self) -> NameSet:
        """The operators that read it."""
        return frozenset(node.op_type for node in self.nodes)

    def list_rows(self, graph: Graph) -> Array:
        """Its values, a row for each output channel."""
        value = np.asarray(graph.find_constant(self.tensor))
        return value.T if self.axis else value


# A weight of the checkpoint, some of its rows, and their places in the network's weight.
Part = tuple[CheckpointWeight, Array, Array]


@dataclass(frozen=True, eq=False)
class FoundWeight:
    """A weight of the network with those of the checkpoint that its channels are. by: "values" or "names"."""

    weight: NetworkWeight
    parts: tuple[Part, ...]
    by: str

    @property
    def sources(self) -> tuple[CheckpointWeight, ...]:
        """The weights of the checkpoint."""
        return tuple(source for source, _, _ in self.parts)

    @property
    def names(self) -> Names:
        """The names of those weights."""
        return tuple(source.name for source in self.sources)

    def read(self) -> WeightCodes:
        """The codes of all channels. Raises CalibrationError where their forms cannot stand in one weight."""
        read = [source.read() for source in self.sources]
        if len({codes.form for codes in read}) > 1:
            forms = " and ".join(f"{source.name} ({source.form})" for source in self.sources[:2])
            cause = f"holds {forms}, or groups in another order, and one weight has one form"
            raise CalibrationError(self.weight.tensor, cause, code="Q515")
        placed = {}
        for name in ("codes", "scale", "zero", "minimum"):
            arrays = [getattr(codes, name) for codes in read]
            if arrays[0] is not None:
                placed[name] = whole = np.empty(
                    (self.weight.shape[0], arrays[0].shape[1]), arrays[0].dtype
                )
                for array, (_, rows, places) in zip(arrays, self.parts, strict=True):
                    whole[places] = array[rows]
        return replace(read[0], **placed).settle()  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class WeightMatch:
    """The weights that were found. missing: why those of the checkpoint were not, by name."""

    found: tuple[FoundWeight, ...]
    missing: Causes


def match_weights(
    checkpoint: Checkpoint, graph: Graph, before: GraphIndex, task: Task
) -> WeightMatch:
    """Find the weights of a checkpoint. before: the graph as it came, whose names its modules may have."""
    weights = _list_weights(graph)
    table = _ChannelTable(weights, graph)
    for source in count_items(checkpoint.weights, task):
        table.look_up(source)
    found = list(filter(None, map(table.collect, range(len(weights)))))
    taken = {match.weight for match in found}
    # The modules that torch's exporter notes at each node; weights that it transposes itself lose their names.
    scopes = {
        node.name: re.findall("'([^']*)'", entry.value)
        for node in walk_all_nodes(before.proto)
        for entry in node.metadata_props
        if entry.key == _SCOPES
    }
    free = [
        (weight, _list_paths(weight, before, scopes)) for weight in weights if weight not in taken
    ]
    used = {name for match in found for name in match.names}
    missing = dict(checkpoint.refused)
    claimed: dict[NetworkWeight, str] = {}
    for source in checkpoint.weights:
        if source.name in used:
            continue
        path = _split_name(source.name)
        named = [weight for weight, paths in free if any(_are_one(path, other) for other in paths)]
        reason = _compare(source, named, graph)
        twice = [claimed[weight] for weight in named if weight in claimed]
        if twice or reason or not named:
            twin = f"{twice[0]} has its name, too" if twice else ""
            missing[source.name] = (
                twin
                or reason
                or table.partial.get(source.name, "the model has not its values or name")
            )
            continue
        claimed |= dict.fromkeys(named, source.name)
        every = np.arange(source.shape[0])
        found += [FoundWeight(weight, ((source, every, every),), "names") for weight in named]
    return WeightMatch(tuple(found), missing)


def _list_weights(graph: Graph) -> list[NetworkWeight]:
    """The constant matrices that MatMul and Gemm multiply by, and those that rows are looked up in."""
    readers = defaultdict(list)
    for node in graph.nodes:
        table = node.looks_up(0)
        tensor = graph.find_input(node, int(not table))
        product = node.is_onnx("MatMul", "Gemm") and not node.transposes_data
        if tensor is not None and (table or product) and graph.is_constant(tensor):
            readers[tensor, int(not (table or node.is_transposed)), table].append(node)
    weights = []
    for (tensor, axis, _), nodes in readers.items():
        value = graph.find_constant(tensor)
        if value is not None and value.ndim == 2:
            rows = value.T if axis else value
            weights.append(NetworkWeight(tensor, axis, tuple(nodes), rows.shape))
    return weights


class _ChannelTable:
    """Digests of the channels of a network's weights, and for each the channel of a checkpoint that has the same."""

    def __init__(self, weights: Sequence[NetworkWeight], graph: Graph) -> None:
        self.weights = weights
        # By length: digests, the number of the weight, and the row.
        parts = defaultdict(list)
        for k, weight in enumerate(weights):
            count, columns = weight.shape
            parts[columns].append(
                (hash_rows(weight.list_rows(graph)), np.full(count, k), np.arange(count))
            )
        self.channels: dict[int, list[Array]] = {}
        for columns, rows in parts.items():
            joined = [np.concatenate(arrays) for arrays in zip(*rows, strict=True)]
            order = np.argsort(joined[0], kind="stable")
            self.channels[columns] = [array[order] for array in joined]
        # By number of the weight.
        self.hits: defaultdict[int, list[Part]] = defaultdict(list)
        self.partial: dict[str, str] = {}

    def look_up(self, source: CheckpointWeight) -> None:
        """Note where the channels of a weight of the checkpoint stand, in the type that most are found in."""
        if source.shape[1] not in self.channels:
            return
        digests, owners, places = self.channels[source.shape[1]]
        values = source.read().dequantize()
        best = np.empty((2, 0), np.int64)
        for kind in _TYPES:
            # Equal channels count once: rows of zeros that stand in a table a thousand times would be found in pairs.
            own, rows = np.unique(hash_rows(values.astype(kind)), return_index=True)
            at = np.searchsorted(own, digests).clip(max=len(own) - 1)
            same = np.flatnonzero(own[at] == digests)
            best = max(best, np.stack([same, rows[at[same]]]), key=np.size)
            # Nearly always the first type has them all, and rounding to the others takes longest.
            if len(same) >= len(values):
                break
        for k in np.unique(owners[best[0]]):
            mine = best[:, owners[best[0]] == k]
            self.hits[int(k)].append((source, mine[1], places[mine[0]]))

    def collect(self, number: int) -> FoundWeight | None:
        """The weight of the network of this number, where all its channels were found."""
        weight = self.weights[number]
        parts = []
        left = np.ones(weight.shape[0], bool)
        # The one with the most channels first: single ones, of zeros, are anywhere.
        for source, rows, places in sorted(self.hits[number], key=lambda part: -len(part[1])):
            if (mine := left[places]).any():
                parts.append((source, rows[mine], places[mine]))
                left[places] = False
        if not left.any():
            return FoundWeight(weight, tuple(parts), "values")
        for source, rows, _ in parts:
            text = f"{len(rows)} of its channels stand in {weight.tensor}, and {left.sum()} there are of no weight"
            self.partial[source.name] = text
        return None


def hash_rows(values: Array) -> Array:
    """A 64-bit digest of each row, the same for equal values."""
    rows, columns = values.shape
    factors = np.random.default_rng(0).integers(0, 2**63, columns, np.uint64) * np.uint64(
        2
    ) + np.uint64(1)
    step = max(1, _CHUNK // columns)
    digests = []
    for k in range(0, rows, step):
        # With 0 added, -0 is 0.
        part = np.ascontiguousarray(values[k : k + step], np.float32) + np.float32(0)
        digests.append(part.view(np.uint32).astype(np.uint64) @ factors)
    return np.concatenate(digests)


def _compare(source: CheckpointWeight, named: Sequence[NetworkWeight], graph: Graph) -> str:
    """Why a weight of the checkpoint is none of these weights of its name; "" where it is."""
    for weight in named:
        values = source.read().dequantize()
        own = as_float32(weight.list_rows(graph))
        if own.shape != values.shape:
            return f"{weight.tensor} has its name, and the shape {own.shape} in the place of {source.shape}"
        error = np.linalg.norm(own - values) / max(float(np.linalg.norm(own)), 1e-30)
        # Written so that NaN, which compares false, counts as far.
        if not error < _FAR:
            return f"{weight.tensor} has its name and other values ({error:.0%} off): another network's, or permuted"
    return ""


def _list_paths(
    weight: NetworkWeight, before: GraphIndex, scopes: Mapping[str, Sequence[str]]
) -> list[Names]:
    """The names that say which module a weight is of, in parts. scopes: of modules, by node."""
    names = [weight.tensor.name]
    for node in weight.nodes:
        edge = before.find_input(before.named.get(node.name), int(not node.looks_up(0)))
        names += [
            node.name,
            *scopes.get(node.name, ()),
            *(tensor.name for tensor in before.walk_back(edge, _LAYOUT)),
        ]
    return list(map(_split_name, names))


def _split_name(name: str) -> Names:
    parts = [part for part in re.split(r"[./]", name) if part]
    while parts and parts[-1] in _PLAIN:
        parts.pop()
    return tuple(parts)


def _are_one(first: Names, other: Names) -> bool:
    """True where one path ends with the other, which has two parts at least, or all but a wrapper around it."""
    short, long = sorted((first, other), key=len)
    return bool(short) and long[-len(short) :] == short and (len(short) > 1 or len(long) <= 2)
