"""Every argument and extra option of onnxruntime.quantization has a row here and in the documents."""

import inspect
import re
from pathlib import Path

import pytest
from onnxruntime import quantization
from onnxruntime.quantization.execution_providers import qnn

from onnxq.compat.options import (
    ARGUMENTS,
    DYNAMIC_EXTRAS,
    STATIC_EXTRAS,
    CompatOption,
    UnaskedMethod,
    choose_observer,
    convert_options,
)
from onnxq.compat.quant_utils import QuantType
from onnxq.compat.shape_inference import quant_pre_process
from onnxq.config import Command
from onnxq.pipeline.configuration import make_config

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


def another(option: CompatOption) -> object:
    """A value that is not the default."""
    return not option.default if isinstance(option.default, bool) else 16


@pytest.mark.parametrize("name", [*ARGUMENTS, *STATIC_EXTRAS])
def test_another_value_is_taken_over_or_warned_about(name: str) -> None:
    table = ARGUMENTS if name in ARGUMENTS else STATIC_EXTRAS
    option = table[name]
    value = ["CPUExecutionProvider"] if name == "calibration_providers" else another(option)
    overrides, cautions = convert_options({name: value}, table)
    assert [caution.code for caution in cautions] == (["W130"] if option.reason else [])
    if overrides and name != "BlockSize":
        make_config(None, overrides, Command.QUANTIZE)
    assert convert_options({name: option.default}, table) == ({}, [])


TYPES = [kind for kind in QuantType if kind is not QuantType.QFLOAT8E4M3FN]


@pytest.mark.parametrize("symmetric", [True, False, None])
@pytest.mark.parametrize("kind", TYPES, ids=str)
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
    theirs = quantization.CalibrationMethod[method]
    overrides, cautions = choose_observer(theirs, extra)
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
