#!/usr/bin/env python3
"""Latency of two or more models, interleaved in one process, so that they share whatever else the machine does.

    python benchmarks/latency.py float.onnx int8.onnx --data samples.npz
    python benchmarks/latency.py before=a.onnx after=b.onnx --data samples.npz --length 96 --threads 1 --json

The first model is the reference of the ratios. Only ratios of one run compare; the range beside them is the lowest and
highest over the blocks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import numpy as np

from measure import table
from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.runtime import Latency, Session, time_models


def first_sample(model: Path, data: Path | None, length: int | None) -> dict[str, np.ndarray]:
    """One sample as the model wants it; `length` cuts or repeats the second axis where the model leaves it open."""
    inputs = Session(model).inputs
    sample = dict(next(iter(load_data(data, inputs, DataConfig()).samples())))
    for value in inputs if length else ():
        if value.shape is not None and len(value.shape) > 1 and not isinstance(value.shape[1], int):
            array = sample[value.name]
            sample[value.name] = np.take(array, np.arange(length) % array.shape[1], axis=1)
    return sample


def compare(
    models: dict[str, Path], sample: dict[str, np.ndarray], args: argparse.Namespace
) -> list[dict[str, object]]:
    """One row per model: median and least milliseconds, and how many times faster than the first, with its range."""
    reference = next(iter(models))
    blocks: dict[str, list[Latency]] = {name: [] for name in models}
    ratios: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(args.blocks):  # fresh sessions each time: where memory lands matters too
        found = time_models(models, sample, threads=args.threads, rounds=args.rounds)
        for name in models:
            blocks[name].append(found[name])
            ratios[name].append(found[name].speedup(found[reference]))
    rows: list[dict[str, object]] = []
    for name, own in ratios.items():
        times = {
            "median_ms": median(b.median_ms for b in blocks[name]),
            "min_ms": min(b.min_ms for b in blocks[name]),
        }
        rows.append(
            {
                "name": name,
                **times,
                "ratio": median(own),
                "ratio_low": min(own),
                "ratio_high": max(own),
            }
        )
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="MODEL.onnx or NAME=MODEL.onnx")
    parser.add_argument(
        "--data", type=Path, help="anything `onnxq quantize --data` takes (default: synthetic)"
    )
    parser.add_argument(
        "--length", type=int, help="length of an open second axis, for sequence models"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds in a block")
    parser.add_argument("--blocks", type=int, default=5, help="blocks, each with fresh sessions")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    args = parser.parse_args()
    pairs = [(m.partition("=") if "=" in m else (Path(m).stem, "", m)) for m in args.models]
    models = {name: Path(path) for name, _, path in pairs}
    if len(models) != len(args.models):
        parser.error("two models have the same name: write NAME=MODEL.onnx")
    rows = compare(models, first_sample(next(iter(models.values())), args.data, args.length), args)
    if args.json:
        print(json.dumps(rows))
        return
    cells = [
        [
            str(row["name"]),
            f"{row['median_ms']:.3f}",
            f"{row['min_ms']:.3f}",
            f"{row['ratio']:.2f}x",
            f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
        ]
        for row in rows
    ]
    print(table(cells, ["model", "median ms", "least ms", "speed", "range"]))


if __name__ == "__main__":
    main()
