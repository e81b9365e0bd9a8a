"""`TensorQuantOverrides` of onnxruntime.quantization as JSON, as `static_quantize_runner` reads it.

{name: [{quant_type, scale, zero_point} or {quant_type, rmin, rmax [, symmetric]}]}       one scale
{name: [{…, axis}, {…}, …]}                                                                one for each channel
{name: [{…, convert: {quant_type, scale, zero_point, recv_nodes}}]}                       another type for some readers
"""

import re
from collections.abc import Sequence
from functools import partial

from onnxq.arrays import Array, as_float64
from onnxq.interop.base import (
    ImportFormat,
    NoGridError,
    ScaleTable,
    TensorScale,
    list_numbers,
    make_entry,
    open_table,
    sort_by_name,
    write_table,
)
from onnxq.numerics import qparams_from_range
from onnxq.sites import JsonObject, Names
from onnxq.spec import Granularity, PerChannel, PerTensor, QuantSpec

_TOOL = "ONNX Runtime"
# As str() writes a member of their enumeration, or its name alone.
_TYPE = re.compile(r"(?:QuantType\.)?Q(U?)Int(\d+)")
_WIDTHS = (2, 4, 8, 16)
# Any one may come first; nothing else names the format.
_KEYS = rb"quant_type|scale|zero_point|rmin|rmax|axis|convert|symmetric"
_RECOGNIZED = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\[\s*\{\s*"(?:' + _KEYS + rb')"')


def _parse(data: bytes, source: str) -> ScaleTable:
    table = open_table(data, source, _TOOL, "TensorQuantOverrides")
    for name, rows in table.root.items():
        table.add_entry((name,), name, partial(_read_rows, name, rows))
        convert = (
            rows[0].get("convert")
            if isinstance(rows, list) and rows and isinstance(rows[0], dict)
            else None
        )
        if convert is not None:
            readers = tuple(map(str, convert.get("recv_nodes") or ()))
            table.add_entry(
                (name, 0, "convert"), name, partial(_read_rows, name, [convert], readers=readers)
            )
    return table.make_table("TensorQuantOverrides")


def _read_rows(
    name: str, rows: Sequence[JsonObject], line: int, readers: Names = ()
) -> TensorScale:
    first = rows[0]
    axis = first.get("axis")
    grain: Granularity = PerTensor() if axis is None else PerChannel(int(axis))
    # ONNX Runtime takes -64…64 of int8 then, one level more than 7 bits have.
    if first.get("reduce_range"):
        raise NoGridError("a reduced range, whose levels are those of no width of bits")
    scale: Array
    zero: Array
    if {"scale", "zero_point"} <= set(first):
        scale, zero = (
            as_float64([row[key] for row in rows]).ravel() for key in ("scale", "zero_point")
        )
        bits, signed = _read_type(first, bool((zero < 0).any()) or axis is not None)
    elif {"rmin", "rmax"} <= set(first):
        bits, signed = _read_type(first, axis is not None)
        spec = QuantSpec(
            bits=bits, signed=signed, symmetric=bool(first.get("symmetric", axis is not None))
        )
        low, high = (as_float64([row[key] for row in rows]) for key in ("rmin", "rmax"))
        qparams = qparams_from_range(low, high, spec)
        scale = qparams.scale
        zero = qparams.zero_point
    else:
        raise NoGridError(
            "a type without numbers, which `quantize_static` of `onnxq.compat` follows"
        )
    return make_entry(
        name, line, (scale, zero), bits=bits, signed=signed, grain=grain, readers=readers
    )


def _read_type(row: JsonObject, signed: bool) -> tuple[int, bool]:
    """Bits and sign of an entry; one without a type is in bytes, with the sign that its numbers have."""
    if "quant_type" not in row:
        return 8, signed
    kind = read_integer_type(row["quant_type"])
    if kind is None:
        raise NoGridError(f"{row['quant_type']}, which is no integer type")
    return kind


def read_integer_type(name: object) -> tuple[int, bool] | None:
    """Bits and sign of a type, by its name in either form; None for one that is no integer type."""
    match = _TYPE.fullmatch(str(name))
    return match and (int(match[2]), not match[1])


def _refuse(entry: TensorScale) -> str:
    spec = entry.spec
    if spec.has_blocks or spec.is_float:
        return "blocks" if spec.has_blocks else "a float type"
    if entry.role.is_bias:
        return "a bias: ONNX Runtime makes its scale of its input's and its weight's"
    if not spec.has_one_scale and not entry.role.is_weight:
        return "channels of an activation"
    return "" if spec.bits in _WIDTHS else f"{spec.bits} bits"


def _write(entries: Sequence[TensorScale]) -> bytes:
    root = {}
    for name, group in sort_by_name(entries).items():
        first, *others = group
        rows = _write_rows(first)
        # Sites of a third kind were left out.
        for entry in others:
            rows[0]["convert"] = {**_write_rows(entry)[0], "recv_nodes": list(entry.readers)}
        root[name] = rows
    return write_table(root)


def _write_rows(entry: TensorScale) -> list[JsonObject]:
    spec = entry.spec
    numbers = list_numbers(entry)
    pairs = [numbers] if spec.has_one_scale else zip(*numbers, strict=True)
    kind = f"Q{'' if spec.signed else 'U'}Int{spec.bits}"
    rows = [{"quant_type": kind, "scale": scale, "zero_point": zero} for scale, zero in pairs]
    rows[0] |= spec.granularity.attributes
    return rows


def _recognize(data: bytes) -> bool:
    return _RECOGNIZED.match(data) is not None and b'"output_dtype"' not in data


OVERRIDES = ImportFormat(
    "tensor-quant-overrides",
    _recognize,
    _parse,
    _write,
    _refuse,
    "onnxruntime.quantization",
    "a tensor's list of objects with `quant_type`, `scale`, `rmin`, …",
    "3, 5, 6 and 7 bits, blocks, biases, a narrow range, more than two encodings of one tensor",
)
