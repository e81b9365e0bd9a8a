"""Dataset: samples of one model's inputs, chosen, checked and given out one by one or in batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.data.cuts import batch_axis, batch_symbols
from onnxq.data.fit import Array, ready
from onnxq.data.sources import Source
from onnxq.errors import DataError
from onnxq.graph import ValueInfo


@dataclass(frozen=True, eq=False)
class Batch:
    """feeds: `count` samples side by side (count 1: one sample as it is); the first is sample `first_index`."""

    feeds: dict[str, Array]
    first_index: int
    count: int


class Dataset:
    """Some of a source's samples, in order. Reading one costs one sample's memory; nothing is kept.

    indices: the source's samples in this set; spare: further ones that a split may hold back.
    synthetic: random numbers, made because no data was given.
    """

    def __init__(
        self,
        source: Source,
        inputs: Sequence[ValueInfo],
        indices: Sequence[int],
        *,
        spare: Sequence[int] = (),
        title: str = "data",
        synthetic: bool = False,
    ) -> None:
        if not indices:
            raise DataError(title, "is empty: it has no samples", "give it at least one sample", code="Q203")
        self.inputs: tuple[ValueInfo, ...] = tuple(inputs)
        self.synthetic = synthetic
        self._source, self._title = source, title
        self._indices, self._spare = tuple(indices), tuple(spare)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def spare(self) -> int:
        """How many samples a split may hold back without taking any of these."""
        return len(self._spare)

    def samples(self) -> Iterator[dict[str, Array]]:
        """Every sample by input name, with the model's own ranks and dtypes.

        Raises DataError naming input and sample for what does not fit the model, NaN and inf included.
        """
        for position in range(len(self)):
            yield self[position]

    def __getitem__(self, position: int) -> dict[str, Array]:
        """One sample; IndexError past the end."""
        i = self._indices[position]
        raw, where = self._source.sample(i), self._source.name(i)
        return {value.name: ready(raw[value.name], value, where) for value in self.inputs}

    def name(self, position: int) -> str:
        """What messages call a sample: file, number in it."""
        return self._source.name(self._indices[position])

    def batches(self, n: int | None = None) -> Iterator[Batch]:
        """Up to n neighbouring samples of equal shapes side by side, in order.

        Samples are only put together along a dynamic batch axis that all inputs have, and only when each has size 1
        there; else they come one by one.
        """
        axes = self._batch_axes() if n is not None and n > 1 else None
        held: list[dict[str, Array]] = []
        first = 0
        for position, sample in enumerate(self.samples()):
            if held and (axes is None or len(held) == n or not _alike(held[0], sample, axes)):
                yield _joined(held, first, axes)
                held, first = [], position
            held.append(sample)
        yield _joined(held, first, axes)

    def split(self, holdout: int, seed: int = 0, keep: Collection[int] = ()) -> tuple[Dataset, Dataset]:
        """(calibration, held back): disjoint, the held-back samples from the spare ones first.

        At least one sample stays for calibration. holdout 0, or a single sample: both are the whole set.
        keep: positions that calibration cannot do without; they are held back only when nothing else is left.
        """
        if holdout <= 0 or len(self) + len(self._spare) == 1:
            return self._of(self._indices), self._of(self._indices)
        rng = np.random.default_rng(seed)
        held = _choice(rng, self._spare, holdout)
        wanted = min(holdout - len(held), len(self) - 1)
        free = [i for position, i in enumerate(self._indices) if position not in keep]
        mine = _choice(rng, free if len(free) >= wanted else self._indices, wanted)
        kept = [i for i in self._indices if i not in frozenset(mine)]
        return self._of(kept), self._of(sorted([*held, *mine]))

    def take(self, count: int, seed: int = 0) -> Dataset:
        """At most `count` of the samples, chosen by the seed, in order."""
        return self._of(_choice(np.random.default_rng(seed), self._indices, max(count, 1)))

    def joined(self, other: Dataset) -> Dataset:
        """The samples of both, which must be parts of one set, each once."""
        return self._of(sorted({*self._indices, *other._indices}))

    def describe(self) -> str:
        """One line for reports and plans: how many samples of what, and what was done to them."""
        total = len(self._source)
        count = f"{len(self)} samples" if len(self) == total else f"{len(self)} of {total} samples"
        count = count.replace("1 samples", "1 sample") if len(self) == total == 1 else count
        text = f"{self._title}: {count}"
        return "; ".join([text, *self._source.notes])

    def _of(self, indices: Sequence[int]) -> Dataset:
        return Dataset(self._source, self.inputs, indices, title=self._title, synthetic=self.synthetic)

    def _batch_axes(self) -> dict[str, int] | None:
        """The axis along which each input's samples are put side by side; None when some input has none."""
        symbols = batch_symbols(self.inputs)
        found: dict[str, int] = {}
        for value in self.inputs:
            axis = batch_axis(value, symbols)
            if axis is None or value.shape is None:
                return None
            found[value.name] = axis
            # A symbol that sizes two axes of a tensor is no batch.
            if isinstance(value.shape[axis], str) and value.shape.count(value.shape[axis]) > 1:
                return None
        return found if len(symbols) < 2 else None


def _choice(rng: np.random.Generator, items: Sequence[int], count: int) -> list[int]:
    if count >= len(items):
        return list(items)
    return [items[k] for k in sorted(rng.choice(len(items), size=count, replace=False))]


def _alike(a: dict[str, Array], b: dict[str, Array], axes: dict[str, int]) -> bool:
    return all(a[name].shape == b[name].shape and a[name].shape[axis] == 1 for name, axis in axes.items())


def _joined(held: list[dict[str, Array]], first: int, axes: dict[str, int] | None) -> Batch:
    if len(held) == 1 or axes is None:
        return Batch(held[0], first, 1)
    feeds = {name: np.concatenate([one[name] for one in held], axis=axis) for name, axis in axes.items()}
    return Batch(feeds, first, len(held))
