"""Nodes and tensors of a plan found in a graph that other tools rewrote, by the values that its tensors hold.

Two nodes are one where they read and make tensors that are alike, and are of one operator, or of two that do the same:
MatMul and Gemm; operators that only move values. Names decide between equals, then the order of the graph.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxq.arrays import Array
from onnxq.graph import LAYOUT_OPS, GraphIndex, NodeRef
from onnxq.plan.contents import Contents, NodeContents, Sketch, sketch_values
from onnxq.sites import MaybeTensor, TensorId

# Gemm adds what an Add behind MatMul added, so that their outputs differ.
_PRODUCTS = frozenset({"MatMul", "Gemm"})
# A bias is read at input 2, by which a Conv with one differs from a Conv with an Add behind it.
_BIASED = frozenset({"Conv", "ConvTranspose", *_PRODUCTS})
# Operators whose output holds exactly the values of input 0.
MOVERS = LAYOUT_OPS | {"Dropout", "Cast"}
# Candidates that an error names.
_NEAREST = 3
# A node and the index of its input.
Reader = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Recognized:
    """The plan's nodes and tensors in this graph.

    nodes: plan's name -> node. tensors: for each of the plan's tensors those of this graph that hold its values, the
    likeliest first; () for none. sketches: of this graph. readers: of the plan's tensors, in the plan. joined: MatMul
    of this graph -> those of the plan whose weights stand side by side in its own, with their columns there.
    """

    contents: Contents
    index: GraphIndex
    nodes: Mapping[str, NodeRef]
    tensors: Mapping[str, tuple[TensorId, ...]]
    sketches: Mapping[TensorId, Sketch]
    readers: Mapping[str, Sequence[Reader]]
    joined: Mapping[str, Mapping[str, slice]]

    def has_lost(self, name: str) -> bool:
        """True for a node of the plan that only moved values, and that this graph does without."""
        node = self.contents.nodes.get(name)
        return node is not None and name not in self.nodes and node.op_type in MOVERS

    def follow_readers(self, name: str) -> Iterator[Reader]:
        """The inputs, in the plan, to which the values went that a lost node moved."""
        for reader, k in self.readers.get(self.contents.nodes[name].output, ()):
            if self.has_lost(reader):
                yield from self.follow_readers(reader)
            else:
                yield reader, k

    def find_joined_maker(self, name: str) -> str:
        """The MatMul of `joined` that a tensor of the plan is computed of, no other weight between; "" for none."""
        queue = list(self.tensors.get(name, ())[:1])
        visited = set()
        while queue:
            maker = self.index.find_producer(queue.pop())
            if maker is None or maker.name in visited:
                continue
            visited.add(maker.name)
            if maker.name in self.joined:
                return maker.name
            inputs = self.index.list_reads(maker)
            weighted = maker.op_type in _BIASED and any(map(self.index.is_constant, inputs))
            queue += [] if weighted else inputs
        return ""

    def suggest_tensors(self, name: str) -> str:
        """The tensors of this graph that come nearest to a tensor of the plan, for a person."""
        wanted = self.contents.tensors.get(name)
        if wanted is None:
            return ""
        near = sorted(
            (wanted.measure_distance(sketch), str(t)) for t, sketch in self.sketches.items()
        )[:_NEAREST]
        listed = [
            f"{text!r} (off by {distance:.2g} of its size)"
            for distance, text in near
            if distance < 1.0
        ]
        return (
            f"nearest by their values: {', '.join(listed)}"
            if listed
            else "no tensor of its size has values near its own"
        )


def recognize_graph(
    contents: Contents, index: GraphIndex, sketches: Mapping[TensorId, Sketch]
) -> Recognized:
    """Find what the contents describe in another graph. sketches: of that graph's tensors, on the same inputs."""
    search = _PatternSearch(contents, index, sketches)
    nodes = {}
    taken = set()
    for name, node in contents.nodes.items():
        candidates = search.list_nodes(name, node)
        # Two nodes of the plan may be one here, where a tool merged what was computed twice.
        free = [candidate for candidate in candidates if candidate.name not in taken] or candidates
        if free:
            nodes[name] = free[0]
            taken.add(free[0].name)
    joined = search.find_joined({name for name in contents.nodes if name not in nodes})
    nodes |= {part: index.find_node(name) for name, parts in joined.items() for part in parts}
    tensors = {name: search.list_tensors(name, nodes) for name in contents.tensors}
    return Recognized(contents, index, nodes, tensors, sketches, search.readers, joined)


@dataclass(eq=False)
class _PatternSearch:
    """Look-ups for one graph."""

    contents: Contents
    index: GraphIndex
    sketches: Mapping[TensorId, Sketch]

    def __post_init__(self) -> None:
        self.by_size = defaultdict[int, list[TensorId]](list)
        for tensor, sketch in self.sketches.items():
            self.by_size[sketch.size].append(tensor)
        self.nodes = [
            node for node in self.index.nodes if not node.scope and node.op_type != "Constant"
        ]
        # Plan's tensor -> its readers in the plan.
        self.readers = defaultdict[str, list[Reader]](list)
        for name, node in self.contents.nodes.items():
            for k, read in enumerate(node.inputs):
                self.readers[read].append((name, k))

    def list_nodes(self, name: str, wanted: NodeContents) -> list[NodeRef]:
        """The nodes that compute the same as one of the plan, the likeliest first."""
        ranked = []
        for node in self.nodes:
            both = {node.op_type, wanted.op_type}
            if not (len(both) == 1 or both <= _PRODUCTS or both <= MOVERS):
                continue
            same = self._is_alike(wanted.output, node.result)
            if same or both <= _BIASED:
                inputs = [
                    self._is_alike(read, self.index.find_input(node, k))
                    # Where only one of the two takes in the bias, their outputs differ by it: data
                    # and weight have to agree.
                    for k, read in enumerate(wanted.inputs if same else wanted.inputs[:2])
                    if read in self.contents.tensors
                ]
                if inputs and all(inputs):
                    ranked.append((not same, node.name != name, len(both) > 1, node.order, node))
        return [entry[-1] for entry in sorted(ranked, key=lambda entry: entry[:-1])]

    def find_joined(self, lost: set[str]) -> dict[str, dict[str, slice]]:
        """The products that a tool made of several that read one tensor, as `Recognized.joined` has them.

        lost: nodes of the plan that have no node here.
        """
        joined = {}
        parts = {
            name: node_contents
            for name in sorted(lost)
            if (node_contents := self.contents.nodes[name]).op_type == "MatMul"
        }
        for node in self.nodes if parts else ():
            weight = self.index.find_input(node, 1) if node.op_type == "MatMul" else None
            value = self.index.find_constant(weight)
            if value is not None and value.ndim == 2:
                data = self.index.find_input(node)
                beside = {
                    name: part.inputs[1]
                    for name, part in parts.items()
                    if self._is_alike(part.inputs[0], data)
                }
                if columns := self._split_columns(value, beside):
                    joined[node.name] = columns
        return joined

    def _split_columns(self, value: Array, parts: Mapping[str, str]) -> dict[str, slice]:
        """The columns in which the weights of nodes stand; {} where they do not make up all of the value."""
        placed = {}
        start = 0
        rows, end = value.shape
        while start < end:
            for name, weight in parts.items():
                wanted = self.contents.tensors.get(weight)
                if name in placed or wanted is None:
                    continue
                # A sketch knows the size of a weight, not its shape; all weights beside each other
                # have as many rows.
                columns = slice(start, start + wanted.size // rows)
                if wanted.is_alike(sketch_values(value[:, columns], constant=True)):
                    placed[name] = columns
                    start = columns.stop
                    break
            else:
                return {}
        return placed

    def list_tensors(self, name: str, nodes: Mapping[str, NodeRef]) -> tuple[TensorId, ...]:
        """The tensors that hold the values of the plan's: those that its readers read, else all that are alike."""
        read = [
            self.index.find_input(nodes[reader], k)
            for reader, k in self.readers[name]
            if reader in nodes
        ]
        likely = dict.fromkeys(t for t in read if t is not None and self._is_alike(name, t))
        if likely:
            # The one that is made first, from which tools may have made the others by moving its values.
            return tuple(sorted(likely, key=self._find_order))
        sketch = self.contents.tensors[name]
        alike = [t for t in self.by_size[sketch.size] if self._is_alike(name, t)]
        return tuple(
            sorted(alike, key=lambda t: (t.name != name, self.sketches[t].measure_distance(sketch)))
        )

    def _find_order(self, tensor: TensorId) -> int:
        maker = self.index.find_producer(tensor)
        return -1 if maker is None else maker.order

    def _is_alike(self, name: str, tensor: MaybeTensor) -> bool:
        wanted = self.contents.tensors.get(name)
        there = self.sketches.get(tensor) if tensor is not None else None
        return wanted is not None and there is not None and wanted.is_alike(there)
