"""Measure what nodes cost in onnxruntime-web, float and int8, and fit the table of `onnxq/backends/web/costs.json`.

    python benchmarks/web_costs.py measure samples.jsonl    # half an hour; --only pair,depthwise --most 20 for some
    python benchmarks/web_costs.py fit samples.jsonl --origin "Intel Xeon (Sapphire Rapids), Node.js 20, …"
    python benchmarks/web_costs.py errors samples.jsonl   # how far the table is from the samples, by family

The shapes are those of `op_costs.py`. A sample is the growth per unit of units side by side: its chains would settle on
values that are easily predicted, and integer kernels clamp each result with a branch. Only what is a difference of two
chains stays one. The time is that of the processor (Node.js' process.cpuUsage), and a session of one shape is timed
beside all others, so that other work on the machine counts less. `fit` needs scipy.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxq.backends.web.costs import COSTS, WebCosts, count_work, fits_matrix, parse_costs
from onnxq.backends.web.engine import Node
from onnxq.emit import write_matrices
from onnxq.graph import name_nodes
from op_cost_chains import (
    BLOCKS,
    ELEMENT_MAPS,
    FAMILIES,
    LONG,
    SHORT,
    Builder,
    Plan,
    Shape,
    Unit,
    _convs,
    cases_of,
    chain,
)
from op_cost_fit import Row, read, read_cases

TABLE = Path(__file__).resolve().parents[1] / "onnxq" / "backends" / "web" / "costs.json"
MOST = (
    4e7  # multiplications of one unit; longer ones take seconds in WebAssembly and tell nothing new
)
FLOOR_US = 3.0  # errors below this do not count
LARGE_ERROR = 0.3  # relative; the weight of a sample falls beyond it
LEAST_RATIO = 0.1  # of predicted to measured, below which a sample gains no more weight
ROUNDS = 30  # of weights
SEED = 0
YARDSTICK = Plan("yardstick", (1, 64, 28, 28), _convs(64))
_CONV = ("launch", "products", "results", "weights")
_LINEAR = dict.fromkeys(("float", "int8"), _CONV)
_FLOAT = ("launch", "float products", "results", "weights")
_INT8 = ("launch", "int8 products", "results", "weights", "clamps")
_ELEMENTS = dict.fromkeys(("float", "int8"), ("launch", "results"))
# What the time of a kind of node grows with.
TERMS: dict[str, dict[str, tuple[str, ...]]] = {
    "pointwise": {"float": _FLOAT, "int8": _INT8},
    "dense": {"float": (*_FLOAT, "columns"), "int8": (*_INT8, "columns", "gathers")},
    "grouped": {
        "float": (*_CONV, "columns", "groups"),
        "int8": (*_CONV, "clamps", "columns", "gathers", "groups"),
    },
    "depthwise": {
        "float": ("launch", "products", "lines", "results"),
        "int8": ("launch", "products", "results", "clamps"),
    },
    "matrix": {
        "float": ("launch", "pairs", "groups"),
        "int8": ("launch", "products", "results", "clamps"),
    },
    "Gemm": _LINEAR,
    "MatMul": _LINEAR,
    "folded": {"float": (), "int8": ()},
    # A sample shows only the sum of both ways.
    **{kind: {"int8": ("launch", "results")} for kind in ("convert", "convert map")},
    **dict.fromkeys(
        ("gate", "MaxPool", "AveragePool", "GlobalAveragePool", "Mul", "Sigmoid", "LeakyRelu"),
        _ELEMENTS,
    ),
    **dict.fromkeys(("Concat", "Resize"), _ELEMENTS),
    "Add": dict.fromkeys(("float", "int8"), ("launch", "results", "clamps")),
    # Behind a float Conv it is a part of that, and otherwise as any Add.
    "residual": {"float": (), "int8": ("launch", "results")},
}
# Kinds that no sample shows cost what another one does.
LIKE = {
    **dict.fromkeys(("Transpose", "DepthToSpace", "SpaceToDepth", "Slice", "Pad"), "Concat"),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"), "folded"),
    "unknown": "Sigmoid",
    **dict.fromkeys(("quantize", "dequantize", "quantize dynamic"), "convert"),
    **dict.fromkeys(("quantize map", "dequantize map"), "convert map"),
}


class WebBuilder(Builder):
    """As files for the target are: an activation behind a product is computed on its integers."""

    def activate(self, op: str, inputs: Sequence[str], shape: Shape) -> str:
        """A third of the levels below 0, and a Max that raises them."""
        if not self.int8:
            return super().activate(op, inputs, shape)
        scale, zero = self.const(np.float32(0.03)), self.const(np.uint8(85))
        values = self.node("QuantizeLinear", [inputs[0], scale, zero], shape)
        return self.node(
            "DequantizeLinear", [self.node("Max", [values, zero], shape), scale, zero], shape
        )


def list_plain_plans() -> Iterator[Plan]:
    """1x1 convolutions without an activation, which end the blocks of many networks: nothing is clamped."""
    for narrow, wide, side in BLOCKS:
        yield Plan("plain", (1, wide, side, side), _convs(narrow, act=""))


def list_add_plans() -> Iterator[Plan]:
    """Adds that no float Conv computes as well, as in front of integer ones."""
    for c, h, w in ELEMENT_MAPS:
        # One behind the other: equal ones side by side are computed once.
        yield Plan(
            "add",
            (1, c, h * w),
            lambda b, x: b.plain("Add", [x, x], b.shapes[x], zero=128),
            head=True,
        )
        yield Plan("add", (1, c, h * w), _add_relu, head=True)


def _add_relu(b: Builder, x: str) -> str:
    shape = b.shapes[x]
    b.note("Add", [x, x], shape, activation="Relu")
    return b.out(b.node("Relu", [b.node("Add", [x, x], shape)], shape))


def fan(unit: Unit, plan: Plan, int8: bool, count: int) -> tuple[bytes, list[dict[str, Any]]]:
    """A model of so many units side by side, all of which read the same random values, and the nodes of one."""
    builder = WebBuilder(int8, plan.shape)
    x = builder.pair("x", 128, 0.03) if int8 and plan.quantize_input else "x"
    ends = []
    for _ in range(count):
        builder.cases.clear()
        ends.append(builder.node("ReduceMax", [unit(builder, x)], (1,) * len(plan.shape)))
    return builder.model(builder.node("Sum", ends, (1,) * len(plan.shape))), builder.cases


def is_chained(plan: Plan) -> bool:
    """True for samples that are differences of chains, or joined by nodes of their own."""
    return plan.minus is not None or plan.boundary or plan.branches or plan.head


def open_yardstick(node: Node) -> None:
    """A session that is timed beside all others: other work on the machine slows all of them alike."""
    model = onnx.load_from_string(chain(_convs(64), YARDSTICK, False, 2)[0])
    node.open_session("yardstick", model)


def grow(node: Node, unit: Unit, plan: Plan, seconds: float) -> tuple[float, float, float]:
    """(float us, int8 us) of one unit, and us of the yardstick."""
    values = np.random.default_rng(SEED).standard_normal(plan.shape).astype(np.float32)
    feed = {"x": np.abs(values) if is_chained(plan) else values}
    names = []

    def make(int8: bool, count: int) -> onnx.ModelProto:
        made = (
            chain(unit, plan, int8, count, WebBuilder)
            if is_chained(plan)
            else fan(unit, plan, int8, count)
        )
        return write_matrices(name_nodes(onnx.load_from_string(made[0])), fits_matrix)

    for int8 in (False, True):
        for count in (SHORT, LONG):
            names.append(f"{int8} {count}")
            node.open_session(names[-1], make(int8, count))
    yard = {"x": np.ones(YARDSTICK.shape, np.float32)}
    limits = {"warm": 2, "rounds": None, "least": 6, "seconds": seconds, "processor": True}
    times = node.time_sessions([*names, "yardstick"], [*[feed] * 4, yard], **limits)
    for name in names:
        node.request("close", session=name)
    short, long, int8_short, int8_long, yardstick = (min(one) * 1e6 for one in times)
    return (long - short) / (LONG - SHORT), (int8_long - int8_short) / (LONG - SHORT), yardstick


def count_products(plan: Plan) -> float:
    """Multiplications of one unit."""
    cases = read_cases(chain(plan.unit, plan, True, SHORT)[1])
    return sum(count_work(case)[1].get("products", 0.0) for case in cases)


def choose_plans(only: set[str], most: int) -> list[Plan]:
    """So many plans of each family at most, drawn and mixed by a seed: other work meets all families."""
    families: dict[str, list[Plan]] = defaultdict(list)
    for plan in (
        plan for family in (*FAMILIES, list_plain_plans, list_add_plans) for plan in family()
    ):
        if (not only or plan.family in only) and count_products(plan) <= MOST:
            families[plan.family].append(plan)
    draw = random.Random(SEED)
    chosen = [
        plan for plans in families.values() for plan in draw.sample(plans, min(most, len(plans)))
    ]
    return draw.sample(chosen, len(chosen))


def measure(out: Path, only: set[str], most: int, seconds: float) -> None:
    """Append samples to a JSON-lines file."""
    with out.open("a") as stream, Node() as node:
        open_yardstick(node)
        for plan in choose_plans(only, most):
            # A difference of two growths is a small one of large times.
            patience = seconds if plan.minus is None else 4 * seconds
            float_us, int8_us, yardstick = grow(node, plan.unit, plan, patience)
            if plan.minus is not None:
                less, int8_less, _ = grow(node, plan.minus, plan, patience)
                # A boundary between Convs holds a float Conv beside the int8 one.
                int8_us -= int8_less + (less if plan.boundary and plan.op == "conv" else 0.0)
                float_us -= less
            cases = cases_of(plan) if is_chained(plan) else fan(plan.unit, plan, True, SHORT)[1]
            if not is_chained(plan) and plan.quantize_input:
                # What closes a unit of a fan.
                elements = math.prod(cases[-1]["output"])
                cases.append({"boundary": "dequantize", "elements": elements, "conv": False})
            row = {"family": plan.family, "shape": plan.shape, "op": plan.op, "cases": cases}
            stream.write(
                json.dumps(
                    {**row, "float_us": float_us, "int8_us": int8_us, "yardstick_us": yardstick}
                )
                + "\n"
            )
            stream.flush()


def read_quiet(path: Path) -> list[Row]:
    """Samples, as they would be on a quiet machine."""
    rows = read(path)
    quiet = min((row["yardstick_us"] for row in rows), default=1.0)
    for row in rows:
        for side in ("float_us", "int8_us"):
            row[side] *= quiet / row["yardstick_us"]
    return rows


def list_work(row: Row, side: str) -> dict[tuple[str, str], float]:
    """What a sample does, by kind and name."""
    work: dict[tuple[str, str], float] = defaultdict(float)
    for case in row["nodes"]:
        kind, counts = count_work(case)
        for name in TERMS[kind][side]:
            work[kind, name] += counts[name]
    for case in row["boundaries"] if side == "int8" else ():
        for kind in ("convert", *(["convert map"] if case["conv"] else [])):
            work[kind, "launch"] += 1
            work[kind, "results"] += case["elements"]
    return work


def solve(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with constants that are not negative, and large errors weighted down, in the end most."""
    from scipy.optimize import nnls

    weight = np.ones(len(wanted))
    for done in range(ROUNDS):
        found = nnls(matrix * weight[:, None], wanted * weight)[0]
        # Relative to what lies between the two: relative to what was measured, too small is never very wrong.
        between = np.sqrt(np.maximum(matrix @ found / wanted, LEAST_RATIO))
        limit = LARGE_ERROR * max(1.0, 8.0 - 12.0 * done / ROUNDS)
        weight = 1 / between / np.sqrt(1 + ((wanted - matrix @ found) / between / limit) ** 2)
    return np.asarray(found)


def fit(path: Path, origin: str) -> None:
    """Fit all prices of a side together, and write the table."""
    rows = read_quiet(path)
    prices: dict[str, dict[str, dict[str, float]]] = {
        kind: {side: {} for side in sides} for kind, sides in TERMS.items()
    }
    for side in ("float", "int8"):
        mine = [row for row in rows if row[f"{side}_us"] > 0 and list_work(row, side)]
        work = [list_work(row, side) for row in mine]
        names = sorted({name for one in work for name in one})
        scale = np.array([1 / (row[f"{side}_us"] + FLOOR_US) for row in mine])
        matrix = (
            np.array([[one.get(name, 0.0) / 1e3 for name in names] for one in work])
            * scale[:, None]
        )
        # Columns of one size converge together.
        size = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
        found = solve(matrix / size, np.array([row[f"{side}_us"] for row in mine]) * scale) / size
        for (kind, name), price in zip(names, found, strict=True):
            if price > 0:
                prices[kind][side][name] = float(f"{price:.3g}")
    prices["residual"]["float"] = prices["Add"]["float"]
    for kind, other in LIKE.items():
        prices[kind] = prices[other]
    lines = ",\n".join(
        f"    {json.dumps(kind)}: {json.dumps(prices[kind])}" for kind in sorted(prices)
    )
    TABLE.write_text(
        f'{{\n  "origin": {json.dumps(origin)},\n  "prices": {{\n{lines}\n  }}\n}}\n',
        encoding="utf-8",
    )
    show_errors(path, parse_costs(TABLE.read_text(encoding="utf-8")))


def predict(row: Row, side: str, costs: WebCosts) -> float:
    """The table's time of a sample."""
    total = sum(getattr(costs.predict_node(case), f"{side}_us") for case in row["nodes"])
    for case in row["boundaries"] if side == "int8" else ():
        if case["boundary"] == "quantize":
            total += costs.predict_quantize(case["elements"], from_conv=case["conv"])
        else:
            total += costs.predict_dequantize(case["elements"], to_conv=case["conv"])
    return float(total)


def show_errors(path: Path, costs: WebCosts) -> None:
    """exp(mean |log error|) and bias by family and side."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in read_quiet(path):
        for side in ("float", "int8"):
            if row[f"{side}_us"] > 0 and list_work(row, side):
                ratio = (predict(row, side, costs) + FLOOR_US) / (row[f"{side}_us"] + FLOOR_US)
                found[row["family"], side].append(math.log(ratio))
    for (family, side), errors in sorted(found.items()):
        mean = math.exp(statistics.mean(map(abs, errors)))
        print(
            f"{family:10} {side:5} n {len(errors):3}  mean x{mean:.3f}  bias {statistics.mean(errors):+.3f}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("measure", "fit", "errors"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--most", type=int, default=80, help="shapes of a family")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--origin", default="", help="machine, versions and day")
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.file, set(filter(None, args.only.split(","))), args.most, args.seconds)
    elif args.command == "fit":
        fit(args.file, args.origin)
    else:
        show_errors(args.file, COSTS["wasm"])


if __name__ == "__main__":
    main()
