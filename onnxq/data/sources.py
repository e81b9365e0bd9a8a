"""Sources of samples. A source reads one sample at a time, by number, and nothing in advance.

Samples lie in an array stacked along an extra axis or joined along the batch axis, or it is one for all. Those of an
iterable come only once: few are kept in memory, many in a temporary folder."""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from onnxq.arrays import Array, Arrays, Shape, fits_dims
from onnxq.data.fit import (
    Feeds,
    Inputs,
    check_dims,
    check_dtype,
    format_shape,
    make_input_error,
    make_rank_error,
    match_inputs,
    refuse_empty,
)
from onnxq.data.scripts import guard_user_code
from onnxq.errors import DataError
from onnxq.files import ScratchFolder
from onnxq.graph import ValueInfo
from onnxq.progress import Tick
from onnxq.sites import Lines, NameSet

T = TypeVar("T")
# Names of dynamic axes: those that exporters write for the batch, "batch_size" (Hugging Face), "batch", "N", "bs"; and
# those that are surely none. Many have a number, or no meaning.
_BATCHES = re.compile("(?i)n|b|bs|.*batch.*")
_OTHERS = re.compile(
    "(?i)[a-z]|.*(seq|len|time|frame|step|token|node|atom|point|edge|height|width).*"
)


@dataclass(frozen=True)
class Cut:
    """Division of an array into samples."""

    # Number of samples; None: the whole array is used for every sample.
    count: int | None
    axis: int = 0
    # Rows of a sample along `axis`.
    size: int = 1
    # One sample per leading index; `axis` and `size` do not apply.
    stacked: bool = False
    # The model's name for `axis`, where its size is open; "" for none.
    symbol: str = ""
    # Rows that fill no sample and are not used.
    left_over: int = 0

    def take(self, array: Array, i: int) -> Array:
        """Return sample i of the array, a view."""
        if self.count is None:
            return np.asarray(array)
        if self.stacked:
            return np.asarray(array[i])
        rows = slice(i * self.size, (i + 1) * self.size)
        return np.asarray(array[(slice(None),) * self.axis + (rows,)])


def find_batch_symbols(inputs: Inputs) -> NameSet:
    """Collect the symbols of dynamic axes 0."""
    return frozenset(
        value.shape[0] for value in inputs if value.shape and isinstance(value.shape[0], str)
    )


def find_batch_axis(value: ValueInfo, symbols: NameSet) -> int | None:
    """Find the dynamic axis along which samples are joined.

    Axis 0 if it is dynamic, else the axis with one of `symbols`; None for a scalar or a fixed batch.
    """
    if not value.shape:
        return None
    if not isinstance(value.shape[0], int):
        return 0
    return next((axis for axis, dim in enumerate(value.shape) if dim in symbols), None)


def find_cut(
    shape: Sequence[int], value: ValueInfo, symbols: NameSet, where: str, *, feed: bool
) -> Cut:
    """Find the samples in an array of this shape.

    One dimension more than the input: one sample per leading index. The input's own rank: samples along the batch
    axis, of size 1 if that is dynamic, else of the model's own size. feed: the array was given for one run, so a
    dynamic axis is divided only if its symbol names a batch.
    Raises DataError for any other rank, a fixed dim that differs, no sample at all, or less than the model's batch.
    """
    rank = len(shape) if value.shape is None else len(value.shape)
    if len(shape) == rank + 1:
        check_dims(shape, value, where, offset=1)
        return _require_samples(Cut(shape[0], stacked=True), value, where)
    if len(shape) != rank:
        raise make_rank_error(shape, value, where)
    if rank == 0:
        return Cut(None)
    axis = 0 if value.shape is None else find_batch_axis(value, symbols)
    if axis is None:
        # The rows of axis 0 may be those of several batches.
        check_dims(shape, value, where, skip=1)
        return _cut_fixed_batch(shape[0], value, where)
    check_dims(shape, value, where)
    # A dynamic axis that is no batch, e.g. a sequence, belongs to one sample.
    symbol = str(value.shape[axis] or "") if value.shape is not None else ""
    if feed and not _BATCHES.fullmatch(symbol):
        return Cut(None)
    return _require_samples(Cut(shape[axis], axis, symbol=symbol), value, where)


def fits_whole(shape: Shape, value: ValueInfo) -> bool:
    """True if the whole array can be fed."""
    return value.shape is None or fits_dims(shape, value.shape)


def _require_samples(cut: Cut, value: ValueInfo, where: str) -> Cut:
    if cut.count == 0:
        raise make_input_error(
            where, value, "is empty: it has no samples", "give it at least one", code="Q203"
        )
    return cut


def _cut_fixed_batch(rows: int, value: ValueInfo, where: str) -> Cut:
    size = value.shape[0] if value.shape else 1
    if rows == size or not isinstance(size, int):
        return Cut(None)
    if rows < size or size < 1:
        cause = (
            f"has {rows} rows; the model takes {size} at a time, {format_shape(value)}"
            if rows
            else "is empty"
        )
        raise make_input_error(where, value, cause, f"give at least {size}")
    return Cut(rows // size, size=size, left_over=rows % size)


@dataclass(frozen=True, eq=False)
class SampleSource:
    """Samples by number.

    read_sample: arrays by input name, with the input's rank, before conversion of dtypes. name_sample: for messages.
    notes: remarks for reports on how the samples are read. keep: an object that must live as long as the source.
    """

    count: int
    read_sample: Callable[[int], Feeds]
    name_sample: Callable[[int], str]
    notes: Lines = ()
    keep: object = None

    def __len__(self) -> int:
        return self.count


def divide_arrays(
    arrays: Arrays, inputs: Inputs, where: str, *, feed: bool = False, several: bool = False
) -> SampleSource:
    """The samples of arrays by input name (see `onnxq.data.sources`).

    feed: the arrays were given for one run of the model, so they are divided only along axes that are surely batches.
    several: other files hold other samples, so each is a run where an axis 0 is surely no batch, such as one of nodes.
    """
    matched, extra = match_inputs(inputs, arrays, where)
    notes = [f"array {name!r} is no input of the model: not used" for name in extra]
    notes += [check_dtype(matched[value.name].dtype, value, where) for value in inputs]
    symbols = find_batch_symbols(inputs)
    others = [name for name in symbols if _OTHERS.fullmatch(name) and not _BATCHES.fullmatch(name)]
    feed |= several and bool(others)
    shapes = {value.name: matched[value.name].shape for value in inputs}
    cuts = {v.name: find_cut(shapes[v.name], v, symbols, where, feed=feed) for v in inputs}
    counts = {name: cut.count for name, cut in cuts.items() if cut.count is not None}
    uneven = ""
    if len(set(counts.values())) > 1:
        uneven = ", ".join(f"{name!r} has {count}" for name, count in counts.items())
    same = [name for name, shape in shapes.items() if name not in counts and shape]
    total = max(counts.values(), default=1)
    # Batches that disagree, or belong to only some inputs, are none: then the feed is one sample.
    if (
        feed
        and (uneven or (total > 1 and same))
        and all(fits_whole(shapes[v.name], v) for v in inputs)
    ):
        cuts = {value.name: Cut(None) for value in inputs}
        total = 1
    elif uneven:
        cause = f"the inputs disagree on the number of samples: {uneven}"
        raise DataError(where, cause, "give each as many", code="Q212")
    notes += [
        f"{rows} rows left over that do not fill the model's batch: not used"
        for rows in sorted({cut.left_over for cut in cuts.values()} - {0})
    ]
    if total > 1:
        notes += [f"input {name}: one array, used for every sample" for name in same]
        notes += [
            f"input {name}: {total} samples along {cut.symbol!r}; with one more axis in front samples stay whole"
            for name, cut in cuts.items()
            if cut.symbol in others
        ]
    return SampleSource(
        total,
        lambda i: {name: cuts[name].take(array, i) for name, array in matched.items()},
        lambda i: where if total == 1 else f"{where}, sample {i}",
        tuple(filter(None, notes)),
    )


def join_sources(parts: Sequence[SampleSource], keep: object = None) -> SampleSource:
    """Several sources in sequence."""
    ends = list(accumulate(part.count for part in parts))

    def find_part(i: int) -> tuple[SampleSource, int]:
        p = bisect_right(ends, i)
        return parts[p], i - (ends[p - 1] if p else 0)

    def read_sample(i: int) -> Feeds:
        part, k = find_part(i)
        return part.read_sample(k)

    def name_sample(i: int) -> str:
        part, k = find_part(i)
        return part.name_sample(k)

    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return SampleSource(ends[-1] if ends else 0, read_sample, name_sample, tuple(notes), keep)


def read_lazily(
    items: Sequence[T], read: Callable[[T], Feeds], label: Callable[[T], str]
) -> SampleSource:
    """One sample per item, read on request."""
    return SampleSource(len(items), lambda i: read(items[i]), lambda i: label(items[i]))


# Bytes kept in memory. One item more may be alive while it is written.
_IN_MEMORY = 256 * 2**20


def name_arrays(item: Any, inputs: Inputs, where: str) -> Feeds:
    """Convert one item to {input name: array}: a mapping, or a bare array if the model has one input.

    Raises DataError for anything else, and for values that are no arrays.
    """
    if hasattr(item, "__array__") and not isinstance(item, dict):
        if len(inputs) != 1:
            names = ", ".join(value.name for value in inputs)
            raise DataError(
                where,
                "is one array without a name",
                f"the model has several inputs: {names}",
                code="Q207",
            )
        return {inputs[0].name: _to_array(item, where)}
    if not hasattr(item, "keys"):
        cause = f"is of type {type(item).__name__}, not a mapping"
        raise DataError(where, cause, "give {input name: array} for each sample", code="Q206")
    return {str(name): _to_array(item[name], f"{where}, array {name!r}") for name in item}


def _to_array(value: Any, where: str) -> Array:
    try:
        array = np.asarray(value)
    # The last is torch's, for tensors that want gradients.
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(
            where, f"cannot become an array ({error})", "give numeric arrays", code="Q206"
        ) from error
    # Strings are objects, too, and a legitimate input.
    if array.dtype.kind == "O" and not all(isinstance(item, (str, bytes)) for item in array.flat):
        raise DataError(where, "holds Python objects", "give numeric arrays", code="Q206")
    return array


def spool_samples(
    items: Iterable[Any],
    inputs: Inputs,
    where: str,
    limit: int | None,
    tick: Tick,
) -> SampleSource:
    """Iterate once over the items and keep at most `limit` samples, so that endless streams are possible.

    tick: called for each item.
    Raises DataError for an item that does not fit, for an error in the code of the iterable, or without any item.
    """
    parts = []
    store = _Store()
    count = 0
    for k, item in enumerate(_guard_items(items, where)):
        label = f"{where}, item {k}"
        stored = {
            name: store.store_array(array)
            for name, array in name_arrays(item, inputs, label).items()
        }
        parts.append(_open_stored(stored, inputs, label))
        count += len(parts[-1])
        tick()
        if limit is not None and count >= limit:
            break
    if not parts:
        raise refuse_empty(where)
    return join_sources(parts, keep=store)


def _guard_items(items: Iterable[Any], where: str) -> Iterator[Any]:
    """Yield the items; errors of their code become DataErrors that name it."""
    with guard_user_code(where):
        iterator = iter(items)
    while True:
        # A guard for each item: what the caller does between two of them is not the person's code.
        with guard_user_code(where):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _open_stored(stored: Mapping[str, Array | Path], inputs: Inputs, where: str) -> SampleSource:
    """The samples of one item. stored: arrays by input name, or the files that hold them."""

    def open_arrays() -> SampleSource:
        arrays = {
            name: np.load(value, mmap_mode="r", allow_pickle=False)
            if isinstance(value, Path)
            else value
            for name, value in stored.items()
        }
        return divide_arrays(arrays, inputs, where, feed=True)

    source = open_arrays()
    if not any(isinstance(value, Path) for value in stored.values()):
        return source
    # Files are mapped while a sample is read: mapped pages count as memory.
    return replace(source, read_sample=lambda i: open_arrays().read_sample(i))


class _Store:
    """Copies of arrays, because an iterable may reuse its buffer for the next item. Its folder is removed with it."""

    def __init__(self) -> None:
        self.folder: ScratchFolder | None = None
        self._used = 0
        self._files = 0

    def store_array(self, array: Array) -> Array | Path:
        """A copy of the array, or the file that holds it."""
        # Empty arrays and strings cannot be mapped from a file.
        if (
            self._used + array.nbytes <= _IN_MEMORY
            or array.dtype.kind not in "biuf"
            or array.size == 0
        ):
            self._used += array.nbytes
            return np.array(array)
        if self.folder is None:
            self.folder = ScratchFolder()
        path = self.folder.path / f"{self._files}.npy"
        self._files += 1
        try:
            np.save(path, array, allow_pickle=False)
        except OSError as error:
            cause = f"the samples do not fit into the temporary folder ({error.strerror or error})"
            fix = "free space, set TMPDIR, or take fewer with `samples=…`"
            raise DataError(path, cause, fix, code="Q215") from error
        return path
