"""What OpenVINO makes of single operators between pairs, and how near its answers are to the file's.

    python benchmarks/openvino_patterns.py                     all patterns, as a table
    python benchmarks/openvino_patterns.py --only Conv Softmax patterns whose names hold one of these words
    python benchmarks/openvino_patterns.py --write             all, into docs/engines.md

The patterns are those of npu_cases.py, with 8-bit activations. It needs `pip install "onnxq[openvino]"`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from npu_cases import PATTERNS, Pattern
from npu_patterns import (
    PAGE,
    Case,
    choose_sites,
    list_results,
    make_values,
    measure,
    quantize_graph,
    run_cpu,
    run_float,
)
from onnxq.numerics.rounding import dequantize

MARKS = ("<!-- openvino: begin -->\n", "<!-- openvino: end -->")
COLUMNS = ("u8", "i8")
# Layers of the runtime graph that only lay out, convert or hold data.
MOVING = ("Input", "Output", "Const", "Reorder", "Reshape", "Convert", "Broadcast")
# Patterns of widths that no kernel of OpenVINO's has beside integers.
LEFT_OUT = ("u16", "i16", "blocks")


def run_openvino(model: bytes, feeds: dict[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    """The layers that compute, with the type they compute in, and the first answer."""
    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(core.read_model(model), "CPU", settings)
    layers = []
    for layer in compiled.get_runtime_model().get_ordered_ops():
        info = layer.get_rt_info()
        kind = info["layerType"].astype(str)
        if kind not in MOVING:
            number = (
                "int8"
                if info["primitiveType"].astype(str).lower().endswith(("i8", "u8"))
                else "float"
            )
            layers.append(f"{kind} {number}")
    return list(dict.fromkeys(layers)), np.array(compiled(feeds)[0])


def describe_case(pattern: Pattern, kind: str, weight: str, values: dict[str, np.ndarray]) -> str:
    """A cell: the layers, and the dB against ONNX Runtime's answer with optimizations off."""
    case = Case(pattern, kind, weight)
    sites = choose_sites(case, values)
    model, feeds = quantize_graph(case, values, sites)
    try:
        layers, answer = run_openvino(model, feeds)
    except Exception as error:  # its kinds have no common base
        # Names that it makes up end with a count of all nodes so far.
        words = re.sub(r"_\d+'", "'", " ".join(str(error).split()))
        return f"refused: {words[-90:]}".replace("|", "/")
    name, expected = list_results(pattern)[0], run_cpu(model, feeds)[0]
    if name in sites.specs:
        expected, answer = (
            dequantize(codes, sites.qparams[name], sites.specs[name])
            for codes in (expected, answer)
        )
    figure = measure(expected, answer)
    return f"{', '.join(layers) or 'moved'}; {'=' if figure == 200 else f'{figure:.0f}'}"


def make_rows(words: list[str]) -> Iterator[str]:
    """The rows of the patterns whose names hold one of the words; without words, of all."""
    for pattern in PATTERNS:
        if any(part in pattern.name for part in LEFT_OUT) or (
            words and not any(word in pattern.name for word in words)
        ):
            continue
        values = run_float(pattern, make_values(pattern))
        for weight in (
            weight for weight in pattern.weights if "16" not in weight and "4" not in weight
        ):
            cells = [describe_case(pattern, kind, weight, values) for kind in COLUMNS]
            yield f"| {pattern.name} | {weight} | {' | '.join(cells)} |"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    text = (
        "\n".join(
            ["| pattern | weight | u8 | i8 |", "|---|---|---|---|", *make_rows(arguments.only)]
        )
        + "\n"
    )
    if not arguments.write:
        print(text)
        return
    before, rest = Path(PAGE).read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}{text}{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
