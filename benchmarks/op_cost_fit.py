"""Samples of `op_costs.py measure` against a table of costs, and the fit of a table to them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.backends.costs import OpCase
from onnxq.backends.cpu_costs import CpuCosts, Moves

FLOOR_US = 0.25  # errors below this do not count
LARGE_ERROR = 0.1  # of a logarithm; the weight of a sample falls beyond it
ROUNDS = 60
NOTHING = 1e-4  # a fitted constant below it is written as 0

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Samples with their cases as the model's."""
    rows: list[Row] = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["nodes"] = read_cases(row["cases"])
        row["boundaries"] = [case for case in row["cases"] if "boundary" in case]
    return rows


def read_cases(cases: list[dict[str, Any]]) -> list[OpCase]:
    """The nodes of a sample."""
    return [OpCase(**_tuples(case)) for case in cases if "boundary" not in case]


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def warm(cpu: CpuCosts) -> CpuCosts:
    """The table without what only whole networks show: operands of chains of equal nodes are in the nearest cache."""
    return replace(cpu, int8_network=1.0, conv=replace(cpu.conv, cold_ns=0.0, int8_cold_ns=0.0))


def predicted(row: Row, side: str, cpu: CpuCosts) -> float:
    """The model's time of a sample."""
    total = sum(getattr(cpu.predict_node(case), f"{side}_us") for case in row["nodes"])
    for case in row["boundaries"] if side == "int8" else ():
        if case["boundary"] == "quantize":
            total += cpu.predict_quantize(case["elements"], from_conv=case["conv"])
        else:
            total += cpu.predict_dequantize(case["elements"], to_conv=case["conv"])
    return float(total)


def sound(rows: list[Row], side: str) -> list[Row]:
    """Samples of a side that took time.

    The difference of two chains can fall below zero where the machine was busy; a pair has no float side.
    """
    return [row for row in rows if row[f"{side}_us"] > 0 and (side == "int8" or row["nodes"])]


def error(row: Row, side: str, cpu: CpuCosts) -> float:
    """log(predicted / measured)."""
    return math.log((predicted(row, side, cpu) + FLOOR_US) / (row[f"{side}_us"] + FLOOR_US))


@dataclass(frozen=True)
class Group:
    """Constants fitted together: the families of samples they show in, and their names by side."""

    families: frozenset[str]
    float_names: str
    int8_names: str

    def names(self, side: str) -> list[str]:
        return (self.float_names if side == "float" else self.int8_names).split()


# In this order: later groups build on the constants of earlier ones.
GROUPS: tuple[Group, ...] = (
    Group(
        frozenset({"dense", "pair", "stem"}),
        "conv.launch conv.float_gmacs conv.float_gmacs_nchw conv.float_single conv.float_reorder_ns "
        "conv.float_pixel_ns conv.stream_float",
        "conv.int8_launch conv.int8_gmacs conv.int8_channel_ns conv.int8_gather_ns conv.int8_in_ns "
        "conv.int8_in_tap_ns conv.int8_out_ns conv.int8_image_ns conv.stream_int8",
    ),
    Group(
        frozenset({"depthwise", "block"}),
        "depthwise.float_ns depthwise.float_taps",
        "depthwise.int8_launch depthwise.int8_tap_ns depthwise.int8_ns depthwise.int8_pixel_ns "
        "depthwise.int8_channel_ns depthwise.odd_ns depthwise.odd4_ns",
    ),
    Group(frozenset({"clip"}), "conv.clip_ns", ""),
    Group(frozenset({"strided"}), "depthwise.float_skip_ns", ""),
    Group(
        frozenset({"grouped"}),
        "conv.grouped_float_gmacs",
        "conv.grouped_int8_ns conv.grouped_int8_tap_ns conv.grouped_int8_channel_ns",
    ),
    Group(frozenset({"line"}), "conv.line_gmacs depthwise.line_group_ns depthwise.line_tap_ns", ""),
    # A MatMul in integers stands behind a QuantizeLinear, which the pairs alone do not tell from its DequantizeLinear.
    Group(
        frozenset({"boundary", "gemm", "matmul"}),
        "linear.launch linear.gmacs linear.one_row_gmacs linear.row_ns linear.out_ns linear.matmul_bias_launch "
        "linear.matmul_bias_ns linear.stream_float",
        "linear.int8_launch linear.int8_gmacs linear.int8_one_row_gmacs linear.int8_row_ns linear.int8_out_ns "
        "linear.int8_in_ns linear.matmul_int8_bias_launch linear.matmul_int8_bias_ns linear.stream_int8 "
        "pairs.q_launch pairs.q_ns pairs.dq_launch pairs.dq_ns pairs.from_conv_launch pairs.from_conv_ns "
        "pairs.to_conv_launch pairs.to_conv_ns",
    ),
    Group(
        frozenset({"elements"}),
        "elements.residual elements.MaxPool elements.AveragePool elements.GlobalAveragePool elements.gate elements.Mul "
        "elements.Sigmoid elements.LeakyRelu elements.Concat elements.Resize",
        "elements.residual elements.MaxPool elements.AveragePool elements.GlobalAveragePool elements.gate elements.Mul "
        "elements.Sigmoid elements.LeakyRelu elements.Concat elements.Resize",
    ),
)
# No sample shows these; they grow by as much as the samples of operators that move elements do.
UNMEASURED = (
    *("Add", "Transpose", "DepthToSpace", "SpaceToDepth", "Slice", "Pad", "unknown"),
    *("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"),
)
# Fields of `Moves` with a default.
_OPTIONAL = tuple(field.name for field in fields(Moves) if field.default is not MISSING)
_SIDES: Mapping[str, tuple[str, ...]] = {
    "float": ("float_us", "float_ns", "odd_ns"),
    "int8": ("int8_us", "int8_ns", "pixel_ns", "odd_pixel_ns"),
}


def fit(
    path: Path, name: str, origin: str, start: CpuCosts, given: Mapping[str, float], out: Path
) -> None:
    """Fit every group of constants, float and int8, and write the table as a data file.

    given: values by their dotted names: more entries of a table to fit (conv.float_gmacs.4), and what no group fits:
    properties of the kernels (conv.block, conv.row_tile), and int8_network, from predicted and measured speedups of
    whole networks.
    """
    rows, values = read(path), _flat(start)
    values.update(given)
    for group in GROUPS:
        for side in ("float", "int8"):
            mine = sound([row for row in rows if row["family"] in group.families], side)
            names = [key for wanted in group.names(side) for key in _slots(values, wanted, side)]
            if names and mine:
                _scale(values, names, _bias(values, start, mine, side))
                _least_squares(values, names, mine, side, start)
    moving = [row for row in rows if row["family"] == "elements"]
    errors = [
        error(row, side, warm(start)) for side in ("float", "int8") for row in sound(moving, side)
    ]
    unmeasured = [key for op in UNMEASURED for key in values if key.startswith(f"elements.{op}.")]
    if errors:
        _scale(
            values,
            [*unmeasured, "conv.cold_ns", "conv.int8_cold_ns"],
            math.exp(-float(np.mean(errors))),
        )
    table = replace(_built(start, values), name=name, origin=origin)
    out.write_text(write_costs(table), encoding="utf-8")


def _flat(value: Any, path: str = "") -> dict[str, float]:
    """Every number of a table by its dotted name."""
    if is_dataclass(value):
        items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, Mapping):
        items = list(value.items())
    else:
        return {} if isinstance(value, (str, bool)) else {path: value}
    return {
        k: v
        for key, item in items
        for k, v in _flat(item, f"{path}.{key}" if path else str(key)).items()
    }


def _built(value: Any, values: Mapping[str, float], path: str = "") -> Any:
    """A table like `value` with other numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        new = {k: _built(getattr(value, k), values, f"{path}.{k}" if path else k) for k in names}
        return replace(value, **new)
    if isinstance(value, Mapping):
        return {
            key: _built(item, values, f"{path}.{key}")
            for key, item in {**_entries(values, path), **value}.items()
        }
    number = values.get(path, value)
    return int(number) if isinstance(value, int) and not isinstance(value, bool) else number


def _entries(values: Mapping[str, float], path: str) -> dict[int, float]:
    """A table's entries by size, those included that its start does not have."""
    found = (key.rpartition(".") for key in values)
    return dict.fromkeys(
        sorted(int(last) for first, _, last in found if first == path and last.isdigit()), 0.0
    )


def _slots(values: Mapping[str, float], wanted: str, side: str) -> list[str]:
    """The numbers of a field: all entries of a table; of an operator those of one side that are not 0."""
    found = [key for key in values if key == wanted or key.startswith(wanted + ".")]
    if wanted.startswith("elements."):
        return [key for key in found if key.rpartition(".")[2] in _SIDES[side] and values[key] > 0]
    return found


def _bias(values: Mapping[str, float], start: CpuCosts, rows: list[Row], side: str) -> float:
    cpu = warm(_built(start, values))
    return math.exp(-float(np.mean([error(row, side, cpu) for row in rows])))


def _scale(values: dict[str, float], names: list[str], growth: float) -> None:
    """Make the times grow, and the throughputs fall."""
    for name in names:
        if not name.endswith(("float_taps", "float_single")):
            values[name] *= 1 / growth if "gmacs" in name else growth


def _least_squares(
    values: dict[str, float], names: list[str], rows: list[Row], side: str, start: CpuCosts
) -> None:
    """Damped least squares on the log errors, large ones weighted down; constants stay positive."""
    x = np.array([values[name] for name in names])
    step, damping = np.maximum(np.abs(x), 0.01) * 1e-3, 1e-2

    def residuals(tried: np.ndarray) -> np.ndarray:
        cpu = warm(_built(start, {**values, **dict(zip(names, map(float, tried), strict=True))}))
        return np.array([error(row, side, cpu) for row in rows])

    def loss(found: np.ndarray) -> float:
        return float(np.sqrt(1 + (found / LARGE_ERROR) ** 2).sum())

    now = residuals(x)
    for _ in range(ROUNDS):
        slope = np.stack([(residuals(x + d) - now) for d in np.diag(step)], axis=1)
        weight = 1 / np.sqrt(1 + (now / LARGE_ERROR) ** 2)
        normal = slope.T @ (weight[:, None] * slope)
        for _ in range(6):
            move = np.linalg.solve(
                normal + damping * np.diag(np.diag(normal) + 1e-12), -slope.T @ (weight * now)
            )
            tried = np.maximum(x + move * step, x * 0.05)
            then = residuals(tried)
            better = loss(then) < loss(now)
            if better:
                break
            damping *= 5
        gain = loss(now) - loss(then)
        if not better:
            break
        x, now, damping = tried, then, damping / 3
        if gain < 1e-5 * loss(now):
            break
    values.update(zip(names, map(float, x), strict=True))
    print(
        f"{names[0].split('.')[0]:10} {side:5} n {len(rows):4}  mean x{math.exp(np.abs(now).mean()):.3f}",
        flush=True,
    )


def write_costs(cpu: CpuCosts) -> str:
    """The data file of a table: JSON, with a line for each constant."""
    blocks = []
    for name, value in asdict(cpu).items():
        text = json.dumps(_round_numbers(value))
        if isinstance(value, dict):
            entries = [
                f"    {json.dumps(key)}: {json.dumps(_round_numbers(entry))}"
                for key, entry in value.items()
            ]
            text = "{\n" + ",\n".join(entries) + "\n  }"
        blocks.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _round_numbers(value: Any) -> Any:
    """The value with three digits of every number; what an operator of `elements` does not have is left out."""
    if isinstance(value, dict):
        return {
            key: _round_numbers(entry)
            for key, entry in value.items()
            if key not in _OPTIONAL or entry
        }
    if isinstance(value, float):
        return float(f"{value:.3g}") if value > NOTHING else 0.0
    return value
