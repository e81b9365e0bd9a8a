"""Every argument and option of onnxruntime.quantization has a row here and in the documents; lists become rules."""

import inspect
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime import quantization
from onnxruntime.quantization.execution_providers import qnn

import onnxq
from onnxq.backends import find_target
from onnxq.compat.options import (
    ARGUMENTS,
    DYNAMIC_EXTRAS,
    STATIC_EXTRAS,
    CallLists,
    UnaskedMethod,
    UnaskedTypes,
    choose_observer,
    convert_options,
)
from onnxq.compat.overrides import TensorOverrides
from onnxq.compat.quant_utils import QuantType
from onnxq.compat.selection import read_selection
from onnxq.compat.shape_inference import quant_pre_process
from onnxq.config import Command, Rule, matches_any
from onnxq.pipeline.configuration import make_config
from onnxq.sites import Caution
from tests.networks import parse_text

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(quantization.__file__).parent
# Read by `get_next`, by rules, by observers.
NO_ROW = {
    "model_input", "model_output", "calibration_data_reader", "op_types_to_quantize", "nodes_to_quantize",
    "nodes_to_exclude", "calibrate_method", "extra_options", "calibration_cache_path",
}  # fmt: skip


def documented(function: object) -> set[str]:
    """Extra options that a docstring of theirs lists."""
    return set(re.findall(r"^ {8,}([A-Za-z]+(?:\.\w+)*) = [A-Za-z]", inspect.getdoc(function) or "", re.MULTILINE))


def rows(page: str) -> set[str]:
    """The words in backticks in the first column of a page's tables."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {word for cell in first for word in re.findall(r"`([^`]+)`", cell)}


def test_every_extra_option_that_they_document_has_a_row() -> None:
    static, dynamic = documented(quantization.quantize_static), documented(quantization.quantize_dynamic)
    assert len(static) > 20
    assert len(dynamic) > 5
    assert static - set(STATIC_EXTRAS) == set()
    assert dynamic - set(DYNAMIC_EXTRAS) == set()


def test_every_extra_option_that_they_read_has_a_row() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES.glob("*.py"))
    read = set(re.findall(r"""\bextra_options(?:\.get\(|\[)["'](\w+)["']""", text))
    # Names of the second step, which the first one makes of `Calib…`.
    second = {"symmetric", "moving_average", "averaging_constant", "max_intermediate_outputs", "per_channel"}
    second |= {"num_bins", "num_quantized_bins", "percentile", "scenario"}
    assert read - second - set(STATIC_EXTRAS) == set()


@pytest.mark.parametrize("name", ["quantize_static", "quantize_dynamic"])
def test_every_argument_has_a_row(name: str) -> None:
    assert set(inspect.signature(getattr(quantization, name)).parameters) - NO_ROW - set(ARGUMENTS) == set()


def test_every_option_of_theirs_is_in_the_document() -> None:
    functions = [getattr(quantization, name) for name in ("quantize_static", "quantize_dynamic", "get_qdq_config")]
    wanted = {name for one in functions for name in inspect.signature(one).parameters}
    functions = [quantization.quant_pre_process, qnn.get_qnn_qdq_config, qnn.qnn_preprocess_model]
    wanted |= {name for one in functions for name in inspect.signature(one).parameters} - {"deprecated_kwargs"}
    wanted |= {*STATIC_EXTRAS, *DYNAMIC_EXTRAS, *ARGUMENTS, *documented(quantization.quantize_static)}
    assert wanted - rows("from-onnxruntime.md") == set()


@pytest.mark.parametrize("name", [*ARGUMENTS, *STATIC_EXTRAS])
def test_another_value_is_taken_over_or_warned_about(name: str) -> None:
    table = ARGUMENTS if name in ARGUMENTS else STATIC_EXTRAS
    option = table[name]
    another = not option.default if isinstance(option.default, bool) else 16
    value = ["CPUExecutionProvider"] if name == "calibration_providers" else another
    overrides, cautions = convert_options({name: value}, table)
    assert [caution.code for caution in cautions] == (["W130"] if option.reason else [])
    if overrides and name != "BlockSize":
        make_config(None, overrides, Command.QUANTIZE)
    assert convert_options({name: option.default}, table) == ({}, [])


@pytest.mark.parametrize("symmetric", [True, False, None])
@pytest.mark.parametrize("kind", [one for one in QuantType if one is not QuantType.QFLOAT8E4M3FN], ids=str)
def test_every_type_is_a_configuration(kind: QuantType, symmetric: bool | None) -> None:
    arguments, _ = convert_options({"activation_type": kind, "weight_type": kind}, ARGUMENTS)
    extra, _ = convert_options({"WeightSymmetric": symmetric, "ActivationSymmetric": symmetric}, STATIC_EXTRAS)
    chosen = make_config(None, arguments | extra, Command.QUANTIZE)
    assert chosen.weights.bits == chosen.activations.bits == int(re.sub(r"\D", "", kind.name))
    if symmetric is not None:
        assert chosen.weights.scheme == ("symmetric" if symmetric else "asymmetric")


def test_float8_is_for_tensorrt() -> None:
    kind = QuantType.QFLOAT8E4M3FN
    overrides, _ = convert_options({"activation_type": kind, "weight_type": kind}, ARGUMENTS)
    chosen = make_config(None, overrides, Command.QUANTIZE)
    assert (chosen.target, chosen.weights.storage, chosen.high_precision) == ("trt", "float8e4m3fn", "float32")


@pytest.mark.parametrize(
    ("method", "extra", "observer"),
    [
        ("MinMax", {}, {"name": "minmax"}),
        ("MinMax", {"CalibPercentile": 99.0}, {"name": "minmax"}),
        ("MinMax", {"CalibMovingAverage": True}, {"name": "moving_average"}),
        ("Entropy", {"CalibMovingAverage": True}, {"name": "entropy"}),
        ("Percentile", {}, {"name": "percentile"}),
        ("Percentile", {"CalibPercentile": 99.9}, {"name": "percentile", "percentile": 99.9}),
    ],
)
def test_a_calibration_method_is_an_observer(method: str, extra, observer) -> None:
    overrides, cautions = choose_observer(quantization.CalibrationMethod[method], extra)
    assert (overrides.get("activations.observer"), cautions) == (observer, [])
    # What is asked for is not chosen anew; our mean of ranges is no rule of theirs.
    assert overrides.get("skip", []) == ([] if observer == {"name": "moving_average"} else ["ranges"])
    make_config(None, overrides, Command.QUANTIZE)


def test_the_default_method_reads_as_theirs_and_leaves_the_choice() -> None:
    assert UnaskedMethod.MinMax == quantization.CalibrationMethod.MinMax
    assert quantization.CalibrationMethod.MinMax == UnaskedMethod.MinMax != quantization.CalibrationMethod.Entropy
    assert {UnaskedMethod.MinMax: 1}["MinMax"] == 1
    assert choose_observer(UnaskedMethod.MinMax, {}) == ({}, [])


def test_what_an_observer_does_not_have_is_said() -> None:
    said = choose_observer(quantization.CalibrationMethod.Distribution, {})[1]
    said += choose_observer("MinMax", {"CalibMovingAverage": True, "CalibMovingAverageConstant": 0.5})[1]
    assert [str(one).split(" means")[0] for one in said] == [
        "calibrate_method=Distribution",
        "CalibMovingAverageConstant",
    ]


def test_preprocessing_is_documented_too() -> None:
    assert set(inspect.signature(quant_pre_process).parameters) - {"deprecated_kwargs"} <= rows("from-onnxruntime.md")


BODY = "g (float[1,32] x) => (float[1,32] y) { a = Gemm(x, w) b = Relu(a) c = Gemm(b, v) y = Add(c, x) }"
NAMES = ("/l.0/Gemm", "act[1]", "l.1*", "/end/")


@pytest.fixture
def proto() -> onnx.ModelProto:
    model = parse_text(BODY, w=np.eye(32, dtype=np.float32), v=np.eye(32, dtype=np.float32))
    for node, name in zip(model.graph.node, NAMES, strict=True):
        node.name = name
    return model


def chosen(rules: list[dict], key: str, names: tuple[str, ...], word: str = "float") -> set[str]:
    """The names that the one rule with this word selects."""
    (rule,) = [one for one in rules if getattr(Rule.model_validate(one).set, word)]
    return {name for name in names if matches_any(rule[key], name)}


def make(proto: onnx.ModelProto, **lists) -> tuple[list[dict], list[Caution]]:
    if "tensors" in lists:
        lists["tensors"] = TensorOverrides(lists["tensors"], find_target("ort"), "QUInt8")
    wish = read_selection(proto, CallLists(**lists))
    return list(wish.rules), list(wish.cautions)


@pytest.mark.parametrize("name", NAMES)
def test_an_excluded_node_is_that_node_alone(proto, name: str) -> None:
    rules, cautions = make(proto, excluded=[name])
    assert (chosen(rules, "node", (*NAMES, "act1", "l.1x", "end")), cautions) == ({name}, [])


def test_the_wanted_nodes_are_forced_and_all_others_stay_float(proto) -> None:
    rules, cautions = make(proto, nodes=["act[1]", "l.1*", "gone"])
    assert chosen(rules, "node", NAMES) == {"/l.0/Gemm", "/end/"}
    assert chosen(rules, "node", (*NAMES, "l.1x"), "quantize") == {"act[1]", "l.1*"}
    assert [str(one).split(";")[0] for one in cautions] == [
        "nodes_to_quantize: 'gone' means nothing here: the model has no 'gone'"
    ]


def test_the_wanted_operators_are_forced_and_all_others_stay_float(proto) -> None:
    rules, cautions = make(proto, op_types=["Gemm", "Conv"])
    ops = ("Gemm", "Relu", "Add", "Gelu")
    assert (chosen(rules, "op", ops), chosen(rules, "op", ops, "quantize")) == ({"Relu", "Add", "Gelu"}, {"Gemm"})
    assert cautions == []


def test_both_lists_hold_together(proto) -> None:
    rules, _ = make(proto, nodes=["/l.0/Gemm", "act[1]"], op_types=["Gemm"], excluded=["l.1*"])
    assert chosen(rules, "node", NAMES, "quantize") == {"/l.0/Gemm"}
    assert make(proto, nodes=["act[1]"], op_types=["Gemm"])[0][-1]["set"] == {"float": True}


@pytest.mark.parametrize("lists", [{}, {"excluded": ()}, {"nodes": ()}])
def test_who_wants_everything_gets_no_rule(proto, lists) -> None:
    assert make(proto, **lists) == ([], [])


def test_types_that_nobody_asked_for_force_nothing(proto) -> None:
    every = UnaskedTypes(sorted({node.op_type for node in proto.graph.node}))
    assert make(proto, op_types=every) == ([], [])
    # Those of excluded nodes alone are none that were taken out.
    adds = [node.name for node in proto.graph.node if node.op_type == "Add"]
    without = UnaskedTypes(op for op in every if op != "Add")
    assert [rule["set"] for rule in make(proto, op_types=without, excluded=adds)[0]] == [{"float": True}]
    rules, _ = make(proto, op_types=without)
    assert (len(rules), chosen(rules, "op", every)) == (1, {"Add"})


@pytest.mark.parametrize("lists", [{"nodes": NAMES}, {"op_types": ("Gemm", "Relu", "Add")}])
def test_who_names_everything_forces_it(proto, lists) -> None:
    assert [rule["set"] for rule in make(proto, **lists)[0]] == [{"quantize": True}]


def test_an_override_of_a_tensor_does_not_end_the_force(proto) -> None:
    tensors = {name: [{"quant_type": "QUInt8"}] for name in "xw"}
    rules, _ = make(proto, nodes=["/l.0/Gemm"], tensors=tensors)
    assert {str(site.site) for site in onnxq.make_plan(proto, overrides={"rules": rules}).sites} >= {"x", "w"}
    assert not onnxq.make_plan(proto, overrides={"rules": make(proto, tensors=tensors)[0]}).sites


@pytest.mark.parametrize(
    ("tensor", "override", "spec"),
    [
        ("x", {"quant_type": "QUInt16"}, "uint16"),
        ("x", {"quant_type": "QInt8", "symmetric": True}, "int8"),
        ("w", {"quant_type": "QInt4", "axis": 1}, "int8"),
    ],
)
def test_an_override_of_a_tensor_is_its_spec(proto, tensor: str, override, spec: str) -> None:
    rules, cautions = make(proto, tensors={tensor: [override]})
    assert cautions == []
    plan = onnxq.make_plan(proto, overrides={"rules": [*rules, {"op": "*", "set": {"quantize": True}}]})
    assert [site.spec.storage for site in plan.sites if str(site.site) == tensor] in ([spec], [])
    assert rules


def test_numbers_of_activations_are_their_range(proto) -> None:
    overrides = {"x": [{"scale": 0.1, "zero_point": 3}], "b": [{"rmin": 0.0, "rmax": 2.0}]}
    rules, cautions = make(proto, tensors=overrides)
    assert cautions == []
    plan = onnxq.make_plan(proto, overrides={"rules": [*rules, {"op": "*", "set": {"quantize": True}}]})
    numbers = {str(site.site): site.qparams for site in plan.sites}
    assert (float(numbers["x"].scale), int(numbers["x"].zero_point)) == (pytest.approx(0.1), 3)
    assert (float(numbers["b"].scale), int(numbers["b"].zero_point)) == (pytest.approx(2 / 255), 0)


def test_numbers_of_weights_and_unknown_tensors_are_said(proto) -> None:
    tensors = {
        "x": [{"scale": 0.1, "convert": {"quant_type": "QUInt16"}}],
        "w": [{"rmin": -1.0, "rmax": 1.0}],
        "z": [{"symmetric": True}],
    }
    rules, cautions = make(proto, tensors=tensors)
    assert rules == []
    assert [str(one).split(" means")[0] for one in cautions] == [
        "TensorQuantOverrides: 'z'",
        "TensorQuantOverrides: 'scale' of 'x'",
        "TensorQuantOverrides: 'convert' of 'x'",
        "TensorQuantOverrides: 'rmin' of 'w'",
        "TensorQuantOverrides: 'rmax' of 'w'",
    ]
