#!/usr/bin/env python3
"""Quantize models of a corpus with requests of `--min-sqnr`, check each on fresh data, and print a table.

    python benchmarks/accuracy_requests.py --corpus DIR fmnist_resnet:-1,+1,+4 efficientnet_lite0:25 --samples 32

A request is an SQNR in dB. With a sign, it is relative to the SQNR that the file without a request has on fresh data,
rounded to whole dB. Each request has its own calibration samples, drawn by --seed from all rows that data/NAME.npz
holds of the model's inputs (arrays `calib/<input>` and `eval/<input>`); the fresh data are --fresh of the other rows.
The table also shows the file that the same samples give without a request. A request is kept if exit code 0 comes with
at least that SQNR on fresh data at the worst output, padding left out, or if exit code 4 says that it does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from measure import onnxq, run, table
from onnxq.data import load_data
from onnxq.evaluation.compare import ModelErrors
from onnxq.runtime import Session
from subjects import report_in

HEAD = ["model", "requested dB", "reported dB", "fresh dB", "kept", "float operators", "speed", "MB",
        "without: fresh dB", "speed", "MB"]  # fmt: skip
UNMET = 4


def draw_samples(
    args: argparse.Namespace, name: str, number: int
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write the samples of the request with this number to a file, and return it with fresh rows by input."""
    inputs = [
        value.name
        for value in Session(args.corpus / "models" / f"{name}.onnx", optimize=False).inputs
    ]
    with np.load(args.corpus / "data" / f"{name}.npz") as stored:
        parts = [
            part for part in ("calib", "eval") if all(f"{part}/{one}" in stored for one in inputs)
        ]
        rows = {one: np.concatenate([stored[f"{part}/{one}"] for part in parts]) for one in inputs}
    rows = {
        one: array.astype(np.float32) if array.dtype == np.float16 else array
        for one, array in rows.items()
    }
    order = np.random.default_rng([args.seed, number]).permutation(len(next(iter(rows.values()))))
    chosen, fresh = order[: args.samples], order[args.samples : args.samples + args.fresh]
    data = args.out / f"{name}.{number}.npz"
    np.savez(data, **{one: array[chosen] for one, array in rows.items()})
    return data, {one: array[fresh] for one, array in rows.items()}


def measure_fresh(source: Path, target: Path, fresh: dict[str, np.ndarray]) -> float:
    """SQNR in dB of the worst output of a file, as ONNX Runtime runs it."""
    reference, other = (Session(path, threads=1) for path in (source, target))
    errors = ModelErrors()
    for feeds in load_data(fresh, reference.inputs).samples():
        errors.update(feeds, reference.run(feeds), other.run(feeds))
    return min(output.whole_db for output in errors.results())


def quantize(
    args: argparse.Namespace, name: str, data: Path, *request: str
) -> tuple[dict[str, Any], Path]:
    """The report of a run, with its exit code and seconds, and the file."""
    source, target = (
        args.corpus / "models" / f"{name}.onnx",
        args.out / f"{data.stem}{''.join(request)}.q.onnx",
    )
    options = ["--config", args.config, "--force", "--json", "-o", target, *request, *args.options]
    done = run(onnxq("quantize", source, "--data", data, *options))
    (args.out / f"{target.stem}.log").write_text(done.output, encoding="utf-8")
    if done.code not in (0, UNMET):
        sys.exit(done.output)
    return {**report_in(done.output), "exit": done.code, "seconds": done.seconds}, target


def measure(args: argparse.Namespace, name: str, request: str, number: int) -> dict[str, Any]:
    """Measure one request."""
    source = args.corpus / "models" / f"{name}.onnx"
    data, rows = draw_samples(args, name, number)
    plain, file = quantize(args, name, data)
    without = measure_fresh(source, file, rows)
    requested = round(without) + float(request) if request[0] in "+-" else float(request)
    report, file = quantize(args, name, data, "--min-sqnr", f"{requested:g}")
    fresh = measure_fresh(source, file, rows)
    account = report["promotion"]
    return {
        "name": name,
        "requested": requested,
        "met": report["exit"] == 0,
        "reported": account["value"],
        "spread": account["spread"],
        "fresh": fresh,
        "kept": report["exit"] == UNMET or fresh >= requested,
        "promoted": account["operators"],
        "operators": account["operators"] + account["left"],
        # Of a file in which nothing is quantized no time is taken.
        "speeds": [one["latency"]["ratio"] if one["latency"] else 1.0 for one in (report, plain)],
        "megabytes": [one["output_bytes"] / 1e6 for one in (report, plain)],
        "plain": without,
        "seconds": report["seconds"],
        "note": account["note"],
    }


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    reported = " ± ".join(
        f"{number:.1f}" for number in (row["reported"], row["spread"]) if number is not None
    )
    return [
        row["name"],
        f"{row['requested']:g}",
        reported if row["met"] else f"{reported}, not held",
        f"{row['fresh']:.1f}",
        "yes" if row["kept"] else "no",
        f"{row['promoted']} of {row['operators']}",
        f"{row['speeds'][0]:.2f}x",
        f"{row['megabytes'][0]:.2f}",
        f"{row['plain']:.1f}",
        f"{row['speeds'][1]:.2f}x",
        f"{row['megabytes'][1]:.2f}",
    ]


def main() -> None:
    """Measure the requests of each model in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "requests", nargs="+", metavar="NAME:DB,DB", help="a model and its requests, in dB"
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--fresh", type=int, default=1000, help="rows, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="ort-int8", help="preset or file")
    parser.add_argument("--out", type=Path, default=Path("out/accuracy-requests"))
    own, options = (sys.argv[1:], []) if "--" not in sys.argv else (
        sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    )  # fmt: skip
    args = parser.parse_args(own, argparse.Namespace(options=options))
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, _, requests in (one.partition(":") for one in args.requests):
        for number, request in enumerate(requests.split(",")):
            rows.append(measure(args, name, request, number))
            print(rows[-1], file=sys.stderr, flush=True)
    (args.out / "requests.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table([cells(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
