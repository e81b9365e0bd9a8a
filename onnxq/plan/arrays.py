"""Arrays in the plan's JSON, and the mark that says which spec a site's scale and zero point were computed for.

Up to 64 values are written as lists, more as {"shape", "zlib64"}: little-endian float32 or int32, deflated, base64.
Both forms are read at any size.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.spec import QParams, QuantSpec

# Values: a list of so many still fits a screen, and a person edits it.
_INLINE = 64
# Bytes: no model holds a larger array, since protobuf ends at 2 GiB.
_MOST_BYTES = 2**31
# Between the spec and the checksum of a mark.
_MARK = " #"


def write_array(values: NDArray[Any]) -> Any:
    """The array as JSON values: nested lists, or the packed form."""
    if values.size <= _INLINE:
        return values.tolist()
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    packed = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode("ascii")
    return {"shape": list(values.shape), "zlib64": packed}


def read_array(raw: Any, dtype: Any) -> NDArray[Any]:
    """The array that `write_array` wrote, or a person.

    dtype: the numpy type it gets. Raises ValueError for another form and for values that the type does not hold.
    """
    kind = np.dtype(dtype)
    made = _unpack_array(raw, kind) if isinstance(raw, Mapping) else _read_list(raw, kind)
    if kind.kind == "f" and not np.isfinite(made).all():
        raise ValueError(f"must be finite {kind.name} numbers")
    return made


def read_floats(raw: Any) -> NDArray[np.float32]:
    """The float32 array that `write_array` wrote, or a person."""
    return read_array(raw, np.float32)


def _read_list(raw: Any, kind: np.dtype[Any]) -> NDArray[Any]:
    limits = np.iinfo(kind) if kind.kind in "iu" else None
    for value in _iterate_leaves(raw):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"must be numbers, not {type(value).__name__}")
        if limits is None:
            # Written so that NaN, which compares false, is refused too.
            if not abs(value) <= float(np.finfo(kind).max):
                raise ValueError(f"must be finite {kind.name} numbers")
        elif not limits.min <= value <= limits.max or value != int(value):
            raise ValueError(f"must be whole numbers from {limits.min} to {limits.max}")
    try:
        return np.asarray(raw, dtype=kind)
    except ValueError as error:
        raise ValueError("must be lists of one length at each depth") from error


def _iterate_leaves(raw: Any) -> Iterator[Any]:
    if isinstance(raw, list):
        for part in raw:
            yield from _iterate_leaves(part)
    else:
        yield raw


def _unpack_array(raw: Mapping[str, Any], kind: np.dtype[Any]) -> NDArray[Any]:
    shape, packed = raw.get("shape"), raw.get("zlib64")
    if set(raw) != {"shape", "zlib64"} or not isinstance(shape, list) or not isinstance(packed, str):
        raise ValueError('must be numbers, or {"shape": […], "zlib64": "…"}')
    if not all(isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < _MOST_BYTES for dim in shape):
        raise ValueError("must have a shape of whole numbers")
    size = math.prod(shape) * kind.itemsize
    if size > _MOST_BYTES or len(shape) > _INLINE:
        raise ValueError(f"must be smaller: its shape stands for {size:,} bytes")
    try:
        inflater = zlib.decompressobj()
        # NOTE: bounded, since a few kilobytes of a hostile file inflate to gigabytes.
        data = inflater.decompress(base64.b64decode(packed, validate=True), size + 1)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"cannot be unpacked: {error}") from error
    if len(data) != size:
        raise ValueError(f"must hold {size:,} bytes, as its shape says, and does not")
    return np.frombuffer(data, dtype=kind.newbyteorder("<")).astype(kind).reshape(shape)


def write_mark(numbers: QParams, spec: QuantSpec) -> str:
    """The spec that `numbers` were computed for, by default `spec`, with a checksum of them."""
    return f"{numbers.computed_for or spec.levels}{_MARK}{_compute_checksum(numbers)}"


def read_mark(mark: str, numbers: QParams) -> str:
    """The spec of a mark; "" where `numbers` differ from those that were marked, so that a person wrote them."""
    spec, _, checksum = mark.rpartition(_MARK)
    return spec if checksum == _compute_checksum(numbers) else ""


def _compute_checksum(numbers: QParams) -> str:
    scale = np.asarray(numbers.scale, "<f4").tobytes()
    return f"{zlib.crc32(np.asarray(numbers.zero_point, '<i4').tobytes(), zlib.crc32(scale)):08x}"
