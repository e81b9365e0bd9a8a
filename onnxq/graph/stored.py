"""Arrays that lie in files and are mapped into memory while somebody looks at them.

A model of gigabytes is worked on tensor by tensor: each is mapped when it is asked for, and its memory is free again as
soon as nobody refers to the array.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import ModelError, OutputError

# Bytes written at a time: what is written lies in the memory of this process for a moment.
_PIECE = 1 << 24


class OpenFile:
    """A file that is closed with the last array in it: until then it may be renamed or removed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._end = weakref.finalize(self, os.close, descriptor)


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array of `shape`, in native byte order, at `offset` of a file."""

    file: OpenFile
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def map(self) -> NDArray[Any]:
        """The read-only array. Its pages take memory from when they are read until the array is let go of."""
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        length = self.offset - start + self.nbytes
        mapped = mmap.mmap(self.file.descriptor, length, access=mmap.ACCESS_READ, offset=start)
        # Read from start to end, mostly.
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        flat = np.frombuffer(mapped, self.dtype, count=self.nbytes // self.dtype.itemsize, offset=self.offset - start)
        return flat.reshape(self.shape)


def open_data(path: Path) -> OpenFile:
    """A data file, to read. Raises ModelError."""
    try:
        return OpenFile(os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
    except OSError as error:
        cause = f"cannot be read ({error.strerror or error})"
        raise ModelError(str(path), cause, "check its permissions", code="Q106") from error


class Spool:
    """A temporary file without a name for arrays that are not to stay in memory; its space is free with the last."""

    def __init__(self) -> None:
        self._file: OpenFile | None = None
        self._end = 0

    def write(self, array: NDArray[Any]) -> StoredArray:
        """Store a copy of the array. Raises OutputError where there is no space for it."""
        try:
            if self._file is None:
                with tempfile.TemporaryFile() as file:
                    self._file = OpenFile(os.dup(file.fileno()))
            offset = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            os.lseek(self._file.descriptor, offset, os.SEEK_SET)
            for piece in cut_bytes(array):
                _write_all(self._file.descriptor, piece)
        except OSError as error:
            where = os.environ.get("TMPDIR", tempfile.gettempdir())
            cause = f"cannot take {array.nbytes / 1e6:.0f} MB of a model's weights ({error.strerror or error})"
            raise OutputError(where, cause, "free space, or set TMPDIR to another folder", code="Q604") from error
        self._end = offset + array.nbytes
        return StoredArray(self._file, offset, array.dtype, array.shape)


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def cut_bytes(array: NDArray[Any]) -> Iterator[bytes]:
    """The array's bytes in the order of rows, little endian, a piece at a time."""
    flat = array.reshape(-1)
    step = max(1, _PIECE // max(1, array.itemsize))
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        yield part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes()
