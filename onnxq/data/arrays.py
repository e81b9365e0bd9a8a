"""Arrays of .npy and .npz files, mapped into memory instead of read. Pickled objects are never loaded."""

from __future__ import annotations

import io
import math
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from onnxq.data.deflated import DeflatedArray, ScatteredArray
from onnxq.data.fit import Array
from onnxq.errors import DataError, OnnxqError
from onnxq.files import check_input_kind, shorten_error

# Bytes of compressed arrays, together, that are unpacked in memory; the others go into a temporary file.
_IN_MEMORY = 64 * 2**20
# Bytes read at a time when a member is copied or summed.
_COPY_BYTES = 4 * 2**20
# Stored arrays of at most so many bytes are read once for their checksum, which takes about 0.1 s. Of larger ones only
# the requested rows are read.
_CHECKED_BYTES = 256 * 2**20
# Bytes of a zip member's local header before its name (APPNOTE 4.3.7).
_LOCAL_HEADER = 30
# Those of numpy. Python unpacks whole blocks of the others, bzip2 and LZMA: a few kilobytes may become gigabytes.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# Bytes of a header, as numpy's `max_header_size`, which it compares only when it has read them all.
_LONGEST_HEADER = 10_000
_DAMAGED = "copy or make it again; it may be truncated"


def load_npy(path: Path) -> Array:
    """Map the array of a .npy file. Raises DataError if it is damaged or holds Python objects."""
    with _explain_failures(str(path)):
        check_input_kind(path, DataError)
    with _explain_failures(str(path)), path.open("rb") as stream:
        dtype, shape, order = _read_header(stream, str(path))
        return _map_array(path, dtype, shape, order, stream.tell(), str(path))


def load_npz(path: Path) -> dict[str, Array]:
    """Load the arrays of a .npz file by name.

    Stored arrays are mapped in place. Compressed ones are unpacked: up to 64 MiB in memory, beyond that row by row on
    request into temporary files that are removed with the arrays. Raises DataError for a damaged file (with the name of
    the array, if one is damaged), for Python objects, and for an empty file.
    """
    found: dict[str, Any] = {}
    left = _IN_MEMORY
    with _explain_failures(str(path)):
        check_input_kind(path, DataError)
    with _explain_failures(str(path)), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            where = f"{path}, array {name!r}"
            if info.compress_type not in _COMPRESSIONS:
                cause = "is compressed in a way that cannot be unpacked a piece at a time: it may take any memory"
                raise DataError(where, cause, "save it by np.savez or np.savez_compressed", code="Q206")
            with _explain_failures(where), archive.open(info) as stream:
                found[name] = _read_member(path, info, stream, where, left)
            if info.compress_type != zipfile.ZIP_STORED and info.file_size <= left:
                left -= info.file_size
    if not found:
        raise DataError(path, "is empty: it holds no arrays", "save at least one array per model input", code="Q203")
    return found


def _read_member(path: Path, info: zipfile.ZipInfo, stream: IO[bytes], where: str, left: int) -> Any:
    """Read one array of a .npz file; it is unpacked in memory if it has at most `left` bytes."""
    dtype, shape, order = _read_header(stream, where)
    start = stream.tell()
    size = _count_bytes(dtype, shape)
    if start + size != info.file_size:
        raise DataError(where, f"holds {info.file_size - start} bytes, its header says {size}", _DAMAGED, code="Q204")
    if info.compress_type == zipfile.ZIP_STORED:
        if size <= _CHECKED_BYTES:
            _verify_checksum(stream)
        return _map_array(path, dtype, shape, order, _find_data(path, info) + start, where)
    if info.file_size <= left:
        data = bytearray(stream.read())
        return np.frombuffer(data, dtype).reshape(shape, order="F" if order else "C")
    # Rows are contiguous in C order only.
    if not order and len(shape) > 1 and size:
        return DeflatedArray(path, info, _find_data(path, info), start, dtype, shape)
    # Unnamed; it lives as long as the array that is mapped from it.
    with tempfile.TemporaryFile(prefix="onnxq-") as file:
        while block := stream.read(_COPY_BYTES):
            file.write(block)
        file.flush()
        return ScatteredArray(file, dtype, shape) if order else np.memmap(file, dtype, "r", 0, shape)


def _verify_checksum(stream: IO[bytes]) -> None:
    """Read to the end, where zipfile compares the checksum and raises BadZipFile."""
    while stream.read(_COPY_BYTES):
        pass


def _read_header(stream: Any, where: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Read dtype, shape and Fortran order of the .npy data in a stream, and leave the stream at the values."""
    # numpy's own np.load would read the values as well; this leaves them where they are.
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its format has the unknown version {version[0]}.{version[1]}")
    # Bytes of its length; a format of version 1 cannot say more than 64 KiB.
    width = 2 if version == (1, 0) else 4
    prefix = stream.read(width)
    length = int.from_bytes(prefix, "little")
    if length > _LONGEST_HEADER:
        raise ValueError(f"its header says that it is {length} bytes long")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, order, dtype = read(io.BytesIO(prefix + stream.read(length)))
    if any(dim < 0 for dim in shape):
        cause = f"its header says shape {list(shape)}, and no dimension is negative"
        raise DataError(where, cause, _DAMAGED, code="Q204")
    if dtype.hasobject:
        cause = "holds Python objects, which are never loaded: a file could run code"
        raise DataError(where, cause, "save plain numeric arrays", code="Q206")
    if dtype.names is not None or dtype.subdtype is not None:
        raise DataError(where, "is a structured array", "save one plain array per model input", code="Q206")
    return dtype, shape, order


def _count_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    # math.prod: exact for the sizes that a damaged header may claim, where np.prod overflows.
    return math.prod(shape) * dtype.itemsize


def _map_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], order: bool, offset: int, where: str) -> Array:
    size, left = _count_bytes(dtype, shape), path.stat().st_size - offset
    if size > left:
        raise DataError(where, f"is truncated: {left} of {size} bytes are there", _DAMAGED, code="Q204")
    if size == 0:  # which no system maps
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape, "F" if order else "C")


def _find_data(path: Path, info: zipfile.ZipInfo) -> int:
    """Find the first byte of a member's data, behind its local header.

    Name and extra field there may have other lengths than in the central directory, which `info` is read from.
    """
    with path.open("rb") as stream:
        stream.seek(info.header_offset)
        header = stream.read(_LOCAL_HEADER)
    name, extra = (int.from_bytes(header[k : k + 2], "little") for k in (26, 28))
    return info.header_offset + _LOCAL_HEADER + name + extra


@contextmanager
def _explain_failures(where: str) -> Iterator[None]:
    """Turn failures inside into a DataError that names the file."""
    try:
        yield
    except OnnxqError:
        raise
    except OSError as error:
        cause = f"cannot be read ({error.strerror or error})"
        fix = "check its permissions and the space left in the temporary folder"
        raise DataError(where, cause, fix, code="Q202") from error
    except Exception as error:  # the file may hold anything; zipfile, zlib and numpy each complain in their own way
        cause = f"is not a readable array file ({shorten_error(error)})"
        raise DataError(where, cause, _DAMAGED, code="Q204") from error
