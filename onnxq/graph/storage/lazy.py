"""Reading a model whose large weights stay in their files, beside the model's own or inside it."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto

from onnxq.errors import ModelError
from onnxq.files import check_input_kind
from onnxq.graph.light import SAME_LAYOUT, SMALLEST_STUB, ModelLike, WeightStore, count_light_bytes
from onnxq.graph.storage.external import Extent, load_external
from onnxq.graph.storage.skeleton import MESSAGE_LIMIT, read_skeleton
from onnxq.graph.storage.stored import OpenFile, Spool, StoredArray, open_data
from onnxq.graph.weights import count_tensor_bytes

# Bytes of a model file. Below, reading it whole is faster, and it fits into memory several times.
_WORTH_MAPPING = 1 << 26
# Bytes of weights from which on those that are made leave memory, too, and no session gets all of them at once.
LARGE_BYTES = 1 << 30


def read_lazily(
    path: Path, read: Callable[[Path], bytes], parse: Callable[[bytes, Path], ModelProto]
) -> tuple[ModelProto, WeightStore, dict[Path, int]]:
    """A model file with stubs for its large weights, their store, and the bytes in use of each data file.

    read: all bytes of a file, with the errors for one that is none. parse: the model in bytes, likewise.
    """
    store = WeightStore()
    mapped = _read_mapped(path, parse) if _can_map(path) else None
    proto, inside = mapped or (parse(read(path), path), {})
    opened: dict[Path, OpenFile] = {}

    def keep(tensor: TensorProto, extent: Extent) -> bool:
        if not _can_stay(tensor, extent.length):
            return False
        if extent.file not in opened:
            opened[extent.file] = open_data(extent.file)
        del tensor.external_data[:]
        return store.put(tensor, _describe_array(tensor, opened[extent.file], extent.offset))

    found = load_external(proto, path, keep)
    # Now, since stubs are external data to whoever does not know them.
    for number, array in inside.items():
        store.put(proto.graph.initializer[number], array)
    # Before anybody has checked the tensors themselves.
    if path.stat().st_size + sum(found.values()) >= LARGE_BYTES:
        store.spool = Spool()
    return proto, store, found


def is_large_model(model: ModelLike) -> bool:
    """True for a model with more weights than go into memory several times."""
    return count_light_bytes(model) >= LARGE_BYTES


def _can_map(path: Path) -> bool:
    return os.path.isfile(path) and _WORTH_MAPPING <= path.stat().st_size <= MESSAGE_LIMIT


def _read_mapped(
    path: Path, parse: Callable[[bytes, Path], ModelProto]
) -> tuple[ModelProto, dict[int, StoredArray]] | None:
    """The model without its large initializers, and these by their numbers; None for a file that is damaged."""
    check_input_kind(path, ModelError)
    file, inside = open_data(path), {}
    with mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ) as data:
        try:
            skeleton, left_out = read_skeleton(data, SMALLEST_STUB)
        except ValueError:
            return None
        proto = parse(skeleton, path)
        for number, (offset, length) in left_out.items():
            tensor = proto.graph.initializer[number]
            # External data that also has bytes of its own is for the checks to refuse.
            if _can_stay(tensor, length) and not tensor.HasField("data_location"):
                inside[number] = _describe_array(tensor, file, offset)
            else:
                tensor.raw_data = data[offset : offset + length]
    return proto, inside


def _can_stay(tensor: TensorProto, length: int) -> bool:
    """True where the bytes can be looked at as an array without a copy, and are as many as they should be."""
    plain = tensor.data_type in SAME_LAYOUT and sys.byteorder == "little"
    return plain and SMALLEST_STUB <= length == count_tensor_bytes(tensor)


def _describe_array(tensor: TensorProto, file: OpenFile, offset: int) -> StoredArray:
    return StoredArray(file, offset, onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims))
