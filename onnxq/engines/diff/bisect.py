"""The smallest subgraph in which two engines diverge when both are fed the same inputs: the reference engine's.

From the tensor that diverges, grow backwards until the piece diverges by itself; then leave out all it can do without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from onnxq.engines.diff.cut import Parts
from onnxq.engines.diff.levels import Array
from onnxq.engines.diff.matching import Counterpart
from onnxq.engines.diff.measure import Tally, diverges
from onnxq.engines.diff.model import OFF, Bisection, Error
from onnxq.engines.prove.reduce import leave_out_nodes
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, ModelLike
from onnxq.runtime import Feeds, Session, tap_tensors, trim_memory
from onnxq.sites import TensorId

EngineRun = Callable[[ModelLike, Feeds], Mapping[str, Array]]
# How much a growing piece grows: a deep network is not run node by node.
_GROWTH = 1.5
_NOTHING = Error(run="", against="", sqnr_db=-math.inf, cosine=0.0, max_abs=math.inf, max_rel=math.inf)


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine that is compared with the reference. name: of its run. run: gives the outputs of a model on feeds."""

    name: str
    run: EngineRun


@dataclass(frozen=True, eq=False)
class Piece:
    """A bisection with the subgraph as a model and its inputs."""

    bisection: Bisection
    proto: ModelLike
    feeds: dict[str, Array]


class Reference:
    """Tensors of one sample as ORT computes them without optimizations; each computed when first asked for."""

    def __init__(self, index: GraphIndex, feeds: Feeds, *, threads: int = 0) -> None:
        self._index, self._feeds, self._threads = index, feeds, threads
        self._known: dict[str, Array] = dict(feeds)

    def __call__(self, names: Iterable[str]) -> dict[str, Array]:
        """The arrays of these tensors of the main graph."""
        wanted = list(dict.fromkeys(names))
        missing = [TensorId(name) for name in wanted if name not in self._known]
        if missing:
            tapped = tap_tensors(self._index.model, missing, only=True)
            session = Session(tapped.proto, optimize=False, threads=self._threads, arena=False)
            values = session.run({value.name: self._feeds[value.name] for value in session.inputs})
            self._known.update({tensor.name: values[name] for tensor, name in tapped.outputs.items()})
            # The session holds its buffers, which would add to those of the runs that follow.
            del session
            trim_memory()
        return {name: self._known[name] for name in wanted}


def run_optimized(proto: ModelLike, feeds: Feeds, *, provider: str = "") -> Mapping[str, Array]:
    """The outputs of ORT with all optimizations, as users run it. provider: "" for the CPU."""
    return Session(proto, threads=1, arena=False, provider=provider).run(feeds)


def bisect_divergence(
    index: GraphIndex,
    counterpart: Counterpart,
    feeds: Feeds,
    engine: EngineUnderTest,
    *,
    step: float = 0.0,
    failing: bool = False,
    threads: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Piece | None:
    """Search from a tensor of the main graph, on one sample's feeds. step: of its quantizer, 0 without one.

    failing: look for a piece that the engine cannot run, in place of one that it computes differently.

    Returns None when no piece diverges by itself: the difference then adds up from roundings.
    """
    parts = Parts(index, Reference(index, feeds, threads=threads))
    search = _Search(parts, counterpart, engine, step, tick, failing)
    piece = search.grow()
    if piece is None:
        return None
    order = leave_out_nodes(parts.sort_names(piece), search.fails, search.connect)
    proto, inputs = parts.cut_fed(order, counterpart.tensor)
    ended = search.find_end(order)
    # Nodes are left out only while the rest goes on failing.
    assert ended is not None
    error, failure = ended
    ops = tuple(index.node(name).op_type for name in order)
    found = Bisection(
        run=engine.name, against=OFF, output=counterpart.tensor, nodes=tuple(order), ops=ops, inputs=tuple(inputs),
        sqnr_db=error.sqnr_db, max_abs=error.max_abs, levels=error.levels, trials=len(search.tried), failure=failure,
    )  # fmt: skip
    return Piece(found, proto, inputs)


@dataclass(eq=False)
class _Search:
    parts: Parts
    counterpart: Counterpart
    engine: EngineUnderTest
    step: float
    tick: Callable[[], None]
    failing: bool
    # How each piece ended: its error and why the engine cannot run it, None for one that is fine.
    tried: dict[frozenset[str], tuple[Error, str] | None] = field(default_factory=dict)

    def grow(self) -> set[str] | None:
        """The first of growing neighbourhoods that diverges; None when even all nodes before the tensor do not."""
        start = self.parts.producer(self.counterpart.tensor)
        if start is None:
            return None
        piece, edge = {start}, {start}
        target = 1.0
        while True:
            if len(piece) >= target or not edge:
                if self.fails(piece):
                    return piece
                target = max(target * _GROWTH, len(piece) + 1)
            if not edge:
                return None
            edge = {name for node in edge for name in self.parts.list_sources(node)} - piece
            piece = piece | edge

    def connect(self, names: list[str]) -> list[str]:
        """Those of the nodes that the tensor is computed from without leaving them."""
        return self.parts.list_needed([self.counterpart.tensor], names)

    def fails(self, piece: Iterable[str]) -> bool:
        """True when the piece diverges (or fails) by itself; one that the reference cannot run does not count."""
        return self.find_end(piece) is not None

    def find_end(self, piece: Iterable[str]) -> tuple[Error, str] | None:
        """How a piece that diverges (or fails) ends, tried once; None for any other."""
        key = frozenset(piece)
        if key not in self.tried:
            self.tick()
            self.tried[key] = self._try(key)
        return self.tried[key]

    def _try(self, piece: frozenset[str]) -> tuple[Error, str] | None:
        tensor = self.counterpart.tensor
        proto, feeds = self.parts.cut_fed(piece, tensor)
        try:
            reference = Session(proto, optimize=False, threads=1, arena=False).run(feeds)[tensor]
        except ModelError:
            return None
        try:
            value = self.engine.run(proto, feeds)[tensor]
        except ModelError as failure:
            return (_NOTHING, str(failure).splitlines()[0]) if self.failing else None
        tally = Tally(tensor, step=self.step)
        tally.update(self._to_real(reference), self._to_real(value))
        error = tally.error("", "")
        return (error, "") if diverges(error) and not self.failing else None

    def _to_real(self, value: Array) -> Array:
        return self.counterpart.level.to_real(value) if self.counterpart.level is not None else value
