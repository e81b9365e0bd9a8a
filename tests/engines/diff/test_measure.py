"""The sums behind every number: equal to the formulas on all samples at once, and blind to how they are cut up."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from onnxq.config.commands import DiffConfig
from onnxq.engines.diff.measure import Tally, diverges, find_unmet
from onnxq.engines.diff.model import OFF, Error, OutputDiff

VALUES = st.floats(-100, 100, width=32)


def tallied(references: np.ndarray, values: np.ndarray, **options: float) -> Error:
    tally = Tally("y", **options)  # type: ignore[arg-type]
    for reference, value in zip(references, values, strict=True):
        tally.update(reference, value)
    return tally.error("ort-on", "float")


@given(arrays.arrays(np.float32, (3, 2, 5), elements=VALUES), arrays.arrays(np.float32, (3, 2, 5), elements=VALUES))
def test_sums_over_samples_are_the_formulas_over_all(reference: np.ndarray, value: np.ndarray) -> None:
    found = tallied(reference, value)
    assert found.samples == 3
    assert found.max_abs == pytest.approx(np.abs(value - reference).max())
    ref, got = reference.astype(float).ravel(), value.astype(float).ravel()
    if reference.any() and not np.array_equal(reference, value):
        sqnr = 10 * np.log10((ref**2).sum() / ((got - ref) ** 2).sum())
        assert found.sqnr_db == pytest.approx(sqnr, abs=1e-6)
    if reference.any() and value.any():
        assert found.cosine == pytest.approx(ref @ got / np.sqrt((ref @ ref) * (got @ got)), abs=1e-9)


def test_relative_errors_are_to_the_largest_value_of_the_sample() -> None:
    reference = np.array([[0.0, 2.0], [10.0, 0.0]], np.float32)
    value = np.array([[1.0, 2.0], [10.0, 1.0]], np.float32)
    assert tallied(reference, value).max_rel == pytest.approx(0.5)


def test_top_k_counts_what_both_name() -> None:
    reference = np.array([[[9, 5, 1, 0], [1, 2, 3, 4]]], np.float32)
    value = np.array([[[5, 9, 0, 1], [4, 3, 2, 1]]], np.float32)
    assert tallied(reference, value, top_k=1).top_k == 0.0
    assert tallied(reference, value, top_k=2).top_k == 0.5
    assert tallied(reference, value, top_k=4).top_k == 1.0
    assert tallied(reference, value, top_k=9).top_k == 1.0


def test_what_cannot_be_ranked_has_no_agreement() -> None:
    assert math.isnan(tallied(np.ones((2, 3, 1), np.float32), np.ones((2, 3, 1), np.float32), top_k=1).top_k)
    assert math.isnan(tallied(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)).top_k)


def test_levels_are_steps_of_the_quantizer() -> None:
    assert tallied(np.array([[0.0, 1.0]]), np.array([[0.5, 1.0]]), step=0.25).levels == 2.0
    assert math.isnan(tallied(np.array([[0.0]]), np.array([[0.5]])).levels)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_as_far_as_can_be(broken: float) -> None:
    found = tallied(np.array([[1.0, 2.0]]), np.array([[1.0, broken]]))
    assert found.sqnr_db == -math.inf
    assert found.max_rel == math.inf


def test_another_shape_is_as_far_as_can_be() -> None:
    assert tallied(np.ones((1, 4)), np.ones((1, 5))).sqnr_db == -math.inf


def test_the_worst_sample_is_known() -> None:
    tally = Tally("y")
    for gap in (0.1, 0.5, 0.2):
        tally.update(np.ones(4, np.float32), np.full(4, 1 + gap, np.float32))
    assert tally.worst_sample == 1


def error(sqnr_db: float, levels: float = math.nan) -> Error:
    return Error(run="ort-on", against=OFF, sqnr_db=sqnr_db, cosine=0.9, max_abs=1.0, max_rel=0.1, levels=levels)


@pytest.mark.parametrize(
    ("found", "accuracy_db", "expected"),
    [
        pytest.param(error(math.inf), math.inf, False, id="identical"),
        pytest.param(error(41.0), math.inf, False, id="float rounding"),
        pytest.param(error(30.0), math.inf, True, id="more than float rounding, quantization cost nothing"),
        pytest.param(error(30.0, levels=1.0), math.inf, False, id="one level"),
        pytest.param(error(30.0, levels=2.0), math.inf, True, id="two levels"),
        pytest.param(error(30.0, levels=9.0), 25.0, False, id="less than quantization cost"),
        pytest.param(error(22.5, levels=9.0), 25.0, False, id="two equally good roundings"),
        pytest.param(error(21.5, levels=9.0), 25.0, True, id="more than that"),
        pytest.param(error(-3.0), 40.0, True, id="another function"),
        pytest.param(error(-math.inf), 40.0, True, id="no numbers"),
        pytest.param(error(math.nan), 40.0, True, id="nothing known"),
    ],
)
def test_what_is_beyond_rounding(found: Error, accuracy_db: float, expected: bool) -> None:
    assert diverges(found, accuracy_db) is expected


def output(**changes: float) -> OutputDiff:
    values = {"sqnr_db": 30.0, "cosine": 0.99, "max_abs": 0.5, "max_rel": 0.1, "top_k": 0.9, **changes}
    accuracy = Error(run="ort-on", against="float", **values)  # type: ignore[arg-type]
    return OutputDiff(name="y", accuracy=(accuracy,), engines=(error(12.0),))


@pytest.mark.parametrize(
    ("tolerances", "measure"),
    [
        (DiffConfig(min_sqnr=31), "SQNR in dB"),
        (DiffConfig(min_cosine=0.995), "cosine"),
        (DiffConfig(max_abs=0.4), "max abs error"),
        (DiffConfig(min_agreement=0.95), "top-k agreement"),
        (DiffConfig(min_engines=13), "SQNR in dB against what the file says"),
    ],
)
def test_an_unmet_tolerance_names_output_run_and_value(tolerances: DiffConfig, measure: str) -> None:
    (found,) = find_unmet([output()], tolerances)
    assert (found.output, found.run, found.measure) == ("y", "ort-on", measure)


def test_met_tolerances_say_nothing() -> None:
    fair = DiffConfig(min_sqnr=30, min_cosine=0.99, max_abs=0.5, min_agreement=0.9, min_engines=12)
    assert find_unmet([output()], fair) == ()
    assert find_unmet([output(top_k=math.nan)], DiffConfig(min_agreement=1.0)) == ()


def test_what_cannot_be_measured_is_not_met() -> None:
    (found,) = find_unmet([output(sqnr_db=math.nan)], DiffConfig(min_sqnr=-100))
    assert math.isnan(found.value)
