"""ONNX test data: test_data_set_*/input_0.pb, one TensorProto per model input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import onnx

from onnxq.data.fit import Array
from onnxq.errors import DataError
from onnxq.files import read_input
from onnxq.graph import ValueInfo

# Bytes; protobuf's limit for one message.
_MOST_BYTES = 2**31 - 1
_NUMBER = re.compile(r"input_(\d+)\.pb$")


def find_sets(folder: Path) -> list[Path]:
    """Find the folders with input_*.pb: `folder` itself or the test_data_set_* in it, in numeric order."""
    if _list_files(folder):
        return [folder]
    found = [path for path in folder.iterdir() if path.is_dir() and _list_files(path)]
    return sorted(found, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path.name)])


def read_set(folder: Path, inputs: Sequence[ValueInfo]) -> dict[str, Array]:
    """Read one sample: tensors by their own names if these are the inputs' names, else in the order of the inputs.

    Raises DataError for a damaged file or if files and inputs do not match.
    """
    tensors = [read_tensor(path) for path in _list_files(folder)]
    names = [value.name for value in inputs]
    if {name for name, _ in tensors} == set(names):
        return dict(tensors)
    if len(tensors) != len(names):
        cause = f"has {len(tensors)} input files, the model has {len(names)} inputs ({', '.join(names)})"
        raise DataError(folder, cause, code="Q207")
    return {name: array for name, (_, array) in zip(names, tensors, strict=True)}


def read_tensor(path: Path) -> tuple[str, Array]:
    """Read name and values of a TensorProto file."""
    tensor = onnx.TensorProto()
    try:
        data = read_input(path, DataError, limit=_MOST_BYTES)
    except OSError as error:
        raise DataError(path, f"cannot be read ({error.strerror or error})", code="Q202") from error
    try:
        tensor.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError; its package has no types
        raise DataError(path, "is not an ONNX tensor", "sequences and maps are not supported", code="Q206") from error
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise DataError(path, "keeps its values in another file", "save the tensor with its values inside", code="Q204")
    # Values of a sequence stand where a tensor tells its segment, which nobody writes.
    if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type or tensor.HasField("segment"):
        raise DataError(path, "is not an ONNX tensor", "sequences and maps are not supported", code="Q206")
    try:
        return tensor.name, onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise DataError(path, f"is damaged ({error})", "copy or make it again", code="Q204") from error


def _list_files(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.glob("input_*.pb") if (match := _NUMBER.search(path.name))]
    return [path for _, path in sorted(found)]
