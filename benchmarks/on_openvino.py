#!/usr/bin/env python3
"""Quantize a corpus for OpenVINO with onnxq and with NNCF, and compare metrics, answers and speed in OpenVINO.

    python benchmarks/on_openvino.py --corpus DIR [NAME …] [--samples 32] [--transformers NAME …] [--out out/openvino]

A corpus is the folder that corpus.py describes. The table has, for each file: the layers in integers of all products
and pools; the metric and the SQNR in dB against float, on all of the corpus's data, as the file says (ONNX Runtime with
optimizations off) and as OpenVINO computes on each kind of CPU; and there the speed beside float. --isa names the kinds
by the newest kernels that oneDNN may take; `own` is this machine as it is, `avx2` with newer instructions hidden from
all libraries (tests/cpus/avx2.py). Times are of one thread, float32 where it computes in float, batch 1: the median of
ratios over many short rounds, in each of which all files of a model run once, and the ratio of the fastest tenths,
which other work on the machine moves less. NNCF quantizes OpenVINO's own model with its preset MIXED, on the same
samples; with ModelType.TRANSFORMER where the model's name is among --transformers.

What is done is kept in OUT/rows.jsonl, step by step, times last, and not done again: run the same command once more to
go on, or to print the table. Remove lines to have them measured anew. Needs `pip install "onnxq[openvino]" nncf`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from corpus import calibration
from measure import run, table
from npu import Samples, read_samples

RECIPES = ("openvino-int8", "ort-int8", "nncf")
# The environment variable by which oneDNN takes older kernels. OpenVINO has others that do not follow it: with AVX2
# ppocrv4_rec ends in a crash, float as quantized.
ISA, OWN, HIDDEN = "ONEDNN_MAX_CPU_ISA", "own", "avx2"
HERE = Path(__file__).resolve().parent
SHIM = HERE / "openvino_session"
# Seconds after which one step is given up.
PATIENCE = 3600.0
# Seconds of timing for each kind of CPU, and the fewest and most rounds of it.
TIMING, FEWEST, MOST = 25.0, 60, 1500
Row = dict[str, Any]


def quantize_with_nncf(source: Path, samples: Samples, target: Path, transformer: bool) -> None:
    """NNCF's file, in OpenVINO's own format."""
    import nncf
    import openvino

    model = openvino.Core().read_model(source)
    kind = nncf.ModelType.TRANSFORMER if transformer else None
    dataset = nncf.Dataset(samples)
    done = nncf.quantize(
        model,
        dataset,
        preset=nncf.QuantizationPreset.MIXED,
        subset_size=len(samples),
        model_type=kind,
    )
    openvino.save_model(done, target, compress_to_fp16=False)


def quantize(
    recipe: str, source: Path, samples: Samples, target: Path, transformer: bool
) -> tuple[float, float]:
    """Write the file of a recipe; returns seconds and the peak of memory in MB."""
    import onnxq

    start = time.perf_counter()
    if recipe == "nncf":
        quantize_with_nncf(source, samples, target, transformer)
    else:
        onnxq.quantize(source, samples, recipe, overrides={"latency": False}).save(
            target, force=True
        )
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def count_integers(target: Path) -> str:
    """How many products and pools OpenVINO computes in integers, of all."""
    import onnxq

    nodes = onnxq.prove(target, overrides={"engine": "openvino"}).nodes
    return f"{sum(node.type == 'int8' for node in nodes)}/{len(nodes)}"


def make_env(isa: str, out: Path) -> dict[str, str]:
    """The variables by which a process computes on a kind of CPU."""
    if isa in ("", OWN):
        return {}
    if isa != HIDDEN:
        return {ISA: isa}
    sys.path.append(str(HERE.parent))
    from tests.cpus.avx2 import prepare

    folder = out / HIDDEN
    folder.mkdir(exist_ok=True)
    return dict(prepare(folder))


def time_files(
    files: Mapping[str, Path], source: Path, feeds: Mapping[str, np.ndarray], env: dict[str, str]
) -> Row:
    """The speed of files beside the one called float: median and quartiles of the ratios, and that of fast runs."""
    from onnxq.backends import find_engine
    from onnxq.backends.engine import TimedModel, Timing
    from onnxq.graph import name_nodes

    os.environ.update(env)
    proto, engine = name_nodes(onnx.load(source)), find_engine("openvino")
    entries = {name: TimedModel(proto, path.resolve(), feeds) for name, path in files.items()}
    first = engine.time_models(entries, Timing(rounds=5)).eager
    # Short runs repeat until a measurement takes two milliseconds.
    each = sum(max(2.0, times.median_ms) for times in first.values()) / 1e3
    rounds = int(np.clip(TIMING / each, FEWEST, MOST))
    times = engine.time_models(entries, Timing(rounds=rounds, seconds=10 * TIMING)).eager
    floats = np.array(times["float"].times_ms)
    shares = {}
    for name, row in times.items():
        quartiles = np.quantile(floats / np.array(row.times_ms), (0.5, 0.25, 0.75))
        shares[name] = np.append(
            quartiles, np.quantile(floats, 0.1) / np.quantile(row.times_ms, 0.1)
        )
    return {
        "ms": times["float"].median_ms,
        "rounds": rounds,
        "x": {name: x.tolist() for name, x in shares.items()},
    }


def run_apart(function: Callable[..., Any], *arguments: object) -> Any:
    """The result of a function in a fresh process: settings and peaks of memory are those of one file."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, arguments).get(PATIENCE)


def score(args: argparse.Namespace, name: str, model: Path, isa: str) -> Row:
    """Metric and SQNR in dB of a file on the corpus's data. isa: "" as the file says, else in OpenVINO."""
    env = make_env(isa, args.out)
    if isa:
        env["PYTHONPATH"] = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")])
    options = [] if isa else ["--no-optimize"]
    done = run([sys.executable, args.corpus / "evaluate.py", name, model, *options], env).checked(
        "evaluate.py"
    )
    result = json.loads(done.last_line)
    return {"metric": result["main"], "dB": result["sqnr_db"]}


def explain(error: BaseException) -> str:
    """What a tool raised, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A child's last line has the cause, the first the command.
    return f"{type(error).__name__}: {lines[-1][:160] if lines else ''}"


class Journal:
    """Rows by their keys, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows: dict[tuple[str, str], Row] = {
            (row["model"], row["step"]): row for row in map(json.loads, lines)
        }

    def add(self, model: str, step: str, make: Callable[[], Row]) -> Row:
        """The row of a step: the one that is there, else one made now; {"fails": reason} where it cannot be."""
        if (model, step) not in self.rows:
            try:
                result = make()
            except (Exception, SystemExit) as error:  # whatever a tool raises is the result
                result = {"fails": explain(error)}
            self.rows[model, step] = {"model": model, "step": step, **result}
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self.rows[model, step]) + "\n")
            print(*(f"{key}={value}" for key, value in self.rows[model, step].items()), flush=True)
        return self.rows[model, step]


def name_file(name: str, recipe: str, args: argparse.Namespace) -> Path:
    """The file of a recipe."""
    return args.out / f"{name}.{recipe}.{'xml' if recipe == 'nncf' else 'onnx'}"


def measure_quality(name: str, args: argparse.Namespace, journal: Journal) -> None:
    """Make the files of one model, and score them."""
    source = (args.corpus / "models" / f"{name}.onnx").resolve()
    samples = read_samples(calibration(args.corpus, name, args.out, args.samples))
    files = {"float": source}

    def make_file(recipe: str, target: Path) -> Row:
        seconds, peak = run_apart(
            quantize, recipe, source, samples, target, name in args.transformers
        )
        data = target.with_suffix(".bin") if recipe == "nncf" else target
        row = {"s": seconds, "peak MB": peak, "MB": data.stat().st_size / 1e6}
        return row if recipe == "nncf" else {**row, "int8": run_apart(count_integers, target)}

    for recipe in args.recipes:
        target = name_file(name, recipe, args)
        if "fails" not in journal.add(name, recipe, lambda r=recipe, t=target: make_file(r, t)):
            files[recipe] = target
    for recipe, file in files.items():
        for isa in ("", *args.isa) if recipe not in ("nncf", "float") else args.isa:
            step = f"{recipe} {isa or 'file'}"
            journal.add(name, step, lambda f=file, i=isa: score(args, name, f, i))


def measure_times(name: str, args: argparse.Namespace, journal: Journal) -> None:
    """Time the files of one model side by side, on each kind of CPU."""
    source = (args.corpus / "models" / f"{name}.onnx").resolve()
    made = [recipe for recipe in args.recipes if "s" in journal.rows[name, recipe]]
    files = {"float": source, **{recipe: name_file(name, recipe, args) for recipe in made}}
    (feeds,) = read_samples(calibration(args.corpus, name, args.out, args.samples))[:1]
    for isa in args.isa:
        env = make_env(isa, args.out)
        journal.add(
            name, f"times {isa}", lambda e=env: run_apart(time_files, files, source, feeds, e)
        )


def make_rows(name: str, args: argparse.Namespace, journal: Journal) -> list[list[str]]:
    """The rows of one model in the table."""

    def find(step: str) -> Row:
        return journal.rows.get((name, step), {})

    def show_quality(recipe: str, isa: str) -> str:
        row = find(f"{recipe} {isa or 'file'}")
        return (
            f"{row['metric']:.4f} / {row['dB']:.1f}"
            if "dB" in row
            else ("" if not row else "fails")
        )

    def show_speed(recipe: str, isa: str) -> str:
        times = find(f"times {isa}").get("x", {}).get(recipe)
        return "" if times is None else f"{times[0]:.2f} / {times[3]:.2f}"

    rows = []
    for recipe in args.recipes:
        row = find(recipe)
        if "s" not in row:
            rows.append([name, recipe, row.get("fails", ""), *[""] * (2 * len(args.isa) + 4)])
            continue
        cells = [
            cell
            for isa in args.isa
            for cell in (show_quality(recipe, isa), show_speed(recipe, isa))
        ]
        figures = [f"{row['MB']:.2f}", f"{row['s']:.0f}", f"{row['peak MB']:.0f}"]
        rows.append([name, recipe, row.get("int8", ""), show_quality(recipe, ""), *cells, *figures])
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="models of the corpus; all where none is named"
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--transformers", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--isa", nargs="+", default=["AVX512_CORE_VNNI", HIDDEN])
    parser.add_argument("--out", type=Path, default=Path("out/openvino"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.out = args.out.resolve()
    names = args.names or sorted(path.stem for path in (args.corpus / "models").glob("*.onnx"))
    journal = Journal(args.out / "rows.jsonl")
    for step in (measure_quality, measure_times):
        for name in names:
            step(name, args, journal)
    kinds = [
        column for isa in args.isa for column in (f"{isa}: metric / dB", "x float, median / fast")
    ]
    head = ["model", "recipe", "int8", "file: metric / dB", *kinds, "MB", "s", "peak MB"]
    print(table([row for name in names for row in make_rows(name, args, journal)], head))


if __name__ == "__main__":
    main()
