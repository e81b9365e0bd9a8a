"""PPQ's JSON of tensor configurations, in its own form and in that of PPL.

    {"configs": {operator: {tensor: {bit_width, quant_min, quant_max, state, policy, hash, dominator}}},
     "values": {hash: {scale, zero_point}}}
    {"quant_info": {tensor: {bit_width, per_channel, q_min, q_max, scale, zero_point}}}

The numbers of a configuration are those of its dominator. Both name no axis of channels.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from onnxq.interop.base import (
    ImportFormat,
    NoGridError,
    ScaleTable,
    TensorScale,
    make_entry,
    open_table,
)
from onnxq.sites import JsonObject, Names, Role
from onnxq.spec import PerChannel, PerTensor

# States of a configuration that PPQ gives no numbers, or numbers that nothing uses.
_FLOAT = {"FP32", "SOI", "INITIAL", "DEQUANTIZED", "DEACTIVATED", "DEACTIVED"}
_BIAS_BITS = 32


def _parse(data: bytes, source: str) -> ScaleTable:
    table = open_table(data, source, "PPQ", "configuration")
    if "quant_info" in table.root:
        for name, row in table.root["quant_info"].items():
            table.add_entry(("quant_info", name), name, partial(_read_row, name, row))
        return table.make_table("quant_info")
    known: dict[str, set[Any]] = {}
    for operator, tensors in (table.root.get("configs") or {}).items():
        for name, config in tensors.items():
            # One tensor has a configuration at each operator; those of one dominator are the same.
            key = (
                (config.get("dominator"), config.get("bit_width"))
                if isinstance(config, Mapping)
                else None
            )
            if key not in known.setdefault(name, set()):
                readers = (operator,) if known[name] else ()
                known[name].add(key)
                read = partial(_read_config, table.root, name, config, readers)
                table.add_entry(("configs", operator, name), name, read)
    return table.make_table("configs")


def _read_row(name: str, row: JsonObject, line: int) -> TensorScale:
    ends = {"quant_min": row["q_min"], "quant_max": row["q_max"]}
    return _read_numbers(name, row, ends, bool(row.get("per_channel")), (), line)


def _read_config(
    root: JsonObject, name: str, config: Any, readers: Names, line: int
) -> TensorScale:
    if config["state"] in _FLOAT:
        raise NoGridError(f"float: its state is {config['state']}")
    policy = config["policy"]
    if policy.get("FLOATING"):
        raise NoGridError("a float type")
    values = root["values"].get(str(config["dominator"]))
    # PPQ writes numbers of dominators alone, and none where those are float.
    if values is None:
        raise NoGridError(
            "no numbers of its own: those of the configuration that dominates it are not in the file"
        )
    return _read_numbers(name, values, config, bool(policy.get("PER_CHANNEL")), readers, line)


def _read_numbers(
    name: str, values: Any, ends: JsonObject, per_channel: bool, readers: Names, line: int
) -> TensorScale:
    low = int(ends["quant_min"])
    high = int(ends["quant_max"])
    # `bit_width` is that of the container; the levels are what is used.
    bits = (high - low).bit_length()
    if bits >= _BIAS_BITS:
        raise NoGridError("a bias, whose scale is its input's times its weight's")
    signed = low < 0
    narrow = signed and low == -high
    if (low, high) not in (
        (0, (1 << bits) - 1),
        (int(narrow) - (1 << (bits - 1)), (1 << (bits - 1)) - 1),
    ):
        raise NoGridError(f"levels {low}…{high}, which are those of no width of bits")
    return make_entry(
        name,
        line,
        (values["scale"], values["zero_point"]),
        bits=bits,
        signed=signed,
        grain=PerChannel(-1) if per_channel else PerTensor(),
        narrow_range=narrow,
        role=Role.WEIGHT if per_channel else Role.ACTIVATION,
        readers=readers,
    )


def _recognize(data: bytes) -> bool:
    return (b'"configs"' in data and b'"values"' in data) or b'"quant_info"' in data


PPQ = ImportFormat(
    "ppq", _recognize, _parse, title="PPQ, PPL", mark="`configs` and `values`, or `quant_info`"
)
