"""Weights as quantized checkpoints hold them, in one neutral form, the formats of such checkpoints, and safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from onnxq.arrays import Array, Floats, Shape, as_float32, as_int32
from onnxq.errors import CalibrationError
from onnxq.graph.nbits import unpack_bits
from onnxq.sites import Causes, JsonObject

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


# Of what is wrong in a checkpoint.
fault = partial(CalibrationError, code="Q514")
# Bits that a code may have: more do not fit a byte.
MOST_BITS = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightCodes:
    """A quantized weight. Rows are output channels; columns stand in the order of their blocks.

    codes: unsigned, uint8 [rows, columns]. scale, zero, minimum: [rows, blocks] of `size` columns. A value is
    (code - zero) * scale; with a minimum it is code * scale + minimum. order: the network's column at each place; None:
    they stand as in the network.
    """

    codes: Array
    scale: Floats
    zero: Array
    bits: int
    size: int
    minimum: Floats | None = None
    order: Array | None = None

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    @property
    def form(self) -> tuple[int, int, bool, bytes]:
        """All that channels of one weight share."""
        return (
            self.bits,
            self.size,
            self.minimum is None,
            b"" if self.order is None else self.order.tobytes(),
        )

    @property
    def symmetric(self) -> bool:
        """True where all zero points are in the middle."""
        return self.minimum is None and bool((self.zero == self.middle).all())

    def dequantize(self) -> Floats:
        """The values in float32, with columns as in the network."""
        values = self.codes.astype(np.float32)
        if self.minimum is None:
            values -= self._spread(as_float32(self.zero))
        values *= self._spread(self.scale)
        if self.minimum is not None:
            values += self._spread(self.minimum)
        if self.order is None:
            return values
        placed = np.empty_like(values)
        placed[:, self.order] = values
        return placed

    def _spread(self, numbers: Array) -> Array:
        """Numbers of blocks at each of their columns."""
        return np.repeat(numbers, self.size, 1)[:, : self.codes.shape[1]]

    def sort_columns(self, name: str, groups: Array) -> WeightCodes:
        """The same with the columns of each group side by side. groups: of each column, its group (g_idx)."""
        # Stable: columns of a group stay in the order of the network.
        order = as_int32(groups.argsort(kind="stable"))
        if (groups[order] != np.arange(len(groups)) // self.size).any():
            raise fault(
                name,
                f"its groups (g_idx) are not of {self.size} columns each",
                "save the checkpoint again",
            )
        if (np.diff(groups) >= 0).all():
            return self
        return replace(self, codes=self.codes[:, order], order=order)

    def settle(self) -> WeightCodes:
        """The same values without scales of 0, and with whole zero points in the place of minima that are exact so."""
        codes = self.codes
        scale = self.scale
        zero = self.zero
        minimum = self.minimum
        if not scale.all():
            # A block of one value: any scale has it, and engines take none of 0.
            dead = self._spread(scale == 0)
            still = np.zeros_like(zero) if minimum is not None else zero
            codes = np.where(dead, self._spread(still), codes).astype(np.uint8)
            scale = np.where(scale == 0, np.float32(1), scale)
        if minimum is not None:
            # code · s + m = (code + m / s) · s: a minimum of whole steps is a zero point.
            whole = np.rint(-minimum / scale)
            legal = (
                (whole >= 0) & (whole < 1 << self.bits) & (-as_float32(whole) * scale == minimum)
            )
            if legal.all():
                zero = whole.astype(np.uint8)
                minimum = None
        return replace(self, codes=codes, scale=scale, zero=zero, minimum=minimum)


@dataclass(frozen=True)
class InputScale:
    """How a layer's input is quantized to 8 bits. scale: None: on the values of each run. zero: of signed codes.

    steps: 0, or the largest magnitude of each token in units of its scale, by which it is divided first.
    """

    scale: float | None = None
    zero: int = 0
    steps: float = 0.0


@dataclass(frozen=True, eq=False)
class CheckpointWeight:
    """One quantized weight of a checkpoint, which is read when it is asked for. shape: [rows, columns].

    size: columns of a block. form: in words, such as "4 bits in blocks of 128".
    """

    name: str
    shape: tuple[int, int]
    size: int
    form: str
    read: Callable[[], WeightCodes]
    data: InputScale | None = None


@dataclass(frozen=True, eq=False)
class CheckpointFiles:
    """The files of a checkpoint. settings: its quantization configuration. tensors: by name, of safetensors files.

    files: those of other kinds.
    """

    path: Path
    settings: JsonObject
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]

    def find_parts(self, name: str, *parts: str) -> tuple[StoredTensor, ...]:
        """The tensors of a module."""
        return tuple(self.tensors[f"{name}.{part}"] for part in parts)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The quantized weights of a checkpoint. refused: by name, why others are not read."""

    source: str
    format: str
    weights: tuple[CheckpointWeight, ...]
    refused: Causes


@dataclass(frozen=True, eq=False)
class CheckpointFormat:
    """One format. recognizes: whether files are of it. read: the weights; it raises CalibrationError."""

    name: str
    recognizes: Callable[[CheckpointFiles], bool]
    read: Callable[[CheckpointFiles], Checkpoint]


def list_weights(
    files: CheckpointFiles,
    title: str,
    ending: str,
    make: Callable[[CheckpointFiles, str], CheckpointWeight],
) -> Checkpoint:
    """The weight that `make` finds in each module with a tensor of this name; where it raises, one that is refused."""
    weights = []
    refused = {}
    for name in (
        tensor.removesuffix(ending) for tensor in files.tensors if tensor.endswith(ending)
    ):
        try:
            weights.append(make(files, name))
        except CalibrationError as error:
            refused[name] = error.cause
    return Checkpoint(str(files.path), title, tuple(weights), refused)


def unpack_words(words: Array, bits: int, count: int) -> Array:
    """Unpack unsigned integers of 1 to 8 bits from 32-bit words [rows, words], the first in the lowest bits: uint8.

    They stand without gaps, also across words.
    """
    # Little-endian, as the files are and all machines that ONNX Runtime has wheels for.
    packed = np.ascontiguousarray(words).view(np.uint8)
    if MOST_BITS % bits == 0:
        return unpack_bits(packed, bits, count)
    # Widths that do not divide a byte are taken bit by bit.
    stream = np.unpackbits(packed, axis=1, bitorder="little")[:, : count * bits].reshape(
        -1, count, bits
    )
    return np.packbits(stream, axis=2, bitorder="little")[..., 0]


def find_group_size(name: str, columns: int, groups: int, stated: object) -> int:
    """Columns of a group, as it is stated, or as it follows. Raises CalibrationError where there is no such size."""
    for size in (stated, columns // groups if groups else 0):
        if isinstance(size, int) and size > 0 and -(-columns // size) == groups:
            return min(size, columns)
    raise fault(
        name,
        f"{groups} groups do not fit {columns} columns in groups of {stated}",
        "save the checkpoint again",
    )


def describe_form(bits: int, size: int, columns: int, *more: str) -> str:
    """The form of a weight in words."""
    grain = "one scale a row" if size >= columns else f"blocks of {size}"
    return ", ".join((f"{bits} bits", grain, *filter(None, more)))
