"""`search`: mixtures of precisions under limits, made, measured and written."""

import csv
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

import onnxq
from onnxq.annotate import inspect_model
from onnxq.commands.search import SearchResult
from onnxq.errors import ConfigError
from onnxq.evaluation.metric import MetricModel
from onnxq.passes.mixed_precision.promotion_search import Rescaling
from onnxq.report.record import read_record
from tests.cli.kit import run
from tests.pipeline.models import EVERYTHING, images, residual

# Without notes, beside which the weights of a small model are little.
QUICK = {"latency": False, "notes": "none", "points": 3, "effort": "fast"}
LIMIT = 32_000


def search(**overrides: object) -> SearchResult:
    return onnxq.search(residual(), images(), EVERYTHING, overrides={**QUICK, **overrides})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search")
    onnx.save(residual(), path / "m.onnx")
    np.savez(path / "samples.npz", **images())
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> SearchResult:
    files = {f"{kind}_out": str(folder / f"front.{end}") for kind, end in (("rules", "yaml"), ("csv", "csv"))}
    options = {**QUICK, **files, "max_size": LIMIT, "report_out": str(folder / "page.html")}
    return onnxq.search(folder / "m.onnx", folder / "samples.npz", EVERYTHING, overrides=options, out=folder / "q.onnx")


def test_the_file_is_the_most_accurate_that_was_measured_within_the_size(found: SearchResult, folder: Path) -> None:
    taken = next(point for point in found.front if point.taken)
    assert found.met
    assert (folder / "q.onnx").stat().st_size == taken.bytes <= LIMIT
    assert taken.sqnr_db == max(point.sqnr_db for point in found.front if point.holds)
    # It is a mixture: all in 8 bits is too large, all in 4 less accurate.
    assert len(taken.precisions) > 1
    assert {point.describe() for point in found.front} >= {"4 w8a8", "4 w4a8"}
    bits = {pair.bits for pair in inspect_model(folder / "q.onnx").pairs if pair.role.value == "weight"}
    assert bits == {4, 8}


def test_sizes_are_predicted_before_they_are_measured(found: SearchResult) -> None:
    predicted = [point for point in found.front if point.predicted_bytes is not None]
    assert predicted
    for point in predicted:
        assert point.predicted_bytes == pytest.approx(point.bytes, rel=0.05)
        assert point.predicted_db == pytest.approx(point.sqnr_db, abs=6)


def test_its_rules_make_the_same_file(found: SearchResult, folder: Path) -> None:
    files = [folder / name for name in ("m.onnx", "samples.npz", "front.yaml")]
    again = onnxq.quantize(*files, overrides={"latency": False})
    for mine, other in zip(again.model.graph.initializer, found.result.model.graph.initializer, strict=True):
        assert mine.name == other.name
        assert numpy_helper.to_array(mine).tobytes() == numpy_helper.to_array(other).tobytes()
    assert [node.op_type for node in again.model.graph.node] == [n.op_type for n in found.result.model.graph.node]


def test_the_table_and_the_page_show_the_front(found: SearchResult, folder: Path) -> None:
    rows = list(csv.DictReader((folder / "front.csv").read_text().splitlines()))
    assert [int(row["bytes"]) for row in rows] == [point.bytes for point in found.front]
    assert read_record(folder / "page.html").front == found.front
    assert "at most 32.0 kB" in (folder / "page.html").read_text()
    text = onnxq.summarize(found, width=120)
    assert "asked: at most 32.0 kB" in text
    assert "taken" in text
    assert "Q/DQ pairs" in text


def test_the_front_is_drawn(found: SearchResult) -> None:
    pytest.importorskip("matplotlib").use("agg")
    axes = found.plot()
    assert len(axes.lines) == len(found.front)
    assert axes.get_xlabel() == "MB"


def test_an_accuracy_makes_it_small() -> None:
    wanted = 30.0
    found = search(min_sqnr=wanted)
    taken = next(point for point in found.front if point.taken)
    assert found.met
    assert taken.sqnr_db >= wanted
    assert taken.bytes == min(point.bytes for point in found.front if point.sqnr_db >= wanted)


def test_a_metric_is_asked_for_each_model() -> None:
    asked: list[int] = []

    exact = onnxruntime.InferenceSession(residual().SerializeToString()).run(None, images(1))[0]

    def measure_difference(model: MetricModel) -> float:
        asked.append(1)
        return -float(np.abs(model(images(1))["y"] - exact).mean())

    found = search(metric=measure_difference, max_drop=0.05)
    # The float model, and every point.
    assert len(asked) == 1 + len(found.front)
    assert all(point.metric is not None and point.holds == (point.metric >= -0.05) for point in found.front)


def test_a_time_is_measured() -> None:
    found = search(max_latency=1000.0)
    assert found.met
    assert all(point.latency_ms is not None and point.latency_ms < 1000 for point in found.front)


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [
        ({}, "without a limit the float model is best"),
        ({"max_size": LIMIT, "precisions": "w3a3"}, "'w3a3' is none of them"),
        ({"max_latency": 5.0, "target": "virtual"}, "cannot be timed"),
    ],
)
def test_what_is_wrong_is_said(overrides: dict[str, object], cause: str) -> None:
    config = None if "target" in overrides else EVERYTHING
    with pytest.raises(ConfigError, match=cause):
        onnxq.search(residual(), images(), config, overrides={**QUICK, **overrides})


def test_limits_that_nothing_keeps_end_with_an_exit_code_of_their_own(folder: Path) -> None:
    out = folder / "small.onnx"
    options = ["--max-size", "5KB", "--points", "1", "--effort", "fast", "--no-latency", "--json", "-o"]
    done = run("search", folder / "m.onnx", "--data", folder / "samples.npz", *options, out)
    assert done.exit_code == 4, done.output
    values = json.loads(done.stdout)
    assert values["error"]["code"] == "Q712"
    assert not values["met"]
    assert values["applied"]["output"] == str(out)
    assert out.exists()


PAIRS = st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=8)


@given(pairs=PAIRS, values=st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)))
def test_a_larger_prediction_means_no_smaller_measurement(
    pairs: list[tuple[float, float]], values: tuple[float, float]
) -> None:
    curve = Rescaling.fit_pairs(pairs)
    low, high = map(curve.expect_measurement, sorted(values))
    assert low <= high * (1 + 1e-9)
    assert curve.expect_measurement(curve.find_prediction(values[0])) == pytest.approx(values[0], rel=1e-6)


@given(ends=st.lists(st.sets(st.integers(1, 10**6), min_size=5, max_size=5), min_size=2, max_size=2))
def test_a_rising_curve_through_the_points_is_kept(ends: list[set[int]]) -> None:
    rising = list(zip(*map(sorted, ends), strict=True))
    curve = Rescaling.fit_pairs(rising)
    assert all(curve.expect_measurement(a) == pytest.approx(b, rel=1e-9) for a, b in rising)


def test_only_precisions_that_are_named_are_chosen() -> None:
    found = search(max_size=LIMIT, precisions="w8a8,w4a8")
    assert {name for point in found.front for name in point.precisions} == {"w8a8", "w4a8"}
