"""Tensors of safetensors files, from the bytes: a header in JSON, then the arrays, each mapped when it is read."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxq.arrays import Array, Shape

# bfloat16, the upper half of a float32, is widened when it is read.
_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I8": "i1",
    "U8": "u1",
}
# Bytes of the longest header, as the format itself limits it.
_LONGEST = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. offset: of its first byte."""

    path: Path
    dtype: str
    shape: Shape
    offset: int

    def read(self) -> Array:
        """Its values, mapped and not copied; bfloat16 as float32. Raises KeyError for a type that is not read."""
        # A file of another length than its header says is refused here: nothing is mapped beyond its end.
        array = np.memmap(self.path, _TYPES[self.dtype], "r", self.offset, self.shape).view(
            np.ndarray
        )
        return (array.astype(np.uint32) << 16).view(np.float32) if self.dtype == "BF16" else array

    def read_floats(self) -> Array:
        """Its values as float32."""
        return self.read().astype(np.float32)


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises ValueError, KeyError or TypeError for one that is broken."""
    with path.open("rb") as file:
        # safetensors: eight bytes with the length of a header in JSON, the header, then the data.
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST:
            raise ValueError(f"a header of {length:,} bytes")
        header = json.loads(file.read(length))
    start = 8 + length
    tensors = {}
    header.pop("__metadata__", None)
    for name, row in header.items():
        shape = tuple(map(int, row["shape"]))
        first, last = row["data_offsets"]
        size = math.prod(shape) * np.dtype(_TYPES.get(row["dtype"], "u1")).itemsize
        if not 0 <= first <= last <= path.stat().st_size - start or (
            row["dtype"] in _TYPES and size != last - first
        ):
            raise ValueError(f"{name} is not within it")
        tensors[name] = StoredTensor(path, row["dtype"], shape, start + first)
    return tensors
