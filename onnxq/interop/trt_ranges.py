"""Dynamic ranges for TensorRT in JSON: the largest magnitude of each tensor, 127 times its scale.

{"act_quant_info": {name: range}}           PPQ
{"tensorrt": {"blob_range": {name: range}}} MQBench; Dipoorlet without the outer object
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from onnxq.interop.base import ImportFormat, ScaleTable, TensorScale, make_entry
from onnxq.interop.json_tables import open_table, write_table

# Of symmetric int8.
_STEPS = 127
_KEYS = ("act_quant_info", "blob_range")


def _parse(data: bytes, source: str) -> ScaleTable:
    table = open_table(data, source, "TensorRT", "dynamic ranges")
    inner = table.root.get("tensorrt")
    root = inner if isinstance(inner, Mapping) else table.root
    # Of an empty file the message names PPQ's key.
    key = next((key for key in _KEYS if key in root), _KEYS[0])
    path = ("tensorrt", key) if root is inner else (key,)
    for name, value in (root.get(key) or {}).items():
        table.add_entry((*path, name), name, partial(_read_range, name, value))
    return replace(table.make_table(key), only_int8=True)


def _read_range(name: str, value: Any, line: int) -> TensorScale:
    return make_entry(name, line, (float(value) / _STEPS, 0), bits=8, signed=True)


def _write(entries: Sequence[TensorScale]) -> bytes:
    # Products of a float32 and 127 are exact in float64, so that the scales come back to the bit.
    return write_table(
        {_KEYS[0]: {entry.name: float(np.asarray(entry.scale)) * _STEPS for entry in entries}}
    )


def _recognize(data: bytes) -> bool:
    return any(f'"{key}"'.encode() in data for key in _KEYS)


TENSORRT_RANGES = ImportFormat(
    "tensorrt-ranges",
    _recognize,
    _parse,
    _write,
    title="TensorRT, PPQ, MQBench, Dipoorlet",
    mark="`act_quant_info` or `blob_range`",
    limits="all but symmetric int8 activations",
)
