"""The types of arrays and of their sizes, as all rooms write them, and what they all ask of scales."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]
Array64 = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
# Quantized values and zero points.
Codes = NDArray[np.int32]
Indices = NDArray[np.intp]
# By the names of tensors.
Arrays = Mapping[str, Array]
# The same, to be added to.
ArrayDict = dict[str, Array]
# Values of a run by the names of tensors: arrays, lists of them for sequences, None for an optional one.
RunValues = Mapping[str, Any]
# Fixed sizes of a tensor.
Shape = tuple[int, ...]
# Those of inputs, by their names.
InputShapes = Mapping[str, Shape]
# Some of a tensor's axes.
Axes = tuple[int, ...]
# Both ends of a range of values.
Interval = tuple[float, float]


def is_float(value: Array) -> bool:
    """True for float16/32/64 and bfloat16 (whose numpy kind is not 'f')."""
    return value.dtype.kind == "f" or value.dtype.name == "bfloat16"


def list_other_axes(array: Array, axis: int) -> Axes:
    """All axes of an array but this one, for a reduction of each of its channels."""
    return tuple(k for k in range(array.ndim) if k != axis)


def fits_dims(shape: Shape, dims: Sequence[int | str | None]) -> bool:
    """True for a shape that has these dims, as far as they are known as numbers."""
    pairs = zip(shape, dims, strict=False)
    return len(shape) == len(dims) and all(
        size == dim for size, dim in pairs if isinstance(dim, int)
    )


def are_finite(values: Any) -> bool:
    """True where no value is infinite or NaN."""
    return bool(np.isfinite(values).all())


def as_float32(values: ArrayLike) -> Floats:
    """An array of float32: the very one, where it is one already."""
    return np.asarray(values, np.float32)


def as_float64(values: ArrayLike) -> Array64:
    """An array of float64: the very one, where it is one already."""
    return np.asarray(values, np.float64)


def as_int32(values: ArrayLike) -> NDArray[np.int32]:
    """An array of int32: the very one, where it is one already."""
    return np.asarray(values, np.int32)


def as_int64(values: ArrayLike) -> Integers:
    """An array of int64: the very one, where it is one already."""
    return np.asarray(values, np.int64)


def cast_quietly(values: Array, dtype: DTypeLike) -> Array:
    """The values in another float type; those that it cannot hold are infinite, or 0."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(values.astype(dtype))


def unwrap_single(one: bool, scale: Array, zero: Array) -> tuple[Array, Array]:
    """Both, as arrays of shape [] where a tensor has `one` scale, which tools write with shape [1] as well."""
    if one and scale.size == zero.size == 1:
        return scale.reshape(()), zero.reshape(())
    return scale, zero


def are_scales(values: Array) -> bool:
    """True where all values are finite and above 0."""
    return bool((np.isfinite(values) & (values > 0)).all())


def map_shapes(arrays: Arrays) -> dict[str, Shape]:
    """The shapes of arrays by their names."""
    return {name: array.shape for name, array in arrays.items()}


def part_by_size(sizes: Sequence[int], most: int) -> list[slice]:
    """Runs of neighbours whose sizes add up to `most` at most, or of one alone that is larger."""
    starts = [0]
    total = 0
    for k, size in enumerate(sizes):
        if k > starts[-1] and total + size > most:
            starts.append(k)
            total = 0
        total += size
    return list(map(slice, starts, [*starts[1:], len(sizes)]))


def view_content(array: Array) -> bytes | memoryview:
    """The bytes of the values, to be hashed; of strings, of which the array has only the addresses, their text."""
    if array.dtype.kind == "O":
        return repr(array.tolist()).encode()
    return np.ascontiguousarray(array).ravel().view(np.uint8).data


def hash_parts(*parts: str | bytes | memoryview) -> str:
    """Hash texts and bytes in order."""
    # Each with its length: ("ab", "c") must not hash like ("a", "bc").
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
