"""Checkpoints written byte by byte from the published formats, by code that shares nothing with the readers.

Each writer gets codes [rows, columns], unsigned, and numbers by group, and returns the values that they stand for.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, Any]
NAMES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}


def write_safetensors(path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Path:
    """The file, and beside it config.json with this quantization_config."""
    header, parts, at = {}, [], 0
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[str(array.dtype)], "shape": list(array.shape), "data_offsets": [at, at + len(raw)]
        }  # fmt: skip
        parts.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path.parent


def to_words(values: Any, bits: int) -> Any:
    """int32 words of each row, its integers from the lowest bit on without gaps."""
    rows = []
    for row in np.asarray(values):
        number = sum(int(value) << (bits * k) for k, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([number >> (32 * k) & 0xFFFFFFFF for k in range(count)])
    return np.array(rows, np.uint32).view(np.int32)


def spread(numbers: Any, groups: Any) -> Any:
    """Of [rows, groups] the number of each column. groups: of each column."""
    return np.asarray(numbers)[:, groups]


def gptq(
    name: str, codes: Any, scale: Any, zero: Any, groups: Any, bits: int, *, second: bool = False
) -> tuple[Tensors, Any]:
    """scale: float16 [rows, groups]. zero: [rows, groups]. groups: of each column (g_idx)."""
    stored = np.asarray(zero) - (0 if second else 1)
    tensors = {
        f"{name}.qweight": to_words(codes, bits).T,
        f"{name}.qzeros": to_words(stored.T, bits),
        f"{name}.scales": np.asarray(scale, np.float16).T,
        f"{name}.g_idx": np.asarray(groups, np.int32),
    }
    values = (codes.astype(np.float32) - spread(zero, groups)) * spread(scale, groups).astype(np.float32)
    return tensors, values.astype(np.float32)


def awq(name: str, codes: Any, scale: Any, zero: Any, size: int) -> tuple[Tensors, Any]:
    def pack(rows: Any) -> Any:
        words = np.zeros((rows.shape[1], rows.shape[0] // 8), np.uint32)
        for word in range(words.shape[1]):
            for nibble, row in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words[:, word] |= rows[word * 8 + row].astype(np.uint32) << np.uint32(4 * nibble)
        return words.view(np.int32)

    tensors = {
        f"{name}.qweight": pack(codes), f"{name}.qzeros": pack(zero), f"{name}.scales": np.asarray(scale, np.float16).T
    }  # fmt: skip
    groups = np.arange(codes.shape[1]) // size
    values = (codes.astype(np.float32) - spread(zero, groups)) * spread(scale, groups).astype(np.float32)
    return tensors, values.astype(np.float32)


def packed(
    name: str, codes: Any, scale: Any, bits: int, size: int, zero: Any = None, groups: Any = None
) -> tuple[Tensors, Any]:
    """compressed-tensors, pack-quantized. codes, zero: unsigned, as they are packed."""
    groups = np.arange(codes.shape[1]) // size if groups is None else groups
    tensors = {
        f"{name}.weight_packed": to_words(codes, bits),
        f"{name}.weight_shape": np.array(codes.shape, np.int64),
        f"{name}.weight_scale": np.asarray(scale, np.float16),
    }
    if zero is not None:
        tensors[f"{name}.weight_zero_point"] = to_words(zero.T, bits).T
    if (np.diff(groups) < 0).any():
        tensors[f"{name}.weight_g_idx"] = np.asarray(groups, np.int32)
    middle = np.full(np.shape(scale), 1 << (bits - 1)) if zero is None else zero
    values = (codes.astype(np.float32) - spread(middle, groups)) * spread(scale, groups).astype(np.float32)
    return tensors, values.astype(np.float32)


def write_gguf(path: Path, tensors: Mapping[str, tuple[int, tuple[int, int], bytes]]) -> Path:
    """tensors: by name the number of the type, (rows, columns), and the blocks."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    keys += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    keys += text("tokenizer.ggml.scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<2f", 1, 2)
    infos, blocks = b"", b""
    for name, (kind, (rows, columns), raw) in tensors.items():
        infos += text(name) + struct.pack("<IQQIQ", 2, columns, rows, kind, len(blocks))
        blocks += raw + bytes(-len(raw) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 3) + keys + infos
    path.write_bytes(head + bytes(-len(head) % 32) + blocks)
    return path


def q4_0(codes: Any, scale: Any) -> tuple[bytes, Any]:
    """codes [rows, columns] of 0 to 15, scale float16 [rows, columns / 32]."""
    raw = b""
    for row, scales in zip(codes, scale, strict=True):
        for k, d in enumerate(scales):
            q = row[32 * k : 32 * k + 32]
            raw += struct.pack("<e", d) + bytes(int(q[j]) | int(q[j + 16]) << 4 for j in range(16))
    groups = np.arange(codes.shape[1]) // 32
    return raw, ((codes.astype(np.float32) - 8) * spread(scale, groups).astype(np.float32)).astype(np.float32)


def q4_1(codes: Any, scale: Any, minimum: Any) -> tuple[bytes, Any]:
    raw = b""
    for row, scales, least in zip(codes, scale, minimum, strict=True):
        for k, d in enumerate(scales):
            q = row[32 * k : 32 * k + 32]
            raw += struct.pack("<ee", d, least[k]) + bytes(int(q[j]) | int(q[j + 16]) << 4 for j in range(16))
    groups = np.arange(codes.shape[1]) // 32
    scales, least = (spread(part, groups).astype(np.float32) for part in (scale, minimum))
    return raw, (scales * codes.astype(np.float32) + least).astype(np.float32)


def q8_0(codes: Any, scale: Any) -> tuple[bytes, Any]:
    """codes: int8."""
    raw = b""
    for row, scales in zip(codes, scale, strict=True):
        for k, d in enumerate(scales):
            raw += struct.pack("<e", d) + row[32 * k : 32 * k + 32].tobytes()
    groups = np.arange(codes.shape[1]) // 32
    return raw, (codes.astype(np.float32) * spread(scale, groups).astype(np.float32)).astype(np.float32)
