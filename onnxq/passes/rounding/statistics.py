"""Statistics of one operator's input: first and second moments of its positions, from both models' tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxq.data import read_mask
from onnxq.passes.rounding.gptq_core import POSITIONS_PER_COLUMN, ErrorFeedback, factor_hessian
from onnxq.passes.rounding.im2col import (
    Geometry,
    compute_gather_indices,
    gather_positions,
    sample_positions,
    window_means,
)
from onnxq.passes.rounding.low_bit_core import shrink_moments
from onnxq.passes.rounding.second_moments import Accumulator, Moments, Workspace, merge_moments, position_limit
from onnxq.runtime import Feeds
from onnxq.sites import TensorId

Array = NDArray[Any]

# Largest H and C: two of 2**25 float64 are half a GiB. Operators beyond keep nearest rounding.
_MATRIX = 1 << 25
# Largest for which there are two of each, to re-fit weights on one half of the samples and judge them on the other.
_FITTED = 1 << 22
# Small samples are looked at together, up to so many values: one by one, Python takes longer than the arithmetic.
_TOGETHER = 1 << 17


@dataclass(frozen=True)
class MomentsRequest:
    """Request for the moments of one tensor.

    reader: a node that reads the tensors. shape: (groups, K). second: of H and C too; halves: those of each half of the
    samples in any case, not only where a re-fit is possible.
    """

    reader: str = field(compare=False)
    data: TensorId
    paired: TensorId | None
    geometry: Geometry
    shape: tuple[int, int]
    second: bool
    halves: bool

    @property
    def rounded(self) -> bool:
        """True where H is wanted and not too large."""
        return self.second and self.volume <= _MATRIX

    @property
    def volume(self) -> int:
        """Values of H."""
        return self.shape[0] * self.shape[1] ** 2


class OperatorStatistics:
    """Moments of all samples and, where they are needed, of the even and of the odd ones."""

    def __init__(self, moments: Moments, halves: tuple[Moments, Moments] | None) -> None:
        self.moments, self.halves = moments, halves
        self._found: dict[tuple[float, bool], ErrorFeedback] = {}

    def spreading(self, damping: float, *, agreed: bool = False) -> ErrorFeedback:
        """The factors of H that rounding needs, found once. agreed: of the part that the halves agree on."""
        if (damping, agreed) not in self._found:
            h = self.moments.h
            if agreed and self.halves is not None and all(half.count for half in self.halves):
                h = shrink_moments(h, *(half.h for half in self.halves))
            self._found[damping, agreed] = factor_hessian(h, damping=damping)
        return self._found[damping, agreed]


@dataclass(frozen=True, eq=False)
class _Sample:
    """One sample's tensors with an axis for samples in front, and which of its positions are meant (None: all).

    given: False for one that counts in second moments alone.
    """

    number: int
    given: bool
    x: Array
    y: Array
    meant: NDArray[np.bool_] | None

    def goes_with(self, other: _Sample) -> bool:
        """True where both can be looked at as one."""
        alike = self.x.shape == other.x.shape and self.given == other.given
        return alike and (self.meant is None) == (other.meant is None)


class Samples(Protocol):
    """Samples to gather from, with the tensors that an operator reads of each."""

    @property
    def feeds(self) -> Sequence[Feeds]: ...

    def tensors(self, wanted: MomentsRequest) -> Iterable[tuple[Feeds, Array, Array]]:
        """Feeds, tensor in the float model, tensor in the quantized one."""
        ...


def gather_statistics(
    samples: Samples, others: Samples, wanted: MomentsRequest, workspace: Workspace
) -> OperatorStatistics:
    """Moments of the samples. Empty tensors are left out: their branch did not run.

    others: made from the samples in turn, in their order. They are looked at where the samples show few positions, go
    with the half of the samples they are made from, and count in second moments alone: means are of real inputs.
    """
    found = _Gathering(wanted, workspace, len(samples.feeds), len(others.feeds))
    for k, both in enumerate(samples.tensors(wanted)):
        found.add(k, *both, given=True)
    if found.scarce:
        for k, both in enumerate(others.tensors(wanted)):
            found.add(k, *both, given=False)
    return found.result()


class _Gathering:
    """Moments on the way, and samples that wait to be looked at together with others."""

    def __init__(self, wanted: MomentsRequest, workspace: Workspace, given: int, others: int) -> None:
        self.wanted, self.workspace, self.given, self.others = wanted, workspace, given, others
        self.scarce, self.each = False, 0
        self.sums: list[Accumulator] = []
        self.waiting: list[list[_Sample]] = []

    def add(self, number: int, feeds: Feeds, x: Array, y: Array, *, given: bool) -> None:
        """One sample; others after those that are given."""
        if not x.size or x.shape != y.shape:
            return
        if not given and not (np.isfinite(x).all() and np.isfinite(y).all()):
            # What a network makes of inputs that never come is no reason to fail.
            return
        sample = _sample(number, given, feeds, x, y, self.wanted.geometry)
        if not self.sums:
            self._begin(sample)
        # Number k is made from sample k modulo their count, and belongs where that one does.
        half = number % self.given % len(self.sums)
        held = self.waiting[half]
        # From its first sample on a half always has one waiting.
        if not given and not held:
            return
        if held and not (sample.goes_with(held[0]) and (len(held) + 1) * x.size <= _TOGETHER):
            _add(self.sums[half], held, self.wanted, self.each)
            held.clear()
        held.append(sample)

    def _begin(self, sample: _Sample) -> None:
        """Prepare the statistics that so many samples like the first allow."""
        wanted, (groups, size) = self.wanted, self.wanted.shape
        second, here = wanted.rounded, _count_positions(sample, wanted.geometry)
        self.scarce = second and here * self.given < position_limit(groups, size)
        count = self.given + (self.others if self.scarce else 0)
        self.each = -(-position_limit(groups, size) // max(count, 1))
        # Where weights are not fitted C is never read, and costs as much as H.
        few = min(here, self.each) * count < POSITIONS_PER_COLUMN * size
        cross = not few and wanted.volume <= _FITTED
        halves = range(2 if second and (cross or wanted.halves) else 1)
        self.sums = [Accumulator(groups, size, second=second, cross=cross, workspace=self.workspace) for _ in halves]
        self.waiting = [[] for _ in halves]

    def result(self) -> OperatorStatistics:
        """Everything added."""
        for half, held in enumerate(self.waiting):
            if held:
                _add(self.sums[half], held, self.wanted, self.each)
        if not self.sums:
            return OperatorStatistics(Accumulator(*self.wanted.shape, second=False).result(), None)
        whole, *others = [half.result() for half in self.sums]
        return (
            OperatorStatistics(merge_moments(whole, others[0]), (whole, others[0]))
            if others
            else (OperatorStatistics(whole, None))
        )


def _sample(number: int, given: bool, feeds: Feeds, x: Array, y: Array, geometry: Geometry) -> _Sample:
    if geometry.kernel:
        return _Sample(number, given, x, y, None)
    meant = read_mask(feeds, x.shape)
    shape = (1, -1, x.shape[-1])
    return _Sample(number, given, x.reshape(shape), y.reshape(shape), None if meant is None else meant.reshape(1, -1))


def _count_positions(sample: _Sample, geometry: Geometry) -> int:
    return gather_positions(sample.x.shape, geometry) if sample.meant is None else int(np.count_nonzero(sample.meant))


def _add(half: Accumulator, samples: list[_Sample], wanted: MomentsRequest, each: int) -> None:
    """Add samples of one shape: the means of all their positions, and columns of at most `each` a sample."""
    # A single one may be large, and needs no copy.
    x, y = (many[0] if len(many) == 1 else np.concatenate(many)
            for many in ([s.x for s in samples], [s.y for s in samples]))  # fmt: skip
    meant = None if samples[0].meant is None else np.concatenate([s.meant for s in samples if s.meant is not None])
    counts = [_count_positions(sample, wanted.geometry) for sample in samples]
    total, most, seed = sum(counts), each * len(samples), samples[0].number
    chosen = sample_positions(total, most, seed)
    if meant is not None:
        chosen = np.flatnonzero(meant)[chosen]
    means = [window_means(one, wanted.geometry, meant) for one in (x, y)]
    means = [one.reshape(len(samples), -1, *one.shape[1:]).mean(axis=1) for one in means]
    at = compute_gather_indices(x.shape, wanted.geometry, chosen if wanted.rounded else chosen[:0])
    parts = list(zip(counts, *means, strict=True)) if samples[0].given else []
    half.update(at.columns(x), at.columns(y), parts, count=len(chosen))
