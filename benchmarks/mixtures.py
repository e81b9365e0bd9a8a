#!/usr/bin/env python3
"""Search mixtures of precisions for models of a corpus, check the files on its metric, and print tables.

    python benchmarks/mixtures.py --corpus DIR fmnist_mobilenetv2 efficientnet_lite0 minilm_l6_fp16w --out out/mixtures

For each model: the file in 8 bits; the one that `onnxq search --max-size` finds where the weights of its operators may
have --share of the bytes that they have in 8 bits; the one that `quantize --weight-bits-budget` makes with as many bits
on average; and the one of `onnxq search --max-latency`, --slack times as long as the 8-bit file. The first table tells
how well the front was predicted before it was measured. A corpus is a folder as in corpus.py. Rows are kept in
OUT/rows.jsonl: another run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from corpus import calibration, evaluate
from measure import onnxq, run, table

UNMET = 4
# By the type of constants that are weights.
_BITS = {TensorProto.INT8: 8, TensorProto.UINT8: 8, TensorProto.INT4: 4, TensorProto.UINT4: 4}
FRONT = ["model", "points", "median dB off", "largest", "in order", "seconds"]
FILES = [
    "model",
    "file",
    "operators",
    "metric",
    "SQNR dB",
    "bytes of weights",
    "MB",
    "ms",
    "seconds",
]


def count_weight_bytes(path: Path) -> float:
    """Bytes of the integers of weights, but for tables that rows are looked up in."""
    graph = onnx.load(path).graph
    tables = {node.input[0] for node in graph.node if node.op_type == "Gather"}
    weights = [stored for stored in graph.initializer if stored.name not in tables]
    return sum(math.prod(stored.dims) * _BITS.get(stored.data_type, 0) / 8 for stored in weights)


def make(
    args: argparse.Namespace, name: str, kind: str, command: str, *options: str
) -> dict[str, Any]:
    """Run a command of onnxq, and score its file."""
    source, target = args.corpus / "models" / f"{name}.onnx", args.out / f"{name}.{kind}.onnx"
    data = calibration(args.corpus, name, args.out, args.samples)
    done = run(
        onnxq(
            command,
            source,
            "--data",
            data,
            "--notes",
            "none",
            "--force",
            "--json",
            "-o",
            target,
            *options,
        )
    )
    if done.code not in (0, UNMET):
        sys.exit(done.output)
    # Behind it stands the message of a limit that no model keeps.
    document, _ = json.JSONDecoder().raw_decode(done.output[done.output.index("{") :])
    report = document.get("applied", document)
    score = evaluate(args.corpus, name, target)
    return {
        "name": name,
        "kind": kind,
        "options": " ".join(options),
        "metric": score["main"],
        "sqnr": score["sqnr_db"],
        "weights": count_weight_bytes(target),
        "bytes": report["output_bytes"],
        "ms": (report["latency"] or {}).get("int8_ms"),
        "float_ms": (report["latency"] or {}).get("float_ms"),
        "seconds": done.seconds,
        "front": document.get("front", []),
        "met": document.get("met", True),
    }


def measure(
    args: argparse.Namespace, name: str, rows: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """All files of a model that have no row yet."""

    def add(kind: str, command: str, *options: str) -> dict[str, Any]:
        if (name, kind) not in rows:
            rows[name, kind] = make(args, name, kind, command, *options)
            with (args.out / "rows.jsonl").open("a") as file:
                file.write(json.dumps(rows[name, kind]) + "\n")
        return rows[name, kind]

    plain = add("w8a8", "quantize")
    limit = plain["bytes"] - (1 - args.share) * plain["weights"]
    add("max-size", "search", "--max-size", str(int(limit)), "--precisions", "w8a8,w4a8")
    add("with float", "search", "--max-size", str(int(limit)))
    add(
        "bits-budget",
        "quantize",
        "--config",
        "ort-w4a8",
        "--weight-bits-budget",
        f"{8 * args.share:g}",
    )
    add("max-latency", "search", "--max-latency", f"{args.slack * plain['ms']:.3g}")


def describe_front(row: dict[str, Any]) -> list[str]:
    """How far the predictions of a front were off."""
    points = [point for point in row["front"] if point["predicted_db"] is not None]
    off = [abs(point["predicted_db"] - point["sqnr_db"]) for point in points]
    pairs = [
        (a, b)
        for k, a in enumerate(points)
        for b in points[k + 1 :]
        if abs(a["sqnr_db"] - b["sqnr_db"]) > 0.5
    ]
    right = [
        (a["predicted_db"] - b["predicted_db"]) * (a["sqnr_db"] - b["sqnr_db"]) > 0
        for a, b in pairs
    ]
    order = f"{sum(right)} of {len(right)}"
    name = f"{row['name']} {row['kind']}"
    return [
        name,
        str(len(points)),
        f"{statistics.median(off):.1f}",
        f"{max(off):.1f}",
        order,
        f"{row['seconds']:.0f}",
    ]


def describe_file(row: dict[str, Any]) -> list[str]:
    """The cells of a file."""
    taken = next((point["precisions"] for point in row["front"] if point["taken"]), {})
    mixture = ", ".join(f"{count} {kind}" for kind, count in taken.items())
    times = "" if row["ms"] is None else f"{row['ms']:.3g} (float {row['float_ms']:.3g})"
    figures = [
        f"{row['metric']:.4f}",
        f"{row['sqnr']:.1f}",
        f"{row['weights']:,.0f}",
        f"{row['bytes'] / 1e6:.2f}",
        times,
    ]
    kind = f"{row['kind']} {row['options']}" + ("" if row["met"] else ": not kept")
    return [row["name"], kind, mixture, *figures, f"{row['seconds']:.0f}"]


def main() -> None:
    """Measure what has no row yet, and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--slack", type=float, default=1.1)
    parser.add_argument("--out", type=Path, default=Path("out/mixtures"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stored = args.out / "rows.jsonl"
    lines = stored.read_text().splitlines() if stored.exists() else []
    rows = {(row["name"], row["kind"]): row for row in map(json.loads, lines)}
    for name in args.names:
        measure(args, name, rows)
    wanted = [row for row in rows.values() if row["name"] in args.names]
    print(table([describe_front(row) for row in wanted if row["front"]], FRONT))
    print()
    print(table([describe_file(row) for row in wanted], FILES))


if __name__ == "__main__":
    main()
