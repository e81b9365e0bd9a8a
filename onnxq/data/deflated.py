"""Large compressed arrays of an .npz file, read by rows: in C order each is unpacked on request, once."""

from __future__ import annotations

import mmap
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from onnxq.data.fit import Array
from onnxq.errors import DataError

# Bytes read and unpacked at a time.
_BLOCK_BYTES = 2**20
# Distance in bytes of the positions from which unpacking can resume. zlib keeps about 45 KB for each.
_CHECKPOINT_BYTES = 32 * 2**20

# Bytes of a file that rows in Fortran order are collected from at a time.
_PIECE_BYTES = 16 * 2**20


class DeflatedArray:
    """An array in C order, read by rows of its first axis, with the interface that numpy and `Cut` need.

    Unpacked rows are kept in an unnamed temporary file.
    member: entry of the zip. start: offset of its data in the file. header: bytes before the values.
    """

    def __init__(
        self, path: Path, member: zipfile.ZipInfo, start: int, header: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self.dtype, self.shape, self.ndim = dtype, shape, len(shape)
        name = member.filename.removesuffix(".npy")
        self._where = f"{path}, array {name!r}"
        self._stream = _Inflater(path, member, start)
        self._header = header
        self._row = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        file = tempfile.TemporaryFile(prefix="onnxq-")  # noqa: SIM115, as old as the array
        weakref.finalize(self, file.close)
        file.truncate(shape[0] * self._row)  # sparse: rows that are never read take no space
        self._file, self._values = file, np.memmap(file, dtype, "r", 0, shape)
        self._there = np.zeros(shape[0], np.bool_)

    def __getitem__(self, key: Any) -> Array:
        """Return rows by index, slice, or a tuple that begins with one of these."""
        first = key[0] if isinstance(key, tuple) else key
        rows = range(self.shape[0])[first] if isinstance(first, (int, np.integer, slice)) else range(self.shape[0])
        for row in [rows] if isinstance(rows, int) else rows:
            self._fill(row)
        return np.asarray(self._values[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the whole array."""
        return np.asarray(self[:], dtype)

    def _fill(self, row: int) -> None:
        if self._there[row]:
            return
        try:
            # Written to the file, not to the mapping, where a full disk would kill the process.
            self._file.seek(row * self._row)
            for part in self._stream.read(self._header + row * self._row, self._row):
                self._file.write(part)
            self._file.flush()
        except (zlib.error, EOFError) as error:
            fix = "copy or make it again; it may be truncated"
            raise DataError(self._where, f"is damaged ({error})", fix, code="Q204") from error
        except OSError as error:
            fix = "check the space left in the temporary folder, or set TMPDIR"
            raise DataError(self._where, f"cannot be unpacked ({error.strerror or error})", fix, code="Q204") from error
        self._there[row] = True


class ScatteredArray:
    """An array in Fortran order, mapped from a file, with the interface that numpy and `Cut` need.

    The values of a row lie all over the file, so that one row reads as many pages as all of them: they are collected
    a piece of the file at a time, and the pages of a piece are given back behind it.
    """

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self.ndim = dtype, shape, len(shape)
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
            if hasattr(mmap, "MADV_DONTNEED"):
                self._mapping.madvise(mmap.MADV_DONTNEED)
        return rows.reshape(*self.shape[:0:-1], *rows.shape[1:]).T

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Return the whole array."""
        return np.asarray(self._values, dtype)


class _Inflater:
    """Random access to the unpacked bytes of one deflated zip entry, by unpacking from the nearest checkpoint.

    The checksum is compared when the end is reached for the first time.
    """

    def __init__(self, path: Path, member: zipfile.ZipInfo, start: int) -> None:
        self._path, self._end, self._member = path, start + member.compress_size, member
        # (offset in the file, offset in the entry, zlib's state) of each.
        self._checkpoints: list[tuple[int, int, Any]] = [(start, 0, zlib.decompressobj(-zlib.MAX_WBITS))]
        # Bytes covered by the checksum so far: it has to be computed in order.
        self._summed, self._sum = 0, 0
        self._go_to(0)

    def read(self, position: int, size: int) -> Iterator[bytes]:
        """Yield `size` bytes from `position` on, part by part. Raises zlib.error and EOFError for damaged data."""
        behind = self._checkpoints[-1][1]
        if position < self._at or (self._at + len(self._block) < behind <= position):
            self._go_to(position)
        with self._path.open("rb") as file:
            while True:
                low, high = max(position, self._at), min(position + size, self._at + len(self._block))
                if low < high:
                    yield self._block[low - self._at : high - self._at]
                if high == position + size:
                    return
                self._advance(file)

    def _go_to(self, position: int) -> None:
        self._source, self._at, state = next(one for one in reversed(self._checkpoints) if one[1] <= position)
        self._state, self._pending, self._block = state.copy(), b"", b""

    def _advance(self, file: BinaryIO) -> None:
        """Unpack the next block."""
        at = self._at + len(self._block)
        if not self._pending:
            file.seek(self._source)
            self._pending = file.read(min(_BLOCK_BYTES, self._end - self._source))
            self._source += len(self._pending)
        given = len(self._pending)
        block = self._state.decompress(self._pending, _BLOCK_BYTES)
        self._pending = self._state.unconsumed_tail
        if not block and not given:
            raise EOFError("it ends too early")
        if at == self._summed:
            self._sum = zlib.crc32(block, self._sum)
            self._summed += len(block)
            if self._summed > self._member.file_size:
                raise zlib.error("it is longer than the archive says")
            if self._summed == self._member.file_size and self._sum != self._member.CRC:
                raise zlib.error("its checksum is wrong")
        self._at, self._block = at, block
        reached = at + len(block)
        if not self._pending and reached >= self._checkpoints[-1][1] + _CHECKPOINT_BYTES:
            self._checkpoints.append((self._source, reached, self._state.copy()))
