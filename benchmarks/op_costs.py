"""Measure what nodes cost in ONNX Runtime, float and int8, and refit `onnxq/targets/ort_costs.py`.

    python benchmarks/op_costs.py measure samples.jsonl --only dense,depthwise
    python benchmarks/op_costs.py errors samples.jsonl           # how far the model is from the samples, by family
    python benchmarks/op_costs.py fit samples.jsonl dense float  # new values for one group of coefficients
    python benchmarks/op_costs.py check model.onnx model.q.onnx  # predicted against measured; shapes by --dim NAME=SIZE

Every sample is the growth of a chain per unit, (t(long) - t(short)) / units, at one thread, so that what happens at the
ends cancels out; float and int8 chains of both lengths run interleaved and the minimum of many runs is taken, so that
other work on the machine hardly matters. A unit may hold several nodes; the model is fitted to their sum.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import operator
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime as ort

from op_cost_chains import FAMILIES, LONG, SHORT, Plan, Unit, cases_of, chain

COSTS = Path(__file__).resolve().parents[1] / "onnxq" / "targets" / "ort_costs.py"
FLOOR_US = 0.25  # errors below this do not count
FOLDED = ("Relu", "Clip")


def load_model() -> ModuleType:
    """The cost model by its path, so that coefficients can be changed and nothing else is imported."""
    spec = importlib.util.spec_from_file_location("ort_costs", COSTS)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(COSTS)
    module = importlib.util.module_from_spec(spec)
    sys.modules["ort_costs"] = module
    spec.loader.exec_module(module)
    return module


def session(model: bytes) -> ort.InferenceSession:
    """One thread, all optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def fastest(sessions: Sequence[ort.InferenceSession], feed: dict[str, Any], seconds: float) -> list[float]:
    """Shortest run of each session in microseconds, interleaved."""
    best = [math.inf] * len(sessions)
    start, rounds = time.perf_counter(), 0
    while rounds < 12 or (time.perf_counter() - start < seconds and rounds < 600):
        for k, s in enumerate(sessions):
            t = time.perf_counter()
            s.run(None, feed)
            best[k] = min(best[k], time.perf_counter() - t)
        rounds += 1
    return [b * 1e6 for b in best]


def growth(unit: Unit, plan: Plan, seconds: float) -> tuple[float, float]:
    """(float us, int8 us) of one unit."""
    sessions = [session(chain(unit, plan, int8, n)[0]) for int8 in (False, True) for n in (SHORT, LONG)]
    feed = {"x": np.abs(np.random.default_rng(0).standard_normal(plan.shape)).astype(np.float32)}
    t = fastest(sessions, feed, seconds)
    return (t[1] - t[0]) / (LONG - SHORT), (t[3] - t[2]) / (LONG - SHORT)


def times(plan: Plan, seconds: float) -> dict[str, float]:
    """What one unit takes, less what `minus` takes."""
    float_us, int8_us = growth(plan.unit, plan, seconds)
    if plan.minus is not None:
        f, i = growth(plan.minus, plan, seconds)
        # a boundary between Convs holds a float Conv beside the int8 one
        float_us, int8_us = float_us - f, int8_us - i - (f if plan.boundary and plan.op == "conv" else 0.0)
    return {"float_us": float_us, "int8_us": int8_us}


def measure(out: Path, only: set[str], seconds: float) -> None:
    """Append samples to a JSON-lines file; what is there already is not measured again."""
    key = operator.itemgetter("family", "shape", "cases", "op")
    done = {json.dumps(key(json.loads(line))) for line in out.read_text().splitlines()} if out.exists() else set()
    plans = [p for family in FAMILIES for p in family() if not only or p.family in only]
    with out.open("a") as stream:
        for plan in plans:
            row = {"family": plan.family, "shape": plan.shape, "op": plan.op, "cases": cases_of(plan)}
            if json.dumps(key(row)) not in done:
                stream.write(json.dumps({**row, **times(plan, seconds)}) + "\n")
                stream.flush()


# --- the model against the samples ----------------------------------------------------------------------------------


def read(path: Path, model: ModuleType) -> list[dict[str, Any]]:
    """Samples with their cases as the model's. Chains are warm, so the model's cold terms are switched off."""
    model.COLD_NS = model.COLD_INT8_NS = 0.0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["nodes"] = [model.OpCase(**_tuples(case)) for case in row["cases"] if "boundary" not in case]
        row["boundaries"] = [case for case in row["cases"] if "boundary" in case]
    return rows


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def predicted(row: dict[str, Any], side: str, model: ModuleType) -> float:
    """The model's time of a sample."""
    total = sum(getattr(model.op_cost(case), f"{side}_us") for case in row["nodes"])
    for case in row["boundaries"] if side == "int8" else ():
        layout = {"from_conv" if case["boundary"] == "quantize" else "to_conv": case["conv"]}
        total += getattr(model, f"{case['boundary']}_us")(case["elements"], **layout)
    return float(total)


def error(row: dict[str, Any], side: str, model: ModuleType) -> float:
    """log(predicted / measured)."""
    return math.log((predicted(row, side, model) + FLOOR_US) / (max(row[f"{side}_us"], 0.05) + FLOOR_US))


def errors(path: Path) -> None:
    """Median and 90th percentile of the error by family, and the worst samples."""
    model = load_model()
    families = defaultdict(list)
    for row in read(path, model):
        families[row["family"]].append(row)
    for family, rows in families.items():
        for side in ("float", "int8"):
            if side == "float" and family == "boundary":
                continue
            found = sorted((error(row, side, model) for row in rows), key=abs)
            print(
                f"{family:10} {side:5} n {len(rows):3}  median {abs(found[len(found) // 2]):.3f}"
                f"  90 % {abs(found[int(len(found) * 0.9)]):.3f}  bias {statistics.mean(found):+.3f}"
            )
            for row in sorted(rows, key=lambda r: -abs(error(r, side, model)))[:3]:
                nodes = " ".join(f"{case.op_type}{list(case.weight or ())}" for case in row["nodes"])
                times_us = f"measured {row[f'{side}_us']:.2f} predicted {predicted(row, side, model):.2f}"
                print(f"    {row['shape']} {nodes} {row['op']} {times_us}")


# group: (families, coefficients of the float side, of the int8 side); a table stands for all its entries
GROUPS: dict[str, tuple[set[str], str, str]] = {
    "dense": (
        {"dense", "pair", "stem"},
        (
            "CONV_LAUNCH FLOAT_GMACS FLOAT_GMACS_ONE_BLOCK FLOAT_GMACS_NCHW FLOAT_SINGLE FLOAT_REORDER_NS "
            "FLOAT_PIXEL_NS STREAM_FLOAT"
        ),
        "CONV_INT8_LAUNCH INT8_GMACS INT8_CHANNEL_NS INT8_GATHER_NS INT8_IN_NS INT8_IN_TAP_NS INT8_OUT_NS STREAM_INT8",
    ),
    "depthwise": (
        {"depthwise", "block"},
        "DEPTHWISE_FLOAT_NS DEPTHWISE_FLOAT_TAPS",
        (
            "DEPTHWISE_LAUNCH DEPTHWISE_INT8_TAP_NS DEPTHWISE_INT8_NS DEPTHWISE_INT8_PIXEL_NS "
            "DEPTHWISE_INT8_CHANNEL_NS DEPTHWISE_ODD_NS DEPTHWISE_ODD4_NS"
        ),
    ),
    "grouped": ({"grouped"}, "GROUPED_FLOAT_GMACS", "GROUPED_INT8_NS GROUPED_INT8_TAP_NS GROUPED_INT8_CHANNEL_NS"),
    "line": ({"line"}, "LINE_GMACS LINE_DEPTHWISE_GROUP_NS LINE_DEPTHWISE_TAP_NS", ""),
    "linear": (
        {"gemm", "matmul"},
        "GEMM_LAUNCH GEMM_ROW_NS GEMM_OUT_NS GEMV_GMACS GEMM_STREAM_FLOAT MATMUL_BIAS_LAUNCH MATMUL_BIAS_NS",
        (
            "GEMM_INT8_LAUNCH GEMM_INT8_ROW_NS GEMM_INT8_OUT_NS GEMM_INT8_IN_NS GEMV_INT8_GMACS GEMM_STREAM_INT8 "
            "MATMUL_INT8_BIAS_LAUNCH MATMUL_INT8_BIAS_NS"
        ),
    ),
    "boundary": ({"boundary"}, "", "Q_LAUNCH Q_NS FROM_CONV_LAUNCH FROM_CONV_NS TO_CONV_LAUNCH TO_CONV_NS"),
}


def fit(path: Path, group: str, side: str, rounds: int = 30) -> None:
    """Damped least squares on the log errors, large ones weighted down; coefficients stay positive."""
    model = load_model()
    families, *names = GROUPS[group]
    rows = [row for row in read(path, model) if row["family"] in families]
    slots = [slot for name in names[side == "int8"].split() for slot in _slots(model, name)]
    x = np.array([_get(model, *slot) for slot in slots])
    step, damping = np.maximum(np.abs(x), 0.05) * 1e-3, 1e-2

    def residuals(values: np.ndarray) -> np.ndarray:
        for slot, value in zip(slots, values, strict=True):
            _put(model, *slot, float(value))
        return np.array([error(row, side, model) for row in rows])

    now = residuals(x)
    for _ in range(rounds):
        slope = np.stack([(residuals(x + d) - now) for d in np.diag(step)], axis=1)
        weight = 1 / np.sqrt(1 + (now / 0.1) ** 2)
        normal = slope.T @ (weight[:, None] * slope)
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-12), -slope.T @ (weight * now))
        tried = np.maximum(x + move * step, 0.0)
        then = residuals(tried)
        better = np.sqrt(1 + (then / 0.1) ** 2).sum() < np.sqrt(1 + (now / 0.1) ** 2).sum()
        x, now, damping = (tried, then, damping / 3) if better else (x, now, damping * 5)
    print(f"{group} {side}: median {np.median(np.abs(now)):.3f}, 90 % {np.quantile(np.abs(now), 0.9):.3f}")
    for (name, key), value in zip(slots, x, strict=True):
        print(f"  {name}{'' if key is None else f'[{key}]'} = {value:.4g}")


def _slots(model: ModuleType, name: str) -> list[tuple[str, int | None]]:
    value = getattr(model, name)
    return [(name, key) for key in value] if isinstance(value, dict) else [(name, None)]


def _get(model: ModuleType, name: str, key: int | None) -> float:
    return float(getattr(model, name) if key is None else getattr(model, name)[key])


def _put(model: ModuleType, name: str, key: int | None, value: float) -> None:
    setattr(model, name, value if key is None else {**getattr(model, name), key: value})


# --- the model against whole networks -------------------------------------------------------------------------------


def check(paths: Sequence[Path], dims: dict[str, int], seconds: float) -> None:
    """Predicted and measured time of whole files, float or with pairs."""
    model = load_model()
    protos = [onnx.load(path) for path in paths]
    feed = _feed(protos[0], dims)
    measured = fastest([session(proto.SerializeToString()) for proto in protos], feed, seconds)
    for path, proto, us in zip(paths, protos, measured, strict=True):
        parts = Network(proto, _shapes(proto, feed)).parts(model)
        total = sum(parts.values())
        print(f"{path}: measured {us:.0f} us, predicted {total:.0f} us ({total / us - 1:+.0%})")
        for name, part in sorted(parts.items(), key=lambda item: -item[1])[:8]:
            print(f"    {name:24} {part:8.1f}")


def _feed(proto: onnx.ModelProto, dims: dict[str, int]) -> dict[str, Any]:
    rng, feed = np.random.default_rng(0), {}
    constants = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name not in constants:
            tensor = value.type.tensor_type
            shape = [dim.dim_value or dims.get(dim.dim_param, 1) for dim in tensor.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            feed[value.name] = rng.random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
    return feed


def _shapes(proto: onnx.ModelProto, feed: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, by running the model as the file says."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(proto)
    known = {value.name for value in tapped.graph.output}
    names = [out for node in tapped.graph.node for out in node.output if out and out not in known]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    runner = ort.InferenceSession(tapped.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = zip((out.name for out in runner.get_outputs()), runner.run(None, feed), strict=True)
    constants = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    return {**constants, **{name: v.shape for name, v in (*feed.items(), *values) if isinstance(v, np.ndarray)}}


class Network:
    """A float or quantized file as the cost model sees it: which nodes run in integers, which pairs cost time."""

    def __init__(self, proto: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> None:
        self.nodes, self.shapes = proto.graph.node, shapes
        self.maker = {out: node for node in self.nodes for out in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        self.fixed = {tensor.name for tensor in proto.graph.initializer}
        for node in self.nodes:
            for name in node.input:
                self.readers[name].append(node)
            if all(name in self.fixed for name in node.input):
                self.fixed |= set(node.output)

    def data(self, node: onnx.NodeProto) -> list[str]:
        return [name for name in node.input if name and name not in self.fixed]

    def ends(self, name: str) -> list[onnx.NodeProto]:
        """Readers of a tensor, those behind an activation that folds into its pair or behind a guard included."""
        behind = [(self.ends(n.output[0]) if n.op_type in FOLDED else [n]) for n in self.readers[name]]
        return [node for nodes in behind for node in nodes]

    def source(self, name: str) -> onnx.NodeProto | None:
        node = self.maker.get(name)
        return self.source(node.input[0]) if node is not None and node.op_type in FOLDED else node

    def is_int8(self, node: onnx.NodeProto) -> bool:
        makers = [self.maker.get(name) for name in self.data(node)]
        after = self.ends(node.output[0])
        writes = node.op_type == "MatMul" or (bool(after) and all(n.op_type == "QuantizeLinear" for n in after))
        return writes and bool(makers) and all(n is not None and n.op_type == "DequantizeLinear" for n in makers)

    def case(self, node: onnx.NodeProto, model: ModuleType) -> Any:
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        weighted = node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in self.fixed
        next_ops = [reader.op_type for reader in self.readers[node.output[0]]]
        return model.OpCase(
            op_type=node.op_type,
            inputs=tuple(self.shapes.get(name) for name in self.data(node)),
            output=self.shapes.get(node.output[0]),
            weight=self.shapes.get(node.input[1]) if weighted else None,
            group=attrs.get("group", 1),
            kernel=tuple(attrs.get("kernel_shape", ())),
            strides=tuple(attrs.get("strides", ())),
            activation=next_ops[0] if len(next_ops) == 1 and next_ops[0] in FOLDED else "",
        )

    def parts(self, model: ModuleType) -> dict[str, float]:
        """Predicted microseconds by operator and side."""
        parts: dict[str, float] = defaultdict(float)
        for node in self.nodes:
            count = math.prod(self.shapes.get(node.output[0], ()))
            if not self.data(node) or node.op_type in FOLDED:
                continue
            if node.op_type == "QuantizeLinear":
                made = self.source(node.input[0])
                if made is None or made.op_type == "MatMul" or not self.is_int8(made):
                    parts["pairs"] += model.quantize_us(count, from_conv=made is not None and made.op_type == "Conv")
            elif node.op_type == "DequantizeLinear":
                floats = [reader for reader in self.ends(node.output[0]) if not self.is_int8(reader)]
                if floats or not self.readers[node.output[0]]:
                    parts["pairs"] += model.dequantize_us(count, to_conv=any(n.op_type == "Conv" for n in floats))
            else:
                side = "int8" if self.is_int8(node) else "float"
                parts[f"{node.op_type} {side}"] += getattr(model.op_cost(self.case(node, model)), f"{side}_us")
        return parts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "errors", "fit", "check"):
        command = commands.add_parser(name)
        command.add_argument("files", nargs="+" if name == "check" else 1, type=Path)
        command.add_argument("--seconds", type=float, default=5.0 if name == "check" else 0.3)
        if name == "measure":
            command.add_argument("--only", default="", help="families, separated by commas")
        elif name == "fit":
            command.add_argument("group", choices=sorted(GROUPS))
            command.add_argument("side", choices=("float", "int8"))
        elif name == "check":
            command.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE")
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.files[0], set(filter(None, args.only.split(","))), args.seconds)
    elif args.command == "errors":
        errors(args.files[0])
    elif args.command == "fit":
        fit(args.files[0], args.group, args.side)
    else:
        check(args.files, {k: int(v) for k, v in (item.split("=") for item in args.dim)}, args.seconds)


if __name__ == "__main__":
    main()
