#!/usr/bin/env python3
"""A language model in fewer bits, by onnxq and by other tools: one run, one table.

    python examples/language_model/train.py --out DIR && python examples/language_model/export.py --out DIR
    python benchmarks/language_model.py DIR --modelopt /venv/bin/python

DIR has model.onnx (float, bytes as tokens), train.txt for the rows with data and test.txt for the figures. Every row is
made by a child, the other tools in interpreters of their own; then all files run on the same text side by side. Rows
whose file is there already are not made again, so that a row can be added to a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import run

TOOLS = Path(__file__).with_name("peer_tools.py")
# Windows of training text for rows with data.
SAMPLES = 64


@dataclass(frozen=True)
class Row:
    """One file. config, sets: of onnxq. tool: another one, of peer_tools.py. data: TEXT (to train on) or GENERATED."""

    name: str
    config: str = ""
    sets: tuple[str, ...] = ()
    tool: str = ""
    data: str = ""


TEXT, GENERATED = "text", "self-generated"
SYMMETRIC = ("weights.scheme=symmetric", "weights.signed=true", "weights.storage=int4")
# All products stay in int8, also those that make most of the noise.
WHOLE = ("skip=[sensitive_ops]",)
LEVEL_4 = ("emit=nbits", "accuracy_level=4")
ROWS = (
    Row("dynamic int8", "ort-dynamic"),
    Row("dynamic int8, tables in int8", "ort-dynamic-embeddings"),
    Row("dynamic int8, tables in int8, text of its own", "ort-dynamic-embeddings", WHOLE, data=GENERATED),
    Row("int8 weights", "ort-int8-weights"),
    Row("int4 weights, nearest", "ort-int4-weights", ("effort=fast", "weights.observer=minmax")),
    Row("int4 weights", "ort-int4-weights"),
    Row("int4 weights, symmetric", "ort-int4-weights", SYMMETRIC),
    Row("int4 weights, 4.15 bits on average", "ort-int4-weights", ("weight_bits_budget=4.15",)),
    Row("int4 weights, 5 bits on average", "ort-int4-weights", ("weight_bits_budget=5",)),
    Row("int4 weights, text of its own", "ort-int4-weights", data=GENERATED),
    Row("int4 weights, with data: AWQ alone", "ort-int4-weights", ("skip=[rotation,rounding]",), data=TEXT),
    Row("int4 weights, with data: GPTQ alone", "ort-int4-weights", ("skip=[rotation,smoothquant]",), data=TEXT),
    Row("int4 weights, with data: GPTQ, AWQ", "ort-int4-weights", ("skip=[rotation]",), data=TEXT),
    Row("int4 weights, with data: GPTQ, AWQ, rotation", "ort-int4-weights", data=TEXT),
    Row("int4 weights, with data, symmetric", "ort-int4-weights", SYMMETRIC, data=TEXT),
    Row("int4 weights, text of its own, symmetric", "ort-int4-weights", SYMMETRIC, data=GENERATED),
    Row("int4 weights, with data, float16 beside", "ort-int4-weights", ("high_precision=float16",), data=TEXT),
    Row("int4 weights, with data, MatMulNBits", "ort-int4-weights", ("emit=nbits",), data=TEXT),
    Row("int4 weights, with data, MatMulNBits, level 4", "ort-int4-weights", LEVEL_4, data=TEXT),
    Row("int3 weights, with data", "ort-int4-weights", ("weights.bits=3",), data=TEXT),
    Row("int2 weights, with data", "ort-int4-weights", ("weights.bits=2",), data=TEXT),
    Row("ORT dynamic", tool="ort-dynamic"),
    Row("ORT MatMulNBits, DEFAULT, symmetric", tool="ort-blocks-symmetric"),
    Row("ORT MatMulNBits, DEFAULT", tool="ort-blocks-asymmetric"),
    Row("ORT MatMulNBits, HQQ", tool="ort-blocks-hqq"),
    Row("ORT MatMulNBits, k_quant", tool="ort-blocks-k_quant"),
    # Of ModelOpt 0.47, rtn makes a file that ONNX Runtime 1.32 refuses, and awq_lite fails on this model.
    Row("ModelOpt int4, awq_clip", tool="modelopt-blocks-awq_clip", data=TEXT),
)  # fmt: skip


def name_file(row: Row) -> str:
    """A file name of a row's."""
    return "".join(letter if letter.isalnum() else "-" for letter in row.name) + ".onnx"


def make_file(row: Row, folder: Path, target: Path, modelopt: str) -> None:
    """Let a child quantize; prints its seconds and memory."""
    source, samples = folder / "model.onnx", folder / "samples.npz"
    if row.tool:
        python = modelopt if "modelopt" in row.tool else sys.executable
        done = run([python, TOOLS, row.tool, source, samples, target])
    else:
        text = folder / "train.txt" if row.data == TEXT else row.data
        data = (
            ["--data", text, "--tokenizer", "bytes", "--samples", str(SAMPLES)] if row.data else []
        )
        sets = [part for one in row.sets for part in ("--set", one)]
        command = [
            sys.executable,
            "-m",
            "onnxq",
            "quantize",
            source,
            "-o",
            target,
            "--force",
            "--no-latency",
        ]
        done = run([*command, "--config", row.config, *sets, *data])
    if done.code:
        print(f"{row.name}: failed: {done.last_line}")
        target.unlink(missing_ok=True)
        return
    print(
        f"{row.name}: {done.seconds:.0f} s, {done.peak_mb:.0f} MB; {done.last_line[:100]}",
        flush=True,
    )


def write_samples(folder: Path) -> None:
    """Prompts for the tools that want arrays: as many windows of the same text, with empty caches."""
    code = (
        "import sys, numpy as np; from onnxq.config import DataConfig; from onnxq.data.text import *; "
        "from onnxq.runtime import Session; from pathlib import Path; f = Path(sys.argv[1]); "
        "s = Session(f / 'model.onnx'); p = find_text_inputs(s.inputs, [o.name for o in s.outputs]); "
        "w = choose_windows(f / 'train.txt', load_tokenizer('bytes'), LENGTH, int(sys.argv[2]), 0); "
        "d = [p.make_feeds(one.ids[None]) for one in w]; "
        "np.savez(f / 'samples.npz', **{k: np.stack([one[k] for one in d]) for k in d[0]})"
    )
    run([sys.executable, "-c", code, folder, str(SAMPLES)]).checked("writing samples")


def measure_constants(files: Iterable[str]) -> dict[str, int]:
    """Bytes of all constants of each file, which exporters' notes and names do not count in."""
    code = (
        "import json, sys, onnx; from onnxq.graph.storage import count_model_bytes; "
        "print(json.dumps({f: count_model_bytes(onnx.load(f)) for f in sys.argv[1:]}))"
    )
    sizes: dict[str, int] = json.loads(
        run([sys.executable, "-c", code, *files]).checked("measuring sizes").last_line
    )
    return sizes


def print_table(found: dict[str, Any], names: dict[str, str], constants: dict[str, int]) -> None:
    """The table for people, in Markdown."""
    print(
        f"\n{found['tokens']} bytes in windows of {found['length']}; {found['device']}, {found['threads']} thread(s)\n"
    )
    print("| | weights, MB | file, MB | perplexity | agreement | KL | same tokens of 50 | prompt tokens/s "
          "| generated tokens/s |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for one in found["models"]:
        sizes = constants[one["name"]] / 1e6, one["size"] / 1e6
        figures = (
            *sizes,
            one["perplexity"],
            100 * one["agreement"],
            one["divergence"],
            one["generated"],
        )
        cells = "{:.2f} | {:.2f} | {:.4f} | {:.2f}% | {:.5f} | {:.1f}".format(*figures)
        print(f"| {names[one['name']]} | {cells} | {one['prompt']:.0f} | {one['generation']:.0f} |")


def main() -> None:
    """Make the files, run them, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--modelopt", default="", metavar="PYTHON", help="an interpreter that has nvidia-modelopt"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TEXT", help="rows whose names have one of these"
    )
    parser.add_argument("--windows", type=int, default=400, help="windows of the test")
    given = parser.parse_args()
    made = given.folder / "rows"
    made.mkdir(exist_ok=True)
    write_samples(given.folder)
    names = {str(given.folder / "model.onnx"): "float"}
    for row in ROWS:
        target = made / name_file(row)
        wanted = not given.only or any(text in row.name for text in given.only)
        if not wanted or ("modelopt" in row.tool and not given.modelopt):
            continue
        if not target.exists():
            make_file(row, given.folder, target, given.modelopt)
        if target.exists():
            names[str(target)] = row.name
    command = [
        sys.executable,
        "-m",
        "onnxq",
        "perplexity",
        *names,
        "--data",
        given.folder / "test.txt",
    ]
    asked = [
        "--tokenizer",
        "bytes",
        "--samples",
        str(given.windows),
        "--prompts",
        "32",
        "--json",
        "--quiet",
    ]
    done = run([*command, *asked]).checked("measuring")
    print_table(json.loads(done.output[done.output.index("{") :]), names, measure_constants(names))


if __name__ == "__main__":
    main()
