"""Every kernel of ORT's optimized graph by itself, fed the tensors that the unoptimized run computes.

Down a deep network one value rounded the other way moves thousands after it, and a small fault could hide in that.
A kernel fed the same integers has nothing to hide in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxq.engines.diff.bisect import Reference, run_optimized
from onnxq.engines.diff.cut import Parts
from onnxq.engines.diff.layers import DivergencePoint, Inner, mark_divergence
from onnxq.engines.diff.levels import Array
from onnxq.engines.diff.matching import Counterpart, MatchedTensor, match_tensors
from onnxq.engines.diff.measure import Tally, diverges
from onnxq.engines.diff.model import OFF, ON, Error, label_run
from onnxq.errors import ModelError
from onnxq.runtime import Feeds, Session


@dataclass(frozen=True)
class KernelCheck:
    """The agreement of kernels, each by itself."""

    # How many were tried.
    kernels: int
    # Most steps that any quantized value is off by, and the share of values that are off in the worst kernel.
    levels: float = 0.0
    share: float = 0.0
    # Of the worst float result.
    sqnr_db: float = math.inf
    # The first kernel that diverges.
    point: DivergencePoint | None = None

    def describe(self) -> str:
        """The agreement of the kernels, in a line."""
        whole = f"to 1 level on at most {100 * self.share:.2g}% of a tensor's values" if self.levels else "exactly"
        real = "exactly" if math.isinf(self.sqnr_db) else f"to {self.sqnr_db:.0f} dB"
        return (
            f"{label_run(ON)}: each of {self.kernels} kernels alone, fed the same, agrees with the file: "
            f"quantized results {whole}, float ones {real}"
        )


def check_kernels(
    inner: Inner, feeds: Feeds, *, threads: int = 0, tick: Callable[[], None] = lambda: None
) -> KernelCheck:
    """Cut the model where ORT's fusions do, and run every piece on the first sample without and with optimizations."""
    matched = match_tensors(inner.float_index, inner.index)
    survivors = inner.survivors
    wanted = [(row, one) for row in matched for one in row.counterparts if one.tensor in survivors]
    reference = Reference(inner.index, feeds, threads=threads)
    cutter = Parts(inner.index, reference)
    pieces = {one.tensor: _find_kernel(cutter, one.tensor, survivors) for _, one in wanted}
    # All at once: one run of the model in place of one for every piece.
    reference([*pieces, *(tensor for piece in pieces.values() for tensor in cutter.list_inputs(piece))])
    kernels, levels, share, worst = 0, 0.0, 0.0, math.inf
    point: DivergencePoint | None = None
    for row, counterpart in wanted:
        found = _run_kernel(cutter, row, counterpart, pieces[counterpart.tensor])
        tick()
        if found is None:
            continue
        kernels += 1
        error, off = found
        if math.isnan(error.levels):
            worst = min(worst, error.sqnr_db)
        else:
            levels, share = max(levels, error.levels), max(share, off)
        if point is None and diverges(error):
            point = mark_divergence(row, counterpart, error, 0)
    return KernelCheck(kernels, levels, share, worst, point)


def _find_kernel(cutter: Parts, tensor: str, stops: frozenset[str]) -> set[str]:
    """The nodes between a tensor ORT computes and those before it that it also computes."""
    start = cutter.producer(tensor)
    stack = [start] if start is not None else []
    found = set(stack)
    while stack:
        for name in cutter.list_sources(stack.pop()):
            if name not in found and not stops.intersection(cutter.nodes[name].output):
                found.add(name)
                stack.append(name)
    return found


def _run_kernel(
    cutter: Parts, row: MatchedTensor, counterpart: Counterpart, piece: set[str]
) -> tuple[Error, float] | None:
    """The error of one piece and the share of values that differ; None when it cannot run by itself."""
    proto, feeds = cutter.cut_fed(piece, counterpart.tensor)
    try:
        mine = Session(proto, optimize=False, threads=1, arena=False).run(feeds)[counterpart.tensor]
        theirs = run_optimized(proto, feeds)[counterpart.tensor]
    except ModelError:
        return None
    return _measure(row, counterpart, mine, theirs)


def _measure(row: MatchedTensor, counterpart: Counterpart, mine: Array, theirs: Array) -> tuple[Error, float] | None:
    own, other = (counterpart.read({counterpart.tensor: value}) for value in (mine, theirs))
    if own is None or other is None:
        return None
    level = counterpart.level
    # Steps are only counted between integers; a float result has none.
    tally = Tally(row.name, step=level.scale if level is not None and mine.dtype.kind in "iu" else 0.0)
    tally.update(own, other)
    same = mine.shape == theirs.shape
    return tally.error(ON, OFF), float(np.mean(mine != theirs)) if same and mine.size else 0.0
