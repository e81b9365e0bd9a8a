"""Statistics of one operator's input: first and second moments of its positions, from both models' tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TypeVar

import numpy as np

from onnxq.arrays import Array, Floats, Mask, Shape, are_finite
from onnxq.data import read_mask
from onnxq.numerics.machine import count_cores, map_in_threads
from onnxq.passes.rounding.gptq_core import POSITIONS_PER_COLUMN, ErrorFeedback, factor_hessian
from onnxq.passes.rounding.layerwise import MomentsRequest, PairedRunner
from onnxq.passes.rounding.low_bit_core import shrink_moments
from onnxq.passes.rounding.operators import (
    Geometry,
    gather_columns,
    gather_positions,
    sample_positions,
    window_means,
)
from onnxq.passes.rounding.second_moments import (
    Accumulator,
    Block,
    Moments,
    Part,
    Workspace,
    merge_moments,
    position_limit,
)
from onnxq.passes.rounding.shared_work import SharedWork, Tensor, TensorFile, read_tensor
from onnxq.runtime import Feeds

T = TypeVar("T")
R = TypeVar("R")

# Largest for which there are two of each, to re-fit weights on one half of the samples and judge them on the other.
_FITTED = 1 << 22
# Values of the products that wait at a time, half a GiB: one of each thread.
_AT_A_TIME = 1 << 27
# Small samples are looked at together, up to so many values: one by one, Python takes longer than the arithmetic.
_TOGETHER = 1 << 17


class OperatorStatistics:
    """Moments of all samples and, where they are needed, of the even and of the odd ones.

    scarce: other samples were looked at too.
    """

    def __init__(
        self, moments: Moments, halves: Sequence[Moments] = (), *, scarce: bool = False
    ) -> None:
        self.moments = moments
        self.halves = halves
        self.scarce = scarce
        # A Cholesky factor costs K³ and serves every weight that reads the tensor (query, key,
        # value).
        self._factors: dict[tuple[float, bool], ErrorFeedback] = {}

    def factor_moments(self, damping: float, *, agreed: bool) -> ErrorFeedback:
        """The factors of H that rounding needs, found once. agreed: of the part that the halves agree on."""
        if (damping, agreed) not in self._factors:
            h = self.moments.h
            # With one sample a half is empty, and there is nothing to compare the other with.
            if agreed and self.halves and all(half.count for half in self.halves):
                h = shrink_moments(h, *(half.h for half in self.halves))
            self._factors[damping, agreed] = factor_hessian(h, damping=damping)
        return self._factors[damping, agreed]


@dataclass(frozen=True, eq=False)
class _Sample:
    """One sample's tensors, and which of their positions are meant (None: all).

    shape: of both, with an axis for samples in front. real: False for one that counts in second moments alone.
    """

    number: int
    real: bool
    x: Tensor
    y: Tensor
    shape: Shape
    meant: Mask | None

    def goes_with(self, other: _Sample) -> bool:
        """True where both can be looked at as one."""
        alike = self.shape == other.shape and self.real == other.real
        return alike and (self.meant is None) == (other.meant is None)


@dataclass(frozen=True, eq=False)
class _Group:
    """Samples of one shape that are looked at together.

    each: columns of a sample, at most.
    """

    samples: tuple[_Sample, ...]
    geometry: Geometry
    each: int

    @property
    def counts(self) -> list[int]:
        """Positions of each sample."""
        return [_count_positions(sample, self.geometry) for sample in self.samples]

    @property
    def count(self) -> int:
        """Positions whose columns are taken."""
        return min(sum(self.counts), self.each * len(self.samples))

    def _read_tensors(self, *, both: bool) -> list[Array]:
        """y of all samples and, with `both`, x. A single one may be large, and needs no copy."""
        joined = []
        for tensors in zip(
            *((sample.y, sample.x) if both else (sample.y,) for sample in self.samples), strict=True
        ):
            # Of files only what is read now is in memory.
            values = [read_tensor(tensor).reshape(self.samples[0].shape) for tensor in tensors]
            joined.append(values[0] if len(values) == 1 else np.concatenate(values))
        return joined

    def average_positions(self) -> list[Part]:
        """The means over all positions of each sample; none of those that count in second moments alone."""
        # All of a group are of one kind, see `goes_with`.
        if not self.samples[0].real:
            return []
        means = []
        # A part is (count, mean of x, mean of y), and tensors are read y first.
        for values in reversed(self._read_tensors(both=True)):
            windows = window_means(values, self.geometry, self._meant)
            means.append(windows.reshape(len(self.samples), -1, *windows.shape[1:]).mean(axis=1))
        return list(zip(self.counts, *means, strict=True))

    def take_columns(self, first: int, last: int, *, both: bool) -> Sequence[Floats]:
        """See `Columns`."""
        tensors = self._read_tensors(both=both)
        total = sum(self.counts)
        most = self.each * len(self.samples)
        # By sample, so that positions do not depend on threads or on the order of groups.
        chosen = sample_positions(total, most, self.samples[0].number)
        if self._meant is not None:
            # Positions were drawn among those that the mask means.
            chosen = np.flatnonzero(self._meant)[chosen]
        return gather_columns(tensors, self.geometry, chosen[first:last])

    @property
    def _meant(self) -> Mask | None:
        masks = [sample.meant for sample in self.samples if sample.meant is not None]
        return np.concatenate(masks) if masks else None


def gather_statistics(
    samples: PairedRunner,
    others: PairedRunner,
    wanted: MomentsRequest,
    work: SharedWork | None = None,
    *,
    threads: int = 0,
) -> OperatorStatistics:
    """Moments of the samples. Empty tensors are left out: their branch did not run.

    others: made from the samples in turn, in their order. They are looked at where the samples show few positions, go
    with the half of the samples they are made from, and count in second moments alone: means are of real inputs.
    work: shares the products out, of tensors in files; else so many threads compute them, 0: one for each core. The
    result is the same, to the bit.
    """
    gathering = _Gathering(wanted, len(samples.feeds), len(others.feeds))
    for k, both in enumerate(samples.iterate_tensors(wanted)):
        gathering.add_sample(k, *both, real=True)
    if gathering.scarce:
        for k, both in enumerate(others.iterate_tensors(wanted)):
            gathering.add_sample(k, *both, real=False)
    return gathering.make_statistics(work, threads)


class _Gathering:
    """Moments on the way, and samples that wait to be looked at together with others."""

    def __init__(self, wanted: MomentsRequest, count: int, others: int) -> None:
        self.wanted = wanted
        self.count = count
        self.others = others
        self.scarce = False
        self.each = 0
        self.sums: list[Accumulator] = []
        self.waiting: list[list[_Sample]] = []
        # Each with its half; nothing was read of them yet.
        self.groups: list[tuple[Accumulator, _Group]] = []

    def add_sample(self, number: int, feeds: Feeds, x: Tensor, y: Tensor, *, real: bool) -> None:
        """One sample; others after those that are real."""
        # Computed values can decide a size, as behind a NonZero, and the models may differ in them.
        if not x.size or x.shape != y.shape:
            return
        if not real and not (_is_finite(x) and _is_finite(y)):
            # What a network makes of inputs that never come is no reason to fail.
            return
        shape = x.shape
        kernel = self.wanted.geometry.kernel
        meant = None
        if kernel:
            # Values in the body of a loop have an axis of its steps in front.
            behind = shape[-len(kernel) - 1 :]
            shape = (math.prod(shape[: -len(behind)]), *behind)
        else:
            mask = read_mask(feeds, shape)
            meant = None if mask is None else mask.reshape(1, -1)
            # As one entry of positions by columns, however many axes the tensor has.
            shape = (1, x.size // shape[-1], shape[-1])
        sample = _Sample(number, real, x, y, shape, meant)
        if not self.sums:
            self._begin_sums(sample)
        # Number k is made from sample k modulo their count, and belongs where that one does.
        # Even and odd samples make the halves; of augmented samples their original decides, so that
        # no half sees both a picture and a turned copy of the other half's.
        half = number % self.count % len(self.sums)
        waiting = self.waiting[half]
        # From its first sample on a half always has one waiting.
        if not real and not waiting:
            return
        if waiting and not (
            sample.goes_with(waiting[0]) and (len(waiting) + 1) * x.size <= _TOGETHER
        ):
            self._close_group(half)
        waiting.append(sample)

    def _begin_sums(self, sample: _Sample) -> None:
        """Prepare the statistics that so many samples like the first allow."""
        wanted = self.wanted
        groups, size = wanted.shape
        second = wanted.rounded
        here = _count_positions(sample, wanted.geometry)
        # By the first sample: most models have one size of input.
        self.scarce = second and here * self.count < position_limit(groups, size)
        count = self.count + (self.others if self.scarce else 0)
        # Rounded up, so that no limit leaves a sample without positions.
        self.each = -(-position_limit(groups, size) // max(count, 1))
        # Where weights are not fitted C is never read, and costs as much as H.
        # Least squares over K columns with fewer positions fits noise.
        refits = min(here, self.each) * count >= POSITIONS_PER_COLUMN * size
        cross = refits and wanted.volume <= _FITTED
        halves = range(2 if second and (cross or wanted.halves) else 1)
        self.sums = [Accumulator(groups, size, second=second, cross=cross) for _ in halves]
        self.waiting = [[] for _ in halves]

    def _close_group(self, half: int) -> None:
        """Make a group of the samples that wait in one half."""
        group = _Group(tuple(self.waiting[half]), self.wanted.geometry, self.each)
        self.waiting[half].clear()
        self.groups.append((self.sums[half], group))

    def make_statistics(self, work: SharedWork | None, threads: int) -> OperatorStatistics:
        """Everything added: the means of all positions, and columns of at most `each`; see `gather_statistics`."""

        def spread(title: str, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
            if work is not None:
                return work.map(title, function, tasks)
            most = max(1, _AT_A_TIME // max(self.wanted.volume, 1))
            return map_in_threads(function, tasks, threads=min(threads or count_cores(), most))

        for half, waiting in enumerate(self.waiting):
            if waiting:
                self._close_group(half)
        if not self.sums:
            return OperatorStatistics(Accumulator(*self.wanted.shape, second=False).make_moments())
        groups = [group for _, group in self.groups]
        means = spread("rounding: means", _Group.average_positions, groups)
        for (sums, group), parts in zip(self.groups, means, strict=True):
            sums.add_columns(group, group.count, parts)
        blocks = [(sums, block) for sums in self.sums for block in sums.take_blocks()]
        multiply = Block.multiply_columns
        if work is None:
            multiply = partial(multiply, workspace=Workspace())
        products = spread("rounding: second moments", multiply, [block for _, block in blocks])
        for (sums, _), block_products in zip(blocks, products, strict=True):
            # In the order of blocks, whoever computed them: float sums depend on it.
            sums.add_products(block_products)
        halves = [half.make_moments() for half in self.sums]
        return OperatorStatistics(
            reduce(merge_moments, halves), halves if len(halves) > 1 else (), scarce=self.scarce
        )


def _is_finite(value: Tensor) -> bool:
    return value.finite if isinstance(value, TensorFile) else are_finite(value)


def _count_positions(sample: _Sample, geometry: Geometry) -> int:
    return (
        gather_positions(sample.shape, geometry)
        if sample.meant is None
        else int(np.count_nonzero(sample.meant))
    )
