#!/usr/bin/env python3
"""The evaluate.py of a corpus of classifiers: top-1 accuracy, and SQNR of the answers against the float model's.

    evaluate.py NAME [MODEL.onnx] [--no-optimize]
    evaluate.py --calib NAME OUT.npz --samples N

data/NAME.npz beside it has calib/INPUT, eval/INPUT and label/y. Needs numpy and onnxruntime only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent
BATCH = 50


def read_arrays(name: str, kind: str) -> dict[str, np.ndarray]:
    """Arrays of one kind by the name of the input."""
    with np.load(HERE / "data" / f"{name}.npz") as arrays:
        return {key.partition("/")[2]: arrays[key] for key in arrays if key.startswith(f"{kind}/")}


def compute_answers(
    path: Path, feeds: dict[str, np.ndarray], *, optimize: bool = True
) -> np.ndarray:
    """The first output for all samples."""
    options = onnxruntime.SessionOptions()
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    count = len(next(iter(feeds.values())))
    batches = [
        {name: array[i : i + BATCH] for name, array in feeds.items()}
        for i in range(0, count, BATCH)
    ]
    return np.concatenate([session.run(None, batch)[0] for batch in batches]).astype(np.float64)


def main() -> None:
    """Print the figures, or write samples."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--calib", action="store_true")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--no-optimize", action="store_true")
    args = parser.parse_args()
    if args.calib:
        np.savez(
            args.file,
            **{key: each[: args.samples] for key, each in read_arrays(args.name, "calib").items()},
        )
        return
    model, feeds = HERE / "models" / f"{args.name}.onnx", read_arrays(args.name, "eval")
    want = compute_answers(model, feeds)
    found = compute_answers(args.file or model, feeds, optimize=not args.no_optimize)
    error = max(np.sum((found - want) ** 2), 1e-30)
    main = float(np.mean(found.argmax(1) == read_arrays(args.name, "label")["y"]))
    print(
        json.dumps(
            {"main": main, "sqnr_db": round(float(10 * np.log10(np.sum(want**2) / error)), 2)}
        )
    )


if __name__ == "__main__":
    main()
