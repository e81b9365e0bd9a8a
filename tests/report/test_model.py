"""Warnings that follow from a report's numbers, and the groups of what is not quantized."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from onnxq.report.model import SYNTHETIC, LatencyRatio, OutputCheck, Report, group_reasons, warn_synthetic
from onnxq.sites import Caution, LeftFloat, Refusal


def check(off: float, on: float, *, optimized: bool = True) -> OutputCheck:
    return OutputCheck(name="y", sqnr_db=(off, on), cosine=(1.0, 1.0), agreement_db=50.0, optimized=optimized)


GOOD = Report(source="m.onnx", source_bytes=100, output_bytes=50, pairs=2, target="ort", checks=(check(40.0, 40.0),))


@pytest.mark.parametrize(
    ("report", "codes"),
    [
        (GOOD, []),
        (replace(GOOD, pairs=0), ["W111"]),
        (replace(GOOD, checks=(check(9.9, 9.9),)), ["W108"]),
        (replace(GOOD, checks=(check(40.0, 9.9),)), ["W108"]),
        (replace(GOOD, checks=(check(40.0, math.nan),)), ["W108"]),
        (replace(GOOD, checks=(check(40.0, math.nan, optimized=False),)), []),
        (replace(GOOD, checks=(check(40.0, 36.9),)), ["W109"]),
        (replace(GOOD, checks=(check(40.0, 37.1),)), []),
        # So near to float the order of additions makes as much of a difference.
        (replace(GOOD, checks=(check(137.0, 125.0),)), []),
        (replace(GOOD, checks=(check(math.inf, 41.0),)), []),
        (replace(GOOD, checks=(replace(check(20.0, 20.0), top_1=(0.7, 0.4), rows=100, classes=True),)), ["W108"]),
        (replace(GOOD, pairs=0, latency=LatencyRatio(float_ms=1.0, int8_ms=1.1)), ["W111"]),
        (replace(GOOD, target="trt", checks=(check(40.0, 5.0),)), ["W109"]),
        (replace(GOOD, latency=LatencyRatio(float_ms=1.0, int8_ms=1.1)), ["W110"]),
        (replace(GOOD, latency=LatencyRatio(float_ms=1.0, int8_ms=0.9)), []),
        (replace(GOOD, latency=LatencyRatio(float_ms=1.0, int8_ms=0.0)), []),
    ],
)
def test_alarms(report: Report, codes: list[str]) -> None:
    assert [alarm.code for alarm in report.alarms()] == codes


def test_what_another_placement_would_gain_stands_in_the_alarm_that_nothing_is_quantized() -> None:
    other = Caution("W103", "on CPUs of kind vnni it would pay")
    kept = LeftFloat("a", "no faster")
    float_still = replace(GOOD, pairs=0, warnings=(other,), left_float=(kept,))
    text = "int8 would not pay: nothing was quantized, and the result computes what the model did; "
    assert float_still.alarms() == (f"{text}{other}",)
    assert replace(float_still, refusals=(Refusal("b", "no"),)).alarms()[0].startswith("everything was refused")


def test_an_alarm_names_the_reason_where_it_is_known() -> None:
    slow = replace(GOOD, latency=LatencyRatio(float_ms=1.0, int8_ms=2.0, reason="no VNNI"))
    assert slow.alarms()[0] == "the quantized model is slower than the float one: no VNNI"
    drifted = replace(GOOD, checks=(check(40.0, 30.0),), saturating="2 rows overflow")
    assert drifted.alarms()[0].endswith("optimizations on: 2 rows overflow")


@pytest.mark.parametrize(
    ("roles", "calibrated"),
    [((), True), ((("weight", 3),), False), ((("weight", 3), ("activation", 0)), False), ((("output", 1),), True)],
)
def test_weights_alone_are_not_calibrated(roles: tuple[tuple[str, int], ...], calibrated: bool) -> None:
    assert replace(GOOD, roles=roles).calibrated == calibrated


def test_reasons_are_grouped_most_frequent_first_then_by_name() -> None:
    found = [Refusal("a", "z"), LeftFloat("b", "y"), Refusal("c", "y"), Refusal("d", "x")]
    groups = group_reasons(found)
    assert [(reason, [one.subject for one in members]) for reason, members in groups] == [
        ("y", ["b", "c"]),
        ("x", ["d"]),
        ("z", ["a"]),
    ]


def test_made_up_inputs_have_one_code_and_one_way_out() -> None:
    warnings = [SYNTHETIC, warn_synthetic("costs were measured")]
    assert {warning.code for warning in warnings} == {"W101"}
    assert all("`data=…`" in warning for warning in warnings)
    assert warnings[1].startswith("no samples were given: costs were measured on made-up inputs")
