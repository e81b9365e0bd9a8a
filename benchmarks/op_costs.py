"""Measure what nodes cost in an engine, float and int8, and fit the tables of its backend, `BACKEND/costs/`.

    python benchmarks/op_costs.py measure samples.jsonl --only dense,depthwise [--engine openvino --isa AVX2]
    python benchmarks/op_costs.py errors samples.jsonl --cpu avx2  # how far a table is from the samples, by family
    python benchmarks/op_costs.py fit samples.jsonl --cpu avx2 --origin "AMD EPYC (Zen 3), …" --set conv.block=8
    python benchmarks/op_costs.py check model.onnx model.q.onnx    # predicted, measured; shapes by --dim NAME=SIZE

All commands take `--engine`; `ort` without it. `--isa` is the newest instruction set that oneDNN, in OpenVINO, may use.
`fit` starts from the table of `--start` and writes `onnxq/backends/ENGINE/costs/CPU.json`. The samples of a kind of CPU
must come from a machine of that kind, quiet; `errors` compares them with any table.

Every sample is the growth of a chain per unit, (t(long) - t(short)) / units, at one thread, so that what happens at the
ends cancels out; float and int8 chains of both lengths run interleaved and the minimum of many runs is taken, so that
other work on the machine hardly matters. A unit may hold several nodes; the model is fitted to their sum.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime as ort

from onnxq.backends import find_target
from onnxq.backends.costs import OpCase
from onnxq.backends.cpu_costs import CpuCosts
from op_cost_chains import FAMILIES, LONG, SHORT, Plan, Unit, cases_of, chain
from op_cost_fit import error, fit, predicted, read, sound, warm

FOLDED = ("Relu", "Clip")
BACKENDS = Path(__file__).resolve().parents[1] / "onnxq" / "backends"


Run = Callable[[dict[str, Any]], object]


def open_ort(model: bytes) -> Run:
    """One thread, all optimizations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


def open_openvino(model: bytes) -> Run:
    """One thread, float32 where it computes in float."""
    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    request = core.compile_model(core.read_model(model), "CPU", settings).create_infer_request()
    return lambda feed: request.infer(feed, share_inputs=True, share_outputs=True)


OPENERS: dict[str, Callable[[bytes], Run]] = {"ort": open_ort, "openvino": open_openvino}


def fastest(runs: Sequence[Run], feed: dict[str, Any], seconds: float) -> list[float]:
    """Shortest run of each model in microseconds, interleaved."""
    best = [math.inf] * len(runs)
    start, rounds = time.perf_counter(), 0
    while rounds < 12 or (time.perf_counter() - start < seconds and rounds < 600):
        for k, run in enumerate(runs):
            t = time.perf_counter()
            run(feed)
            best[k] = min(best[k], time.perf_counter() - t)
        rounds += 1
    return [b * 1e6 for b in best]


def growth(unit: Unit, plan: Plan, seconds: float, engine: str) -> tuple[float, float]:
    """(float us, int8 us) of one unit."""
    runs = [
        OPENERS[engine](chain(unit, plan, int8, n)[0])
        for int8 in (False, True)
        for n in (SHORT, LONG)
    ]
    feed = {"x": np.abs(np.random.default_rng(0).standard_normal(plan.shape)).astype(np.float32)}
    t = fastest(runs, feed, seconds)
    return (t[1] - t[0]) / (LONG - SHORT), (t[3] - t[2]) / (LONG - SHORT)


def times(plan: Plan, seconds: float, engine: str = "ort") -> dict[str, float]:
    """The time of one unit, less that of `minus`."""
    float_us, int8_us = growth(plan.unit, plan, seconds, engine)
    if plan.minus is not None:
        f, i = growth(plan.minus, plan, seconds, engine)
        # a boundary between Convs holds a float Conv beside the int8 one
        float_us, int8_us = (
            float_us - f,
            int8_us - i - (f if plan.boundary and plan.op == "conv" else 0.0),
        )
    return {"float_us": float_us, "int8_us": int8_us}


def measure(out: Path, only: set[str], seconds: float, engine: str, every: int) -> None:
    """Append samples to a JSON-lines file; what is there already is not measured again."""
    key = operator.itemgetter("family", "shape", "cases", "op")
    done = (
        {json.dumps(key(json.loads(line))) for line in out.read_text().splitlines()}
        if out.exists()
        else set()
    )
    plans = [
        p for family in FAMILIES for p in list(family())[::every] if not only or p.family in only
    ]
    with out.open("a") as stream:
        for plan in plans:
            row = {
                "family": plan.family,
                "shape": plan.shape,
                "op": plan.op,
                "cases": cases_of(plan),
            }
            if json.dumps(key(row)) not in done:
                stream.write(json.dumps({**row, **times(plan, seconds, engine)}) + "\n")
                stream.flush()


# --- the model against the samples ----------------------------------------------------------------------------------


def errors(path: Path, cpu: CpuCosts) -> None:
    """exp(mean |log error|), median and 90th percentile by family and side, and the worst samples."""
    cpu, families = warm(cpu), defaultdict(list)
    for row in read(path):
        families[row["family"]].append(row)
    for family, every in families.items():
        for side in ("float", "int8"):
            rows = sound(every, side)
            if not rows:
                continue
            found = sorted((error(row, side, cpu) for row in rows), key=abs)
            sizes = np.abs(found)
            print(
                f"{family:10} {side:5} n {len(rows):3}  mean x{math.exp(sizes.mean()):.3f}"
                f"  median {np.median(sizes):.3f}  90 % {np.quantile(sizes, 0.9):.3f}"
                f"  bias {statistics.mean(found):+.3f}"
            )
            for row in sorted(rows, key=lambda r: -abs(error(r, side, cpu)))[:3]:
                nodes = " ".join(
                    f"{case.op_type}{list(case.weight or ())}" for case in row["nodes"]
                )
                times_us = (
                    f"measured {row[f'{side}_us']:.2f} predicted {predicted(row, side, cpu):.2f}"
                )
                print(f"    {row['shape']} {nodes} {row['op']} {times_us}")


# --- the model against whole networks -------------------------------------------------------------------------------


def check(
    paths: Sequence[Path], dims: dict[str, int], seconds: float, cpu: CpuCosts, engine: str
) -> None:
    """Predicted and measured time of whole files, float or with pairs."""
    protos = [onnx.load(path) for path in paths]
    feed = _feed(protos[0], dims)
    measured = fastest(
        [OPENERS[engine](proto.SerializeToString()) for proto in protos], feed, seconds
    )
    for path, proto, us in zip(paths, protos, measured, strict=True):
        parts = Network(proto, _shapes(proto, feed)).parts(cpu)
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
            feed[value.name] = (
                rng.random(shape).astype(dtype) if dtype.kind == "f" else np.ones(shape, dtype)
            )
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
    runner = ort.InferenceSession(
        tapped.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = zip((out.name for out in runner.get_outputs()), runner.run(None, feed), strict=True)
    constants = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    return {
        **constants,
        **{name: v.shape for name, v in (*feed.items(), *values) if isinstance(v, np.ndarray)},
    }


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
        behind = [
            (self.ends(n.output[0]) if n.op_type in FOLDED else [n]) for n in self.readers[name]
        ]
        return [node for nodes in behind for node in nodes]

    def source(self, name: str) -> onnx.NodeProto | None:
        node = self.maker.get(name)
        return self.source(node.input[0]) if node is not None and node.op_type in FOLDED else node

    def is_int8(self, node: onnx.NodeProto) -> bool:
        makers = [self.maker.get(name) for name in self.data(node)]
        after = self.ends(node.output[0])
        writes = node.op_type == "MatMul" or (
            bool(after) and all(n.op_type == "QuantizeLinear" for n in after)
        )
        return (
            writes
            and bool(makers)
            and all(n is not None and n.op_type == "DequantizeLinear" for n in makers)
        )

    def case(self, node: onnx.NodeProto) -> OpCase:
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        weighted = node.op_type in ("Conv", "Gemm", "MatMul") and node.input[1] in self.fixed
        next_ops = [reader.op_type for reader in self.readers[node.output[0]]]
        return OpCase(
            op_type=node.op_type,
            inputs=tuple(self.shapes.get(name) for name in self.data(node)),
            output=self.shapes.get(node.output[0]),
            weight=self.shapes.get(node.input[1]) if weighted else None,
            group=attrs.get("group", 1),
            kernel=tuple(attrs.get("kernel_shape", ())),
            strides=tuple(attrs.get("strides", ())),
            activation=next_ops[0] if len(next_ops) == 1 and next_ops[0] in FOLDED else "",
        )

    def parts(self, cpu: CpuCosts) -> dict[str, float]:
        """Predicted microseconds by operator and side."""
        parts: dict[str, float] = defaultdict(float)
        for node in self.nodes:
            count = math.prod(self.shapes.get(node.output[0], ()))
            if not self.data(node) or node.op_type in FOLDED:
                continue
            if node.op_type == "QuantizeLinear":
                made = self.source(node.input[0])
                if made is None or made.op_type == "MatMul" or not self.is_int8(made):
                    parts["pairs"] += cpu.predict_quantize(
                        count, from_conv=made is not None and made.op_type == "Conv"
                    )
            elif node.op_type == "DequantizeLinear":
                floats = [
                    reader for reader in self.ends(node.output[0]) if not self.is_int8(reader)
                ]
                if floats or not self.readers[node.output[0]]:
                    parts["pairs"] += cpu.predict_dequantize(
                        count, to_conv=any(n.op_type == "Conv" for n in floats)
                    )
            else:
                side = "int8" if self.is_int8(node) else "float"
                parts[f"{node.op_type} {side}"] += getattr(
                    cpu.predict_node(self.case(node)), f"{side}_us"
                )
        return parts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "errors", "fit", "check"):
        command = commands.add_parser(name)
        command.add_argument("files", nargs="+" if name == "check" else 1, type=Path)
        command.add_argument("--engine", choices=sorted(OPENERS), default="ort")
        command.add_argument("--isa", default="", help="of oneDNN: AVX2, AVX512_CORE_VNNI …")
        if name in ("measure", "check"):
            command.add_argument("--seconds", type=float, default=5.0 if name == "check" else 0.3)
        if name == "measure":
            command.add_argument("--only", default="", help="families, separated by commas")
            command.add_argument(
                "--every",
                type=int,
                default=1,
                metavar="N",
                help="only each N-th sample of a family",
            )
        elif name == "fit":
            command.add_argument(
                "--cpu", required=True, metavar="NAME", help="the kind of CPU the samples are from"
            )
            command.add_argument(
                "--origin", required=True, help="machine, version of the engine and day"
            )
            command.add_argument("--start", default="vnni", help="the table to start from")
            command.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="FIELD=NUMBER",
                help="values to start from",
            )
            command.add_argument("--out", type=Path, help="another file than the kind's own")
        else:
            command.add_argument("--cpu", default="vnni", help="the table to compare with")
        if name == "check":
            command.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE")
    args = parser.parse_args()
    if args.isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = args.isa
    if args.command == "measure":
        measure(
            args.files[0],
            set(filter(None, args.only.split(","))),
            args.seconds,
            args.engine,
            args.every,
        )
        return
    tables: Any = find_target(args.engine).costs
    if args.command == "errors":
        errors(args.files[0], tables[args.cpu])
    elif args.command == "fit":
        given = {field: float(value) for field, value in (item.split("=") for item in args.set)}
        start = tables.get(args.start) or find_target("ort").costs[args.start]
        fit(
            args.files[0],
            args.cpu,
            args.origin,
            start,
            given,
            args.out or BACKENDS / args.engine / "costs" / f"{args.cpu}.json",
        )
    else:
        dims = {k: int(v) for k, v in (item.split("=") for item in args.dim)}
        check(args.files, dims, args.seconds, tables[args.cpu], args.engine)


if __name__ == "__main__":
    main()
