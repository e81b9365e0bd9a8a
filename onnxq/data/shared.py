"""Samples in the folder of a crew, from which workers read theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxq.data.dataset import Dataset
from onnxq.data.sources import LazySource
from onnxq.graph import ValueInfo
from onnxq.runtime.crew import Crew, SharedFeeds, read_feeds


@dataclass(frozen=True)
class SharedSamples:
    """Some samples of a set, in order. names: as the set calls them in messages."""

    inputs: tuple[ValueInfo, ...]
    feeds: tuple[SharedFeeds, ...]
    names: tuple[str, ...]

    def open(self) -> Dataset:
        """Return them as a set of their own; each is read when it is asked for."""
        items = list(zip(self.feeds, self.names, strict=True))
        source = LazySource(items, lambda item: read_feeds(item[0]), lambda item: str(item[1]))
        return Dataset(source, self.inputs, range(len(items)))


def share_samples(crew: Crew, dataset: Dataset, positions: Sequence[int]) -> SharedSamples:
    """Put the samples at some positions into the crew's folder."""
    feeds = tuple(crew.share_feeds(dataset[position]) for position in positions)
    return SharedSamples(dataset.inputs, feeds, tuple(map(dataset.name, positions)))
