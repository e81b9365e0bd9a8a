"""The smallest part of a model whose build fails in the same way, found by building with fewer and fewer nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import onnx
from onnx import ModelProto, helper

from onnxq.engines.prove.proof import Reduced
from onnxq.graph import GraphIndex
from onnxq.graph.scopes import list_reads
from onnxq.graph.subgraph import Cutter
from onnxq.sites import TensorId

Fails = Callable[[ModelProto], bool]


class Parts:
    """Cuts parts out of one model by shapes alone. Nodes that compute constants always go with their readers."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._cutter = Cutter(index.proto, computed=True)
        self.names: tuple[str, ...] = tuple(name for name in self._cutter.nodes if name not in self._cutter.constants)

    def op(self, name: str) -> str:
        """The operator of a node."""
        return str(self._cutter.nodes[name].op_type)

    def needed(self, last: str, among: Sequence[str]) -> list[str]:
        """Those of the nodes that `last` is computed from."""
        return self._cutter.list_needed(self._cutter.nodes[last].output, among)

    def cut(self, names: Sequence[str]) -> ModelProto | None:
        """The nodes as a model; None when a tensor that would become an input has no known type or rank."""
        inputs = [self._declare(name) for name in self._cutter.list_inputs(names)]
        nodes = [self._cutter.nodes[name] for name in self._cutter.sort_names(names)]
        read = {name for node in nodes for name in list_reads(node)}
        ends = {value.name for value in self._index.proto.graph.output}
        given = [name for node in nodes for name in node.output if name and (name not in read or name in ends)]
        outputs = [self._declare(name) or onnx.ValueInfoProto(name=name) for name in given]
        known = [value for value in inputs if value is not None]
        return self._cutter.cut(names, known, outputs) if len(known) == len(inputs) else None

    def _declare(self, name: str) -> onnx.ValueInfoProto | None:
        tensor = TensorId(name)
        dtype, shape = self._index.dtype(tensor), self._index.shape(tensor)
        if not dtype or shape is None:
            return None
        return helper.make_tensor_value_info(name, dtype, list(shape))


def find_smallest_failure(
    index: GraphIndex, fails: Fails, *, seconds: float, hint: str = ""
) -> tuple[ModelProto, Reduced] | None:
    """Bisect to the shortest prefix that fails, then to the shortest piece of it, then leave out node by node.

    fails: builds a part and says whether it ends as the whole did. hint: the node the library blamed, tried first.
    Returns None when nothing smaller than the whole fails; stops when the time is up, with the best so far.
    """
    search = _Search(Parts(index), fails, time.perf_counter() + seconds)
    start = time.perf_counter()
    best = list(search.parts.names)
    if hint in best:
        best = next((tried for tried in search.grow_around(hint, best) if search.fails(tried)), best)
    if len(best) == len(search.parts.names):
        best = search.find_prefix(best)
    best = search.find_suffix(best)
    best = leave_out_nodes(best, search.fails)
    model = search.parts.cut(best)
    if model is None or len(best) == len(search.parts.names):
        return None
    found = Reduced(
        nodes=tuple(best),
        ops=tuple(search.parts.op(name) for name in best),
        builds=search.builds,
        seconds=time.perf_counter() - start,
    )
    return model, found


class _Search:
    """Counts builds, remembers their ends, and builds nothing more once the time is up."""

    def __init__(self, parts: Parts, fails: Fails, end: float) -> None:
        self.parts, self._fails, self._end = parts, fails, end
        self.builds = 0
        self._known: dict[frozenset[str], bool] = {}

    @property
    def out_of_time(self) -> bool:
        """True when the time is up."""
        return time.perf_counter() > self._end

    def fails(self, names: Sequence[str]) -> bool:
        """Does this part end as the whole did?"""
        key = frozenset(names)
        if key not in self._known:
            model = None if self.out_of_time or not names else self.parts.cut(names)
            if model is not None:
                self.builds += 1
            self._known[key] = model is not None and self._fails(model)
        return self._known[key]

    def grow_around(self, node: str, names: list[str]) -> list[list[str]]:
        """Growing pieces that end in a node: itself, then itself and the nodes before it."""
        needed = self.parts.needed(node, names)
        return [needed[-size:] for size in (1, 2, 4, 8) if size <= len(needed)]

    def find_prefix(self, names: list[str]) -> list[str]:
        """The shortest prefix that fails, by bisection, less the nodes that its last one does not need."""
        low, high = 1, len(names)
        while low < high:
            middle = (low + high) // 2
            if self.fails(names[:middle]):
                high = middle
            else:
                low = middle + 1
        short = names[:high]
        needed = self.parts.needed(short[-1], short)
        return needed if self.fails(needed) else short

    def find_suffix(self, names: list[str]) -> list[str]:
        """The shortest suffix that fails, by bisection."""
        low, high = 1, len(names)
        while low < high:
            middle = (low + high) // 2
            if self.fails(names[-middle:]):
                high = middle
            else:
                low = middle + 1
        short = names[-high:]
        return short if self.fails(short) else names


def leave_out_nodes(
    names: list[str], fails: Callable[[list[str]], bool], connect: Callable[[list[str]], list[str]] = list
) -> list[str]:
    """Leave out runs of nodes, half of them at first, until not even a single one can go while it still fails.

    connect: reduces the remaining nodes to those that are still of use.
    """
    size = max(len(names) // 2, 1)
    while True:
        before, position = len(names), 0
        while position < len(names):
            shorter = connect(names[:position] + names[position + size :])
            if shorter and fails(shorter):
                names = shorter
            else:
                position += size
        if size == 1 and len(names) == before:
            return names
        size = max(size // 2, 1)
