"""The smallest part of a model whose build fails in the same way, found by building with fewer and fewer nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import onnx
from onnx import ModelProto, helper

from onnxq.engines.prove.proof import Reduced
from onnxq.graph import GraphIndex
from onnxq.graph.scopes import reads
from onnxq.sites import TensorId

Fails = Callable[[ModelProto], bool]


class Parts:
    """Cuts parts out of one model by shapes alone: the tensors that a part reads from outside become its inputs.

    Nodes that compute constants (weights behind DequantizeLinear) always go with their readers.
    """

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        graph = index.proto.graph
        protos = {node.name: node for node in graph.node}
        self._nodes = {ref.name: protos[ref.name] for ref in index.nodes if not ref.scope}
        self._maker = {name: node.name for node in graph.node for name in node.output if name}
        self._fixed = {tensor.name: tensor for tensor in graph.initializer}
        self._sparse = {tensor.values.name: tensor for tensor in graph.sparse_initializer}
        self._constant: set[str] = set()
        for name, node in self._nodes.items():
            if all(self._is_constant(tensor) for tensor in reads(node)):
                self._constant.add(name)
        self.names: tuple[str, ...] = tuple(name for name in self._nodes if name not in self._constant)

    def _is_constant(self, tensor: str) -> bool:
        return tensor in self._fixed or tensor in self._sparse or self._maker.get(tensor) in self._constant

    def op(self, name: str) -> str:
        """The operator of a node."""
        return str(self._nodes[name].op_type)

    def needed(self, last: str, among: Sequence[str]) -> list[str]:
        """Those of the nodes that `last` is computed from."""
        found, stack, allowed = {last}, [last], set(among)
        while stack:
            for tensor in reads(self._nodes[stack.pop()]):
                maker = self._maker.get(tensor)
                if maker in allowed and maker not in found:
                    found.add(maker)
                    stack.append(maker)
        return [name for name in among if name in found]

    def cut(self, names: Sequence[str]) -> ModelProto | None:
        """The nodes as a model; None when a tensor that would become an input has no known type or rank."""
        chosen = set(names)
        stack = list(names)
        while stack:  # constants that are computed go along
            for tensor in reads(self._nodes[stack.pop()]):
                maker = self._maker.get(tensor)
                if maker in self._constant and maker not in chosen:
                    chosen.add(maker)
                    stack.append(maker)
        nodes = [node for name, node in self._nodes.items() if name in chosen]
        made = {name for node in nodes for name in node.output if name}
        wanted = dict.fromkeys(name for node in nodes for name in reads(node) if name not in made)
        model = ModelProto()
        model.ir_version = self._index.proto.ir_version
        model.opset_import.extend(self._index.proto.opset_import)
        model.functions.extend(self._index.proto.functions)
        model.graph.name = "part"
        model.graph.node.extend(nodes)
        crossing = [name for name in wanted if name not in self._fixed and name not in self._sparse]
        model.graph.initializer.extend(self._fixed[name] for name in wanted if name in self._fixed)
        model.graph.sparse_initializer.extend(self._sparse[name] for name in wanted if name in self._sparse)
        inputs = [self._info(name) for name in crossing]
        if None in inputs:
            return None
        model.graph.input.extend(info for info in inputs if info is not None)
        read = {name for node in nodes for name in reads(node)}
        outputs = {value.name for value in self._index.proto.graph.output}
        for node in nodes:
            if node.name in self._constant:
                continue
            for name in node.output:
                if name and (name not in read or name in outputs):
                    model.graph.output.append(self._info(name) or onnx.ValueInfoProto(name=name))
        inner = made - {value.name for value in model.graph.output}
        model.graph.value_info.extend(info for info in self._index.proto.graph.value_info if info.name in inner)
        return model

    def _info(self, name: str) -> onnx.ValueInfoProto | None:
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
