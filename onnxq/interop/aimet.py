"""AIMET's encodings. Offsets of 0.6.1 and 1.0.0 are of unsigned integers: value = (level + offset) * scale.

    0.6.1  {"activation_encodings": {name: [{bitwidth, dtype, is_symmetric, scale, offset, min, max}, …]}, …}
    1.0.0  {"activation_encodings": [{name, enc_type, dtype, bw, is_sym, scale: […], offset: […]}, …], …}
    2.0.0  {"encodings": [{name, output_dtype, y_scale [, y_zero_point] [, axis [, block_size]]}, …]}

Several scales of the first two are those of output channels; neither names an axis. Signed integers are the symmetric
ones. A signed zero point of -1 is AIMET's strictly symmetric scheme, -127…127.

2.0.0 and 2.1.0 say what an ONNX QuantizeLinear says. Scales of blocks may be integers in steps of a scale for each
channel: 2.0.0 has `per_block_int_scale` and `per_channel_float_scale`, 2.1.0 a table {x, x_scale, …} in the place of
y_scale. Their products are read.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from onnxq.arrays import Array, as_float64, as_int64
from onnxq.interop.base import (
    ImportFormat,
    JsonTable,
    NoGridError,
    ScaleTable,
    TensorScale,
    list_numbers,
    make_entry,
    name_entry,
    open_table,
    write_table,
)
from onnxq.sites import JsonObject, Role
from onnxq.spec import FLOAT8, Granularity, PerBlock, PerChannel, PerTensor, find_element_type

_TOOL = "AIMET"
# Whose files these are.
_TITLE = "AIMET, QNN"
_SECTIONS = {"activation_encodings": Role.ACTIVATION, "param_encodings": Role.WEIGHT}
_TABLE = re.compile(rb'"(?:activation|param)_encodings"\s*:\s*([\[{])')
# AIMET's own name of each granularity -> whether the entry has channels.
_KINDS = {"PER_TENSOR": False, "PER_CHANNEL": True}
_NEWER = "write 2.0.0, which names the axis of blocks"


def _parse(data: bytes, source: str) -> ScaleTable:
    table = open_table(data, source, _TOOL, "encodings")
    for section, role in _SECTIONS.items():
        for key, name, entries in _list_entries(table.root.get(section) or ()):
            table.add_entry((section, key), name, partial(_read_entry, name, entries, role))
    return _make_table(table, "0.4.0")


def _make_table(table: JsonTable, oldest: str) -> ScaleTable:
    """The table of a file, as `JsonTable.make_table`. oldest: the version of files that name none."""
    producer = table.root.get("producer")
    made = (
        f" ({producer.get('package')} {producer.get('version')})"
        if isinstance(producer, Mapping)
        else ""
    )
    return table.make_table(f"encodings {table.root.get('version', oldest)}{made}")


def _list_entries(section: Any) -> Iterator[tuple[Any, str, Any]]:
    """(key, tensor, entry) of each entry of a section of either version."""
    # 0.6.1; a list is of 1.0.0.
    if isinstance(section, Mapping):
        yield from ((name, name, entry) for name, entry in section.items())
    else:
        yield from ((k, name_entry(entry, k), entry) for k, entry in enumerate(section))


def _read_entry(name: str, entry: Any, role: Role, line: int) -> TensorScale:
    legacy = isinstance(entry, Sequence)
    first = entry[0] if legacy else entry
    bits = int(first["bitwidth" if legacy else "bw"])
    # 0.4.0 had integers alone, and no dtype.
    if str(first.get("dtype", "int")).lower() != "int":
        raise NoGridError(f"float of {bits} bits, which is no integer")
    kind = first.get("enc_type", "PER_CHANNEL" if legacy and len(entry) > 1 else "PER_TENSOR")
    if kind not in _KINDS:
        raise NoGridError(f"{kind}, whose axis the file does not name; {_NEWER}")
    # The grid -3 -1 1 3 of 2 bits.
    if any(first.get("zero_point_shift", ())):
        raise NoGridError("a zero point between two integers")
    rows = (
        entry
        if legacy
        else [
            {"scale": s, "offset": o} for s, o in zip(entry["scale"], entry["offset"], strict=True)
        ]
    )
    signed = str(first["is_symmetric" if legacy else "is_sym"]).lower() == "true"
    scale = as_float64([row["scale"] for row in rows])
    zero = -as_float64([row["offset"] for row in rows]) - ((1 << (bits - 1)) if signed else 0)
    # AIMET counts -127…127 from the lowest of 255 levels, which puts the zero one further down.
    narrow = signed and bool((zero == -1).all())
    return make_entry(
        name,
        line,
        (scale, np.zeros_like(zero) if narrow else zero),
        bits=bits,
        signed=signed,
        grain=PerChannel(-1) if _KINDS[kind] else PerTensor(),
        role=role,
        narrow_range=narrow,
    )


def _refuse_kind(entry: TensorScale) -> str:
    """Why no version of the encodings has a place for an entry; "" where one has."""
    if entry.readers:
        return "the format has one encoding for all that reads a tensor"
    return "a float type" if entry.spec.is_float else ""


def _refuse(entry: TensorScale) -> str:
    return _refuse_kind(entry) or (
        f"blocks, whose axis the format does not name; {_NEWER}" if entry.spec.has_blocks else ""
    )


def _list_offsets(entry: TensorScale) -> tuple[list[float], list[int], bool]:
    """Scales, offsets of unsigned integers, and whether the integers are signed."""
    spec = entry.spec
    qparams = entry.make_qparams("")
    lowest = (1 << (spec.bits - 1)) if spec.signed else 0
    offsets = -(as_int64(qparams.zero_point.ravel()) + lowest) + int(spec.narrow_range)
    # Signed integers around another zero have the same values as unsigned ones, and only these are said to be so.
    signed = spec.signed and not qparams.zero_point.any()
    return qparams.scale.ravel().tolist(), offsets.tolist(), signed


def _split_roles(entries: Sequence[TensorScale]) -> dict[str, list[TensorScale]]:
    # Biases are parameters to AIMET.
    return {
        section: [entry for entry in entries if entry.role.is_constant == role.is_weight]
        for section, role in _SECTIONS.items()
    }


def _write_0(entries: Sequence[TensorScale]) -> bytes:
    sections = {
        section: {entry.name: list(_list_rows(entry)) for entry in part}
        for section, part in _split_roles(entries).items()
    }
    return write_table({"version": "0.6.1", **sections})


def _list_rows(entry: TensorScale) -> Iterator[JsonObject]:
    bits = entry.spec.bits
    scales, offsets, signed = _list_offsets(entry)
    # Readers of this version take scale and offset; the ends are for people.
    for scale, offset in zip(scales, offsets, strict=True):
        ends = {"min": offset * scale, "max": (offset + (1 << bits) - 1) * scale}
        numbers = {"scale": scale, "offset": offset, "bitwidth": bits}
        yield {**ends, **numbers, "dtype": "int", "is_symmetric": str(signed)}


def _write_1(entries: Sequence[TensorScale]) -> bytes:
    parts = _split_roles(entries)
    sections = {section: list(map(_make_row, part)) for section, part in parts.items()}
    return write_table({"version": "1.0.0", **sections})


def _make_row(entry: TensorScale) -> JsonObject:
    scales, offsets, signed = _list_offsets(entry)
    return {
        "name": entry.name,
        "enc_type": "PER_TENSOR" if entry.spec.has_one_scale else "PER_CHANNEL",
        "dtype": "INT",
        "bw": entry.spec.bits,
        "is_sym": signed,
        "scale": scales,
        "offset": offsets,
    }


def _recognize(bracket: bytes, data: bytes) -> bool:
    found = _TABLE.search(data)
    return found is not None and found[1] == bracket


_LIMITS = "the axis of channels (it is the output channels'), blocks, float types, several encodings of one tensor"


AIMET_0 = ImportFormat(
    "aimet-0.6.1",
    partial(_recognize, b"{"),
    _parse,
    _write_0,
    _refuse,
    _TITLE,
    "`activation_encodings`, an object (0.4.0 too)",
    _LIMITS,
)
AIMET_1 = ImportFormat(
    "aimet-1.0",
    partial(_recognize, b"["),
    _parse,
    _write_1,
    _refuse,
    _TITLE,
    "`activation_encodings`, a list",
    _LIMITS,
)


# Types that an entry may have -> bits and sign.
_INTEGER = re.compile(r"(u?)int(\d+)")
# Of ONNX's integer types that `output_dtype` may name.
_WIDTHS = (2, 4, 8, 16, 32)


def _parse_linear(data: bytes, source: str) -> ScaleTable:
    table = open_table(data, source, _TOOL, "encodings")
    for k, row in enumerate(table.root.get("encodings") or ()):
        table.add_entry(("encodings", k), name_entry(row, k), partial(_read_linear_entry, row))
    return _make_table(table, "2.0.0")


def _read_linear_entry(row: JsonObject, line: int) -> TensorScale:
    dtype = str(row["output_dtype"])
    integer = _INTEGER.fullmatch(dtype)
    if integer is None and dtype != FLOAT8:
        raise NoGridError(f"{dtype}, which has no pair here")
    scale = _read_scale(row)
    axis = row.get("axis")
    size = row.get("block_size")
    grain: Granularity = PerTensor()
    if axis is not None:
        grain = PerChannel(int(axis)) if size is None else PerBlock(int(axis), int(size))
    kind = find_element_type(dtype)
    zero = row.get("y_zero_point", 0)
    bits, signed = (int(integer[2]), not integer[1]) if integer else (kind.bits, True)
    # Encodings of this version do not tell parameters apart; the model does.
    storage = "" if integer else FLOAT8
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


def _refuse_linear(entry: TensorScale) -> str:
    spec = entry.spec
    if spec.is_float and not entry.readers:
        return ""
    fits = spec.bits in _WIDTHS
    return _refuse_kind(entry) or (
        "" if fits else f"{spec.bits} bits, and output_dtype has {', '.join(map(str, _WIDTHS))}"
    )


def _write_linear(version: str, entries: Sequence[TensorScale]) -> bytes:
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


def _recognize_linear(version: str, data: bytes) -> bool:
    if re.search(rb'"encodings"\s*:\s*\[', data) is None:
        return False
    # Also the version of the tool may stand there.
    named = set(re.findall(rb'"version"\s*:\s*"(\d+\.\d+)', data))
    return (b"2.0" in named or not named) == (version == "2.0")


def _make_linear_format(version: str) -> ImportFormat:
    return ImportFormat(
        f"aimet-{version}",
        partial(_recognize_linear, version),
        _parse_linear,
        partial(_write_linear, f"{version}.0"),
        _refuse_linear,
        _TITLE,
        f"`encodings`, a list, and version {version}",
        "3, 5, 6 and 7 bits, a narrow range, several encodings of one tensor",
    )


AIMET_2_0, AIMET_2_1 = map(_make_linear_format, ("2.0", "2.1"))
