#!/usr/bin/env python3
"""Quantize models for Snapdragon's NPU with onnxq and with ONNX Runtime's recipe, and compare the emulator's answers.

    python benchmarks/npu.py MODEL.onnx=DATA.npz … [--samples 32] [--judged 8] [--recipes ort-a8w8 qnn-mixed …]

DATA.npz holds samples by input of the model; the first --samples calibrate, the next --judged are emulated (they wrap
around where there are no more). A recipe of the form qnn-mixed@45 asks for so many decibels (`--min-sqnr`); ort-a16w8+
preprocesses the model for ONNX Runtime first, without which its recipe takes constants outside initializers, as Paddle
writes them, for activations, and leaves their convolutions in float. Sizes are fixed to those of the samples, for both
tools. The table has the parts of the model on the NPU and the nodes left to the
CPU, the operators that compute in float and in 16 bits, the SQNR in dB against the float model as the file says and as
the NPU computes, over all judged samples, and the same for one against the other. It needs `pip install "onnxq[qnn]"`.
Emulation says nothing of time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.version_converter

import onnxq
from measure import table
from onnxq.backends import find_engine
from onnxq.backends.engine import Job, Kernel
from onnxq.engines.prove.proof import Proof
from onnxq.evaluation.compare import ModelErrors
from onnxq.graph import fix_sizes, name_nodes
from onnxq.runtime import Session

Samples = list[dict[str, np.ndarray]]
RECIPES = ("ort-a8w8", "qnn-int8", "ort-a16w8", "qnn-mixed", "qnn-a16w8")
HEAD = ["model", "recipe", "parts", "on the CPU", "float", "16 bits", "operators", "file dB", "NPU dB", "NPU / file dB",
        "MB", "s"]  # fmt: skip
# The first opset with QuantizeLinear to 16 bits.
OPSET = 21
# Kinds that compute nothing: they move, lay out or convert.
MOVING = (
    "Convert",
    "Reshape",
    "Transpose",
    "StridedSlice",
    "Concat",
    "Quantize",
    "Dequantize",
    "Cast",
    "Gather",
    "Pad",
)


def read_samples(path: Path) -> Samples:
    """The samples of a file, one by one."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored}
    return [
        {name: array[k : k + 1] for name, array in arrays.items()}
        for k in range(len(next(iter(arrays.values()))))
    ]


def lift_constants(source: Path, target: Path) -> None:
    """ONNX Runtime's general preprocessing of a model in an opset that has 16 bits."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(source)
    onnx.save(
        onnx.version_converter.convert_version(model, max(OPSET, model.opset_import[0].version)),
        target,
    )
    # Symbolic shape inference fails on some models whose sizes are fixed already (a ViT of Keras).
    quant_pre_process(target, target, skip_symbolic_shape=True)


def quantize_with_ort(
    source: Path, samples: Samples, target: Path, *, wide: bool, lift: bool
) -> None:
    """ONNX Runtime's own recipe for the NPU, with weights per channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
    from onnxruntime.quantization.execution_providers.qnn import (
        get_qnn_qdq_config,
        qnn_preprocess_model,
    )

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.samples = iter(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.samples, None)

    prepared, bare = target.with_suffix(".prepared.onnx"), target.with_suffix(".bare.onnx")
    if lift:
        lift_constants(source, bare)
    model = onnx.load(bare if lift else source)
    # The NPU's preprocessing ends in a TypeError for models with metadata.
    del model.metadata_props[:]
    onnx.save(model, bare)
    source = prepared if qnn_preprocess_model(bare, prepared) else bare
    activations = QuantType.QUInt16 if wide else QuantType.QUInt8
    config = get_qnn_qdq_config(
        source, Reader(), activation_type=activations, weight_type=QuantType.QInt8, per_channel=True
    )
    quantize(source, target, config)


def quantize(recipe: str, source: Path, samples: Samples, target: Path) -> None:
    """The file of a recipe."""
    if recipe.startswith("ort-"):
        quantize_with_ort(
            source, samples, target, wide="a16w8" in recipe, lift=recipe.endswith("+")
        )
    else:
        preset, _, least = recipe.partition("@")
        overrides = {"latency": False} | ({"min_sqnr": float(least)} if least else {})
        onnxq.quantize(source, samples, preset, overrides=overrides).save(target, force=True)


def emulate(path: Path, samples: Samples) -> list[Mapping[str, np.ndarray]]:
    """The emulator's answers."""
    model = name_nodes(onnx.load(path))
    with (
        tempfile.TemporaryDirectory() as folder,
        find_engine("qnn").open_runner(path.name, model, Job(), Path(folder)) as runner,
    ):
        return [dict(runner.infer(feeds)) for feeds in samples]


def count_types(kernels: tuple[Kernel, ...]) -> Counter[str]:
    """How many operators compute in float, in 16 bits and in fewer; those that only move data are left out."""
    counts: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.moves or kernel.kind in MOVING or not kernel.outputs:
            continue
        dtype = kernel.outputs[0].dtype
        counts["float" if "float" in dtype else "16" if "16" in dtype else "8"] += 1
    return counts


def measure_db(
    wanted: list[Mapping[str, np.ndarray]], got: list[Mapping[str, np.ndarray]], samples: Samples
) -> float:
    """The SQNR of the worst output over all samples."""
    errors = ModelErrors()
    for feeds, exact, answers in zip(samples, wanted, got, strict=True):
        errors.update(feeds, exact, answers)
    return min(output.whole_db for output in errors.results())


def make_row(
    name: str, recipe: str, source: Path, samples: Samples, judged: Samples, out: Path
) -> list[str]:
    """One row of the table; the reason in the place of figures where there is no file or no answer."""
    target, start = out / f"{name}.{recipe}.onnx", time.perf_counter()
    try:
        quantize(recipe, source, samples, target)
        seconds = time.perf_counter() - start
        proof: Proof = onnxq.prove(target, overrides={"engine": "qnn"})
        floats, file = (Session(path, optimize=False) for path in (source, target))
        exact, said = ([dict(session.run(feeds)) for feeds in judged] for session in (floats, file))
        computed = emulate(target, judged)
    except Exception as error:  # whatever either tool raises is the result
        cause = str(error).partition("\n")[0][:90]
        return [name, recipe, f"fails: {type(error).__name__}: {cause}", *[""] * 9]
    counts = count_types(proof.kernels)
    placement = proof.placement
    figures = [
        measure_db(exact, said, judged),
        measure_db(exact, computed, judged),
        measure_db(said, computed, judged),
    ]
    return [
        name,
        recipe,
        str(placement.partitions if placement else 0),
        str(len(placement.left) if placement else 0),
        str(counts["float"]),
        str(counts["16"]),
        str(sum(counts.values())),
        *(f"{figure:.1f}" for figure in figures),
        f"{target.stat().st_size / 1e6:.2f}",
        f"{seconds:.0f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", nargs="+", metavar="MODEL.onnx=DATA.npz")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--judged", type=int, default=8)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--out", type=Path, default=Path("out/npu"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for subject in args.subjects:
        model, _, data = subject.rpartition("=")
        source, samples = Path(model), read_samples(Path(data))
        judged = (samples[args.samples :] + samples)[: args.judged]
        fixed = args.out / f"{source.stem}.fixed.onnx"
        onnx.save(
            fix_sizes(onnx.load(source), {name: value.shape for name, value in samples[0].items()}),
            fixed,
        )
        for recipe in args.recipes:
            row = make_row(source.stem, recipe, fixed, samples[: args.samples], judged, args.out)
            rows.append(row)
            print(*row, sep="  ", flush=True)
    print(table(rows, HEAD))


if __name__ == "__main__":
    main()
