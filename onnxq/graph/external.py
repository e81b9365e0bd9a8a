"""Tensors kept in files beside the model, read without trusting where the model says they are.

A location must be a relative path, without "..", that ends (symbolic links followed) in the folder the model was given
in or the folder its real file lies in; the second serves caches that link a model and its data to one store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from onnxq.errors import ModelError
from onnxq.files import register_input
from onnxq.graph.scopes import iterate_subgraphs

# Keys of the ONNX format; ONNX Runtime adds names that begin with "prepacked".
_KEYS = frozenset(("location", "offset", "length", "checksum", "basepath"))


def walk_tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every TensorProto of the model: initializers, sparse parts and attributes, in subgraphs and functions too."""
    stack: list[GraphProto | FunctionProto] = [proto.graph, *proto.functions]
    while stack:
        graph = stack.pop()
        if isinstance(graph, GraphProto):
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield sparse.values
                yield sparse.indices
        for node in graph.node:
            yield from walk_node_tensors(node)
            stack.extend(subgraph for _, subgraph in iterate_subgraphs(node))


def walk_node_tensors(node: NodeProto) -> Iterator[TensorProto]:
    """The tensors in a node's own attributes."""
    for attr in node.attribute:
        if attr.type == AttributeProto.TENSOR:
            yield attr.t
        elif attr.type == AttributeProto.TENSORS:
            yield from attr.tensors
        elif attr.type == AttributeProto.SPARSE_TENSOR:
            yield attr.sparse_tensor.values
            yield attr.sparse_tensor.indices


def is_external(tensor: TensorProto) -> bool:
    """True when the tensor's bytes lie in another file."""
    return tensor.data_location == TensorProto.EXTERNAL


def load_external(proto: ModelProto, path: Path) -> dict[Path, int]:
    """Read every external tensor of the model at `path` into the proto, in place; the bytes read from each file.

    Raises ModelError for a location that is missing, absolute, outside the model's folder, or too short.
    """
    roots = tuple(dict.fromkeys((path.parent.resolve(), path.resolve().parent)))
    sizes: dict[Path, int] = {}
    read: dict[Path, int] = {}
    for tensor in walk_tensors(proto):
        if not is_external(tensor):
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        strange = next((key for key in entries if key not in _KEYS and not key.startswith("prepacked")), None)
        if strange is not None:
            # Left out of account, a damaged "offset" would give the tensor another one's values.
            cause = f"its external data has the unknown key {strange!r}"
            raise ModelError(
                f"{path}, tensor {tensor.name!r}", cause, "the file is damaged; export or copy it again", code="Q107"
            )
        try:
            file = _locate_file(tensor.name, entries.get("location", ""), path, roots)
        except OSError as error:
            raise ModelError(
                f"{path}, tensor {tensor.name!r}",
                f"its data file cannot be reached ({error.strerror or error})",
                "check the location's name and its permissions",
                code="Q107",
            ) from error
        if file not in sizes:
            register_input(file)
            sizes[file] = file.stat().st_size
        tensor.raw_data = _read_bytes(tensor, entries, file, sizes[file])
        read[file] = read.get(file, 0) + len(tensor.raw_data)
        del tensor.external_data[:]
        tensor.ClearField("data_location")
    return read


def _locate_file(name: str, location: str, path: Path, roots: tuple[Path, ...]) -> Path:
    subject = f"{path}, tensor {name!r}"
    windows = PureWindowsPath(location)
    if not location:
        raise ModelError(subject, "its data is external but no file is named", "export the model again", code="Q107")
    if PurePosixPath(location).is_absolute() or windows.is_absolute() or windows.drive:
        raise ModelError(
            subject,
            f"its data file {location!r} is an absolute path",
            "move the data beside the model and save it with a relative location",
            code="Q107",
        )
    if ".." in PurePosixPath(location).parts or ".." in windows.parts:
        raise ModelError(
            subject,
            f"its data file {location!r} points outside the model's folder",
            "move the data beside the model",
            code="Q107",
        )
    file = path.parent / location
    if not file.exists() and len(roots) > 1:
        file = path.resolve().parent / location
    if not file.exists():
        raise ModelError(
            subject,
            f"its data file {location!r} is not there",
            f"put it beside the model: {path.parent / location}",
            code="Q106",
        )
    real = file.resolve()
    if not any(real.is_relative_to(root) for root in roots):
        raise ModelError(
            subject,
            f"its data file {location!r} is a link that leads outside the model's folder ({real})",
            "copy the model with its data into one folder (cp -L)",
            code="Q107",
        )
    if not real.is_file():
        raise ModelError(
            subject, f"its data file {location!r} is not a regular file", "export the model again", code="Q107"
        )
    return real


def _read_bytes(tensor: TensorProto, entries: dict[str, str], file: Path, size: int) -> bytes:
    subject = f"{file}, tensor {tensor.name!r}"
    try:
        offset = int(entries.get("offset", "") or 0)
        length = int(entries.get("length", "") or size - offset)
    except ValueError as error:
        raise ModelError(
            subject, f"offset or length is not a number ({error})", "export the model again", code="Q107"
        ) from error
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            subject,
            f"the file is too short: bytes {offset} to {offset + length} are wanted, {size} are there",
            "the file is truncated or belongs to another model; copy it again",
            code="Q106",
        )
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            return stream.read(length)
    except OSError as error:
        raise ModelError(
            subject, f"cannot be read ({error.strerror or error})", "check its permissions", code="Q106"
        ) from error
