"""Dataset: chosen and validated samples of a model's inputs, one by one or in batches; facts that choices depend on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.arrays import Array, Arrays, Mask, Shape
from onnxq.data.fit import Feeds, Inputs, fit_array, refuse_empty
from onnxq.data.sources import SampleSource, find_batch_axis, find_batch_symbols, read_lazily
from onnxq.graph.base import ValueInfos
from onnxq.runtime.crew import Crew, SharedFeeds, read_feeds
from onnxq.sites import Names

# By input, the axis along which its samples are joined.
BatchAxes = dict[str, int]
# Of a sample's number in its source and its inputs: the inputs, and more.
Extend = Callable[[int, Feeds], Arrays]


@dataclass(frozen=True, eq=False)
class Batch:
    """Neighbouring samples for one run."""

    # Inputs by name, joined along their batch axes.
    feeds: Feeds
    # Position of the first sample in its dataset.
    first_index: int
    # Number of samples; 1: one sample as it is.
    count: int


class Unchosen:
    """The numbers below `total` that are not among `chosen`, sorted; not as a list, since there may be millions."""

    def __init__(self, total: int, chosen: Sequence[int]) -> None:
        self._count = total - len(chosen)
        # Of each chosen number, how many before it are not.
        self._before = [number - position for position, number in enumerate(chosen)]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> int:
        """The number at a position."""
        place = range(self._count)[position]
        return place + bisect_right(self._before, place)


class Dataset:
    """A selection of a source's samples, in order. Samples are read on request and not kept.

    indices: the selected samples of the source. spare: further ones that a split may hold back.
    synthetic: the samples are random numbers, made because no data was given. extend: see `extended`.
    """

    def __init__(
        self,
        source: SampleSource,
        inputs: Inputs,
        indices: Sequence[int],
        *,
        spare: Sequence[int] | Unchosen = (),
        title: str = "data",
        synthetic: bool = False,
        extend: Extend | None = None,
    ) -> None:
        if not indices:
            raise refuse_empty(title)
        self.inputs: ValueInfos = tuple(inputs)
        self.synthetic = synthetic
        self._source = source
        self._title = title
        self._extend = extend
        self._indices = tuple(indices)
        self._spare = spare

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def spare(self) -> int:
        """Number of samples that a split may hold back without taking any of the selection."""
        return len(self._spare)

    def samples(self) -> Iterator[Feeds]:
        """Yield every sample by input name, with the model's own ranks and dtypes.

        Raises DataError with input and sample for arrays that do not fit the model, and for NaN and inf.
        """
        for position in range(len(self)):
            yield self[position]

    def __getitem__(self, position: int) -> Feeds:
        """Read one sample. Raises IndexError past the end."""
        i = self._indices[position]
        raw = self._source.read_sample(i)
        where = self._source.name_sample(i)
        feeds = {value.name: fit_array(raw[value.name], value, where) for value in self.inputs}
        return feeds if self._extend is None else dict(self._extend(i, feeds))

    def name(self, position: int) -> str:
        """Name a sample for messages: file and number in it."""
        return self._source.name_sample(self._indices[position])

    def split_batch(self, batch: Batch) -> Iterator[Batch]:
        """Yield the samples of a batch, one by one."""
        first = batch.first_index
        return (Batch(self[k], k, 1) for k in range(first, first + batch.count))

    def batches(self, n: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to n neighbouring samples of equal shapes, in order.

        Samples are joined only along a dynamic batch axis that all inputs have, and only if each has size 1 there;
        else they come one by one.
        """
        axes = self._batch_axes() if n is not None and n > 1 else None
        waiting: list[Feeds] = []
        first = 0
        for position, sample in enumerate(self.samples()):
            if waiting and (
                axes is None or len(waiting) == n or not _can_join(waiting[0], sample, axes)
            ):
                yield _join_samples(waiting, first, axes)
                waiting = []
                first = position
            waiting.append(sample)
        yield _join_samples(waiting, first, axes)

    def split(
        self, holdout: int, seed: int = 0, keep: Collection[int] = ()
    ) -> tuple[Dataset, Dataset]:
        """Split into (calibration, validation); disjoint, with validation samples from the spare ones first.

        At least one sample stays for calibration. holdout 0, or no sample that may be held back: both parts are the
        whole set. keep: positions that calibration needs and that are never held back; fewer may then be.
        """
        if holdout <= 0:
            return self._choose(self._indices), self._choose(self._indices)
        rng = np.random.default_rng(seed)
        spare = choose_items(rng, self._spare, holdout)
        free = [i for position, i in enumerate(self._indices) if position not in keep]
        own = choose_items(rng, free, min(holdout - len(spare), len(self) - 1))
        validation = sorted(spare + own) or self._indices
        return self._choose([i for i in self._indices if i not in frozenset(own)]), self._choose(
            validation
        )

    def take(self, count: int, seed: int = 0) -> Dataset:
        """Choose at most `count` of the samples by the seed, in order."""
        return self._choose(choose_items(np.random.default_rng(seed), self._indices, max(count, 1)))

    def joined(self, other: Dataset) -> Dataset:
        """Join two parts of one set; a sample of both counts once."""
        return self._choose(sorted({*self._indices, *other._indices}))

    def find_positions(self, part: Dataset) -> list[int]:
        """Return the positions here of the samples of a part."""
        return [self._indices.index(index) for index in part._indices]

    def without(self, other: Dataset) -> Dataset:
        """Leave out the samples of another part of the same set; at least one must remain."""
        taken = frozenset(other._indices)
        return self._choose([i for i in self._indices if i not in taken])

    def extended(self, extend: Extend) -> Dataset:
        """Return the same samples with further inputs, each as `extend` gives it when it is read."""
        return self._choose(self._indices, extend)

    def describe(self) -> str:
        """Describe the set in one line for reports and plans: number, source and conversions of the samples."""
        count = len(self)
        total = len(self._source)
        text = (
            f"{count} of {total} samples"
            if count != total
            else "1 sample"
            if count == 1
            else f"{count} samples"
        )
        return "; ".join([f"{self._title}: {text}", *self._source.notes])

    def part(self, positions: Sequence[int]) -> Dataset:
        """Return the samples at some positions."""
        return self._choose([self._indices[position] for position in positions])

    def _choose(self, indices: Sequence[int], extend: Extend | None = None) -> Dataset:
        return Dataset(
            self._source,
            self.inputs,
            indices,
            title=self._title,
            synthetic=self.synthetic,
            extend=extend or self._extend,
        )

    def _batch_axes(self) -> BatchAxes | None:
        """Find each input's axis for joining samples; None if an input has none."""
        symbols = find_batch_symbols(self.inputs)
        axes = {}
        for value in self.inputs:
            axis = find_batch_axis(value, symbols)
            if axis is None or value.shape is None:
                return None
            axes[value.name] = axis
            # A symbol that sizes two axes of a tensor is not the batch.
            if isinstance(value.shape[axis], str) and value.shape.count(value.shape[axis]) > 1:
                return None
        # Two symbols on axes 0 may have to differ, e.g. for images and boxes.
        return axes if len(symbols) < 2 else None


def choose_items(
    rng: np.random.Generator, items: Sequence[int] | Unchosen, count: int
) -> list[int]:
    """Choose so many of the items, in their order; all where there are fewer."""
    places: Iterable[int] = range(len(items))
    if count < len(items):
        places = sorted(rng.choice(len(items), size=count, replace=False))
    return [items[k] for k in places]


def _can_join(a: Feeds, b: Feeds, axes: BatchAxes) -> bool:
    shapes = ((a[name].shape, b[name].shape, axis) for name, axis in axes.items())
    return all(shape == other and shape[axis] == 1 for shape, other, axis in shapes)


def _join_samples(samples: list[Feeds], first: int, axes: BatchAxes | None) -> Batch:
    if len(samples) == 1 or axes is None:
        return Batch(samples[0], first, 1)
    feeds = {
        name: np.concatenate([sample[name] for sample in samples], axis=axis)
        for name, axis in axes.items()
    }
    return Batch(feeds, first, len(samples))


@dataclass(frozen=True)
class SharedSamples:
    """Some samples of a set, in order. names: as the set calls them in messages."""

    inputs: ValueInfos
    feeds: tuple[SharedFeeds, ...]
    names: Names

    def open(self) -> Dataset:
        """Return them as a set of their own; each is read when it is asked for."""
        items = list(zip(self.feeds, self.names, strict=True))
        source = read_lazily(items, lambda item: read_feeds(item[0]), lambda item: str(item[1]))
        return Dataset(source, self.inputs, range(len(items)))


def share_samples(crew: Crew, dataset: Dataset, positions: Sequence[int]) -> SharedSamples:
    """Put the samples at some positions into the crew's folder."""
    feeds = tuple(crew.share_feeds(dataset[position]) for position in positions)
    return SharedSamples(dataset.inputs, feeds, tuple(map(dataset.name, positions)))


# Of each extreme the samples that calibration keeps must reach so much: a range a tenth too short clips little.
_REACH = 0.9


def find_extremes(samples: Iterable[Arrays], wanted: int = 0) -> frozenset[int]:
    """Find the samples with the least or greatest value, the most energy or the most elements of an input.

    samples: inputs by name, any shapes. Integer inputs count by their size only, because their values are indices.
    Of equal samples the first counts. An input that is the same in all samples is ignored.
    wanted: so many others are wanted. Where fewer are left, as with many inputs, those extremes are left out, too,
    without which all others still reach nine tenths as far.
    Returns the samples' positions.
    """
    table = np.array(
        [[x for name in sorted(sample) for x in _measure_array(sample[name])] for sample in samples]
    )
    peaks = table.max(axis=0)
    varying = peaks > table.min(axis=0)
    extremes = np.unique(table[:, varying].argmax(axis=0))
    if len(table) - len(extremes) >= wanted:
        return frozenset(extremes.tolist())
    # A peak below 0, such as that of a least value above 0, is a tenth lower, too.
    least = peaks * np.where(peaks > 0, _REACH, 2 - _REACH)
    left = set(range(len(table)))
    # Others first, none of which is missed; then the extremes that lead by least.
    leads = (table - least).max(axis=1)
    for position in sorted(left, key=lambda k: (k in extremes, leads[k])):
        rest = sorted(left - {position})
        if len(table) - len(left) < wanted and rest and (table[rest].max(axis=0) >= least).all():
            left.discard(position)
    return frozenset(left)


def _measure_array(value: Array) -> tuple[float, ...]:
    """Measure an array: size; of floats also negated minimum, maximum and mean square. Larger is more extreme."""
    if value.dtype.kind != "f" or not value.size:
        return float(value.size), 0.0, 0.0, 0.0
    wide = value.astype(np.float32, copy=False)
    if not np.isfinite(wide.min()):
        # A mask's -inf is in no range.
        wide = wide[np.isfinite(wide)]
    # Squares of a mask's -3.4e38 are infinite.
    with np.errstate(over="ignore"):
        power = float(np.mean(np.square(wide))) if wide.size else 0.0
    return (
        float(value.size),
        -float(wide.min(initial=np.inf)),
        float(wide.max(initial=-np.inf)),
        power,
    )


def read_mask(feeds: Arrays, shape: Shape) -> Mask | None:
    """Read the mask [batch, positions] of values of this shape from the model's own mask input; None: all count.

    The network computes values for padding, too, and no output depends on them. In samples with much padding they would
    outweigh the text.
    """
    masks = {
        name.lower(): value
        for name, value in feeds.items()
        if "mask" in name.lower() and value.dtype.kind in "iub"
    }
    if len(masks) != 1:
        return None
    ((name, value),) = masks.items()
    if value.ndim != 2 or shape[:2] != value.shape or len(shape) != 3:
        return None
    mask = value != 0
    if "key_padding" in name:
        # torch's MultiheadAttention calls padding True.
        mask = ~mask
    elif "pad" in name:
        # Of either meaning; padding stands behind the tokens.
        mask = mask == mask[:, :1]
    # Other values than 0 and 1 make it something else, e.g. an additive mask; a mask without ones hides everything.
    return mask if np.isin(value, (0, 1)).all() and mask.any() else None
