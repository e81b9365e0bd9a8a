"""Pieces of a model that are fed alike: the smallest one in which engines diverge, and every kernel by itself.

Both engines get the reference engine's inputs. From the tensor that diverges, the search grows backwards until the
piece diverges by itself, and leaves out all it can do without.

Down a deep network one value rounded the other way moves thousands after it, and a small fault could hide in that. A
kernel fed the same integers has nothing to hide in.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from onnx import ValueInfoProto, helper

from onnxq.arrays import Array, ArrayDict
from onnxq.engines.diff.layers import (
    Counterpart,
    DivergencePoint,
    Inner,
    MatchedTensor,
    mark_divergence,
    match_tensors,
)
from onnxq.engines.diff.measure import Tally, diverges
from onnxq.engines.diff.model import OFF, ON, Bisection, Error, label_run
from onnxq.engines.diff.runs import EngineRun, Reference, run_part
from onnxq.engines.prove.reduce import leave_out_nodes
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, ModelLike, walk_from
from onnxq.graph.subgraph import Cutter, declare_input
from onnxq.progress import Tick
from onnxq.runtime import Feeds
from onnxq.sites import NameSet, TensorId

# How a piece ended: its error and why the engine cannot run it; None for one that is fine.
_End = tuple[Error, str] | None
# How much a growing piece grows: a deep network is not run node by node.
_GROWTH = 1.5
_NOTHING = Error(
    run="", against="", sqnr_db=-math.inf, cosine=0.0, max_abs=math.inf, max_rel=math.inf
)


@dataclass(frozen=True, eq=False)
class Piece:
    """A bisection with the subgraph as a model and its inputs."""

    bisection: Bisection
    proto: ModelLike
    feeds: Feeds


class FedParts(Cutter[ModelLike]):
    """Cuts parts out of one model. `values` gives the arrays that cross a cut, by tensor name."""

    def __init__(self, index: GraphIndex, values: Callable[[Iterable[str]], ArrayDict]) -> None:
        super().__init__(index.model)
        self._index = index
        self._values = values

    def cut_fed(self, names: Collection[str], output: str) -> tuple[ModelLike, Feeds]:
        """The nodes as a model with one output, and the arrays to feed it."""
        crossing = self.list_inputs(names)
        arrays = self._values([*crossing, output])
        inputs = [self._declare(name, arrays[name]) for name in crossing]
        model = self.cut(names, inputs, [self._declare(output, arrays[output])])
        return model, {name: arrays[name] for name in crossing}

    def _declare(self, name: str, array: Array) -> ValueInfoProto:
        """Declared as in the model where it says so, as fusions look at shapes; vectors, perhaps of sizes, as fed."""
        dtype = self._index.find_dtype(TensorId(name))
        shape = self._index.find_shape(TensorId(name))
        if not dtype or shape is None or len(shape) != array.ndim or len(shape) == 1:
            return declare_input(name, [array], dtype)
        return helper.make_tensor_value_info(name, dtype, shape)


@dataclass(eq=False)
class PieceSearch:
    """The search for the smallest piece that diverges, from a tensor of the main graph, on one sample's feeds.

    parts: of the model on that sample. run: of the engine, which runs parts of the model as it did. step: of the
    tensor's quantizer, 0 without one. failing: look for a piece that the engine cannot run, in place of one that it
    computes differently.
    """

    parts: FedParts
    counterpart: Counterpart
    run: str
    engine: EngineRun
    tick: Tick
    step: float = 0.0
    failing: bool = False
    tried: dict[NameSet, _End] = field(default_factory=dict)

    def find_piece(self) -> Piece | None:
        """None when no piece diverges by itself: the difference then adds up from roundings."""
        piece = self.grow()
        if piece is None:
            return None
        order = leave_out_nodes(self.parts.sort_names(piece), self.diverges_alone, self.connect)
        proto, inputs = self.parts.cut_fed(order, self.counterpart.tensor)
        ended = self.find_end(order)
        # Nodes are left out only while the rest goes on failing.
        assert ended is not None
        error, failure = ended
        bisection = Bisection(
            run=self.run,
            against=OFF,
            output=self.counterpart.tensor,
            nodes=tuple(order),
            ops=tuple(self.parts.nodes[name].op_type for name in order),
            inputs=tuple(inputs),
            sqnr_db=error.sqnr_db,
            max_abs=error.max_abs,
            levels=error.levels,
            trials=len(self.tried),
            failure=failure,
        )
        return Piece(bisection, proto, inputs)

    def grow(self) -> set[str] | None:
        """The first of growing neighbourhoods that diverges; None when even all nodes before the tensor do not."""
        start = self.parts.find_producer(self.counterpart.tensor)
        if start is None:
            return None
        piece = {start}
        edge = {start}
        target = 1.0
        while True:
            if len(piece) >= target or not edge:
                if self.diverges_alone(piece):
                    return piece
                target = max(target * _GROWTH, len(piece) + 1)
            if not edge:
                return None
            edge = {name for node in edge for name in self.parts.list_sources(node)} - piece
            piece |= edge

    def connect(self, names: list[str]) -> list[str]:
        """Those of the nodes that the tensor is computed from without leaving them."""
        return self.parts.list_needed([self.counterpart.tensor], names)

    def diverges_alone(self, piece: Iterable[str]) -> bool:
        """True when the piece diverges (or fails) by itself; one that the reference cannot run does not count."""
        return self.find_end(piece) is not None

    def find_end(self, piece: Iterable[str]) -> _End:
        """How a piece that diverges (or fails) ends, tried once; None for any other."""
        key = frozenset(piece)
        if key not in self.tried:
            self.tick()
            self.tried[key] = self._try(key)
        return self.tried[key]

    def _try(self, piece: NameSet) -> _End:
        tensor = self.counterpart.tensor
        proto, feeds = self.parts.cut_fed(piece, tensor)
        try:
            reference = run_part(proto, feeds, optimize=False)[tensor]
        except ModelError:
            return None
        try:
            value = self.engine(proto, feeds)[tensor]
        except ModelError as failure:
            return (_NOTHING, str(failure).splitlines()[0]) if self.failing else None
        tally = Tally(tensor, step=self.step)
        tally.update(self._to_real(reference), self._to_real(value))
        error = tally.error("", "")
        return (error, "") if diverges(error) and not self.failing else None

    def _to_real(self, value: Array) -> Array:
        return (
            self.counterpart.level.to_real(value) if self.counterpart.level is not None else value
        )


@dataclass(frozen=True)
class KernelCheck:
    """The agreement of kernels, each by itself."""

    # How many were tried.
    kernels: int
    # Most steps that any quantized value is off by, and the share of values that are off in the worst kernel.
    levels: float
    share: float
    # Of the worst float result.
    sqnr_db: float
    # The first kernel that diverges.
    point: DivergencePoint | None

    def describe(self) -> str:
        """The agreement of the kernels, in a line."""
        whole = (
            f"to 1 level on at most {100 * self.share:.2g}% of a tensor's values"
            if self.levels
            else "exactly"
        )
        real = "exactly" if math.isinf(self.sqnr_db) else f"to {self.sqnr_db:.0f} dB"
        return (
            f"{label_run(ON)}: each of {self.kernels} kernels alone, fed the same, agrees with the file: "
            f"quantized results {whole}, float ones {real}"
        )


def check_kernels(
    inner: Inner, feeds: Feeds, *, threads: int = 0, tick: Tick = lambda: None
) -> KernelCheck:
    """Cut the model where ORT's fusions do, and run every piece on the first sample without and with optimizations."""
    matched = match_tensors(inner.float_index, inner.index)
    survivors = inner.survivors
    wanted = [(row, one) for row in matched for one in row.counterparts if one.tensor in survivors]
    reference = Reference(inner.index, feeds, threads=threads)
    cutter = FedParts(inner.index, reference)
    pieces = {one.tensor: _find_kernel(cutter, one.tensor, survivors) for _, one in wanted}
    # All at once: one run of the model in place of one for every piece.
    reference(
        [*pieces, *(tensor for piece in pieces.values() for tensor in cutter.list_inputs(piece))]
    )
    results = []
    for row, counterpart in wanted:
        found = _run_kernel(cutter, row, counterpart, pieces[counterpart.tensor])
        tick()
        if found is not None:
            results.append((row, counterpart, *found))
    # A tensor that no quantizer makes has no steps to count in.
    whole = [(error.levels, off) for *_, error, off in results if not math.isnan(error.levels)]
    real = (error.sqnr_db for *_, error, _ in results if math.isnan(error.levels))
    first = next((result for result in results if diverges(result[2])), None)
    return KernelCheck(
        kernels=len(results),
        levels=max((levels for levels, _ in whole), default=0.0),
        share=max((off for _, off in whole), default=0.0),
        sqnr_db=min(real, default=math.inf),
        point=None if first is None else mark_divergence(*first[:3], 0),
    )


def _find_kernel(cutter: FedParts, tensor: str, stops: NameSet) -> set[str]:
    """The nodes between a tensor ORT computes and those before it that it also computes."""

    def list_behind(node: str) -> list[str]:
        sources = cutter.list_sources(node)
        return [name for name in sources if not stops.intersection(cutter.nodes[name].output)]

    start = cutter.find_producer(tensor)
    return walk_from(() if start is None else (start,), list_behind)


def _run_kernel(
    cutter: FedParts, row: MatchedTensor, counterpart: Counterpart, piece: set[str]
) -> tuple[Error, float] | None:
    """The error of one piece and the share of values that differ; None when it cannot run by itself."""
    proto, feeds = cutter.cut_fed(piece, counterpart.tensor)
    try:
        mine, theirs = (
            run_part(proto, feeds, optimize=optimize)[counterpart.tensor]
            for optimize in (False, True)
        )
    except ModelError:
        return None
    own, other = (counterpart.read({counterpart.tensor: value}) for value in (mine, theirs))
    if own is None or other is None:
        return None
    level = counterpart.level
    # Steps are only counted between integers; a float result has none.
    tally = Tally(
        row.name, step=level.scale if level is not None and mine.dtype.kind in "iu" else 0.0
    )
    tally.update(own, other)
    same = mine.shape == theirs.shape
    return tally.error(ON, OFF), float(np.mean(mine != theirs)) if same and mine.size else 0.0
