#!/usr/bin/env python3
"""Quantize models of a corpus for wishes of accuracy, and see on fresh data whether they are kept; print a table.

    python benchmarks/wishes.py --corpus DIR fmnist_resnet:36,38,40 efficientnet_lite0:25 --samples 32 --out out/wishes

Each wish, `--min-sqnr` in dB, has calibration samples of its own, as many as --samples; `benchmarks/corpus.py` says
what a corpus is, whose evaluation data is fresh. Beside each stands the file that the same samples give without a wish.
A wish is kept where exit code 0 comes with at least so many dB on fresh data, or code 4 says that it is not held.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from corpus import calibration, evaluate
from measure import onnxq, run, table
from subjects import report_in

HEAD = ["model", "wish dB", "told dB", "fresh dB", "kept", "float operators", "speed", "MB", "without: fresh dB",
        "speed", "MB"]  # fmt: skip
UNMET = 4


def take_samples(source: Path, target: Path, first: int, count: int) -> Path:
    """Some rows of calibration inputs as a file of their own, beginning anew where they end."""
    with np.load(source) as inputs:
        np.savez(target, **{name: np.take(rows, range(first, first + count), 0, mode="wrap")
                            for name, rows in inputs.items()})  # fmt: skip
    return target


def quantize(args: argparse.Namespace, name: str, data: Path, *wish: str) -> dict[str, Any]:
    """The report of a run, with its exit code and the SQNR on fresh data."""
    source, target = args.corpus / "models" / f"{name}.onnx", args.out / f"{name}.q.onnx"
    options = ["--config", args.config, "--force", "--json", "-o", target, *wish, *args.options]
    done = run(onnxq("quantize", source, "--data", data, *options))
    (args.out / f"{data.stem}{''.join(wish)}.log").write_text(done.output, encoding="utf-8")
    if done.code not in (0, UNMET):
        sys.exit(done.output)
    return {
        **report_in(done.output),
        "exit": done.code,
        "seconds": done.seconds,
        "fresh": evaluate(args.corpus, name, target),
    }


def measure(args: argparse.Namespace, name: str, wish: float, data: Path) -> dict[str, Any]:
    """Everything about one wish."""
    found = quantize(args, name, data, "--min-sqnr", f"{wish:g}")
    plain = quantize(args, name, data)
    account = found["promotion"]
    fresh = found["fresh"]["sqnr_db"]
    return {
        "name": name,
        "wish": wish,
        "met": found["exit"] == 0,
        "told": account["value"],
        "spread": account["spread"],
        "fresh": fresh,
        "kept": found["exit"] == UNMET or fresh >= wish,
        "promoted": account["operators"],
        "operators": account["operators"] + account["left"],
        # Of a file in which nothing is quantized no time is taken.
        "speeds": [one["latency"]["ratio"] if one["latency"] else 1.0 for one in (found, plain)],
        "megabytes": [one["output_bytes"] / 1e6 for one in (found, plain)],
        "plain": plain["fresh"]["sqnr_db"],
        "seconds": found["seconds"],
        "note": account["note"],
    }


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    told = " ± ".join(f"{number:.1f}" for number in (row["told"], row["spread"]) if number is not None)
    return [
        row["name"],
        f"{row['wish']:g}",
        told if row["met"] else f"{told}, not held",
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
    """Measure the wishes of each model in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wishes", nargs="+", metavar="NAME:DB,DB", help="a model and its wishes")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--config", default="ort-int8", help="preset or file")
    parser.add_argument("--out", type=Path, default=Path("out/wishes"))
    own, options = (sys.argv[1:], []) if "--" not in sys.argv else (
        sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    )  # fmt: skip
    args = parser.parse_args(own, argparse.Namespace(options=options))
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, _, wishes in (one.partition(":") for one in args.wishes):
        numbers = [float(wish) for wish in wishes.split(",")]
        whole = calibration(args.corpus, name, args.out, args.samples * len(numbers))
        for k, wish in enumerate(numbers):
            data = take_samples(whole, args.out / f"{name}.{k}.npz", k * args.samples, args.samples)
            rows.append(measure(args, name, wish, data))
            print(rows[-1], file=sys.stderr, flush=True)
    (args.out / "wishes.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table([cells(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
