#!/usr/bin/env python3
"""float32, float16, ModelOpt and onnxq on TensorRT: times side by side on a GPU, kernels alone without one.

    python benchmarks/gpu.py resnet50 vit_b bert_base --peer modelopt=/venv/bin/python
    python benchmarks/gpu.py --corpus DIR efficientnet_lite0 minilm_l6 --batches 1 32 --write docs/gpu-results.md

A model is NAME of a corpus, MODEL.onnx=DATA.npz, or one of the shapes of `shapes.py`, whose weights are random.
ModelOpt does what it does by itself, float16 around int8; it has an interpreter of its own. Each file of a model is
timed in turn with the others, by `onnxq bench`: the table has CUDA graphs, and how many times as fast as float16 it is.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from measure import Run, onnxq, run, table
from subjects import Subject, brief, report_in, subject

HERE = Path(__file__).resolve().parent
SHAPES = ("resnet50", "vit_b", "bert_base")
HEAD = ["model", "batch", "file", "heavy nodes", "kernels", "moving data"]
TIMES = ["median ms", "p99 ms", "runs/s", "× float16"]
_ROWS = re.compile(r"(<!-- rows: begin -->\n).*?(<!-- rows: end -->)", re.DOTALL)


@dataclass
class Made:
    """The files of one model by name, and why others are not there."""

    files: dict[str, Path] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def keep(self, name: str, path: Path, done: Run) -> None:
        """Take a file if the tool that should make it made it."""
        if done.code or not path.exists():
            self.failed[name] = brief(done.last_line or "no file")
        else:
            self.files[name] = path


def make_subject(item: str, corpus: Path | None, out: Path, count: int) -> Subject:
    """The model that one argument names."""
    if item not in SHAPES:
        return subject(item, corpus, out, count)
    source, data = out / f"{item}.onnx", out / f"{item}.npz"
    run([sys.executable, HERE / "shapes.py", item, source, data]).checked(item)
    return Subject(item, source, data, None)


def make_files(
    one: Subject, out: Path, wanted: Sequence[str], peer: str, options: Sequence[str]
) -> Made:
    """Every file of a model that was asked for."""
    made = Made()

    def convert(name: str, config: str) -> None:
        path = out / f"{one.name}.{name}.onnx"
        made.keep(name, path, one.quantized(path, "--config", config, *options)[0])

    def ask_modelopt() -> None:
        path = out / f"{one.name}.modelopt.onnx"
        path.unlink(missing_ok=True)
        command = [peer, HERE / "peer_tools.py", "modelopt", one.source, one.data, path]
        try:
            made.keep("modelopt", path, run(command, {"PYTHONSAFEPATH": "1"}))
        except OSError as error:  # no such interpreter
            made.failed["modelopt"] = brief(str(error))

    steps: dict[str, Callable[[], None]] = {
        "float32": lambda: made.files.update(float32=one.source),
        "float16": lambda: convert("float16", "trt-fp16"),
        "modelopt": ask_modelopt,
        "onnxq": lambda: convert("onnxq", "trt-int8"),
    }
    for name in wanted:
        steps[name]()
    return made


def bench(one: Subject, made: Made, engine: str, batch: int, seconds: float) -> dict[str, Any]:
    """The document of one `onnxq bench`; its error alone where it has nothing to say."""
    done = run(onnxq("bench", *made.files.values(), "--data", one.data, "--engine", engine, "--batch", str(batch),
                     "--seconds", str(seconds), "--json"))  # fmt: skip
    return report_in(done.output)


def make_rows(name: str, batch: int, made: Made, found: dict[str, Any]) -> list[list[str]]:
    """A line for each file of a model at one batch."""
    models = dict(zip(made.files, found.get("models", ()), strict=False))
    if not models:
        return [
            [name, str(batch), "", brief(str((found.get("error") or {}).get("cause", "failed")))]
        ]
    half = find_median(models.get("float16"))
    rows = []
    for file in (*made.files, *made.failed):
        one = models.get(file)
        if one is None or not one["types"]:
            reason = made.failed.get(file) or (one or {}).get("build", {}).get("reason", "")
            rows.append([name, str(batch), file, brief(str(reason))])
            continue
        types = ", ".join(f"{count} {kind}" for kind, count in one["types"].items())
        row = [name, str(batch), file, types, str(one["kernels"]), str(one["moving"])]
        best = one["graph"] or one["eager"]
        if best is not None:
            own = find_median(one)
            ratio = f"{half / own:.2f}" if half and own else ""
            row += [
                f"{best['median_ms']:.3f}",
                f"{best['p99_ms']:.3f}",
                f"{best['per_second']:.0f}",
                ratio,
            ]
        rows.append(row)
    return rows


def find_median(one: dict[str, Any] | None) -> float:
    """The median of a file's graph, of its launches where it has none; 0 where it was not timed."""
    best = (one or {}).get("graph") or (one or {}).get("eager")
    return float(best["median_ms"]) if best else 0.0


def describe(found: dict[str, Any]) -> str:
    """The line above the table: what ran where."""
    version = str(found.get("version", ""))
    if found.get("device"):
        return f"{version}, {found['device']}, CUDA graphs, {date.today()}."
    return f"{version}, kernels of ahead-of-time builds for compute capability 8.6; nothing was timed. {date.today()}."


def main() -> None:
    """Parse, make, build, time, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="+", help=f"NAME, MODEL.onnx=DATA.npz, or one of {', '.join(SHAPES)}"
    )
    parser.add_argument("--corpus", type=Path, help="folder with models/, data/ and evaluate.py")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--files", nargs="+", default=["float32", "float16", "modelopt", "onnxq"])
    parser.add_argument("--engine", default="tensorrt", choices=["tensorrt", "tensorrt-rtx"])
    parser.add_argument("--peer", default="", help="modelopt=PYTHON: the interpreter that has it")
    parser.add_argument("--effort", default="balanced")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of timing, for each model and batch"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--write", type=Path, help="a page whose rows are replaced")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    peer = args.peer.removeprefix("modelopt=") or sys.executable
    rows: list[list[str]] = []
    told = ""
    for item in args.models:
        one = make_subject(item, args.corpus, args.out.resolve(), args.samples)
        made = make_files(one, args.out.resolve(), args.files, peer, ("--effort", args.effort))
        for batch in args.batches:
            found = bench(one, made, args.engine, batch, args.seconds)
            told = told or (describe(found) if found.get("models") else "")
            rows += make_rows(one.name, batch, made, found)
    width = max(map(len, rows))
    head = (HEAD + TIMES)[: max(width, len(HEAD))]
    text = f"{told}\n\n{table([row + [''] * (len(head) - len(row)) for row in rows], head)}\n"
    print(text)
    if args.write:
        page = args.write.read_text(encoding="utf-8")
        args.write.write_text(
            _ROWS.sub(lambda old: f"{old[1]}{text}{old[2]}", page), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
