"""Which engine loads and fuses each form of pairs of few bits, and how near its answers are to numpy's.

    python benchmarks/bits_forms.py                                     the table, of a small network
    python benchmarks/bits_forms.py --write                             the same, into docs/bits.md
    python benchmarks/bits_forms.py --subject MODEL.onnx=DATA.npz       answers and kernels of a model

Weights and activations of W and A bits are written by `onnxq quantize`, then rewritten by `annotate-bits --emit`. A
cell has the products that run in int8, or why the engine refuses the file. For onnx's evaluator in numpy, and for ONNX
Runtime with optimizations off and on, it has the least SQNR in dB against what numpy makes of the file before it was
rewritten ("=": the same bits). Files for TensorRT are those of its own target. It needs `onnxq[ort,trt-rtx,openvino]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import onnxq
from onnxq.annotate import annotate_model
from onnxq.annotate.forms import FORMS, QONNX
from onnxq.graph import ensure_opset
from onnxq.runtime import Session
from subjects import brief

PAGE = Path(__file__).resolve().parent.parent / "docs" / "bits.md"
MARKS = ("<!-- forms: begin -->\n", "<!-- forms: end -->")
# (bits of weights, bits of activations)
WIDTHS = ((4, 8), (8, 4), (4, 4), (3, 3), (2, 8))
# By the preset that files for them are made with.
ENGINES = {"ort": "ort-int8", "openvino": "ort-int8", "tensorrt-rtx": "trt-int8"}
Samples = list[dict[str, np.ndarray]]


def make_network() -> tuple[onnx.ModelProto, Samples]:
    """Three convolutions with a sum, and samples."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,32,8,8] x) => (float[1,32,8,8] y) {
        [first] a = Conv <pads=[1,1,1,1]>(x, w0) b = Relu(a)
        [second] c = Conv <pads=[1,1,1,1]>(b, w1) d = Add(b, c) e = Relu(d) [third] y = Conv(e, w2) }"""
    model, random = parser.parse_model(text), np.random.default_rng(0)
    for name, side in (("w0", 3), ("w1", 3), ("w2", 1)):
        weight = random.standard_normal((32, 32, side, side)) / (6 * side)
        model.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), name))
    return model, [
        {"x": random.standard_normal((1, 32, 8, 8)).astype(np.float32)} for _ in range(16)
    ]


def read_subject(text: str) -> tuple[onnx.ModelProto, Samples]:
    """The model and the first samples of MODEL.onnx=DATA.npz."""
    path, _, data = text.partition("=")
    model = onnx.load(path)
    with np.load(data) as file:
        # Those to calibrate on stand first, in a folder of their own.
        names = {
            value.name: next(key for key in file if key.endswith(value.name))
            for value in model.graph.input
        }
        arrays = {name: file[key] for name, key in names.items()}
    return model, [{name: array[k : k + 1] for name, array in arrays.items()} for k in range(16)]


def measure_db(expected: np.ndarray, got: np.ndarray) -> float:
    """SQNR in dB; infinite for equal bits."""
    noise = float(np.square(expected.astype(np.float64) - got).sum())
    return (
        10 * np.log10(float(np.square(expected.astype(np.float64)).sum()) / noise)
        if noise
        else np.inf
    )


class Quant(OpRun):
    """The operator of QONNX, as its specification has it."""

    op_domain = QONNX

    def _run(
        self, *inputs: np.ndarray, signed: int = 1, narrow: int = 0, **_: object
    ) -> tuple[np.ndarray, ...]:
        x, scale, zero, bits = inputs
        low = -(2 ** (bits - 1)) + narrow if signed else 0.0
        high = 2 ** (bits - 1) - 1 if signed else 2**bits - 1 - narrow
        codes = np.clip(np.rint(x / scale + zero), low, high)
        return (((codes - zero) * scale).astype(x.dtype),)


def run_numpy(model: onnx.ModelProto, samples: Samples) -> list[np.ndarray]:
    """The answers of onnx's evaluator, which has these operators from opset 21 on."""
    evaluator = ReferenceEvaluator(ensure_opset(model, 21), new_ops=[Quant])
    return [evaluator.run(None, sample)[0] for sample in samples]


def run_ort(model: onnx.ModelProto, samples: Samples, optimize: bool) -> list[np.ndarray]:
    """The answers of ONNX Runtime."""
    session = Session(model, optimize=optimize)
    return [next(iter(session.run(sample).values())) for sample in samples]


def describe_answers(answers: list[np.ndarray], run: Callable[[], list[np.ndarray]]) -> str:
    """A cell: the least SQNR against numpy's answers."""
    try:
        least = min(measure_db(want, got) for want, got in zip(answers, run(), strict=True))
    except onnxq.errors.OnnxqError as error:
        return describe_refusal(error.cause)
    return "=" if least == np.inf else f"{least:.0f} dB"


def describe_refusal(reason: str) -> str:
    """A cell of an engine that does not load the file."""
    return f"refused: {brief(' '.join(reason.split()), 60)}"


def count_kernels(model: onnx.ModelProto, engine: str) -> str:
    """A cell: how many of the products run in int8."""
    try:
        proof = onnxq.prove(model, overrides={"engine": engine})
    except onnxq.errors.OnnxqError as error:
        return describe_refusal(error.cause)
    if not proof.built:
        return describe_refusal(proof.build.reason)
    fused = sum(node.runs_in("int8") for node in proof.nodes)
    return f"{fused} of {len(proof.nodes)} in int8"


def quantize_network(
    model: onnx.ModelProto, samples: Samples, preset: str, bits: tuple[int, int]
) -> onnx.ModelProto:
    """The model in so many bits of weights and of activations, all of it."""
    chosen = {"weights": {"bits": bits[0]}, "activations": {"bits": bits[1]}, "effort": "fast"}
    settings = onnxq.load_config(
        preset, {**chosen, "rules": [{"op": "*", "set": {"quantize": True}}]}
    )
    return onnxq.quantize(model, samples, settings, overrides={"latency": False}).model


def make_rows(model: onnx.ModelProto, samples: Samples) -> Iterator[str]:
    """A row for each pair of widths and each form."""
    yield f"| weights, activations | form | numpy | ORT off | ORT on | {' | '.join(ENGINES)} |"
    yield "|---" * (5 + len(ENGINES)) + "|"
    for bits in WIDTHS:
        files = {
            preset: quantize_network(model, samples, preset, bits)
            for preset in set(ENGINES.values())
        }
        answers = run_numpy(files["ort-int8"], samples)
        for form in FORMS:
            written = {
                preset: annotate_model(file, form=form).model for preset, file in files.items()
            }
            file = written["ort-int8"]
            cells = [
                describe_answers(answers, partial(run_numpy, file, samples)),
                describe_answers(answers, partial(run_ort, file, samples, optimize=False)),
                describe_answers(answers, partial(run_ort, file, samples, optimize=True)),
                *(count_kernels(written[preset], engine) for engine, preset in ENGINES.items()),
            ]
            yield f"| W{bits[0]}A{bits[1]} | {form} | {' | '.join(cells)} |"


def show_table(rows: Iterable[str], marks: tuple[str, str], *, write: bool) -> None:
    """Print the lines of a table as they come. write: put them between two marks of the page, too."""
    lines = []
    for line in rows:
        print(line, flush=True)
        lines.append(f"{line}\n")
    if write:
        before, rest = PAGE.read_text(encoding="utf-8").split(marks[0])
        _, after = rest.split(marks[1])
        PAGE.write_text(f"{before}{marks[0]}{''.join(lines)}{marks[1]}{after}", encoding="utf-8")


def main() -> None:
    """Read the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--subject", metavar="MODEL.onnx=DATA.npz")
    options.add_argument("--write", action="store_true")
    arguments = options.parse_args()
    model, samples = read_subject(arguments.subject) if arguments.subject else make_network()
    show_table(make_rows(model, samples), MARKS, write=arguments.write)


if __name__ == "__main__":
    main()
