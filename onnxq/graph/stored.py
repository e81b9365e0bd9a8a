"""Arrays that lie in files: those a model keeps beside it, and those mapped into memory while somebody looks at them.

A model of gigabytes is worked on tensor by tensor: each is mapped when it is asked for, and its memory is free again as
soon as nobody refers to the array.

Where a model says that its tensors are is not trusted. A location must be a relative path, without "..", that ends
(symbolic links followed) in the folder the model was given in or the folder its real file lies in; the second serves
caches that link a model and its data to one store.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto

from onnxq.arrays import Array, Shape
from onnxq.errors import ModelError, OutputError
from onnxq.files import ScratchFolder, register_input
from onnxq.graph.scopes import walk_all_graphs

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
    shape: Shape
    _seen: list[weakref.ref[Array]] = field(default_factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def map(self) -> Array:
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


def release_pages(*arrays: Array) -> None:
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

    def keep_array(self, array: Array) -> Array:
        """The array, mapped from the file; itself where it is too small. Raises OutputError as `write` does."""
        return self.write(array).map() if self.takes(array.nbytes) else array

    def write(self, array: Array) -> StoredArray:
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


def cut_bytes(array: Array) -> Iterator[bytes]:
    """The array's bytes in the order of rows, little endian, a piece at a time."""
    flat = array.reshape(-1)
    step = max(1, _PIECE // max(1, array.itemsize))
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        yield part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes()


# Keys of the ONNX format; ONNX Runtime adds names that begin with "prepacked".
_KEYS = frozenset(("location", "offset", "length", "checksum", "basepath"))
_fault = partial(ModelError, code="Q107")


def walk_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every TensorProto of the model: initializers, sparse parts and attributes, in subgraphs and functions too."""
    for _, graph in walk_all_graphs(proto):
        if isinstance(graph, GraphProto):
            yield from graph.initializer
            yield from (part for sparse in graph.sparse_initializer for part in (sparse.values, sparse.indices))
        for attr in (attr for node in graph.node for attr in node.attribute):
            if attr.type == AttributeProto.TENSOR:
                yield attr.t
            elif attr.type == AttributeProto.TENSORS:
                yield from attr.tensors
            elif attr.type == AttributeProto.SPARSE_TENSOR:
                yield from (attr.sparse_tensor.values, attr.sparse_tensor.indices)


def is_external(tensor: TensorProto) -> bool:
    """True when the tensor's bytes lie in another file."""
    return tensor.data_location == TensorProto.EXTERNAL


@dataclass(frozen=True)
class Extent:
    """Where the bytes of an external tensor lie: in a real file, `length` bytes from `offset`."""

    file: Path
    offset: int
    length: int


def load_external(
    proto: ModelProto,
    path: Path,
    keep: Callable[[TensorProto, Extent], bool] | None = None,
) -> dict[Path, int]:
    """Read every external tensor of the model at `path` into the proto, in place; the bytes in use of each file.

    keep: called with the initializers of the main graph; True for one that it has made a stub of, which is not read.
    Raises ModelError for a location that is missing, absolute, outside the model's folder, or too short.
    """
    read: dict[Path, int] = {}
    main = {id(tensor): tensor for tensor in proto.graph.initializer} if keep is not None else {}
    for tensor in walk_tensors(proto):
        if not is_external(tensor):
            continue
        extent = _find_extent(tensor, path, read)
        if keep is None or id(tensor) not in main or not keep(tensor, extent):
            tensor.raw_data = _read_extent(tensor, extent)
            del tensor.external_data[:]
            tensor.ClearField("data_location")
    return read


def _find_extent(tensor: TensorProto, path: Path, read: dict[Path, int]) -> Extent:
    """Where an external tensor of the model at `path` lies; its bytes are added to those `read` from its file.

    Raises ModelError as `load_external` does.
    """
    subject = f"{path}, tensor {tensor.name!r}"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    strange = next((key for key in entries if key not in _KEYS and not key.startswith("prepacked")), None)
    if strange is not None:
        # Left out of account, a damaged "offset" would give the tensor another one's values.
        cause = f"its external data has the unknown key {strange!r}"
        raise _fault(subject, cause, "the file is damaged; export or copy it again")
    try:
        file = _locate_file(subject, entries.get("location", ""), path)
    except OSError as error:
        cause = f"its data file cannot be reached ({error.strerror or error})"
        raise _fault(subject, cause, "check the location's name and its permissions") from error
    if file not in read:
        register_input(file)
    offset, length = _read_range(tensor, entries, file)
    read[file] = read.get(file, 0) + length
    return Extent(file, offset, length)


def _locate_file(subject: str, location: str, path: Path) -> Path:
    """The real file of a location, the one beside the model as it was named before the one beside its real file."""
    if not location:
        raise _fault(subject, "its data is external but no file is named", "export the model again")
    # Both: a file written on one system is read on the other.
    kinds = PurePosixPath(location), PureWindowsPath(location)
    name = f"its data file {location!r}"
    if any(kind.is_absolute() or kind.drive for kind in kinds):
        fix = "move the data beside the model and save it with a relative location"
        raise _fault(subject, f"{name} is an absolute path", fix)
    if any(".." in kind.parts for kind in kinds):
        raise _fault(subject, f"{name} points outside the model's folder", "move the data beside the model")
    folders = (path.parent, path.resolve().parent)
    file = next((folder / location for folder in folders if (folder / location).exists()), None)
    if file is None:
        fix = f"put it beside the model: {path.parent / location}"
        raise ModelError(subject, f"{name} is not there", fix, code="Q106")
    real = file.resolve()
    # A relative name may still be a link that leads anywhere.
    if not any(real.is_relative_to(folder.resolve()) for folder in folders):
        cause = f"{name} is a link that leads outside the model's folder ({real})"
        raise _fault(subject, cause, "copy the model with its data into one folder (cp -L)")
    if not real.is_file():
        raise _fault(subject, f"{name} is not a regular file", "export the model again")
    return real


def _read_range(tensor: TensorProto, entries: dict[str, str], file: Path) -> tuple[int, int]:
    """Offset and length of a tensor's bytes, which the file is long enough for."""
    subject, size = f"{file}, tensor {tensor.name!r}", file.stat().st_size
    try:
        offset = int(entries.get("offset", "") or 0)
        # Without a length the data goes to the end of the file.
        length = int(entries.get("length", "") or size - offset)
    except ValueError as error:
        raise _fault(subject, f"offset or length is not a number ({error})", "export the model again") from error
    if offset < 0 or length < 0 or offset + length > size:
        cause = f"the file is too short: bytes {offset} to {offset + length} are wanted, {size} are there"
        fix = "the file is truncated or belongs to another model; copy it again"
        raise ModelError(subject, cause, fix, code="Q106")
    return offset, length


def _read_extent(tensor: TensorProto, extent: Extent) -> bytes:
    try:
        with extent.file.open("rb") as stream:
            stream.seek(extent.offset)
            return stream.read(extent.length)
    except OSError as error:
        subject = f"{extent.file}, tensor {tensor.name!r}"
        raise ModelError(
            subject, f"cannot be read ({error.strerror or error})", "check its permissions", code="Q106"
        ) from error
