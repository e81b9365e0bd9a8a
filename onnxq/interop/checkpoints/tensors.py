"""Tensors of safetensors files, from the bytes: a header in JSON, then the arrays, each mapped when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxq.arrays import Array
from onnxq.errors import CalibrationError

# bfloat16, the upper half of a float32, is widened when it is read.
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
          "U8": "u1", "BOOL": "?", "U16": "<u2", "U32": "<u4", "U64": "<u8"}  # fmt: skip
# Bytes of the longest header, as the format itself limits it.
_LONGEST = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. offset: of its first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> Array:
        """Its values, mapped and not copied; bfloat16 as float32."""
        if self.dtype not in _TYPES:
            raise CalibrationError(self.path, f"holds {self.dtype}, which is not read", "", code="Q514")
        if 0 in self.shape:
            return np.zeros(self.shape, _TYPES[self.dtype])
        array = np.memmap(self.path, _TYPES[self.dtype], "r", self.offset, self.shape)
        if self.dtype != "BF16":
            return array.view(np.ndarray)
        return (array.astype(np.uint32) << 16).view(np.float32)

    def read_floats(self) -> Array:
        """Its values as float32."""
        return self.read().astype(np.float32)


def list_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of these files by name. Raises CalibrationError for a file that is broken."""
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            tensors |= _read_header(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            cause = f"is no whole safetensors file ({error})"
            raise CalibrationError(path, cause, "download it again", code="Q514") from error
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST:
            raise ValueError(f"a header of {length:,} bytes")
        header = json.loads(file.read(length))
    start, end, tensors = 8 + length, path.stat().st_size, {}
    for name, row in header.items():
        if name == "__metadata__":
            continue
        shape, (first, last) = tuple(map(int, row["shape"])), row["data_offsets"]
        size = np.dtype(_TYPES[row["dtype"]]).itemsize * math.prod(shape) if row["dtype"] in _TYPES else last - first
        if not 0 <= first <= last <= end - start or size != last - first or min(shape, default=0) < 0:
            raise ValueError(f"{name} is not within it")
        tensors[name] = StoredTensor(path, row["dtype"], shape, start + first)
    return tensors
