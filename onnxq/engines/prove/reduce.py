"""The smallest part of a model whose build fails in the same way, found by building with fewer and fewer nodes."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import onnx
from onnx import helper

from onnxq.engines.prove.proof import Reduced
from onnxq.graph import Cutter, GraphIndex, ModelLike
from onnxq.graph.scopes import list_reads
from onnxq.sites import Names, NameSet, TensorId

Fails = Callable[[ModelLike], bool]


class Parts(Cutter[ModelLike]):
    """Cuts parts out of one model by shapes alone. Nodes that compute constants always go with their readers.

    names: of the other nodes, in an order that runs.
    """

    def __init__(self, index: GraphIndex) -> None:
        super().__init__(index.model, computed=True)
        self._index = index
        self.names: Names = tuple(name for name in self.nodes if name not in self.constants)

    def cut_part(self, names: Sequence[str]) -> ModelLike | None:
        """The nodes as a model; None when a tensor that would become an input has no known type or rank."""
        inputs = [self._declare(name) for name in self.list_inputs(names)]
        nodes = [self.nodes[name] for name in self.sort_names(names)]
        read = {name for node in nodes for name in list_reads(node)}
        ends = self._index.output_names
        given = [
            name
            for node in nodes
            for name in node.output
            if name and (name not in read or name in ends)
        ]
        outputs = [self._declare(name) or onnx.ValueInfoProto(name=name) for name in given]
        known = [value for value in inputs if value is not None]
        return self.cut(names, known, outputs) if len(known) == len(inputs) else None

    def _declare(self, name: str) -> onnx.ValueInfoProto | None:
        dtype = self._index.find_dtype(TensorId(name))
        shape = self._index.find_shape(TensorId(name))
        return (
            helper.make_tensor_value_info(name, dtype, shape)
            if dtype and shape is not None
            else None
        )


def find_smallest_failure(
    index: GraphIndex, fails: Fails, *, seconds: float, hint: str = ""
) -> tuple[ModelLike, Reduced] | None:
    """Bisect to the shortest prefix that fails, then to the shortest piece of it, then leave out node by node.

    fails: builds a part and says whether it ends as the whole did. hint: the node the library blamed, tried first.
    Returns None when nothing smaller than the whole fails; stops when the time is up, with the best so far.
    """
    search = _Search(Parts(index), fails, time.perf_counter() + seconds)
    start = time.perf_counter()
    whole = search.parts.names
    best = list(whole)
    # The node to blame with a few before it is often enough, and spares the bisection its builds of half a model.
    if hint in best:
        best = next(filter(search.ends_alike, search.grow_around(hint, best)), best)
    if len(best) == len(whole):
        best = search.find_prefix(best)
    best = search.find_suffix(best)
    best = leave_out_nodes(best, search.ends_alike)
    model = search.parts.cut_part(best)
    if model is None or len(best) == len(whole):
        return None
    ops = tuple(search.parts.nodes[name].op_type for name in best)
    seconds = time.perf_counter() - start
    return model, Reduced(nodes=tuple(best), ops=ops, builds=search.builds, seconds=seconds)


class _Search:
    """Counts builds, remembers their ends, and builds nothing more once the time is up."""

    def __init__(self, parts: Parts, fails: Fails, end: float) -> None:
        self.parts = parts
        self._fails = fails
        self._end = end
        self.builds = 0
        self._known: dict[NameSet, bool] = {}

    def ends_alike(self, names: Sequence[str]) -> bool:
        """Does this part end as the whole did?"""
        key = frozenset(names)
        if key not in self._known:
            # Once the time is up every part counts as fine, so the search ends with the best so far.
            late = time.perf_counter() > self._end
            model = None if late or not names else self.parts.cut_part(names)
            self.builds += model is not None
            # A part that cannot be cut counts as fine too.
            self._known[key] = model is not None and self._fails(model)
        return self._known[key]

    def grow_around(self, node: str, names: list[str]) -> list[list[str]]:
        """Growing pieces that end in a node: itself, then itself and the nodes before it."""
        needed = self._list_needed(node, names)
        return [needed[-size:] for size in (1, 2, 4, 8) if size <= len(needed)]

    def find_prefix(self, names: list[str]) -> list[str]:
        """The shortest prefix that fails, by bisection, less the nodes that its last one does not need."""
        short = names[: self._find_least(len(names), lambda size: names[:size])]
        needed = self._list_needed(short[-1], short)
        return needed if self.ends_alike(needed) else short

    def find_suffix(self, names: list[str]) -> list[str]:
        """The shortest suffix that fails, by bisection."""
        short = names[-self._find_least(len(names), lambda size: names[-size:]) :]
        # Bisection takes for granted that larger parts fail too, which need not be so: ask again.
        return short if self.ends_alike(short) else names

    def _find_least(self, most: int, take: Callable[[int], list[str]]) -> int:
        """The least size at which what is taken fails, as if every larger one did."""
        return bisect_left(range(most), True, lo=1, key=lambda size: self.ends_alike(take(size)))

    def _list_needed(self, last: str, among: Sequence[str]) -> list[str]:
        """Those of the nodes that `last` is computed from."""
        return self.parts.list_needed(self.parts.nodes[last].output, among)


def leave_out_nodes(
    names: list[str],
    fails: Callable[[list[str]], bool],
    connect: Callable[[list[str]], list[str]] = list,
) -> list[str]:
    """Leave out runs of nodes, half of them at first, until not even a single one can go while it still fails.

    connect: reduces the remaining nodes to those that are still of use.
    """
    size = max(len(names) // 2, 1)
    while True:
        before = len(names)
        position = 0
        while position < len(names):
            shorter = connect(names[:position] + names[position + size :])
            if shorter and fails(shorter):
                names = shorter
            else:
                position += size
        if size == 1 and len(names) == before:
            return names
        # Once more with single nodes until nothing goes: leaving one out can make another dispensable.
        size = max(size // 2, 1)
