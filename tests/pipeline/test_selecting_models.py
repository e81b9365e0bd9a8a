"""Models that choose by computed values: figures, verdicts and passes go by the values, and the choices are told."""

import json
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.commands.results import write_json
from onnxq.config import Config
from onnxq.engines.diff.model import OFF, ON
from onnxq.engines.saturation import measure_saturation
from onnxq.graph import light
from tests.evaluation.selecting import HEADS, PLAIN, network, samples
from tests.pipeline import models
from tests.pipeline.models import EVERYTHING, add_rule, list_accounts

# What is judged in each network: the values in front of its choices, and outputs on the float model's choices.
JUDGED = {
    "detector": {"flat in front of best/TopK", "out"},
    "suppression": {"boxes in front of kept/NonMaxSuppression", "by_class in front of kept/NonMaxSuppression", "out"},
    "threshold": {"flat in front of sure/Greater", "out"},
    "labels": {"logits in front of label/ArgMax", "out"},
    "queries": {"flat in front of best/TopK", "classes in front of top/TopK", "out"},
    "experts": {"router in front of best/TopK", "out"},
    "fused_experts": {"tokens in front of mixed/MoE/router", "out"},
    "branch": {
        "flat in front of picked/If.then_branch/best/TopK",
        "sums in front of picked/If.else_branch/best/TopK",
        "out",
    },
    "loop": {"flat in front of best/TopK", "out"},
    "scan": {"logits in front of label/ArgMax", "out"},
}
DATA = dict(samples(24))


def quantize(name: str, config: Config = EVERYTHING, **overrides: Any) -> onnxq.Result:
    return onnxq.quantize(network(name), DATA, config, overrides={"latency": False, "threads": 1, **overrides})


def with_bits(tensor: str, bits: int) -> Config:
    """Everything in 8 bits, and one weight in fewer."""
    return add_rule(EVERYTHING, tensor=tensor, role="weight", set={"quantize": True, "bits": bits})


def print_report(report: Any) -> str:
    return onnxq.summarize(report, width=300)


@pytest.mark.parametrize("name", HEADS)
def test_a_sound_network_is_told_as_sound(name: str) -> None:
    report = quantize(name, effort="balanced").report
    assert {check.name for check in report.checks} == JUDGED[name]
    assert all(db > 20 for check in report.checks for db in check.sqnr_db)
    assert report.alarms() == ()
    assert report.promotion is None
    assert not any("was not checked" in warning for warning in report.warnings)
    for choice in report.choices:
        assert 0.9 * choice.chosen < choice.shared <= choice.chosen


def test_passes_are_kept_that_the_order_of_rows_would_have_taken_back() -> None:
    """Rounded weights move scores by less than they are off; which rows change places is chance."""
    result = quantize("queries", effort="balanced")
    assert not any(
        "rolled back" in line for name in ("rounding", "smoothquant") for line in list_accounts(result, name)
    )


@pytest.mark.parametrize(("name", "least"), [("labels", 24), ("queries", 17)])
def test_weights_behind_a_choice_are_rounded_on_rows_that_match(name: str, least: float) -> None:
    """Fitted to rows in other places they answered worse than rounded to nearest: 21 and 15 dB with four bits."""
    few = EVERYTHING.model_copy(update={"weights": EVERYTHING.weights.model_copy(update={"bits": 4})})
    result = models.quantize(network(name), dict(samples(64)), few, effort="balanced")
    assert "rolled back" not in list_accounts(result, "rounding")[0]
    (out,) = (check for check in result.report.checks if check.name == "out")
    assert out.sqnr_db[0] > least


@pytest.mark.parametrize(
    ("name", "weight", "lost"),
    [
        ("threshold", "w_score", "flat in front of sure/Greater"),
        ("detector", "w_box", "out"),
        ("queries", "w_box", "out"),
        ("labels", "w_class", "logits in front of label/ArgMax"),
    ],
)
def test_a_broken_network_is_told_as_broken(name: str, weight: str, lost: str) -> None:
    report = quantize(name, with_bits(weight, 2), effort="fast").report
    (alarm,) = report.alarms()
    assert alarm.code == "W108"
    assert f"output {lost} (" in alarm


def test_the_summary_and_the_document_tell_both() -> None:
    result = quantize("queries", effort="fast")
    # Judging changes nothing that is written.
    assert result.model.graph.input == network("queries").graph.input
    assert result.model.graph.output == network("queries").graph.output
    assert not any("in front of" in node.name or node.name.endswith("/own") for node in result.model.graph.node)
    report = result.report
    first, second = report.choices
    assert (first.node, first.op, first.chosen) == ("best/TopK", "TopK", 12.0)
    assert first.values == ("flat in front of best/TopK",)
    assert (second.outputs, second.decides, second.chosen) == (("out",), ("label",), 6.0)
    text = print_report(report)
    assert "best/TopK (TopK): " in text
    assert f"top/TopK (TopK): {second.shared:.4g} of 6 chosen are the same as in float; decides label" in text
    assert "flat in front of best/TopK" in text
    document = json.loads(write_json(report))
    assert [entry["node"] for entry in document["choices"]] == ["best/TopK", "top/TopK"]
    assert {entry["name"] for entry in document["checks"]} == JUDGED["queries"]
    labels = print_report(quantize("labels", effort="fast").report)
    assert "% of the choices are the same as in float; decides label, number; out: compared on" in labels


def test_a_wish_is_met_by_the_values_and_the_rows_that_match() -> None:
    promotion = quantize("detector", min_sqnr=25).report.promotion
    assert (promotion.met, promotion.steps) == (True, ())


def test_the_operator_behind_a_choice_that_costs_most_is_promoted() -> None:
    report = quantize("queries", with_bits("w_box", 3), min_sqnr=24).report
    assert report.promotion.met
    assert [node for step in report.promotion.steps for node in step.nodes] == ["boxes/MatMul"]


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in ("ids", "best")])
def test_a_network_that_does_not_choose_has_its_outputs_alone(name: str) -> None:
    report = quantize(name, effort="fast").report
    assert [check.name for check in report.checks] == ["out"]
    assert report.choices == ()
    assert "the float model's choice" not in print_report(report)


@pytest.mark.parametrize("name", ["detector", "suppression", "queries"])
def test_diff_gives_every_run_the_same_choices(name: str) -> None:
    result = quantize(name, effort="fast")
    settings = {"engines": ["ort"], "layers": True, "bisect": True, "min_sqnr": 20, "threads": 1}
    found = onnxq.diff(network(name), result.model, DATA, overrides=settings)
    assert found.holds
    assert {output.name for output in found.outputs} == JUDGED[name]
    assert found.choices.keys() == {OFF, ON}
    for choices in found.choices.values():
        assert all(0.9 * one.chosen < one.shared <= one.chosen for one in choices)
    # Behind a choice too, where rows would have changed places.
    behind = {"picked", "confidence", "decoded", "boxes", "heat"}
    figures = {layer.name: layer.accuracy[0].sqnr_db for layer in found.layers if layer.name in behind}
    assert figures
    assert min(figures.values()) > 15
    assert found.divergences == ()
    assert "chosen are the same as in float" in print_report(found)
    assert json.loads(write_json(found))["choices"][OFF][0]["op"] == (
        "NonMaxSuppression" if name == "suppression" else "TopK"
    )


def test_saved_runs_are_compared_where_they_took_the_choices(tmp_path) -> None:
    result, settings = quantize("detector", effort="fast"), {"engines": ["ort"], "keep": 24, "threads": 1}
    proto = network("detector")
    onnxq.diff(proto, result.model, DATA, overrides=settings, out=tmp_path / "saved")
    again = onnxq.diff(proto, result.model, overrides={**settings, "load": [str(tmp_path / "saved")], "min_sqnr": 20})
    assert again.holds
    assert again.skipped == ()
    (out,) = [output for output in again.outputs if output.name == "out"]
    assert [error.run for error in out.accuracy] == [OFF, ON, f"{OFF} (saved)", f"{ON} (saved)"]
    inputs = json.loads((tmp_path / "saved" / "inputs.json").read_text())
    assert inputs[0].keys() == {"x"}
    # As another tool saves them: outputs alone, of the run's own choice.
    results = json.loads((tmp_path / "saved" / "results.json").read_text())
    for _, rows in results["lst"]:
        for row in rows:
            row["outputs"] = {"out": row["outputs"]["out"]}
    (tmp_path / "saved" / "results.json").write_text(json.dumps(results))
    other = onnxq.diff(proto, result.model, overrides={**settings, "load": [str(tmp_path / "saved")], "min_sqnr": 20})
    assert other.holds
    assert [(one.subject, one.code) for one in other.skipped] == [
        (f"output out of {run}", "R111") for run in (OFF, ON)
    ]  # fmt: skip
    (out,) = [output for output in other.outputs if output.name == "out"]
    assert [error.run for error in out.accuracy] == [OFF, ON]


def test_a_tolerance_that_the_values_break_is_told() -> None:
    result = quantize("detector", with_bits("w_score", 2), effort="fast")
    found = onnxq.diff(network("detector"), result.model, DATA, overrides={"engines": ["ort"], "min_sqnr": 20})
    assert {one.output for one in found.unmet} == {"flat in front of best/TopK"}


def test_a_profile_is_of_values_and_rows_that_match() -> None:
    result = quantize("detector", effort="fast")
    found = onnxq.profile_model(network("detector"), result.model, DATA, overrides={"threads": 1})
    assert {cost.name for cost in found.outputs} == JUDGED["detector"]
    assert all(cost.sqnr_db > 20 and cost.float_db > 100 for cost in found.outputs)
    assert found.warnings == ()
    (choice,) = found.choices
    assert 11 <= choice.shared <= choice.chosen == 12
    assert "chosen are the same as in float" in print_report(found)
    assert json.loads(write_json(found))["choices"][0]["node"] == "best/TopK"


def test_another_tools_names_are_told() -> None:
    """Where the quantized model has no such tensor, it is compared as it comes."""
    quantized = quantize("detector", effort="fast").model
    for node in quantized.graph.node:
        node.input[:] = ["places of the best" if name == "at" else name for name in node.input]
        node.output[:] = ["places of the best" if name == "at" else name for name in node.output]
    del quantized.metadata_props[:]
    profile = onnxq.profile_model(network("detector"), quantized, DATA, overrides={"threads": 1})
    assert [warning.code for warning in profile.warnings] == ["W117"]
    found = onnxq.diff(network("detector"), quantized, DATA, overrides={"engines": ["ort"], "threads": 1})
    for told in (str(profile.warnings[0]), found.notes[0]):
        assert "has no tensor 'at'" in told
    assert [output.name for output in found.outputs] == ["out"]


def test_a_large_model_is_checked_on_the_choices(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "LARGE_BYTES", 1 << 10)
    onnx.save(network("queries"), tmp_path / "m.onnx")
    report = onnxq.quantize(str(tmp_path / "m.onnx"), DATA, EVERYTHING, overrides={"effort": "fast"}).report
    assert report.segments
    assert report.alarms() == ()
    assert [choice.node for choice in report.choices] == ["best/TopK", "top/TopK"]


def test_saturation_is_measured_on_the_exact_sums_choices() -> None:
    result = quantize("detector", effort="fast")
    rows = [{"x": row[None]} for row in DATA["x"][:3]]
    cost = measure_saturation(result.model, rows, threads=1)
    assert {one.output for one in cost.outputs} == JUDGED["detector"]
    assert all(one.sqnr_db > 20 for one in cost.outputs)


@pytest.mark.parametrize("effort", ["fast", "balanced"])
def test_ties_do_not_make_a_rewrite_another_function(effort: str) -> None:
    """Every token twice: which of two equal rows comes first hangs on the order of sums, and says nothing."""
    proto = network("detector")
    twice = {"x": np.concatenate([DATA["x"][:, :48]] * 2, axis=1)}
    result = onnxq.quantize(proto, twice, EVERYTHING, overrides={"effort": effort, "latency": False})
    assert result.report.alarms() == ()


def test_measured_placements_are_compared_on_the_choices() -> None:
    report = quantize("detector", EVERYTHING, effort="fast", placement="measured").report
    assert "W108" not in [alarm.code for alarm in report.alarms()]
    assert {check.name for check in report.checks} == JUDGED["detector"]
