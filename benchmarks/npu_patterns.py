"""What Qualcomm's NPU (HTP) does with single operators between pairs, by its own compiler and emulator on x86.

    python benchmarks/npu_patterns.py                     all patterns, as a table
    python benchmarks/npu_patterns.py --only Conv Softmax patterns whose names hold one of these words
    python benchmarks/npu_patterns.py --write             all, into docs/engines.md
    python benchmarks/npu_patterns.py --json FILE         all that is known of each, a line a file

Each pattern (npu_cases.py) is a graph of one or a few operators. Its float tensors get pairs of the row's and the
column's types. onnxruntime-qnn compiles the file without a fallback to the CPU and runs it in its emulator
(npu_emulator.py). The result is compared with ONNX Runtime's answer to the same file, and with the float graph's.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from npu_cases import ACTIVATIONS, PATTERNS, Pattern, Shape, choose_weight_spec
from npu_emulator import Emulator, Reply, Values
from onnxq.numerics.ranges import bias_qparams, qparams_from_range
from onnxq.numerics.rounding import dequantize, quantize
from onnxq.numerics.weights import weight_qparams
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec

PAGE = Path(__file__).resolve().parents[1] / "docs" / "engines.md"
MARKS = ("<!-- npu: begin -->\n", "<!-- npu: end -->")
# An answer counts as wrong where it is below so many dB against float, and so many farther from it than the file's own.
BROKEN, TOLERANCE = 30.0, 6.0
# Codes of QNN's data types (QnnTypes.h); fixed-point ones by the names of npu_cases.py.
TYPES = {
    0x0408: "u8", 0x0308: "i8", 0x0416: "u16", 0x0316: "i16", 0x0332: "i32", 0x0304: "i4", 0x0404: "u4",
    0x0232: "float32", 0x0216: "float16", 0x0032: "int32", 0x0064: "int64", 0x0132: "uint32", 0x0508: "bool",
}  # fmt: skip
# QNN's operators that only change the layout.
LAYOUT = ("Transpose", "Reshape")


@dataclass(frozen=True)
class Case:
    """One file: a pattern with the types of its pairs."""

    pattern: Pattern
    activation: str
    weight: str


@dataclass(frozen=True)
class Sites:
    """The float tensors of a case that get pairs: specs and numbers by name."""

    specs: Mapping[str, QuantSpec]
    qparams: Mapping[str, QParams]


@dataclass
class Outcome:
    """What became of a case.

    nodes: of QNN, with the types that they read and write. reason: why it is not on the NPU; "" where it is.
    against_file, against_float: SQNR in dB of the first result. file_against_float: the same of ONNX Runtime's.
    differences: by how many codes it is off from ONNX Runtime's, and how often.
    """

    name: str
    activation: str
    weight: str
    nodes: list[str] = field(default_factory=list)
    reason: str = ""
    against_file: float = 0.0
    against_float: float = 0.0
    file_against_float: float = 0.0
    differences: dict[int, int] = field(default_factory=dict)

    @property
    def operators(self) -> list[str]:
        """QNN's operators, each once; those of layout only where there is no other."""
        names = list(dict.fromkeys(node.partition("(")[0] for node in self.nodes))
        return [name for name in names if name not in LAYOUT] or names

    @property
    def is_float(self) -> bool:
        """True where a node computes in float."""
        return any("float" in node for node in self.nodes)


def make_values(pattern: Pattern) -> Values:
    """Inputs and constants of a pattern."""
    rng = np.random.default_rng(0)
    values: Values = {}
    for name, shape in pattern.shapes.items():
        drawn = rng.normal(0, 1, shape).clip(-3, 3)
        if name[0] == "x":
            values[name] = np.abs(drawn) + pattern.low if pattern.low > 0 else drawn
        else:
            special = {"f0": 0 * drawn, "f1": np.abs(drawn) + 0.5, "f2": 0 * drawn + 2}
            values[name] = special.get(name, drawn / 2)
    if "c" in pattern.fixed:  # an exponent
        values["c"] = np.full(pattern.shapes["c"], 2.0)
    floats = {name: np.asarray(value, np.float32) for name, value in values.items()}
    kinds = {"m": np.int32}
    return floats | {
        name: np.asarray(value, kinds.get(name[0], np.int64))
        for name, value in pattern.integers.items()
    }


def parse_nodes(pattern: Pattern) -> list[onnx.NodeProto]:
    """The nodes of the float graph."""
    body = pattern.body or "y = Identity (x)"
    return list(onnx.parser.parse_graph(f"g () => () {{ {body} }}").node)


def run_float(pattern: Pattern, values: Values) -> Values:
    """Every float tensor of the graph, computed in float."""
    nodes = parse_nodes(pattern)
    names = [name for node in nodes for name in node.output]
    model = make_model(nodes, pattern, values, names)
    results = run_cpu(model, list_feeds(values))
    return values | dict(zip(names, results, strict=True))


def list_feeds(values: Values) -> Values:
    """Those of the values that are inputs of the graph."""
    return {name: value for name, value in values.items() if name[0] in "xnm"}


def make_model(
    nodes: list[onnx.NodeProto],
    pattern: Pattern,
    values: Values,
    outputs: list[str],
    packed: Mapping[str, TensorProto] = {},
    shapes: Mapping[str, Shape] = {},
) -> bytes:
    """The file of these nodes; `values` are inputs or constants by their names, `packed` constants of other types.

    shapes: of computed float tensors, since ONNX cannot infer all.
    """
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
        for name, value in list_feeds(values).items()
    ]
    constants = [
        numpy_helper.from_array(value, name)
        for name, value in values.items()
        if name[0] not in "xnm"
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [onnx.ValueInfoProto(name=name) for name in outputs],
        constants + list(packed.values()),
    )
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    )
    opset = helper.make_opsetid("", pattern.opset)
    model = helper.make_model(
        graph, opset_imports=[opset], ir_version=10 if pattern.opset < 23 else 11
    )
    return onnx.shape_inference.infer_shapes(model, data_prop=True).SerializeToString()


def run_cpu(model: bytes, feeds: Values) -> list[np.ndarray]:
    """ONNX Runtime's answer, optimizations off."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)


def choose_sites(case: Case, values: Values) -> Sites:
    """The pairs of a case, with scales from the values of its tensors."""
    pattern, specs, numbers = case.pattern, {}, {}
    floats = [
        name for name, value in values.items() if value.dtype == np.float32 and name[0] not in "_f"
    ]
    # Biases last: their scales are products.
    for name in sorted(
        floats,
        key=lambda name: (pattern.types.get(name) == "i32", name == "b", name in pattern.same),
    ):
        kind = pattern.types.get(name, case.activation)
        if kind == "float":
            continue
        if name == "b" or kind == "i32":
            factor = "w" if "w" in numbers else "c"
            weight = numbers[factor]
            # A channel of a weight in blocks has many scales; the largest of all does.
            weight = (
                replace(weight, scale=weight.scale.max()) if specs[factor].has_blocks else weight
            )
            numbers[name] = bias_qparams(numbers["x"], weight, values[name].size)
            grain = PerChannel(0) if numbers[name].scale.ndim else PerTensor()
            specs[name] = QuantSpec(bits=32, granularity=grain)
        elif name == "w":
            specs[name] = choose_weight_spec(case.weight, pattern.axis)
            numbers[name] = weight_qparams(values[name], specs[name])
        else:
            specs[name] = ACTIVATIONS[kind]
            low, high = (
                values[pattern.same.get(name, name)].min(),
                values[pattern.same.get(name, name)].max(),
            )
            numbers[name] = qparams_from_range(low, high, specs[name])
        if name in pattern.fixed:
            scale, zero = pattern.fixed[name][case.activation]
            numbers[name] = QParams(np.asarray(scale), np.asarray(zero, np.int32))
    return Sites(specs, numbers)


def quantize_graph(case: Case, values: Values, sites: Sites) -> tuple[bytes, Values]:
    """The file with pairs, whose inputs and results are integers, and what it is fed with."""
    pattern, specs, nodes = case.pattern, sites.specs, parse_nodes(case.pattern)
    computed = {name for node in nodes for name in node.output}
    read = {name for node in nodes for name in node.input}
    stored = {
        name: value for name, value in values.items() if name not in computed and name not in specs
    }
    packed: dict[str, TensorProto] = {}
    graph: list[onnx.NodeProto] = []
    for name, spec in specs.items():
        qparams, number = sites.qparams[name], getattr(TensorProto, spec.storage.upper())
        scale, zero, code = f"{name}_scale", f"{name}_zero", f"{name}_q"
        packed[scale] = numpy_helper.from_array(np.asarray(qparams.scale, np.float32), scale)
        packed[zero] = helper.make_tensor(
            zero, number, qparams.zero_point.shape, qparams.zero_point.ravel().tolist()
        )
        if name in computed:
            continue
        graph.append(make_half("DequantizeLinear", name, spec))
        codes = quantize(values[name], qparams, spec)
        if name[0] == "x":
            stored[code] = codes
        else:
            packed[code] = helper.make_tensor(code, number, codes.shape, codes.ravel().tolist())
    for node in nodes:
        node.input[:] = [f"{name}_dq" if name in specs else name for name in node.input]
        graph.append(node)
        for name in filter(specs.__contains__, node.output):
            graph.append(make_half("QuantizeLinear", name, specs[name]))
            if name in read:
                graph.append(make_half("DequantizeLinear", name, specs[name]))
    if not pattern.body:
        graph = [node for node in graph if node.op_type != "Identity"]
        graph[-1].input[0] = "x_dq"
    results = [f"{name}_q" if name in specs else name for name in list_results(pattern)]
    shapes = {name: values[name].shape for name in computed if values[name].dtype == np.float32}
    return make_model(graph, pattern, stored, results, packed, shapes), list_feeds(stored)


def make_half(operator: str, name: str, spec: QuantSpec) -> onnx.NodeProto:
    """The QuantizeLinear or DequantizeLinear of a tensor."""
    grain = spec.granularity
    attributes = {} if isinstance(grain, PerTensor) else {"axis": grain.axis}
    if isinstance(grain, PerBlock):
        attributes["block_size"] = grain.size
    source, target = (
        (name, f"{name}_q") if operator == "QuantizeLinear" else (f"{name}_q", f"{name}_dq")
    )
    return helper.make_node(
        operator, [source, f"{name}_scale", f"{name}_zero"], [target], target, **attributes
    )


def list_results(pattern: Pattern) -> list[str]:
    """Tensors that no node reads."""
    nodes = parse_nodes(pattern)
    read = {name for node in nodes for name in node.input}
    return [name for node in nodes for name in node.output if name not in read]


def describe_nodes(graph: Mapping[str, Any]) -> list[str]:
    """The nodes of one QNN graph with the types that they read and write."""
    kinds = {
        name: TYPES.get(tensor["data_type"], hex(tensor["data_type"]))
        for name, tensor in graph["tensors"].items()
    }
    return [
        f"{node['type']}({', '.join(kinds[name] for name in node['input_names'])})"
        f" → {', '.join(kinds[name] for name in node['output_names'])}"
        for node in graph["nodes"].values()
    ]


def find_reason(reply: Reply) -> str:
    """Why a file is not on the NPU: as its provider says, or else as the session's exception does; "" where it is."""
    if not reply.error:
        return ""
    causes = re.findall(r"REASON ?: ?(.+)", reply.log)
    reasons = [cause for cause in causes if cause != "Failed to add node."]
    if reasons:
        return reasons[-1].partition(" by QNN EP.")[0]
    if causes and "backendValidateOpConfig() failed" in reply.log:
        return (
            "QNN's validator refuses the operator with these types and gives no reason (error 3110)"
        )
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", reply.error.splitlines()[0])
    return re.sub(r"\S*QNNExecutionProvider_\S+", "…", text)


def measure(truth: np.ndarray, answer: np.ndarray) -> float:
    """SQNR in dB, to a tenth; at most 200."""
    signal, noise = (
        np.square(truth.astype(np.float64)).sum(),
        np.square(truth.astype(np.float64) - answer).sum(),
    )
    if not noise or not signal:
        return 0.0 if noise else 200.0
    return round(float(min(10 * np.log10(signal / noise), 200.0)), 1)


def try_case(case: Case, values: Values, emulator: Emulator) -> Outcome:
    """Compile and run one case."""
    outcome = Outcome(case.pattern.name, case.activation, case.weight)
    sites = choose_sites(case, values)
    model, feeds = quantize_graph(case, values, sites)
    reply = emulator.run(model, feeds)
    outcome.reason = find_reason(reply)
    if outcome.reason:
        return outcome
    outcome.nodes = [line for graph in reply.graphs for line in describe_nodes(graph)]
    name = list_results(case.pattern)[0]
    answer, expected = reply.results[0], run_cpu(model, feeds)[0]
    if expected.dtype != np.float32:
        counts = np.unique(answer.astype(np.int64) - expected, return_counts=True)
        outcome.differences = {int(step): int(count) for step, count in zip(*counts, strict=True)}
    if name in sites.specs:
        expected, answer = (
            dequantize(codes, sites.qparams[name], sites.specs[name])
            for codes in (expected, answer)
        )
    outcome.against_file = measure(expected, answer)
    outcome.against_float, outcome.file_against_float = (
        measure(values[name], answer),
        measure(values[name], expected),
    )
    return outcome


def try_patterns(words: list[str], options: Mapping[str, str]) -> Iterator[Outcome]:
    """All cases of the patterns whose names hold one of the words; without words, of all."""
    emulator = Emulator(options)
    for pattern in PATTERNS:
        if words and not any(word in pattern.name for word in words):
            continue
        values = run_float(pattern, make_values(pattern))
        for weight in pattern.weights:
            for activation in ACTIVATIONS:
                yield try_case(Case(pattern, activation, weight), values, emulator)
    emulator.close()


def describe_outcome(outcome: Outcome, operators: list[str], notes: list[str]) -> str:
    """The cell of an outcome. operators: those that the row names. notes: reasons so far, which grow."""
    if outcome.reason:
        if outcome.reason not in notes:
            notes.append(outcome.reason)
        return f"no ({notes.index(outcome.reason) + 1})"
    figure = "=" if outcome.against_file == 200 else f"{outcome.against_file:.0f}"
    words = (
        ["float"]
        if outcome.is_float
        else [name for name in outcome.operators if name not in operators]
    )
    if outcome.against_float < min(BROKEN, outcome.file_against_float - TOLERANCE):
        words.insert(0, "**wrong**")
    return " ".join([*words, figure])


def make_table(outcomes: Iterable[Outcome]) -> str:
    """The table of all, and the reasons of refusals below it."""
    rows: dict[tuple[str, str], dict[str, Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.name, outcome.weight), {})[outcome.activation] = outcome
    notes: list[str] = []
    lines = [
        f"| pattern | weight | QNN | {' | '.join(ACTIVATIONS)} |",
        "|---|---|---|" + "---:|" * len(ACTIVATIONS),
    ]
    for (name, weight), cells in rows.items():
        placed = [cell for cell in cells.values() if not cell.reason]
        integer = [cell for cell in placed if not cell.is_float]
        operators = integer[0].operators if integer else ["float"] if placed else []
        texts = [describe_outcome(cells[kind], operators, notes) for kind in ACTIVATIONS]
        lines.append(f"| {name} | {weight} | {', '.join(operators)} | {' | '.join(texts)} |")
    reasons = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", "Reasons:", "", *reasons]) + "\n"


def write_table(text: str) -> None:
    """Put the table between its marks in docs/engines.md."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    _, after = rest.split(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}{text}{MARKS[1]}{after}", encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--option", nargs="+", default=[], metavar="KEY=VALUE", help="options of the provider"
    )
    arguments = parser.parse_args()
    outcomes = list(
        try_patterns(arguments.only, dict(pair.split("=") for pair in arguments.option))
    )
    if arguments.json:
        lines = [json.dumps(asdict(outcome), ensure_ascii=False) for outcome in outcomes]
        arguments.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arguments.write:
        write_table(make_table(outcomes))
    else:
        print(make_table(outcomes))


if __name__ == "__main__":
    main()
