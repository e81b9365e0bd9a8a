"""What the samples say of one operator's input: the moments of its positions, gathered from both models' tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.data import attended
from onnxq.passes.adaround_core import agreed_moments
from onnxq.passes.gptq_core import POSITIONS_PER_COLUMN, Spreading, spreading
from onnxq.passes.moments_core import Accumulator, Moments, Room, position_limit, together
from onnxq.passes.unfold_core import Geometry, places, positions, sampled, window_means
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
class Wanted:
    """What moments are of. shape: (groups, K). second: of H and C too; halves: those of each half of the samples in any
    case, not only where a re-fit is possible."""

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


class Seen:
    """Moments of all samples and, where they are needed, of the even and of the odd ones."""

    def __init__(self, moments: Moments, halves: tuple[Moments, Moments] | None) -> None:
        self.moments, self.halves = moments, halves
        self._found: dict[tuple[float, bool], Spreading] = {}

    def spreading(self, damping: float, *, agreed: bool = False) -> Spreading:
        """What rounding needs of H, found once. agreed: of what the halves agree on."""
        if (damping, agreed) not in self._found:
            h = self.moments.h
            if agreed and self.halves is not None and all(half.count for half in self.halves):
                h = agreed_moments(h, *(half.h for half in self.halves))
            self._found[damping, agreed] = spreading(h, damping=damping)
        return self._found[damping, agreed]


@dataclass(frozen=True, eq=False)
class _Sample:
    """One sample's tensors with an axis for samples in front, and which of its positions are meant (None: all)."""

    number: int
    x: Array
    y: Array
    meant: NDArray[np.bool_] | None

    def goes_with(self, other: _Sample) -> bool:
        """True where both can be looked at as one."""
        return self.x.shape == other.x.shape and (self.meant is None) == (other.meant is None)


def gathered(count: int, both: Iterable[tuple[Feeds, Array, Array]], wanted: Wanted, room: Room) -> Seen:
    """Moments of `count` samples: feeds, tensor in the float model, tensor in the quantized one. Empty ones are left
    out: their branch did not run."""
    (groups, size), second = wanted.shape, wanted.rounded
    each = -(-position_limit(groups, size) // max(count, 1))
    sums: list[Accumulator] = []
    waiting: list[list[_Sample]] = []
    for k, (feeds, x, y) in enumerate(both):
        if not x.size or x.shape != y.shape:
            continue
        sample = _sample(k, feeds, x, y, wanted.geometry)
        if not sums:
            few = min(_meant(sample, wanted.geometry), each) * count < POSITIONS_PER_COLUMN * size
            cross = not few and wanted.volume <= _FITTED
            number = 2 if second and (cross or wanted.halves) else 1
            sums = [Accumulator(groups, size, second=second, cross=cross, room=room) for _ in range(number)]
            waiting = [[] for _ in sums]
        half = k % len(sums)
        held = waiting[half]
        if held and not (sample.goes_with(held[0]) and (len(held) + 1) * x.size <= _TOGETHER):
            _add(sums[half], held, wanted, each)
            held.clear()
        held.append(sample)
    for half, held in enumerate(waiting):
        if held:
            _add(sums[half], held, wanted, each)
    found = [half.result() for half in sums] or [Accumulator(groups, size, second=False).result()]
    return Seen(together(*found), (found[0], found[1])) if len(found) > 1 else Seen(found[0], None)


def _sample(number: int, feeds: Feeds, x: Array, y: Array, geometry: Geometry) -> _Sample:
    if geometry.kernel:
        return _Sample(number, x, y, None)
    meant = attended(feeds, x.shape)
    shape = (1, -1, x.shape[-1])
    return _Sample(number, x.reshape(shape), y.reshape(shape), None if meant is None else meant.reshape(1, -1))


def _meant(sample: _Sample, geometry: Geometry) -> int:
    return positions(sample.x.shape, geometry) if sample.meant is None else int(np.count_nonzero(sample.meant))


def _add(half: Accumulator, samples: list[_Sample], wanted: Wanted, each: int) -> None:
    """Add samples of one shape: the means of all their positions, and columns of at most `each` a sample."""
    x, y = (_joined(many) for many in ([s.x for s in samples], [s.y for s in samples]))
    meant = None if samples[0].meant is None else np.concatenate([s.meant for s in samples if s.meant is not None])
    counts = [_meant(sample, wanted.geometry) for sample in samples]
    total, most, seed = sum(counts), each * len(samples), samples[0].number
    chosen = sampled(total, most, seed)
    if meant is not None:
        chosen = np.flatnonzero(meant)[chosen]
    means = [window_means(one, wanted.geometry, meant) for one in (x, y)]
    means = [one.reshape(len(samples), -1, *one.shape[1:]).mean(axis=1) for one in means]
    at = places(x.shape, wanted.geometry, chosen if wanted.rounded else chosen[:0])
    half.update(at.columns(x), at.columns(y), list(zip(counts, *means, strict=True)), count=len(chosen))


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
