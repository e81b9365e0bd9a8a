"""The smallest subgraph in which two engines part when both are fed the same inputs: the reference engine's.

From the tensor that parts, grow backwards until the piece parts alone; then leave out whatever it parts without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxq.engines.diff_extract import Parts
from onnxq.engines.diff_levels import Level
from onnxq.engines.diff_measure import Tally, parts
from onnxq.engines.diff_model import OFF, Bisection, Error
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex
from onnxq.runtime import Session, tap, trim
from onnxq.sites import TensorId

Array = NDArray[np.generic]
Feeds = Mapping[str, Array]
Rival = Callable[[onnx.ModelProto, Feeds], Mapping[str, Array]]

# How much a growing piece grows: a deep network is not walked node by node.
_GROWTH = 1.5
_NOTHING = Error(run="", against="", sqnr_db=-math.inf, cosine=0.0, max_abs=math.inf, max_rel=math.inf)


@dataclass(frozen=True, eq=False)
class Found:
    """The result, the model that shows it and what to feed it."""

    bisection: Bisection
    proto: onnx.ModelProto
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
            tapped = tap(self._index.proto, missing, only=True)
            session = Session(tapped.proto, optimize=False, threads=self._threads, arena=False)
            values = session.run({value.name: self._feeds[value.name] for value in session.inputs})
            self._known.update({tensor.name: values[name] for tensor, name in tapped.outputs.items()})
            del session
            trim()
        return {name: self._known[name] for name in wanted}


def optimized(proto: onnx.ModelProto, feeds: Feeds) -> Mapping[str, Array]:
    """The rival that users run: ORT with all optimizations."""
    return Session(proto, threads=1, arena=False).run(feeds)


def bisect(
    index: GraphIndex,
    tensor: str,
    feeds: Feeds,
    rival: Rival,
    *,
    run: str,
    level: Level | None = None,
    step: float = 0.0,
    failing: bool = False,
    threads: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Found | None:
    """Search from `tensor` of the main graph, on one sample's feeds. level, step: what its integers mean, if any.

    failing: look for what the rival cannot run, in place of what it computes otherwise.

    Returns None when no piece parts alone: the difference then adds up from roundings.
    """
    search = _Search(Parts(index, Reference(index, feeds, threads=threads)), tensor, rival, level, step, tick, failing)
    piece = search.grow()
    if piece is None:
        return None
    piece = search.shrink(piece)
    proto, inputs = search.parts.cut_fed(piece, tensor)
    error = search.tried[frozenset(piece)]
    order = search.parts.sort_names(piece)
    found = Bisection(
        run=run,
        against=OFF,
        output=tensor,
        nodes=tuple(order),
        ops=tuple(index.node(name).op_type for name in order),
        inputs=tuple(inputs),
        sqnr_db=error.sqnr_db,
        max_abs=error.max_abs,
        levels=error.levels,
        trials=search.trials,
        failure=search.failures.get(frozenset(piece), ""),
    )
    return Found(found, proto, inputs)


class _Search:
    def __init__(
        self,
        cutter: Parts,
        tensor: str,
        rival: Rival,
        level: Level | None,
        step: float,
        tick: Callable[[], None],
        failing: bool,
    ) -> None:
        self.parts, self._tensor, self._rival = cutter, tensor, rival
        self._level, self._step, self._tick = level, step, tick
        self.tried: dict[frozenset[str], Error] = {}
        self.failures: dict[frozenset[str], str] = {}
        self._failing = failing
        self._fine: set[frozenset[str]] = set()
        self.trials = 0

    def grow(self) -> set[str] | None:
        """The first of growing neighbourhoods that parts; None when even everything before the tensor does not."""
        start = self.parts.producer(self._tensor)
        if start is None:
            return None
        piece, edge = {start}, [start]
        target = 1.0
        while True:
            if len(piece) >= target or not edge:
                if self.differs(piece):
                    return piece
                target = max(target * _GROWTH, len(piece) + 1)
            if not edge:
                return None
            edge = [name for node in edge for name in self.parts.list_sources(node) if name not in piece]
            edge = list(dict.fromkeys(edge))
            piece = piece | set(edge)

    def shrink(self, piece: set[str]) -> set[str]:
        """Leave out nodes, many at a time at first, until none can go: farthest from the output first."""
        size = max(1, len(piece) // 2)
        while True:
            order = self.parts.sort_names(piece)
            smaller = None
            for at in range(0, len(order), size):
                rest = set(self.parts.list_needed([self._tensor], piece - set(order[at : at + size])))
                if rest and len(rest) < len(piece) and self.differs(rest):
                    smaller = rest
                    break
            if smaller is not None:
                piece = smaller
                size = max(1, min(size, len(piece) // 2))
            elif size == 1:
                return piece
            else:
                size = max(1, size // 2)

    def differs(self, piece: set[str]) -> bool:
        """Does the piece part (or fail) alone? What the reference itself cannot run does not count."""
        key = frozenset(piece)
        if key in self.tried or key in self._fine:
            return key in self.tried
        self.trials += 1
        self._tick()
        proto, feeds = self.parts.cut_fed(piece, self._tensor)
        try:
            mine = Session(proto, optimize=False, threads=1, arena=False).run(feeds)[self._tensor]
        except ModelError:
            self._fine.add(key)
            return False
        try:
            theirs = self._rival(proto, feeds)[self._tensor]
        except ModelError as failure:
            if self._failing:
                self.tried[key], self.failures[key] = _NOTHING, str(failure).splitlines()[0]
            else:
                self._fine.add(key)
            return self._failing
        tally = Tally(self._tensor, step=self._step)
        tally.update(self._real(mine), self._real(theirs))
        error = tally.error("", "")
        if parts(error) and not self._failing:
            self.tried[key] = error
            return True
        self._fine.add(key)
        return False

    def _real(self, value: Array) -> Array:
        return self._level.real(value) if self._level is not None else value
