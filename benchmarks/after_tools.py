"""Pairs and notes of bits that are left by the tools that people run on a quantized file.

    python benchmarks/after_tools.py --python TOOLS/bin/python             the table
    python benchmarks/after_tools.py --python TOOLS/bin/python --write     the same, into docs/bits.md

TOOLS is an environment of its own: `pip install onnxslim onnxsim onnxoptimizer onnxscript onnx-graphsurgeon polygraphy
onnxruntime`. The file is that of `bits_forms.py`, in 4 bits, whose second convolution has weights of 6. Pairs are
counted by role and bits. A tool that fails, or whose file ONNX Runtime does not load, has the reason in its row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

import onnxq
from bits_forms import (
    count_kernels,
    describe_answers,
    describe_refusal,
    make_network,
    run_ort,
    show_table,
)
from onnxq.annotate import PairInfo, annotate_model, find_pairs, read_sidecar, write_sidecar

MARKS = ("<!-- tools: begin -->\n", "<!-- tools: end -->")
# By the name of the distribution: code that reads `source` and writes `target`.
_MODEL = "import onnx; model = onnx.load(source); "
_ORT = (
    "import onnxruntime as ort; o = ort.SessionOptions(); o.optimized_model_filepath = target; "
    "o.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_{}; "
    "ort.InferenceSession(source, o, providers=['CPUExecutionProvider'])"
)
_POLYGRAPHY = (
    "import os, subprocess, sys; tool = os.path.join(os.path.dirname(sys.executable), 'polygraphy'); "
    "subprocess.run([tool, 'surgeon', 'sanitize', source, '{}', '-o', target], check=True)"
)
TOOLS = {
    ("onnxslim", ""): "import onnxslim; onnxslim.slim(source, target)",
    ("onnxsim", ""): _MODEL + "import onnxsim; onnx.save(onnxsim.simplify(model)[0], target)",
    ("onnxoptimizer", ""): _MODEL + "import onnxoptimizer; onnx.save(onnxoptimizer.optimize(model), target)",
    ("onnx", "version converter, to opset 23"): _MODEL
    + "from onnx.version_converter import convert_version; onnx.save(convert_version(model, 23), target)",
    ("onnxscript", "optimizer"): _MODEL + "import onnxscript.optimizer as o; onnx.save(o.optimize(model), target)",
    ("onnxruntime", "saved, basic"): _ORT.format("BASIC"),
    ("onnxruntime", "saved, extended"): _ORT.format("EXTENDED"),
    ("onnx-graphsurgeon", "cleanup, toposort"): _MODEL
    + "import onnx_graphsurgeon as gs; onnx.save(gs.export_onnx(gs.import_onnx(model).cleanup().toposort()), target)",
    ("polygraphy", "surgeon sanitize --cleanup"): _POLYGRAPHY.format("--cleanup"),
    ("polygraphy", "surgeon sanitize --fold-constants"): _POLYGRAPHY.format("--fold-constants"),
}  # fmt: skip
HEADER = (
    "| tool | Q and DQ by name | notes in the model | in nodes | bits read | after `annotate-bits` | with the sidecar "
    "| answers | products in int8 |\n|---|---|---|---|---|---|---|---|---|"
)


def run_tool(python: str, code: str, source: Path, target: Path) -> str:
    """Run a tool in its environment. Returns the last line of what it says where it fails, "" where it does not."""
    target.unlink(missing_ok=True)
    command = [python, "-c", f"source, target = {str(source)!r}, {str(target)!r}; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode == 0 and target.is_file():
        return ""
    return (done.stderr.strip() or "it wrote no file").splitlines()[-1]


def find_version(python: str, name: str) -> str:
    """The version of a distribution in the environment of the tools."""
    command = [python, "-c", f"from importlib.metadata import version; print(version({name!r}))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def count_right(expected: Iterable[PairInfo], found: Iterable[PairInfo]) -> str:
    """A cell: how many pairs have the bits that they had."""
    want, got = (Counter((pair.role, pair.bits) for pair in pairs) for pairs in (expected, found))
    return f"{(want & got).total()} of {want.total()}"


def count_kept(before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[str, str, str]:
    """Cells: nodes of pairs that keep their names, notes in the model's metadata and in that of nodes."""
    ours, theirs = (
        {
            node.name: node
            for node in model.graph.node
            if node.op_type in ("QuantizeLinear", "DequantizeLinear")
        }
        for model in (before, after)
    )
    names = ours.keys() & theirs.keys()
    held = {entry.key: entry.value for entry in after.metadata_props}
    notes = len(json.loads(held.get("onnxq.bits", "{}")).keys() & ours.keys())
    inside = sum(
        any(entry.key == "onnxq.bits" for entry in theirs[name].metadata_props) for name in names
    )
    return f"{len(names)} of {len(ours)}", f"{notes} of {len(ours)}", f"{inside} of {len(ours)}"


def make_rows(python: str, folder: Path) -> Iterator[str]:
    """A row for each tool."""
    model, samples = make_network()
    rules = [{"op": "*", "set": {"quantize": True}}, {"tensor": "w1", "set": {"bits": 6}}]
    changes = {
        "weights": {"bits": 4},
        "activations": {"bits": 4},
        "effort": "fast",
        "rules": rules,
        "latency": False,
    }
    file = onnxq.quantize(model, samples, "ort-int8", overrides=changes).model
    source, target, beside = (folder / name for name in ("before.onnx", "after.onnx", "bits.json"))
    onnx.save(file, source)
    pairs, answers = find_pairs(file), run_ort(file, samples, optimize=False)
    beside.write_text(write_sidecar(file, pairs), encoding="utf-8")
    yield HEADER
    for (name, way), code in TOOLS.items():
        title = f"{name} {find_version(python, name)}{way and f', {way}'}"
        refusal = run_tool(python, code, source, target)
        if refusal:
            yield f"| {title} | {describe_refusal(refusal)} |" + " |" * 7
            continue
        after = onnx.load(target)
        restored = (
            annotate_model(after, beside=notes).pairs for notes in (None, read_sidecar(beside))
        )
        cells = [
            *count_kept(file, after),
            *(count_right(pairs, found) for found in (find_pairs(after), *restored)),
            describe_answers(answers, partial(run_ort, after, samples, optimize=False)),
            count_kernels(after, "ort"),
        ]
        yield f"| {title} | {' | '.join(cells)} |"


def main() -> None:
    """Read the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--python", default=sys.executable, help="of the environment of the tools")
    options.add_argument("--write", action="store_true")
    arguments = options.parse_args()
    with TemporaryDirectory() as folder:
        show_table(make_rows(arguments.python, Path(folder)), MARKS, write=arguments.write)


if __name__ == "__main__":
    main()
