"""Every kernel of ORT's optimized graph alone: fed what the unoptimized run computes, does it give the same?

Down a deep network one value rounded the other way moves thousands after it, and a small fault could hide in that.
A kernel fed the same integers has nothing to hide in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.engines.diff.bisect import Feeds, Reference, optimized
from onnxq.engines.diff.cut import Parts
from onnxq.engines.diff.layers import Inner, Spot
from onnxq.engines.diff.matching import Place, Row, rows
from onnxq.engines.diff.measure import Tally, parts
from onnxq.engines.diff.model import OFF, ON, Error, Parting, run_label
from onnxq.errors import ModelError
from onnxq.runtime import Session

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Alone:
    """kernels: how many were tried. levels: most steps any quantized value is off by; share: of values that are off
    in the worst kernel. sqnr_db: of the worst float result. spot: the first kernel that parts.
    """

    kernels: int
    levels: float = 0.0
    share: float = 0.0
    sqnr_db: float = math.inf
    spot: Spot | None = None

    def text(self) -> str:
        """What it shows, in a line."""
        whole = f"to 1 level on at most {100 * self.share:.2g}% of a tensor's values" if self.levels else "exactly"
        real = "exactly" if math.isinf(self.sqnr_db) else f"to {self.sqnr_db:.0f} dB"
        return (
            f"{run_label(ON)}: each of {self.kernels} kernels alone, fed the same, agrees with the file: "
            f"quantized results {whole}, float ones {real}"
        )


def check_kernels(
    inner: Inner, feeds: Feeds, *, sample: int = 0, threads: int = 0, tick: Callable[[], None] = lambda: None
) -> Alone:
    """Cut the model where ORT's fusions do, and run every piece on one sample without and with optimizations."""
    made = rows(inner.float_index, inner.index)
    survivors = inner.survivors
    wanted = [(row, place) for row in made for place in row.places if place.tensor in survivors]
    reference = Reference(inner.index, feeds, threads=threads)
    cutter = Parts(inner.index, reference)
    pieces = {place.tensor: _kernel(cutter, place.tensor, survivors) for _, place in wanted}
    reference([*pieces, *(tensor for piece in pieces.values() for tensor in cutter.crossing(piece))])
    kernels, levels, share, worst = 0, 0.0, 0.0, math.inf
    spot: Spot | None = None
    for row, place in wanted:
        found = _alone(cutter, row, place, pieces[place.tensor])
        tick()
        if found is None:
            continue
        kernels += 1
        error, off = found
        if math.isnan(error.levels):
            worst = min(worst, error.sqnr_db)
        else:
            levels, share = max(levels, error.levels), max(share, off)
        if spot is None and parts(error):
            spot = _spot(row, place, error, sample)
    return Alone(kernels, levels, share, worst, spot)


def _kernel(cutter: Parts, tensor: str, stops: frozenset[str]) -> set[str]:
    """The nodes between a tensor ORT computes and those before it that it also computes."""
    start = cutter.maker(tensor)
    stack = [start] if start is not None else []
    found = set(stack)
    while stack:
        for name in cutter.before(stack.pop()):
            if name not in found and not stops.intersection(cutter.makes(name)):
                found.add(name)
                stack.append(name)
    return found


def _alone(cutter: Parts, row: Row, place: Place, piece: set[str]) -> tuple[Error, float] | None:
    """The error of one piece and the share of values that differ; None when it cannot run by itself."""
    proto, feeds = cutter.cut(piece, place.tensor)
    try:
        mine = Session(proto, optimize=False, threads=1, arena=False).run(feeds)[place.tensor]
        theirs = optimized(proto, feeds)[place.tensor]
    except ModelError:
        return None
    return _error(row, place, mine, theirs)


def _error(row: Row, place: Place, mine: Array, theirs: Array) -> tuple[Error, float] | None:
    reals: Sequence[Array | None] = [place.read({place.tensor: value}) for value in (mine, theirs)]
    if reals[0] is None or reals[1] is None:
        return None
    tally = Tally(row.name, step=place.level.scale if place.level is not None and mine.dtype.kind in "iu" else 0.0)
    tally.update(reals[0], reals[1])
    same = mine.shape == theirs.shape
    return tally.error(ON, OFF), float(np.mean(mine != theirs)) if same and mine.size else 0.0


def _spot(row: Row, place: Place, error: Error, sample: int) -> Spot:
    parting = Parting(
        run=ON,
        against=OFF,
        tensor=row.reference or row.name,
        node=row.node.name,
        op=row.node.op_type,
        sqnr_db=error.sqnr_db,
        levels=error.levels,
    )
    return Spot(parting, place, row.step, sample)
