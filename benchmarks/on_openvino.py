#!/usr/bin/env python3
"""Quantize models for OpenVINO with onnxq and with NNCF, and compare answers and speed in OpenVINO.

    python benchmarks/on_openvino.py MODEL.onnx=DATA.npz … [--samples 32] [--judged 32] [--transformers NAME …]

DATA.npz holds samples by input of the model; the first --samples calibrate, the next --judged are judged (they wrap
around where there are no more). The table has the products and pools in integers of all, the SQNR in dB against the
float model over all judged samples as OpenVINO computes with this CPU's kernels and with those for AVX2, for onnxq's
files also as the file says, and the speed beside float in OpenVINO: one thread, interleaved, float32 where it computes
in float. NNCF quantizes OpenVINO's own model with its preset MIXED; with ModelType.TRANSFORMER where the model's name
is among --transformers. It needs `pip install 'onnxq[openvino]' nncf`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxq
from measure import table
from npu import Samples, measure_db, read_samples
from onnxq.backends import find_engine
from onnxq.backends.engine import TimedModel, Timing
from onnxq.graph import name_nodes
from onnxq.runtime import Session

RECIPES = ("openvino-int8", "ort-int8", "nncf")
HEAD = ["model", "recipe", "int8", "file dB", "OpenVINO dB", "AVX2 dB", "x float", "MB", "s", "peak MB"]
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
# The environment variable by which oneDNN takes older kernels.
ISA = "ONEDNN_MAX_CPU_ISA"


def quantize_with_nncf(source: Path, samples: Samples, target: Path, transformer: bool) -> None:
    """NNCF's file, in OpenVINO's own format."""
    import nncf
    import openvino

    model = openvino.Core().read_model(source)
    kind = nncf.ModelType.TRANSFORMER if transformer else None
    dataset = nncf.Dataset(samples)
    done = nncf.quantize(
        model, dataset, preset=nncf.QuantizationPreset.MIXED, subset_size=len(samples), model_type=kind
    )
    openvino.save_model(done, target, compress_to_fp16=False)


def quantize(recipe: str, source: Path, samples: Samples, target: Path, transformer: bool) -> tuple[float, float]:
    """Write the file of a recipe; returns seconds and the peak of memory in MB."""
    start = time.perf_counter()
    if recipe == "nncf":
        quantize_with_nncf(source, samples, target, transformer)
    else:
        onnxq.quantize(source, samples, recipe, overrides={"latency": False}).save(target, overwrite=True)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def answer(path: Path, samples: Samples, isa: str) -> list[Mapping[str, np.ndarray]]:
    """OpenVINO's answers; isa: the newest kernels, "" for those of this CPU."""
    if isa:
        os.environ[ISA] = isa
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(path), "CPU", SETTINGS)
    names = [value.get_any_name() for value in compiled.outputs]
    return [dict(zip(names, map(np.array, compiled(feeds).values()), strict=True)) for feeds in samples]


def run_apart(function: Callable[..., Any], *arguments: object) -> Any:
    """The result of a function in a fresh process: settings and peaks of memory are those of one file."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def make_rows(
    source: Path, samples: Samples, judged: Samples, out: Path, recipes: Sequence[str], transformer: bool
) -> list[list[str]]:
    """The rows of one model; the reason in the place of figures where there is no file."""
    exact = [dict(Session(source, optimize=False).run(feeds)) for feeds in judged]
    rows, files = {}, {"float": source}
    for recipe in recipes:
        target = out / f"{source.stem}.{recipe}.{'xml' if recipe == 'nncf' else 'onnx'}"
        try:
            seconds, peak = run_apart(quantize, recipe, source, samples, target, transformer)
            computed = [run_apart(answer, target, judged, isa) for isa in ("", "AVX2")]
        except Exception as error:  # whatever a tool raises is the result
            reason = f"fails: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
            rows[recipe] = [source.stem, recipe, reason, *[""] * (len(HEAD) - 3)]
            continue
        said, count = "", ""
        if recipe != "nncf":
            said = f"{measure_db(exact, [Session(target, optimize=False).run(feeds) for feeds in judged], judged):.1f}"
            proof = onnxq.prove(target, overrides={"engine": "openvino"})
            count = f"{sum(node.type == 'int8' for node in proof.nodes)}/{len(proof.nodes)}"
        data = target.with_suffix(".bin") if recipe == "nncf" else target
        figures = [f"{measure_db(exact, answers, judged):.1f}" for answers in computed]
        rows[recipe] = [source.stem, recipe, count, said, *figures, "", f"{data.stat().st_size / 1e6:.2f}",
                        f"{seconds:.0f}", f"{peak:.0f}"]  # fmt: skip
        files[recipe] = target
    proto = name_nodes(onnx.load(source))
    entries = {name: TimedModel(proto, path.resolve(), judged[0]) for name, path in files.items()}
    times = find_engine("openvino").time_models(entries, Timing(seconds=12.0)).eager
    for name in files.keys() - {"float"}:
        rows[name][6] = f"{times[name].speedup(times['float']):.2f}"
    return list(rows.values())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="+", metavar="MODEL.onnx=DATA.npz")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--judged", type=int, default=32)
    parser.add_argument("--transformers", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--out", type=Path, default=Path("out/openvino"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for subject in args.subjects:
        model, _, data = subject.rpartition("=")
        samples = read_samples(Path(data))
        judged = (samples[args.samples :] + samples)[: args.judged]
        transformer = Path(model).stem in args.transformers
        for row in make_rows(Path(model), samples[: args.samples], judged, args.out, args.recipes, transformer):
            rows.append(row)
            print(*row, sep="  ", flush=True)
    print(table(rows, HEAD))


if __name__ == "__main__":
    main()
