#!/usr/bin/env python3
"""Quantize models for onnxruntime-web with onnxq, and compare answers and speed there.

    python benchmarks/on_web.py --corpus DIR efficientnet_lite0 minilm_l6 fmnist_resnet:64 [--length minilm_l6=64]

Models are named as for `peers.py`. The table has the integer kernels of all, the metric of the corpus and the dB that
its scorer finds, the SQNR in dB against float over --judged other samples as the file says and as onnxruntime-web
computes, and the speed beside float in onnxruntime-web on one thread: the median of ratios of processor times, each
file in turns with float, in a process of its own. A model that has its rows in --out is not measured again. It needs
Node.js and the package that docs/web.md names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import onnx

import onnxq
from measure import table
from npu import Samples, measure_db
from onnxq.backends import find_engine
from onnxq.backends.engine import Job
from onnxq.backends.web.engine import Node
from onnxq.config import DataConfig
from onnxq.data import load_data
from onnxq.graph import name_nodes
from onnxq.runtime import Session
from subjects import Subject, subject

RECIPES = ("web-int8", "ort-int8")
HEAD = [
    "model",
    "recipe",
    "int8",
    "metric / dB",
    "file dB",
    "web dB",
    "float ms",
    "x float",
    "MB",
    "s",
]


def answer(path: Path, samples: Samples) -> list[dict[str, np.ndarray]]:
    """The answers of onnxruntime-web."""
    model, engine = name_nodes(onnx.load(path)), find_engine("web")
    with (
        tempfile.TemporaryDirectory() as folder,
        engine.open_runner(path.name, model, Job(), Path(folder)) as runner,
    ):
        return [dict(runner.infer(feeds)) for feeds in samples]


def cut_sample(sample: dict[str, np.ndarray], length: int | None) -> dict[str, np.ndarray]:
    """The first so many tokens of a sample of text; None: all."""
    return {name: value[:, :length] for name, value in sample.items()} if length else sample


def measure_speeds(
    files: dict[str, Path], sample: dict[str, np.ndarray], seconds: float
) -> tuple[float, list[float]]:
    """Milliseconds of the first file, and how many times as fast each is."""
    first, *others = files
    limits = {"warm": 8, "rounds": None, "least": 20, "seconds": seconds, "processor": True}
    ratios = [1.0]
    for other in others:
        # Files of one process share its caches, and the compiler's guesses at what is called often.
        with Node() as node:
            for name in (first, other):
                node.open_session(name, onnx.load(files[name]))
            times = np.array(node.time_sessions([first, other], [sample] * 2, **limits))
        ratios.append(statistics.median(times[0] / times[1]))
    return 1e3 * statistics.median(times[0]), ratios


def choose_judged(item: Subject, args: argparse.Namespace) -> Samples:
    """The samples behind those that calibrate; they wrap around where there are no more."""
    inputs = Session(item.source).inputs
    calibrating = len(load_data(item.data, inputs, DataConfig()))
    more = (
        subject(f"{item.name}:{calibrating + args.judged}", args.corpus, args.out, 0)
        if item.corpus
        else item
    )
    samples = [dict(sample) for sample in load_data(more.data, inputs, DataConfig()).samples()]
    return (samples[calibrating:] + samples)[: args.judged]


def make_rows(item: Subject, judged: Samples, args: argparse.Namespace) -> list[list[str]]:
    """The rows of one model."""
    exact = [dict(Session(item.source, optimize=False).run(feeds)) for feeds in judged]
    files = {"float": item.source}
    rows = [
        [
            item.name,
            "float",
            "",
            str(item.score()),
            "",
            f"{measure_db(exact, answer(item.source, judged), judged):.1f}",
        ]
    ]
    seconds = [0.0]
    for recipe in args.recipes:
        files[recipe] = target = args.out / f"{item.name}.{recipe}.onnx"
        made, _ = item.quantized(target, "--config", recipe)
        seconds.append(made.checked(f"onnxq quantize {item.name}").seconds)
        said = [dict(Session(target, optimize=False).run(feeds)) for feeds in judged]
        kernels = onnxq.prove(target, overrides={"engine": "web"}).nodes
        counts = f"{sum(node.type == 'int8' for node in kernels)}/{len(kernels)}"
        figures = [
            f"{measure_db(exact, answers, judged):.1f}"
            for answers in (said, answer(target, judged))
        ]
        rows.append([item.name, recipe, counts, str(item.score(target)), *figures])
    sample = cut_sample(judged[0], args.length.get(item.name))
    float_ms, speeds = measure_speeds(files, sample, args.seconds)
    for row, path, speed, spent in zip(rows, files.values(), speeds, seconds, strict=True):
        row += [
            f"{float_ms:.2f}",
            f"{speed:.2f}",
            f"{path.stat().st_size / 1e6:.2f}",
            f"{spent:.0f}",
        ]
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--judged", type=int, default=16)
    parser.add_argument(
        "--length", action="append", default=[], metavar="NAME=N", help="tokens of the sample timed"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing a model")
    parser.add_argument("--out", type=Path, default=Path("out/web"))
    args = parser.parse_args()
    args.length = {
        name: int(count) for name, _, count in (each.partition("=") for each in args.length)
    }
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for each in args.models:
        item = subject(each, args.corpus, args.out, args.samples)
        kept = args.out / f"{item.name}.json"
        if not kept.exists():
            kept.write_text(
                json.dumps(make_rows(item, choose_judged(item, args), args)), encoding="utf-8"
            )
        rows += json.loads(kept.read_text(encoding="utf-8"))
    print(table(rows, HEAD))


if __name__ == "__main__":
    main()
