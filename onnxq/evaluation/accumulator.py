"""Error sums of one tensor against its reference, added up sample by sample: nothing of a sample is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.evaluation.slices import Part, SliceSums

Array = NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class OutputAccuracy:
    """How far one tensor is from its reference over all samples.

    sqnr_db: 10 log10(signal / noise) of the whole tensor, or of the part of it that is farther; inf when identical,
    -inf when shapes differ or a value is not finite where the reference is. whole_db: of the whole. part: the slices
    that `sqnr_db` is of, like "[:, 4:, :]", "" for the whole. cosine: of the angle between all values of both.
    max_abs: the largest difference. top_k: share of the k largest along the last axis that both name, the mean of all
    rows; nan without rows.
    """

    name: str
    sqnr_db: float
    whole_db: float
    part: str = ""
    cosine: float
    max_abs: float
    top_k: float = math.nan
    rows: int = 0


@dataclass(frozen=True)
class SampleError:
    """Sums of one sample. signal, noise: of squares, of reference and difference. max_abs, peak: largest of the two."""

    signal: float
    noise: float
    max_abs: float
    peak: float


@dataclass
class ErrorAccumulator:
    """Sums of one tensor over samples, in float64. Positions where the reference is not finite do not count.

    slices: judge parts of other scales by themselves too, for a tensor that people read. top_k: count how many of the k
    largest of each row are the same; 0: do not.
    """

    name: str = ""
    signal: float = 0.0
    noise: float = 0.0
    dot: float = 0.0
    power: float = 0.0
    max_abs: float = 0.0
    comparable: bool = True
    slices: SliceSums | None = None
    top_k: int = 0
    # Shares of the k largest that agree, summed over the rows along the last axis.
    hits: float = 0.0
    rows: int = 0

    def update(self, reference: Array, value: Array) -> SampleError | None:
        """Add one sample and return its own sums; None for shapes that differ, and for empty arrays."""
        if reference.shape != value.shape:
            self.comparable = False
            return None
        if reference.size == 0:
            return None
        ref, got = reference.astype(np.float64), value.astype(np.float64)
        if self.top_k and ref.ndim and ref.shape[-1] > 1:
            hits, rows = _count_shared(ref, got, self.top_k)
            self.hits += hits
            self.rows += rows
        known = np.isfinite(ref)
        if not known.all():
            # A mask's -inf, or the log of 0: there is no distance to it, so it counts as equal.
            ref, got = np.where(known, ref, 0.0), np.where(known, got, 0.0)
        shape, ref, got = ref.shape, ref.ravel(), got.ravel()
        signal, peak = float(ref @ ref), float(np.abs(ref).max(initial=0.0))
        if not np.isfinite(got).all():
            self.comparable = False
            return SampleError(signal, math.inf, math.inf, peak)
        error = got - ref
        found = SampleError(signal, float(error @ error), float(np.abs(error).max(initial=0.0)), peak)
        self.signal += found.signal
        self.noise += found.noise
        self.dot += float(ref @ got)
        self.power += float(got @ got)
        self.max_abs = max(self.max_abs, found.max_abs)
        # Integers are labels and indices, whose slices have no scales.
        if self.slices is not None and reference.dtype.kind == "f":
            self.slices.update(ref.reshape(shape), error.reshape(shape))
        return found

    def add(self, other: ErrorAccumulator) -> None:
        """Add the sums of one `update` of another accumulator: to the bit as if it had been one of this."""
        self.comparable = self.comparable and other.comparable
        self.signal += other.signal
        self.noise += other.noise
        self.dot += other.dot
        self.power += other.power
        self.max_abs = max(self.max_abs, other.max_abs)
        self.hits += other.hits
        self.rows += other.rows
        if self.slices is not None and other.slices is not None:
            self.slices.add(other.slices)

    def result(self) -> OutputAccuracy:
        """The error over all samples so far. An all-zero pair agrees perfectly."""
        top_k = self.hits / self.rows if self.rows else math.nan
        if not self.comparable:
            return OutputAccuracy(
                name=self.name, sqnr_db=-math.inf, whole_db=-math.inf, cosine=0.0, max_abs=math.inf, top_k=top_k,
                rows=self.rows,
            )  # fmt: skip
        # Roots first: the product of two sums of squares may overflow.
        norm = float(np.sqrt(self.signal) * np.sqrt(self.power))
        cosine = self.dot / norm if norm > 0 else float(self.noise == 0.0)
        whole = compute_sqnr(self.signal, self.noise)
        parts = [(compute_sqnr(part.signal, part.noise), part.text) for part in self.parts()]
        worst, part = min([(whole, ""), *parts], key=lambda one: one[0])
        return OutputAccuracy(
            name=self.name, sqnr_db=worst, whole_db=whole, part=part, cosine=cosine, max_abs=self.max_abs, top_k=top_k,
            rows=self.rows,
        )  # fmt: skip

    def parts(self) -> tuple[Part, ...]:
        """The parts that are judged by themselves."""
        return () if self.slices is None else tuple(self.slices.parts())


def _count_shared(reference: NDArray[np.float64], value: NDArray[np.float64], k: int) -> tuple[float, int]:
    """Over all rows: the share of the k largest that both name, summed; and the number of rows. NaN is the least."""
    width = reference.shape[-1]
    k = min(k, width)
    rows = [np.where(np.isnan(array), -math.inf, array).reshape(-1, width) for array in (reference, value)]
    if k == 1:
        return float((rows[0].argmax(axis=1) == rows[1].argmax(axis=1)).sum()), len(rows[0])
    # A stable sort: equal values keep the order of their indices in both.
    mine, theirs = (np.argsort(-array, axis=1, kind="stable")[:, :k] for array in rows)
    return float((mine[:, :, None] == theirs[:, None, :]).any(axis=2).mean(axis=1).sum()), len(mine)


def compute_sqnr(signal: float, noise: float) -> float:
    """SQNR in dB of two sums of squares; inf without noise, and a finite, very low figure without signal."""
    if noise == 0.0:
        return math.inf
    return 10.0 * float(np.log10(max(signal, np.finfo(np.float64).tiny) / noise))


def measure_error(reference: Array, value: Array, name: str = "") -> OutputAccuracy:
    """The error of one array against another."""
    sums = ErrorAccumulator(name)
    sums.update(reference, value)
    return sums.result()
