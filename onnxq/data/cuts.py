"""Position of samples in an array: stacked along an extra axis, joined along the batch axis, or one for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.data.fit import Array, check_dims, format_shape, make_input_error, make_rank_error
from onnxq.graph import ValueInfo


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


def find_batch_symbols(inputs: Sequence[ValueInfo]) -> frozenset[str]:
    """Collect the symbols of dynamic axes 0."""
    return frozenset(value.shape[0] for value in inputs if value.shape and isinstance(value.shape[0], str))


def find_batch_axis(value: ValueInfo, symbols: frozenset[str]) -> int | None:
    """Find the dynamic axis along which samples are joined.

    Axis 0 if it is dynamic, else the axis with one of `symbols`; None for a scalar or a fixed batch.
    """
    if not value.shape:
        return None
    if not isinstance(value.shape[0], int):
        return 0
    return next((axis for axis, dim in enumerate(value.shape) if dim in symbols), None)


def find_cut(shape: Sequence[int], value: ValueInfo, symbols: frozenset[str], where: str, *, feed: bool) -> Cut:
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
        check_dims(shape, value, where, skip=1)
        return _cut_fixed_batch(shape[0], value, where)
    check_dims(shape, value, where)
    # A dynamic axis that is no batch, e.g. a sequence, belongs to one sample.
    if feed and not (value.shape is not None and is_batch_symbol(value.shape[axis])):
        return Cut(None)
    return _require_samples(Cut(shape[axis], axis), value, where)


def fits_whole(shape: Sequence[int], value: ValueInfo) -> bool:
    """True if the whole array can be fed."""
    if value.shape is None:
        return True
    return len(shape) == len(value.shape) and all(
        got == want for got, want in zip(shape, value.shape, strict=True) if isinstance(want, int)
    )


def is_batch_symbol(symbol: object) -> bool:
    """True if the name of a dynamic axis can only mean the batch."""
    # The names that exporters write: "batch_size" (Hugging Face), "batch", "N", "bs".
    name = str(symbol or "").lower()
    return name in ("n", "b", "bs") or "batch" in name


def _require_samples(found: Cut, value: ValueInfo, where: str) -> Cut:
    if found.count == 0:
        raise make_input_error(where, value, "is empty: it has no samples", "give it at least one", code="Q203")
    return found


def _cut_fixed_batch(rows: int, value: ValueInfo, where: str) -> Cut:
    size = value.shape[0] if value.shape else 1
    if rows == size or not isinstance(size, int):
        return Cut(None)
    if rows < size or size < 1:
        cause = f"has {rows} rows; the model takes {size} at a time, {format_shape(value)}" if rows else "is empty"
        raise make_input_error(where, value, cause, f"give at least {size}")
    return Cut(rows // size, size=size, left_over=rows % size)
