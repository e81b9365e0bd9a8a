#!/usr/bin/env python3
"""Run onnxruntime's own tests of quantization with `onnxq.compat` in place of `onnxruntime.quantization`.

    python benchmarks/ort_suite.py onnxruntime/test/python/quantization [--only test_qdq.py …] [--failures]

The folder is that of a checkout of onnxruntime, near the version that is installed. Its files are copied to a temporary
folder, where nothing but the import changes, and each runs in a process of its own: once with onnxruntime, once with
onnxq, and once more with onnxq where all operators are named, so that those that int8 would not pay for are quantized,
the helpers that count operators only note what they find, and loaded models have their tensors under onnxruntime's
names: the numbers are compared all the same. A fourth run names MinMax where a test leaves `calibrate_method` out, as
onnxruntime's default is, and onnxq's is not. The table has a line for each file. It needs `pip install parameterized`.

passed      as they are
alone       fails by placement or by names alone: everything else that the test checks holds
ranges      and by ranges chosen by their error, where the test names no method of calibration
placement   the test itself counts operators, or reads a pair that is not there
names       the test reads what stands in a configuration, or the order of initializers
accepted    onnxruntime refuses what the test does, and onnxq does it
numbers     other numbers: ties, a floor of scales, answers nearer to float
other       anything else
theirs      fails with onnxruntime, too, here
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from measure import table

_IMPORT = re.compile(r"onnxruntime(\.| import )quantization\b")
# A stand-in for the package by which their helpers print a model before a test fails.
_PLOT = "def onnx_simple_text_plot(model, **_):\n    return ' '.join(node.op_type for node in model.graph.node)\n"
_LENIENT = """
import importlib

import onnx
import op_test_utils

from onnxq.compat import CalibrationMethod
from onnxq.compat.options import Unasked

def note(name):
    check = getattr(op_test_utils, name)

    def run(*args, **kwargs):
        try:
            check(*args, **kwargs)
        except AssertionError as error:
            print(error)

    setattr(op_test_utils, name, run)

for name in ("check_op_type_count", "check_op_type_order", "check_op_nodes", "check_qtype_by_node_type"):
    note(name)

NAMES = {
    "/scale": "_scale", "/zero_point": "_zero_point", "/quantized": "_quantized",
    "/dequantized": "_DequantizeLinear_Output", "/DequantizeLinear": "_DequantizeLinear",
    "/QuantizeLinear": "_QuantizeLinear",
}

def force(quantize):
    def run(model_input, model_output, *args, **kwargs):
        lists = [kwargs.get(name) for name in ("op_types_to_quantize", "nodes_to_quantize")]
        lists += [arg for arg in args if isinstance(arg, list)]
        if not any(names and not isinstance(names, Unasked) for names in lists):
            graph = (model_input if hasattr(model_input, "graph") else onnx.load(model_input)).graph
            kwargs["op_types_to_quantize"] = sorted({node.op_type for node in graph.node})
        if EXACT and quantize.__name__ == "quantize_static":
            kwargs.setdefault("calibrate_method", CalibrationMethod.MinMax)
        return quantize(model_input, model_output, *args, **kwargs)

    return run

package = importlib.import_module("onnxq.compat")
module = importlib.import_module("onnxq.compat.quantize")
for name in ("quantize_static", "quantize_dynamic"):
    setattr(module, name, force(getattr(module, name)))
    setattr(package, name, getattr(module, name))

def rename(name):
    return next((name.removesuffix(end) + other for end, other in NAMES.items() if name.endswith(end)), name)

def load(*args, **kwargs):
    model = real(*args, **kwargs)
    for tensor in model.graph.initializer:
        tensor.name = rename(tensor.name)
        if tensor.name.endswith(("_scale", "_zero_point")) and tensor.data_type in TYPED:
            values = onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, tensor.data_type, values.shape, values.ravel()))
    for node in model.graph.node:
        node.name = rename(node.name)
        node.input[:] = map(rename, node.input)
        node.output[:] = map(rename, node.output)
    return model

# Types whose values the tests read from fields of their own.
TYPED = [onnx.TensorProto.DataType.Value(name) for name in ("FLOAT", "INT8", "UINT8", "INT16", "UINT16")]
real = onnx.load
onnx.load = onnx.load_model = load
"""
_RUNS = {
    "own": {"ours": True},
    "theirs": {"ours": False},
    "lenient": {"ours": True, "lenient": True},
    "exact": {"ours": True, "lenient": True, "exact": True},
}
# Seconds for a file.
_LIMIT = 1200
# In the text of a failure, the first that matches; else other.
_REASONS = {
    "accepted": r"AssertionError: (\w*(Error|Exception)) not raised|DID NOT RAISE",
    "names": r"q\w\w_config\.|initializer\[\d\]",
    "placement": r"op_type|len\(.*node|node_?(count|cnt)|node, None\)|Unable to check expected shape|StopIteration"
    r"|KeyError: '\w+'|has_relu|zero_types=\[\]|not found in \{|bias_names|already quantized",
    "numbers": r"Not equal to tolerance|_(sc|zp), ",
}


@dataclass
class Outcome:
    """What became of a file's tests. failures: text by test."""

    file: str
    imports: bool = True
    passed: set[str] = field(default_factory=set)
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)


def copy_tests(
    source: Path, target: Path, *, ours: bool, lenient: bool = False, exact: bool = False
) -> list[Path]:
    """Copy the tests, with our import in the place of theirs; returns the files. exact: MinMax where none is named."""
    shutil.copytree(source, target)
    for path in target.glob("*.py") if ours else ():
        text = path.read_text()
        path.write_text(
            _IMPORT.sub(lambda m: f"onnxq{m[1]}compat" + " as quantization" * (m[1] != "."), text)
        )
    if lenient:
        (target / "conftest.py").write_text(f"EXACT = {exact}\n{_LENIENT}")
    plots = target / "onnx_array_api" / "plotting"
    plots.mkdir(parents=True)
    (plots / "text_plot.py").write_text(_PLOT)
    return sorted(target.glob("test_*.py"))


def run_file(path: Path) -> Outcome:
    """Run the tests of one file in a process."""
    log, outcome = path.with_suffix(".xml"), Outcome(path.name)
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, f"--junitxml={log}", path.name]
    try:
        done = subprocess.run(
            command, cwd=path.parent, capture_output=True, text=True, timeout=_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        outcome.failures["(file)"] = f"not done after {_LIMIT} s"
        return outcome
    if not log.exists():
        raise SystemExit(f"{path} does not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    for case in ElementTree.parse(log).iter("testcase"):
        name = case.get("name") or path.name
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        if problem is not None:
            outcome.imports &= bool(case.get("classname"))
            outcome.failures[name] = f"{problem.get('message')}\n{problem.text}"
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed.add(name)
    return outcome


def find_reason(name: str, theirs: Outcome, lenient: Outcome, exact: Outcome) -> str:
    """Why a test fails, by the same test with onnxruntime, without counts and names, and on ranges of MinMax."""
    if name in theirs.failures:
        return "theirs"
    if name not in lenient.failures:
        return "alone"
    if name not in exact.failures:
        return "ranges"
    text = lenient.failures[name]
    return next(
        (reason for reason, pattern in _REASONS.items() if re.search(pattern, text)), "other"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--failures", action="store_true", help="the text of each failure, too")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    runs = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for name, how in _RUNS.items():
            files = copy_tests(options.tests, Path(folder, name), **how)
            runs.append(
                list(
                    pool.map(
                        run_file,
                        [path for path in files if path.name in (options.only or [path.name])],
                    )
                )
            )
    reasons = ("alone", "ranges", *_REASONS, "other", "theirs")
    rows, total = [], Counter[str]()
    for own, theirs, lenient, exact in zip(*runs, strict=True):
        by_test = {name: find_reason(name, theirs, lenient, exact) for name in own.failures}
        counts = Counter(by_test.values())
        counts.update(
            {"imports": int(own.imports), "passed": len(own.passed), "skipped": own.skipped}
        )
        total.update(counts)
        rows.append(
            [
                own.file,
                *(str(counts[head] or "") for head in ("imports", "passed", "skipped", *reasons)),
            ]
        )
        for name, reason in by_test.items() if options.failures else ():
            print(
                f"=== {own.file}::{name} [{reason}]\n{lenient.failures.get(name, own.failures[name])}\n"
            )
    rows.append(["all", *(str(total[head]) for head in ("imports", "passed", "skipped", *reasons))])
    print(table(rows, ["file", "imports", "passed", "skipped", *reasons]))


if __name__ == "__main__":
    main()
