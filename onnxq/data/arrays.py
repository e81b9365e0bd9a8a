"""Arrays in .npy and .npz files, mapped into memory rather than read. Pickled objects are never loaded."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from onnxq.data.deflated import DeflatedArray
from onnxq.data.fit import Array
from onnxq.errors import DataError, OnnxqError
from onnxq.files import check_regular, first_line_of

# Compressed arrays up to this many bytes together are unpacked in memory, larger ones into a temporary file.
_IN_MEMORY = 64 * 2**20
_COPY_BYTES = 4 * 2**20
# Stored arrays up to here are read once for their checksum, some .1 s; of larger ones only what is wanted is read.
_CHECKED_BYTES = 256 * 2**20
_LOCAL_HEADER = 30
_DAMAGED = "copy or make it again; it may be truncated"


def load_npy(path: Path) -> Array:
    """The array of a .npy file, mapped. Raises DataError when it is damaged or holds Python objects."""
    with _reading(str(path)):
        check_regular(path, DataError)
    with _reading(str(path)), path.open("rb") as stream:
        dtype, shape, order = _header(stream, str(path))
        return _mapped(path, dtype, shape, order, stream.tell(), str(path))


def load_npz(path: Path) -> dict[str, Array]:
    """The arrays of a .npz file by name.

    Stored arrays are mapped where they lie; compressed ones are unpacked, beyond 64 MiB into temporary files that go
    away with the arrays, and only the rows that are read. Raises DataError for a damaged file, with the array's name
    where it is one of them, for Python objects, and for a file that is empty.
    """
    found: dict[str, Any] = {}
    left = _IN_MEMORY
    with _reading(str(path)):
        check_regular(path, DataError)
    with _reading(str(path)), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            where = f"{path}, array {name!r}"
            with _reading(where), archive.open(info) as stream:
                found[name] = _member(path, info, stream, where, left)
            if info.compress_type != zipfile.ZIP_STORED and info.file_size <= left:
                left -= info.file_size
    if not found:
        raise DataError(path, "is empty: it holds no arrays", "save at least one array per model input", code="Q203")
    return found


def _member(path: Path, info: zipfile.ZipInfo, stream: IO[bytes], where: str, left: int) -> Array | DeflatedArray:
    """One array of a .npz file; unpacked in memory when it has no more than `left` bytes."""
    dtype, shape, order = _header(stream, where)
    start = stream.tell()
    size = _bytes(dtype, shape)
    if start + size != info.file_size:
        raise DataError(where, f"holds {info.file_size - start} bytes, its header says {size}", _DAMAGED, code="Q204")
    if info.compress_type == zipfile.ZIP_STORED:
        if size <= _CHECKED_BYTES:
            _check_sum(stream)
        return _mapped(path, dtype, shape, order, _data_start(path, info) + start, where)
    if info.file_size <= left:
        data = bytearray(stream.read())
        return np.frombuffer(data, dtype).reshape(shape, order="F" if order else "C")
    # Rows lie together in C order only, and other methods than deflate cannot be taken up in the middle.
    if info.compress_type == zipfile.ZIP_DEFLATED and not order and len(shape) > 1 and size:
        return DeflatedArray(path, info, _data_start(path, info), start, dtype, shape)
    return _unpacked(stream, dtype, shape, order)


def _check_sum(stream: IO[bytes]) -> None:
    """Read to the end, where zipfile compares the checksum and raises BadZipFile."""
    while stream.read(_COPY_BYTES):
        pass


def _header(stream: Any, where: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """dtype, shape and Fortran order of the .npy data the stream stands at; the stream then stands at the values."""
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its format has the unknown version {version[0]}.{version[1]}")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, order, dtype = read(stream)
    if any(dim < 0 for dim in shape):
        raise DataError(
            where, f"its header says shape {list(shape)}, and no dimension is negative", _DAMAGED, code="Q204"
        )
    if dtype.hasobject:
        raise DataError(
            where,
            "holds Python objects, which are never loaded: a file could run code",
            "save plain numeric arrays",
            code="Q206",
        )
    if dtype.names is not None or dtype.subdtype is not None:
        raise DataError(where, "is a structured array", "save one plain array per model input", code="Q206")
    return dtype, shape, order


def _bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count * dtype.itemsize


def _mapped(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], order: bool, offset: int, where: str) -> Array:
    size = _bytes(dtype, shape)
    if offset + size > path.stat().st_size:
        raise DataError(
            where, f"is truncated: {path.stat().st_size - offset} of {size} bytes are there", _DAMAGED, code="Q204"
        )
    if size == 0:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if order else "C")


def _data_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: behind its local header, whose name and extra field may be longer."""
    with path.open("rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(_LOCAL_HEADER)
    name, extra = (int.from_bytes(header[k : k + 2], "little") for k in (26, 28))
    return info.header_offset + _LOCAL_HEADER + name + extra


def _unpacked(stream: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: bool) -> Array:
    """The values in an unnamed temporary file, mapped; the file lives as long as the array."""
    with tempfile.TemporaryFile(prefix="onnxq-") as file:
        while block := stream.read(_COPY_BYTES):
            file.write(block)
        file.flush()
        # The mapping outlives the file object; the space is given back with the array.
        return np.memmap(file, dtype, "r", 0, shape, "F" if order else "C")


@contextmanager
def _reading(where: str) -> Iterator[None]:
    """Say which file could not be read, and why."""
    try:
        yield
    except OnnxqError:
        raise
    except OSError as error:
        cause = f"cannot be read ({error.strerror or error})"
        raise DataError(
            where, cause, "check its permissions and the space left in the temporary folder", code="Q202"
        ) from error
    except Exception as error:  # the file may hold anything; zipfile, zlib and numpy each complain in their own way
        raise DataError(
            where, f"is not a readable array file ({first_line_of(error)})", _DAMAGED, code="Q204"
        ) from error
