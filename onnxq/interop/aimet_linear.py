"""AIMET's encodings 2.0.0 and 2.1.0, which say what an ONNX QuantizeLinear says.

    {"version": "2.0.0", "encodings": [{name, output_dtype, y_scale [, y_zero_point] [, axis [, block_size]]}, …]}

Scales of blocks may be integers in steps of a scale for each channel: 2.0.0 has `per_block_int_scale` and
`per_channel_float_scale`, 2.1.0 a table {x, x_scale, …} in the place of y_scale. Their products are read.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from onnxq.arrays import Array, as_float64
from onnxq.interop.aimet import TOOL, make_table, refuse_kind
from onnxq.interop.base import ImportFormat, NoGridError, ScaleTable, TensorScale, make_entry
from onnxq.interop.json_tables import list_numbers, name_entry, open_table, write_table
from onnxq.sites import JsonObject
from onnxq.spec import FLOAT8, Granularity, PerBlock, PerChannel, PerTensor, find_element_type

# Types that an entry may have -> bits and sign.
_INTEGER = re.compile(r"(u?)int(\d+)")
# Of ONNX's integer types that `output_dtype` may name.
_WIDTHS = (2, 4, 8, 16, 32)


def _parse(data: bytes, source: str) -> ScaleTable:
    table = open_table(data, source, TOOL, "encodings")
    for k, row in enumerate(table.root.get("encodings") or ()):
        table.add_entry(("encodings", k), name_entry(row, k), partial(_read_entry, row))
    return make_table(table, "2.0.0")


def _read_entry(row: JsonObject, line: int) -> TensorScale:
    dtype = str(row["output_dtype"])
    found = _INTEGER.fullmatch(dtype)
    if found is None and dtype != FLOAT8:
        raise NoGridError(f"{dtype}, which has no pair here")
    scale = _read_scale(row)
    axis = row.get("axis")
    size = row.get("block_size")
    grain: Granularity = PerTensor()
    if axis is not None:
        grain = PerChannel(int(axis)) if size is None else PerBlock(int(axis), int(size))
    kind = find_element_type(dtype)
    zero = row.get("y_zero_point", 0)
    bits, signed = (int(found[2]), not found[1]) if found else (kind.bits, True)
    # Encodings of this version do not tell parameters apart; the model does.
    storage = "" if found else FLOAT8
    return make_entry(
        str(row["name"]),
        line,
        (scale, zero),
        bits=bits,
        signed=signed,
        grain=grain,
        storage=storage,
    )


def _read_scale(row: JsonObject) -> Array:
    """The scales, those in two steps multiplied."""
    if "per_block_int_scale" in row:
        return as_float64(row["per_block_int_scale"]) * as_float64(row["per_channel_float_scale"])
    scale = row["y_scale"]
    if not isinstance(scale, Mapping):
        return as_float64(scale)
    steps, unit, zero = (as_float64(scale.get(key, 0)) for key in ("x", "x_scale", "x_zero_point"))
    if scale.get("block_size") is not None:
        raise NoGridError("a scale whose own scale is of blocks")
    # One scale for each channel, along an axis of its own.
    if unit.ndim == 1 and steps.ndim > 1:
        sides = [1] * steps.ndim
        sides[int(scale["axis"])] = -1
        unit = unit.reshape(sides)
        zero = zero.reshape(sides) if zero.ndim else zero
    return (steps - zero) * unit


def _refuse(entry: TensorScale) -> str:
    spec = entry.spec
    if spec.is_float and not entry.readers:
        return ""
    fits = spec.bits in _WIDTHS
    return refuse_kind(entry) or (
        "" if fits else f"{spec.bits} bits, and output_dtype has {', '.join(map(str, _WIDTHS))}"
    )


def _write(version: str, entries: Sequence[TensorScale]) -> bytes:
    rows = []
    for entry in entries:
        spec = entry.spec
        scale, zero = list_numbers(entry)
        row = {"name": entry.name, "output_dtype": spec.kind, "y_scale": scale}
        # AIMET leaves zeros out, and takes a missing one for them.
        if np.any(entry.zero_point):
            row["y_zero_point"] = zero
        rows.append(row | spec.granularity.attributes)
    return write_table({"version": version, "encodings": rows})


def _recognize(version: str, data: bytes) -> bool:
    if re.search(rb'"encodings"\s*:\s*\[', data) is None:
        return False
    # Also the version of the tool may stand there.
    named = set(re.findall(rb'"version"\s*:\s*"(\d+\.\d+)', data))
    return (b"2.0" in named or not named) == (version == "2.0")


def _make_format(version: str) -> ImportFormat:
    recognizes = partial(_recognize, version)
    limits = "3, 5, 6 and 7 bits, a narrow range, several encodings of one tensor"
    return ImportFormat(
        f"aimet-{version}",
        recognizes,
        _parse,
        partial(_write, f"{version}.0"),
        _refuse,
        "AIMET, QNN",
        f"`encodings`, a list, and version {version}",
        limits,
    )


AIMET_2_0, AIMET_2_1 = map(_make_format, ("2.0", "2.1"))
