"""Arrays of .npy and .npz files, mapped into memory instead of read. Pickled objects are never loaded.

Large compressed arrays of an .npz file are read by rows: in C order each is unpacked on request, once."""

import io
import math
import mmap
import sys
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from onnxq.arrays import Array, Shape
from onnxq.data.fit import DType, Feeds
from onnxq.errors import DataError, OnnxqError
from onnxq.files import check_input_kind, explain_unreadable, shorten_error

# Bytes unpacked at a time.
_BLOCK_BYTES = 2**20
# Bytes of a file that rows in Fortran order are collected from at a time.
_PIECE_BYTES = 16 * 2**20


class DeflatedArray:
    """An array in C order, read by rows of its first axis, with the interface that numpy and `Cut` need.

    Rows between those that are read are unpacked and forgotten, and a row in front of the last one is reached from the
    beginning. Unpacked rows are kept in an unnamed temporary file.
    member: entry of the zip. header: bytes before the values. where: the array's name in messages.
    """

    def __init__(
        self,
        path: Path,
        member: zipfile.ZipInfo,
        header: int,
        dtype: DType,
        shape: Shape,
        where: str,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.ndim = len(shape)
        self._where = where
        # Open as long as the array.
        archive = zipfile.ZipFile(path)
        weakref.finalize(self, archive.close)
        self._stream = archive.open(member)
        self._header = header
        self._row = math.prod(shape[1:]) * dtype.itemsize
        file = tempfile.TemporaryFile(prefix="onnxq-")  # noqa: SIM115, as old as the array
        weakref.finalize(self, file.close)
        file.truncate(shape[0] * self._row)  # sparse: rows that are never read take no space
        self._file = file
        self._values = np.memmap(file, dtype, "r", 0, shape)
        self._there = np.zeros(shape[0], np.bool_)

    def __getitem__(self, key: Any) -> Array:
        """Return rows by index, slice, or a tuple that begins with one of these."""
        first = key[0] if isinstance(key, tuple) else key
        rows = (
            range(self.shape[0])[first]
            if isinstance(first, (int, np.integer, slice))
            else range(self.shape[0])
        )
        for row in [rows] if isinstance(rows, int) else rows:
            self._fill(row)
        return np.asarray(self._values[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the whole array."""
        return np.asarray(self[:], dtype)

    def _fill(self, row: int) -> None:
        if self._there[row]:
            return
        start = self._header + row * self._row
        try:
            if start < self._stream.tell():
                self._stream.seek(0)
            # A piece at a time: zipfile's own `seek` holds 16 MiB.
            while self._stream.tell() < start:
                self._read_block(start)
            # Written to the file, not to the mapping, where a full disk would kill the process.
            self._file.seek(row * self._row)
            while self._stream.tell() < start + self._row:
                self._file.write(self._read_block(start + self._row))
            self._file.flush()
        except (zlib.error, zipfile.BadZipFile, EOFError) as error:
            cause = _FAULTS.get(type(error), str(error))
            raise DataError(self._where, f"is damaged ({cause})", _DAMAGED, code="Q204") from error
        except OSError as error:
            fix = "check the space left in the temporary folder, or set TMPDIR"
            raise DataError(
                self._where, f"cannot be unpacked ({error.strerror or error})", fix, code="Q204"
            ) from error
        self._there[row] = True

    def _read_block(self, end: int) -> bytes:
        """The next bytes, up to `end`. Raises EOFError behind the last one."""
        block = self._stream.read(min(_BLOCK_BYTES, end - self._stream.tell()))
        if not block:
            raise EOFError
        return block


class ScatteredArray:
    """An array in Fortran order, mapped from a file, with the interface that numpy and `Cut` need.

    The values of a row lie all over the file, so that one row reads as many pages as all of them: they are collected
    a piece of the file at a time, and the pages of a piece are given back behind it.
    """

    def __init__(self, file: IO[bytes], dtype: DType, shape: Shape) -> None:
        self.dtype = dtype
        self.shape = shape
        self.ndim = len(shape)
        # The mapping outlives the file object.
        self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._values = np.frombuffer(self._mapping, dtype).reshape(shape, order="F")

    def __getitem__(self, key: Any) -> Array:
        """Return rows by index or slice, collected; a view for any other key."""
        if isinstance(key, tuple):
            first, *rest = key
            if rest:
                return self._values[key]
            key = first
        # In the order of the file: a column of it is a row of the array.
        columns = self._values.T.reshape(-1, self.shape[0])
        rows = np.empty_like(columns[:, key])
        height = max(_PIECE_BYTES // columns[:1].nbytes, 1)
        for top in range(0, len(columns), height):
            rows[top : top + height] = columns[top : top + height, key]
            if sys.platform != "win32":
                self._mapping.madvise(mmap.MADV_DONTNEED)
        return rows.reshape(*self.shape[:0:-1], *rows.shape[1:]).T

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the whole array."""
        return np.asarray(self._values, dtype)


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
# What zipfile says by the class alone, or in words about the archive.
_FAULTS = {
    EOFError: "it ends too early",
    zipfile.BadZipFile: "its checksum is wrong",
}


def load_npy(path: Path) -> Array:
    """Map the array of a .npy file. Raises DataError if it is damaged or holds Python objects."""
    with _explain_failures(str(path)):
        check_input_kind(path, DataError)
        with path.open("rb") as stream:
            dtype, shape, order = _read_header(stream, str(path))
            return _map_array(path, dtype, shape, order, stream.tell(), str(path))


def load_npz(path: Path) -> Feeds:
    """Load the arrays of a .npz file by name.

    Stored arrays are mapped in place. Compressed ones are unpacked: up to 64 MiB in memory, beyond that row by row on
    request into temporary files that are removed with the arrays. Raises DataError for a damaged file (with the name of
    the array, if one is damaged), for Python objects, and for an empty file.
    """
    arrays = {}
    memory = _IN_MEMORY
    with _explain_failures(str(path)):
        check_input_kind(path, DataError)
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                where = f"{path}, array {name!r}"
                if info.compress_type not in _COMPRESSIONS:
                    cause = "is compressed in a way that cannot be unpacked a piece at a time: it may take any memory"
                    raise DataError(
                        where, cause, "save it by np.savez or np.savez_compressed", code="Q206"
                    )
                with _explain_failures(where), archive.open(info) as stream:
                    arrays[name] = _read_member(path, info, stream, where, memory)
                if info.compress_type != zipfile.ZIP_STORED and info.file_size <= memory:
                    memory -= info.file_size
    if not arrays:
        raise DataError(
            path,
            "is empty: it holds no arrays",
            "save at least one array per model input",
            code="Q203",
        )
    return arrays


def _read_member(
    path: Path, info: zipfile.ZipInfo, stream: IO[bytes], where: str, left: int
) -> Any:
    """Read one array of a .npz file; it is unpacked in memory if it has at most `left` bytes."""
    dtype, shape, order = _read_header(stream, where)
    start = stream.tell()
    size = _count_bytes(dtype, shape)
    if start + size != info.file_size:
        raise DataError(
            where,
            f"holds {info.file_size - start} bytes, its header says {size}",
            _DAMAGED,
            code="Q204",
        )
    if info.compress_type == zipfile.ZIP_STORED:
        if size <= _CHECKED_BYTES:
            # At its end zipfile compares the checksum, and raises BadZipFile.
            while stream.read(_COPY_BYTES):
                pass
        return _map_array(path, dtype, shape, order, _find_data(path, info) + start, where)
    if info.file_size <= left:
        data = bytearray(stream.read())
        return np.frombuffer(data, dtype).reshape(shape, order="F" if order else "C")
    # Rows are contiguous in C order only.
    if not order and len(shape) > 1 and size:
        return DeflatedArray(path, info, start, dtype, shape, where)
    # Unnamed; it lives as long as the array that is mapped from it.
    with tempfile.TemporaryFile(prefix="onnxq-") as file:
        while block := stream.read(_COPY_BYTES):
            file.write(block)
        file.flush()
        return (
            ScatteredArray(file, dtype, shape) if order else np.memmap(file, dtype, "r", 0, shape)
        )


def _read_header(stream: Any, where: str) -> tuple[DType, Shape, bool]:
    """Read dtype, shape and Fortran order of the .npy data in a stream, and leave the stream at the values."""
    # numpy's own np.load would read the values as well; this leaves them where they are.
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"its format has the unknown version {version[0]}.{version[1]}")
    # Bytes of its length; a format of version 1 cannot say more than 64 KiB.
    prefix = stream.read(2 if version == (1, 0) else 4)
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
        raise DataError(
            where, "is a structured array", "save one plain array per model input", code="Q206"
        )
    return dtype, shape, order


def _count_bytes(dtype: DType, shape: Shape) -> int:
    # math.prod: exact for the sizes that a damaged header may claim, where np.prod overflows.
    return math.prod(shape) * dtype.itemsize


def _map_array(
    path: Path, dtype: DType, shape: Shape, order: bool, offset: int, where: str
) -> Array:
    size = _count_bytes(dtype, shape)
    left = path.stat().st_size - offset
    if size > left:
        raise DataError(
            where, f"is truncated: {left} of {size} bytes are there", _DAMAGED, code="Q204"
        )
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
    # Where a local header has the two lengths (APPNOTE.TXT, 4.3.7).
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
        cause = explain_unreadable(error)
        fix = "check its permissions and the space left in the temporary folder"
        raise DataError(where, cause, fix, code="Q202") from error
    except Exception as error:  # the file may hold anything; zipfile, zlib and numpy each complain in their own way
        cause = f"is not a readable array file ({shorten_error(error)})"
        raise DataError(where, cause, _DAMAGED, code="Q204") from error
