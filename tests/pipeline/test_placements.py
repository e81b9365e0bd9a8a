"""Placements by measuring and by kinds of CPU: in the plan, in every account, and the same bytes when carried out."""

import json
import platform
from collections.abc import Mapping

import numpy as np
import pytest

import onnxq
from onnxq.backends import find_target
from onnxq.commands.results import write_json
from onnxq.errors import ConfigError
from onnxq.evaluation.accumulator import Array
from onnxq.graph import ModelLike
from onnxq.pipeline.finalize import warn_unmeasured_cpu
from onnxq.plan import PlacementMethod
from onnxq.runtime import CPU_KINDS, Latency, detect_cpu, time_models
from tests.graph.kit import model
from tests.pipeline.models import images, quantize, residual, to_bytes


def test_the_choice_is_written_down_and_reproducible() -> None:
    result = quantize(residual(), images(), "ort-int8", placement="measured")
    choice = result.plan.placement
    assert choice.method is PlacementMethod.MEASURED
    assert choice.speedups
    # On a busy machine none may win; then no site is quantized, and the plan says so.
    assert choice.candidate in ("", *choice.speedups)
    assert choice.threads == (1 if choice.candidate else 0)
    assert to_bytes(onnxq.apply(residual(), result.plan)) == to_bytes(result)
    # It is for this machine.
    assert choice.cpu == detect_cpu()
    with pytest.raises(ConfigError, match="cpu") as caught:
        quantize(residual(), images(), "ort-int8", placement="measured", cpu="vnni")
    assert "placement: rules" in str(caught.value)


def test_candidates_of_tensorrt_are_chosen_by_whatever_times_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's times in the place of a GPU's, and one candidate that the engine refuses."""
    seen: list[set[str]] = []

    def measure(models: Mapping[str, ModelLike], feeds: Mapping[str, Array], rounds: int) -> dict[str, Latency]:
        seen.append(set(models))
        return time_models({name: one for name, one in models.items() if name != "linear-only"}, feeds, rounds=rounds)

    monkeypatch.setattr("onnxq.pipeline.quantize_model.choose_timer", lambda _: (measure, 0))
    plan = onnxq.make_plan(residual(), images(), overrides={"target": "trt", "placement": "measured"})
    choice = plan.placement
    assert (choice.method, choice.cpu) == (PlacementMethod.MEASURED, "")
    assert {"float", "rules"} <= seen[0]
    assert choice.speedups.keys() == seen[0] - {"float", "linear-only"}


def test_a_model_that_cannot_gain_is_left_float() -> None:
    text = "g (float[1,4,4,4] x) => (float[1,4,4,4] y) { y = Conv <pads=[1,1,1,1]>(x, w) }"
    data = {"x": np.random.default_rng(1).standard_normal((8, 4, 4, 4)).astype(np.float32)}
    result = quantize(model(text, w=np.ones((4, 4, 3, 3), np.float32)), data, "ort-int8", placement="measured")
    assert result.plan.placement.candidate == ""
    assert result.report.placement == "measured: none"
    assert not result.plan.sites
    assert any("no placement ran faster" in refusal.reason for refusal in result.plan.left_float)


@pytest.mark.parametrize("cpu", [None, "any", *find_target("ort").costs])
def test_plan_and_report_say_what_was_placed_for(cpu: str | None) -> None:
    result = quantize(residual(), images(), "ort-int8", effort="fast", cpu=cpu)
    planned = onnxq.make_plan(residual(), images(), overrides={"cpu": cpu})
    again = onnxq.apply(residual(), result.plan, overrides={"latency": False})
    assert to_bytes(again) == to_bytes(result)
    told = [result.plan.placement.cpu, result.report.cpu, planned.placement.cpu, again.report.cpu]
    assert [*told, json.loads(write_json(result.report))["cpu"]] == [cpu or "any"] * 5


def test_the_summary_names_the_kind_that_timed() -> None:
    result = onnxq.quantize(residual(), images(), overrides={"effort": "fast", "cpu": "avx2"})
    assert result.report.latency.cpu == detect_cpu()
    assert json.loads(write_json(result.report))["latency"]["cpu"] == detect_cpu()
    text = onnxq.summarize(result, width=200)
    assert "placement by rules for x86 with AVX2, without VNNI" in text
    assert f"x 1x32x8x8, on {CPU_KINDS[detect_cpu()]}, ONNX Runtime)" in text


def test_on_an_arm_the_tool_says_that_nobody_measured_it(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = ("ort", "virtual", "web")
    plans = [onnxq.make_plan(residual(), images(), overrides={"target": target}) for target in targets]
    told = {}
    for kind in CPU_KINDS:
        monkeypatch.setattr("onnxq.pipeline.finalize.detect_cpu", lambda kind=kind: kind)
        told[kind] = [warn_unmeasured_cpu(plan) for plan in plans]
    ((line,), *others) = told.pop("arm64")
    assert "nobody has measured" in line
    assert "`placement='measured'`" in line
    # A file for pages runs on other machines than this one, by times of WebAssembly.
    assert others == [(), ()]
    assert not any(map(any, told.values()))


def test_only_a_summary_on_an_arm_says_so_for_the_plan_of_either_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, there in (("aarch64", "x86_64"), ("x86_64", "aarch64")):
        monkeypatch.setattr(platform, "machine", lambda here=here: here)
        plan = onnxq.make_plan(residual(), images())
        shown = onnxq.summarize(plan)
        monkeypatch.setattr(platform, "machine", lambda there=there: there)
        applied = onnxq.apply(residual(), plan, images())
        told = [text.count("W115") for text in (shown, onnxq.summarize(plan), onnxq.summarize(applied))]
        assert told == ([1, 0, 0] if here == "aarch64" else [0, 1, 1])
