"""Large arrays outside the graph: weights left out while a tool works on it, and files that arrays lie in.

`omit_weights` gives the model without the bytes of its large tensors (names, dtypes and dims stay), `restore_weights`
puts them back. Tensors are found again by name and graph, a subgraph by the first output of its parent node: no tool
changes these.
"""

import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxq.arrays import Array, Shape
from onnxq.errors import ModelError, OutputError
from onnxq.files import ScratchFolder, explain_unreadable, register_input
from onnxq.graph import scopes
from onnxq.sites import Names
from onnxq.spec import ELEMENT_TYPES

# Bytes. Shapes, axes and pads are smaller: tools look at their values, so they stay.
SMALL_BYTES = 4096
# Location of a stub of light.py. A path without a file extension in a folder: no exporter writes this one.
STUB_LOCATION = "onnxq/held"

# The original tensors that were left out, by place and the name of the initializer or the Constant's output: no two
# tensors of one graph share a name.
Omitted = dict[tuple[str, str], TensorProto]
# Of a file, see `OpenFile.stamp`.
Stamp = tuple[int, ...]
# How much is read of each file.
ReadBytes = dict[Path, int]
# By their names in lower case, as in QuantSpec; which of them there are depends on the onnx release.
TENSOR_TYPES = {name.lower(): number for name, number in TensorProto.DataType.items()}
# Other types fill the bytes that numpy has for them.
_BITS = {
    TENSOR_TYPES[name]: kind.bits for name, kind in ELEMENT_TYPES.items() if name in TENSOR_TYPES
}


def count_tensor_bytes(tensor: TensorProto) -> int:
    """The bytes the tensor's dims and dtype ask for (sub-byte types packed; strings count as stored)."""
    if tensor.data_type == TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    bits = _BITS.get(tensor.data_type)
    if bits is None:
        bits = 8 * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    count: int = math.prod(tensor.dims)
    return (count * bits + 7) // 8


def count_model_bytes(proto: ModelProto) -> int:
    """The bytes of all tensors inside the model together: about its size when it is serialized."""
    inside = (tensor for tensor in walk_tensors(proto) if not is_external(tensor))
    return sum(map(count_tensor_bytes, inside))


def is_stub(tensor: TensorProto) -> bool:
    """True for a tensor whose values lie in the WeightStore of its model (see light.py)."""
    return is_external(tensor) and any(
        entry.value == STUB_LOCATION for entry in tensor.external_data
    )


def check_tensors(proto: ModelProto, subject: str) -> None:
    """Raise ModelError for a tensor whose stored bytes do not match its dims (onnx.checker never sees the weights)."""
    known = set(onnx.helper.get_all_tensor_dtypes())
    for tensor in walk_tensors(proto):
        where = f"{subject}, tensor {tensor.name!r}"
        if tensor.data_type not in known:
            cause = f"has the unknown element type {tensor.data_type}"
            raise ModelError(where, cause, "export it again, or upgrade onnx", code="Q105")
        if is_external(tensor) or not tensor.HasField("raw_data"):
            continue
        wanted = count_tensor_bytes(tensor)
        if len(tensor.raw_data) != wanted:
            cause = f"its shape {list(tensor.dims)} needs {wanted} bytes, {len(tensor.raw_data)} are stored"
            fix = "the file is damaged; export or copy it again"
            raise ModelError(where, cause, fix, code="Q105")


def omit_weights(
    proto: ModelProto, *, empty: bool = False, functions: bool = True
) -> tuple[ModelProto, Omitted]:
    """The model without its large tensors' bytes, built without ever copying them, and those tensors.

    empty: also give them dims [0], which onnx.checker accepts as a tensor without data. functions: functions too.
    """
    omission = _Omission(empty)
    light = ModelProto()
    copy_fields(proto, light, ("graph", "functions"))
    omission.copy_graph(proto.graph, light.graph, "")
    for function in proto.functions:
        target = light.functions.add()
        if not functions:
            target.CopyFrom(function)
            continue
        copy_fields(function, target, ("node",))
        omission.copy_nodes(function, target, scopes.name_function(function))
    return light, omission.omitted


_WITH_TENSORS = (AttributeProto.TENSOR, AttributeProto.GRAPH, AttributeProto.GRAPHS)


@dataclass(frozen=True)
class _Omission:
    """Copies graphs without their large tensors, which it collects. empty: as of `omit_weights`."""

    empty: bool
    omitted: Omitted = field(default_factory=dict)

    def copy_graph(self, source: GraphProto, target: GraphProto, place: str) -> None:
        """Copy a graph and those inside it."""
        copy_fields(source, target, ("node", "initializer"))
        for tensor in source.initializer:
            self._copy_tensor(tensor, target.initializer.add(), (place, tensor.name))
        self.copy_nodes(source, target, place)

    def copy_nodes(
        self, source: GraphProto | FunctionProto, target: GraphProto | FunctionProto, place: str
    ) -> None:
        """Copy the nodes of a graph or function."""
        for node in source.node:
            copy = target.node.add()
            # Most nodes hold neither a tensor nor a body.
            if not any(attr.type in _WITH_TENSORS for attr in node.attribute):
                copy.CopyFrom(node)
                continue
            copy_fields(node, copy, ("attribute",))
            for attr in node.attribute:
                part = copy.attribute.add()
                copy_around_bodies(attr, part, "t")
                if _holds_value(node, attr):
                    self._copy_tensor(attr.t, part.t, (place, node.output[0]))
                elif attr.HasField("t"):
                    part.t.CopyFrom(attr.t)
            bodies = zip(
                scopes.iterate_subgraphs(node), scopes.iterate_subgraphs(copy), strict=True
            )
            for (label, body), (_, part) in bodies:
                self.copy_graph(body, part, _join_place(place, node, label))

    def _copy_tensor(self, tensor: TensorProto, target: TensorProto, key: tuple[str, str]) -> None:
        if is_external(tensor) or count_tensor_bytes(tensor) > SMALL_BYTES:
            self.omitted[key] = tensor
            write_stub(tensor, target, self.empty)
        else:
            target.CopyFrom(tensor)


def _holds_value(node: NodeProto, attr: AttributeProto) -> bool:
    # A damaged one may have no output to be called by, and a number in place of its tensor.
    return (
        node.op_type == "Constant"
        and attr.name == "value"
        and attr.HasField("t")
        and bool(node.output)
    )


def locate_tensors(
    proto: ModelProto, *, constants: bool = True
) -> Iterator[tuple[tuple[str, str], TensorProto]]:
    """Every initializer, and with `constants` every value of a Constant, under the key an Omitted has for it."""
    waiting = [("", proto.graph)]
    waiting.extend((scopes.name_function(function), function) for function in proto.functions)
    while waiting:
        place, graph = waiting.pop()
        if isinstance(graph, GraphProto):
            yield from (((place, tensor.name), tensor) for tensor in graph.initializer)
        for node in graph.node:
            for label, subgraph in scopes.iterate_subgraphs(node):
                waiting.append((_join_place(place, node, label), subgraph))
            values = (attr.t for attr in node.attribute if constants and _holds_value(node, attr))
            yield from (((place, node.output[0]), value) for value in values)


def restore_weights(light: ModelProto, omitted: Omitted) -> ModelProto:
    """A full model from a light one: every tensor of the omitted that is still there gets its bytes back.

    The light model may have been edited, as long as its tensors keep their names.
    """
    full = deepcopy(light)
    for key, tensor in locate_tensors(full):
        if key in omitted:
            tensor.CopyFrom(omitted[key])
    return full


def _join_place(place: str, node: NodeProto, label: str) -> str:
    return f"{place}/{scopes.find_result(node) or node.name}.{label}"


def write_stub(source: TensorProto, target: TensorProto, empty: bool = False) -> None:
    """Copy a tensor without its values. empty: with dims [0]."""
    for name in ("name", "data_type", "doc_string"):
        if source.HasField(name):
            setattr(target, name, getattr(source, name))
    target.metadata_props.extend(source.metadata_props)
    target.dims.extend([0] if empty else source.dims)
    if source.data_type != TensorProto.STRING:
        # Tools ask which field holds the values; an empty one is an answer.
        target.raw_data = b""


def copy_fields(source: object, target: object, leave_out: Names) -> None:
    """Copy a message field by field: CopyFrom and clearing after would keep the weights' memory alive."""
    for descriptor, value in source.ListFields():  # type: ignore[attr-defined]
        if descriptor.name in leave_out:
            continue
        # How a descriptor says "repeated" has changed between protobuf releases; the containers have not.
        if hasattr(value, "extend"):
            getattr(target, descriptor.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            setattr(target, descriptor.name, value)


def copy_around_bodies(attr: AttributeProto, copy: AttributeProto, *leave_out: str) -> None:
    """Copy an attribute without its subgraphs, in whose places the copy has empty ones, and without other fields."""
    copy_fields(attr, copy, ("g", "graphs", *leave_out))
    for _ in attr.graphs:
        copy.graphs.add()


# Arrays that lie in files: those a model keeps beside it, and those mapped into memory while somebody looks at them.
# A model of gigabytes is worked on tensor by tensor: each is mapped when it is asked for, and its memory is free
# again as soon as nobody refers to the array.
#
# Where a model says that its tensors are is not trusted. A location must be a relative path, without "..", that ends
# (symbolic links followed) in the folder the model was given in or the folder its real file lies in; the second
# serves caches that link a model and its data to one store.

# Bytes from which an array is worth a place in a file; smaller ones are few bytes together.
_WORTH_SPOOLING = 1 << 20
# Bytes written at a time: what is written lies in the memory of this process for a moment.
_PIECE = 1 << 24


class OpenFile:
    """A file that is closed with the last array in it. folder: a temporary one that goes with it."""

    def __init__(self, path: Path, flags: int, folder: ScratchFolder | None = None) -> None:
        self.path = path.resolve()
        self._folder = folder
        self.descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
        self._end = weakref.finalize(self, os.close, self.descriptor)

    @property
    def stamp(self) -> Stamp:
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
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self) -> Array:
        """The read-only array. Its pages take memory from when they are read until the array is let go of."""
        known = self._seen[0]() if self._seen else None
        if known is not None:
            return known
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        length = self.offset - start + self.nbytes
        mapped = mmap.mmap(self.file.descriptor, length, access=mmap.ACCESS_READ, offset=start)
        # Read from start to end, mostly.
        if sys.platform != "win32":
            mapped.madvise(mmap.MADV_SEQUENTIAL)
        count = self.nbytes // self.dtype.itemsize
        flat = np.frombuffer(mapped, self.dtype, count=count, offset=self.offset - start)
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
        if isinstance(mapped, mmap.mmap) and sys.platform != "win32":
            mapped.madvise(mmap.MADV_DONTNEED)


def open_data(path: Path) -> OpenFile:
    """A data file, to read. Raises ModelError."""
    try:
        return OpenFile(path, os.O_RDONLY)
    except OSError as error:
        cause = explain_unreadable(error)
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
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                self._file = OpenFile(folder.path / "weights", flags, folder)
            offset = -(-self._end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            with os.fdopen(self._file.descriptor, "wb", closefd=False) as stream:
                stream.seek(offset)
                stream.writelines(cut_bytes(array))
        except OSError as error:
            where = os.environ.get("TMPDIR", tempfile.gettempdir())
            cause = f"cannot take {array.nbytes / 1e6:.0f} MB of a model's weights ({error.strerror or error})"
            fix = "free space, or set TMPDIR to another folder"
            raise OutputError(where, cause, fix, code="Q604") from error
        self._end = offset + array.nbytes
        return StoredArray(self._file, offset, array.dtype, array.shape)


def cut_bytes(array: Array) -> Iterator[bytes]:
    """The array's bytes in the order of rows, little endian, a piece at a time."""
    flat = array.ravel()
    step = max(1, _PIECE // max(1, array.itemsize))
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        yield part.astype(part.dtype.newbyteorder("<"), copy=False).tobytes()


# Keys of the ONNX format; ONNX Runtime adds names that begin with "prepacked".
_KEYS = ("location", "offset", "length", "checksum", "basepath")
_fault = partial(ModelError, code="Q107")


def walk_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every TensorProto of the model: initializers, sparse parts and attributes, in subgraphs and functions too."""
    for _, graph in scopes.walk_all_graphs(proto):
        if isinstance(graph, GraphProto):
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
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
) -> ReadBytes:
    """Read every external tensor of the model at `path` into the proto, in place; the bytes in use of each file.

    keep: called with the initializers of the main graph; True for one that it has made a stub of, which is not read.
    Raises ModelError for a location that is missing, absolute, outside the model's folder, or too short.
    """
    read: ReadBytes = {}
    main = {id(tensor): tensor for tensor in proto.graph.initializer}
    for tensor in walk_tensors(proto):
        if not is_external(tensor):
            continue
        extent = _find_extent(tensor, path, read)
        if keep is None or id(tensor) not in main or not keep(tensor, extent):
            scopes.embed_bytes(tensor, _read_extent(tensor, extent))
    return read


def _find_extent(tensor: TensorProto, path: Path, read: ReadBytes) -> Extent:
    """Where an external tensor of the model at `path` lies; its bytes are added to those `read` from its file.

    Raises ModelError as `load_external` does.
    """
    subject = f"{path}, tensor {tensor.name!r}"
    entries = scopes.map_entries(tensor.external_data)
    for key in entries:
        # Left out of account, a damaged "offset" would give the tensor another one's values.
        if key not in _KEYS and not key.startswith("prepacked"):
            cause = f"its external data has the unknown key {key!r}"
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
        cause = f"{name} points outside the model's folder"
        raise _fault(subject, cause, "move the data beside the model")
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
    subject = f"{file}, tensor {tensor.name!r}"
    size = file.stat().st_size
    try:
        offset = int(entries.get("offset", "") or 0)
        # Without a length the data goes to the end of the file.
        length = int(entries.get("length", "") or size - offset)
    except ValueError as error:
        cause = f"offset or length is not a number ({error})"
        raise _fault(subject, cause, "export the model again") from error
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
        cause = explain_unreadable(error)
        raise ModelError(subject, cause, "check its permissions", code="Q106") from error
