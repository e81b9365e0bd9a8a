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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import ModelError, OutputError
from onnxq.files import ScratchFolder

# Bytes from which an array is worth a place in a file; smaller ones are few bytes together.
_WORTH_SPOOLING = 1 << 20
# Bytes written at a time: what is written lies in the memory of this process for a moment.
_PIECE = 1 << 24


class OpenFile:
    """A file that is closed with the last array in it. folder: a temporary one that goes with it."""

    def __init__(self, path: Path, flags: int, folder: ScratchFolder | None = None) -> None:
        self.path, self._folder = path.resolve(), folder
        self.descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
        self._end = weakref.finalize(self, os.close, self.descriptor)

    @property
    def stamp(self) -> tuple[int, ...]:
        """Size and second of change, by which another process knows the file again; () for a temporary one."""
        about = os.fstat(self.descriptor)
        return () if self._folder is not None else (about.st_size, int(about.st_mtime))


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An array of `shape`, in native byte order, at `offset` of a file; those who look at it together share memory."""

    file: OpenFile
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    _seen: list[weakref.ref[NDArray[Any]]] = field(default_factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def map(self) -> NDArray[Any]:
        """The read-only array. Its pages take memory from when they are read until the array is let go of."""
        known = self._seen[0]() if self._seen else None
        if known is not None:
            return known
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        length = self.offset - start + self.nbytes
        mapped = mmap.mmap(self.file.descriptor, length, access=mmap.ACCESS_READ, offset=start)
        # Read from start to end, mostly.
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        flat = np.frombuffer(mapped, self.dtype, count=self.nbytes // self.dtype.itemsize, offset=self.offset - start)
        array = flat.reshape(self.shape)
        self._seen[:] = [weakref.ref(array)]
        return array


def release_pages(*arrays: NDArray[Any]) -> None:
    """Free the memory of mapped arrays until somebody looks at them again. Those that are not mapped stay."""
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        mapped = base.obj if isinstance(base, memoryview) else None
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)


def open_data(path: Path) -> OpenFile:
    """A data file, to read. Raises ModelError."""
    try:
        return OpenFile(path, os.O_RDONLY)
    except OSError as error:
        cause = f"cannot be read ({error.strerror or error})"
        raise ModelError(str(path), cause, "check its permissions", code="Q106") from error


class Spool:
    """A temporary file for arrays that are not to stay in memory; it is removed with the last of them."""

    def __init__(self) -> None:
        self._file: OpenFile | None = None
        self._end = 0

    def takes(self, size: int) -> bool:
        """True for arrays of so many bytes that they are not to stay in memory."""
        return size >= _WORTH_SPOOLING

    def keep_array(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array, mapped from the file; itself where it is too small. Raises OutputError as `write` does."""
        return self.write(array).map() if self.takes(array.nbytes) else array

    def write(self, array: NDArray[Any]) -> StoredArray:
        """Store a copy of the array. Raises OutputError where there is no space for it."""
        try:
            if self._file is None:
                folder = ScratchFolder()
                self._file = OpenFile(folder.path / "weights", os.O_RDWR | os.O_CREAT | os.O_EXCL, folder)
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
