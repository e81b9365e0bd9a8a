"""Sources of samples. A source reads one sample at a time, by number, and nothing in advance."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

from onnxq.data.cuts import Cut, find_batch_symbols, find_cut, fits_whole
from onnxq.data.fit import Array, Arrays, check_dtype, match_inputs
from onnxq.errors import DataError
from onnxq.graph import ValueInfo


class Source(Protocol):
    """Samples by number."""

    # Remarks for reports on how the samples are read.
    notes: tuple[str, ...]

    def __len__(self) -> int: ...

    def sample(self, i: int) -> dict[str, Array]:
        """Read the arrays of sample i by input name, with the input's rank, before conversion of dtypes."""
        ...

    def name(self, i: int) -> str:
        """Name sample i for messages."""
        ...


class ArraySource:
    """Arrays by input name, divided into samples (see `onnxq.data.cuts`).

    feed: the arrays were given for one run of the model, so they are divided only along axes that are surely batches.
    """

    def __init__(self, given: Arrays, inputs: Sequence[ValueInfo], where: str, *, feed: bool = False) -> None:
        self._where = where
        self._arrays, extra = match_inputs(inputs, given, where)
        notes = [f"array {name!r} is no input of the model: not used" for name in extra]
        notes += [check_dtype(self._arrays[value.name].dtype, value, where) for value in inputs]
        symbols = find_batch_symbols(inputs)
        shapes = {value.name: self._arrays[value.name].shape for value in inputs}
        self._cuts = {v.name: find_cut(shapes[v.name], v, symbols, where, feed=feed) for v in inputs}
        uneven = _describe_uneven(self._cuts)
        same = [name for name, one in self._cuts.items() if one.count is None and len(shapes[name]) > 0]
        several = any((one.count or 1) > 1 for one in self._cuts.values())
        # Batches that disagree, or belong to only some inputs, are none: then the feed is one sample.
        if feed and (uneven or (several and same)) and all(fits_whole(shapes[v.name], v) for v in inputs):
            self._cuts = {value.name: Cut(None) for value in inputs}
        elif uneven:
            raise DataError(
                where, f"the inputs disagree on the number of samples: {uneven}", "give each as many", code="Q212"
            )
        self._count = next((one.count for one in self._cuts.values() if one.count is not None), 1)
        left = {one.left_over for one in self._cuts.values()} - {0}
        notes += [f"{rows} rows left over that do not fill the model's batch: not used" for rows in sorted(left)]
        if self._count > 1:
            notes += [f"input {name}: one array, used for every sample" for name in same]
        self.notes: tuple[str, ...] = tuple(note for note in notes if note)

    def __len__(self) -> int:
        return self._count

    def sample(self, i: int) -> dict[str, Array]:
        return {name: self._cuts[name].take(array, i) for name, array in self._arrays.items()}

    def name(self, i: int) -> str:
        return self._where if self._count == 1 else f"{self._where}, sample {i}"


def _describe_uneven(cuts: Mapping[str, Cut]) -> str:
    counts = {name: one.count for name, one in cuts.items() if one.count is not None}
    return ", ".join(f"{name!r} has {n}" for name, n in counts.items()) if len(set(counts.values())) > 1 else ""


class JoinedSource:
    """Several sources in sequence. keep: an object that must live as long as they do."""

    def __init__(self, parts: Sequence[Source], keep: object = None) -> None:
        self._parts, self._keep = tuple(parts), keep
        self._ends = list(accumulate(len(part) for part in self._parts))
        self.notes: tuple[str, ...] = tuple(dict.fromkeys(note for part in self._parts for note in part.notes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def sample(self, i: int) -> dict[str, Array]:
        part, k = self._find(i)
        return part.sample(k)

    def name(self, i: int) -> str:
        part, k = self._find(i)
        return part.name(k)

    def _find(self, i: int) -> tuple[Source, int]:
        p = bisect_right(self._ends, i)
        return self._parts[p], i - (self._ends[p - 1] if p else 0)


class LazySource:
    """One sample per item, read on request."""

    def __init__(
        self, items: Sequence[Any], read: Callable[[Any], dict[str, Array]], label: Callable[[Any], str]
    ) -> None:
        self._items, self._read, self._label = tuple(items), read, label
        self.notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._items)

    def sample(self, i: int) -> dict[str, Array]:
        return self._read(self._items[i])

    def name(self, i: int) -> str:
        return self._label(self._items[i])
