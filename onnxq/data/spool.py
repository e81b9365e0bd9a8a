"""Samples of an iterable, which come only once: kept in memory if few, in a temporary folder if many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.data.fit import Array, Arrays
from onnxq.data.sources import ArraySource, JoinedSource, Source
from onnxq.data.user_code import guard_user_code
from onnxq.errors import DataError
from onnxq.files import ScratchFolder
from onnxq.graph import ValueInfo

# Bytes kept in memory. One item more may be alive while it is written.
_IN_MEMORY = 256 * 2**20


def name_arrays(item: Any, inputs: Sequence[ValueInfo], where: str) -> dict[str, Array]:
    """Convert one item to {input name: array}: a mapping, or a bare array if the model has one input.

    Raises DataError for anything else, and for values that are no arrays.
    """
    if isinstance(item, np.ndarray) or (hasattr(item, "__array__") and not isinstance(item, dict)):
        if len(inputs) != 1:
            names = ", ".join(value.name for value in inputs)
            raise DataError(where, "is one array without a name", f"the model has several inputs: {names}", code="Q207")
        return {inputs[0].name: np.asarray(item)}
    if not hasattr(item, "keys"):
        cause = f"is a {type(item).__name__}, not a mapping"
        raise DataError(where, cause, "give {input name: array} for each sample", code="Q206")
    return {str(name): _to_array(item[name], f"{where}, array {name!r}") for name in item}


def _to_array(value: Any, where: str) -> Array:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise DataError(where, f"cannot become an array ({error})", "give numeric arrays", code="Q206") from error
    # Strings are objects, too, and a legitimate input.
    if array.dtype.kind == "O" and not all(isinstance(one, (str, bytes)) for one in array.flat):
        raise DataError(where, "holds Python objects", "give numeric arrays", code="Q206")
    return array


def spool_samples(
    items: Iterable[Any],
    inputs: Sequence[ValueInfo],
    where: str,
    limit: int | None,
    tick: Callable[[], None] = lambda: None,
) -> JoinedSource:
    """Iterate once over the items and keep at most `limit` samples, so that endless streams are possible.

    tick: called for each item.
    Raises DataError for an item that does not fit, for an error in the code of the iterable, or without any item.
    """
    parts: list[Source] = []
    store = _Store()
    count = 0
    for k, item in enumerate(_guard_items(items, where)):
        label = f"{where}, item {k}"
        parts.append(_KeptSource(store.keep(name_arrays(item, inputs, label)), inputs, label))
        count += len(parts[-1])
        tick()
        if limit is not None and count >= limit:
            break
    if not parts:
        raise DataError(where, "is empty: it gave no samples", "give it at least one sample", code="Q203")
    return JoinedSource(parts, keep=store)


def _guard_items(items: Iterable[Any], where: str) -> Iterator[Any]:
    """Yield the items; errors of their code become DataErrors that name it."""
    with guard_user_code(where):
        iterator = iter(items)
    while True:
        with guard_user_code(where):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


class _KeptSource:
    """The samples of one item. Arrays in files are mapped while a sample is read: mapped pages count as memory."""

    def __init__(self, kept: Mapping[str, Array | Path], inputs: Sequence[ValueInfo], where: str) -> None:
        self._kept, self._inputs, self._where = kept, inputs, where
        source = self._open()
        self._count, self.notes = len(source), source.notes
        # Without files there is nothing to close.
        self._source = None if any(isinstance(one, Path) for one in kept.values()) else source

    def __len__(self) -> int:
        return self._count

    def sample(self, i: int) -> dict[str, Array]:
        return (self._source or self._open()).sample(i)

    def name(self, i: int) -> str:
        return self._where if self._count == 1 else f"{self._where}, sample {i}"

    def _open(self) -> ArraySource:
        arrays = {
            name: np.asarray(np.load(one, mmap_mode="r", allow_pickle=False)) if isinstance(one, Path) else one
            for name, one in self._kept.items()
        }
        return ArraySource(arrays, self._inputs, self._where, feed=True)


class _Store:
    """Copies of arrays, because an iterable may reuse its buffer for the next item. Its folder is removed with it."""

    def __init__(self) -> None:
        self.folder: ScratchFolder | None = None
        self._used = 0
        self._files = 0

    def keep(self, arrays: Arrays) -> dict[str, Array | Path]:
        """Copies of the arrays, or the files that hold them."""
        return {name: self._one(array) for name, array in arrays.items()}

    def _one(self, array: Array) -> Array | Path:
        # Empty arrays and strings cannot be mapped from a file.
        if self._used + array.nbytes <= _IN_MEMORY or array.dtype.kind not in "biuf" or array.size == 0:
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
