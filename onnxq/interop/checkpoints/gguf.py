"""GGUF, the file of llama.cpp: a header of key-value pairs and tensors, then blocks of codes with their scales.

    Q4_0, Q5_0, Q8_0   32 values,  d · (q - middle)
    Q4_1, Q5_1         32 values,  d · q + m
    Q3_K, Q6_K        256 values,  d · s · (q - middle), a scale s for each 16
    Q2_K, Q4_K, Q5_K  256 values,  d · s · q - e · m, a scale and a minimum for each 16 or 32

Products of the float16 d and the integer s are exact in float32, and so is every block that is written.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxq.arrays import Array, Shape, as_float32
from onnxq.interop.checkpoints.base import (
    Checkpoint,
    CheckpointFiles,
    CheckpointFormat,
    CheckpointWeight,
    WeightCodes,
    describe_form,
)

_MAGIC = b"GGUF"
# Types of values: their formats for `struct`; of strings and of arrays.
_SCALARS = {
    0: "B",
    1: "b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING = 8
_ARRAY = 9
# Bytes of a string, values of an array and tensors of a file, beyond which it is no such file.
_MOST = 2**28
# Types of tensors that are not quantized.
_FLOATS = (0, 1, 28, 30)
# Names of those whose values stand in a table, not on a grid.
_TABLES = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}

# Codes [blocks, values], scales and minima [blocks, groups]; None: there are no minima.
_Parts = tuple[Array, Array, Array | None]


def _read_float16(blocks: Array, at: int) -> Array:
    return as_float32(np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2"))


def _split_bits(data: Array, each: int, bits: int) -> Array:
    """Of each `each` bytes the lowest so many bits, then the next, and so on."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    # [blocks, runs, parts of a byte, bytes of a run].
    parts = data.reshape(len(data), -1, 1, each) >> shifts & np.uint8((1 << bits) - 1)
    return np.asarray(parts.reshape(len(data), -1))


def _read_simple(blocks: Array, *, bits: int, minimum: bool) -> _Parts:
    """Q4_0 to Q8_0."""
    head = 4 if minimum else 2
    least = _read_float16(blocks, 2) if minimum else None
    if bits == 8:
        # Turning the sign bit makes int8 unsigned, with 128 in the place of 0.
        return blocks[:, head:] ^ np.uint8(128), _read_float16(blocks, 0), least
    codes = _split_bits(blocks[:, -16:], 16, 4)
    if bits == 5:
        # The fifth bits of all 32 codes stand in one word.
        codes = codes | np.unpackbits(
            blocks[:, head : head + 4], axis=1, bitorder="little"
        ) << np.uint8(4)
    return codes, _read_float16(blocks, 0), least


def _read_q2(blocks: Array) -> _Parts:
    scales = blocks[:, :16]
    codes = _split_bits(blocks[:, 16:80], 32, 2)
    d = _read_float16(blocks, 80)
    e = _read_float16(blocks, 82)
    # Each byte has a scale in its low half and a minimum in its high one.
    return codes, d * (scales & 15), -e * (scales >> 4)


def _read_q3(blocks: Array) -> _Parts:
    # The highest bits of all codes stand first, in 32 bytes.
    codes = _split_bits(blocks[:, 32:96], 32, 2) | _split_bits(blocks[:, :32], 32, 1) << np.uint8(2)
    packed = blocks[:, 96:108]
    # Sixteen scales of six bits in twelve bytes: the low four of all, then the high
    # two; 32 means 0.
    low = _split_bits(packed[:, :8], 8, 4)
    top = _split_bits(packed[:, 8:], 4, 2)
    scales = as_float32(low | top << np.uint8(4)) - 32
    return codes, _read_float16(blocks, 108) * scales, None


def _read_q45(blocks: Array, *, bits: int) -> _Parts:
    first, second, third = (blocks[:, k : k + 4] for k in (4, 8, 12))
    # Eight scales and eight minima of six bits: four of each have bytes of their own, whose top
    # bits are the high bits of the other four.
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 1)
    codes = _split_bits(blocks[:, -128:], 32, 4)
    if bits == 5:
        codes = codes | _split_bits(blocks[:, 16:48], 32, 1) << np.uint8(4)
    return codes, _read_float16(blocks, 0) * scales, -_read_float16(blocks, 2) * least


def _read_q6(blocks: Array) -> _Parts:
    low = _split_bits(blocks[:, :128], 64, 4)
    codes = low | _split_bits(blocks[:, 128:192], 32, 2) << np.uint8(4)
    return codes, _read_float16(blocks, 208) * blocks[:, 192:208].view(np.int8), None


@dataclass(frozen=True)
class _BlockType:
    """A type of blocks. length: of a block in bytes. values: in a block. size: values of a scale."""

    name: str
    length: int
    bits: int
    size: int
    split: Callable[[Array], _Parts]
    values: int = 256
    least: bool = False


def _make_simple(name: str, length: int, bits: int, least: bool = False) -> _BlockType:
    return _BlockType(
        name, length, bits, 32, partial(_read_simple, bits=bits, minimum=least), 32, least
    )


# By the numbers of ggml.h.
_TYPES = {
    2: _make_simple("Q4_0", 18, 4),
    3: _make_simple("Q4_1", 20, 4, True),
    6: _make_simple("Q5_0", 22, 5),
    7: _make_simple("Q5_1", 24, 5, True),
    8: _make_simple("Q8_0", 34, 8),
    10: _BlockType("Q2_K", 84, 2, 16, _read_q2, least=True),
    11: _BlockType("Q3_K", 110, 3, 16, _read_q3),
    12: _BlockType("Q4_K", 144, 4, 32, partial(_read_q45, bits=4), least=True),
    13: _BlockType("Q5_K", 176, 5, 32, partial(_read_q45, bits=5), least=True),
    14: _BlockType("Q6_K", 210, 6, 16, _read_q6),
}


def _read_gguf(files: CheckpointFiles) -> Checkpoint:
    weights = []
    refused = {}
    for path in files.files:
        with path.open("rb") as file:
            rows, start = _read_header(file)
        for name, dims, number, offset in rows:
            kind = _TYPES.get(number)
            if number in _FLOATS:
                continue
            if kind is None or len(dims) != 2:
                label = (
                    _TABLES.get(number, f"type {number}")
                    if kind is None
                    else f"{kind.name} of shape {dims}"
                )
                refused[name] = (
                    f"{label} is not read, and matrices of Q4_0 to Q8_0 and Q2_K to Q6_K are"
                )
                continue
            # ggml lists the length of a row first.
            columns, count = dims
            end = start + offset + count * columns // kind.values * kind.length
            if columns % kind.values or end > path.stat().st_size:
                raise ValueError(f"{name} is not within it")
            form = f"{kind.name}: {describe_form(kind.bits, kind.size, columns, 'a minimum' if kind.least else '')}"
            read = partial(_read_weight, path, start + offset, (count, columns), kind)
            weights.append(
                CheckpointWeight(
                    name.removesuffix(".weight"), (count, columns), kind.size, form, read
                )
            )
    return Checkpoint(str(files.path), "GGUF", tuple(weights), refused)


def _read_header(file: BinaryIO) -> tuple[list[tuple[str, Shape, int, int]], int]:
    """Name, sizes (that of a row first), type and offset of each tensor, and where the first begins."""

    def take(form: str) -> Any:
        return struct.unpack(form, file.read(struct.calcsize(form)))[0]

    def count() -> int:
        number = int(take("<Q"))
        if number > _MOST:
            raise ValueError(f"a length of {number:,}")
        return number

    def text() -> str:
        return file.read(count()).decode()

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind != _ARRAY:
            return take(_SCALARS[kind])
        inner = take("<I")
        length = count()
        if inner not in (_STRING, _ARRAY):
            # Numbers in arrays, such as scores of tokens, are not needed.
            return file.seek(length * struct.calcsize(_SCALARS[inner]), 1)
        return [value(inner) for _ in range(length)]

    if file.read(4) != _MAGIC or take("<I") not in (2, 3):
        raise ValueError("version 2 or 3 in little-endian order is read")
    tensors = count()
    keys = {text(): value(take("<I")) for _ in range(count())}
    rows = []
    for _ in range(tensors):
        name = text()
        dims = tuple(take("<Q") for _ in range(take("<I")))
        rows.append((name, dims, int(take("<I")), int(take("<Q"))))
    # The first tensor begins at a multiple of it; 32 is what the format says where none stands.
    align = int(keys.get("general.alignment", 32))
    return rows, math.ceil(file.tell() / align) * align


def _read_weight(path: Path, start: int, shape: tuple[int, int], kind: _BlockType) -> WeightCodes:
    rows, columns = shape
    data = np.memmap(path, np.uint8, "r", start, (rows * columns // kind.values, kind.length)).view(
        np.ndarray
    )
    codes, scale, minimum = kind.split(data)
    scale = np.ascontiguousarray(scale, np.float32).reshape(rows, -1)
    zero = np.full(scale.shape, 0 if kind.least else 1 << (kind.bits - 1), np.uint8)
    minimum = (
        None if minimum is None else np.ascontiguousarray(minimum, np.float32).reshape(rows, -1)
    )
    codes = np.ascontiguousarray(codes).reshape(rows, columns)
    return WeightCodes(
        codes=codes, scale=scale, zero=zero, bits=kind.bits, size=kind.size, minimum=minimum
    )


GGUF = CheckpointFormat("gguf", lambda files: bool(files.files), _read_gguf)
