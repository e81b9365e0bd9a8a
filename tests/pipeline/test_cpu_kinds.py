"""The kind of CPU: asked for, carried through the plan, and named in every account."""

from __future__ import annotations

import io
import json

import pytest

import onnxq
from onnxq.backends.ort.costs import CPU_COSTS
from onnxq.commands.results import show, write_json
from onnxq.errors import ConfigError
from onnxq.pipeline.finalize import warn_unmeasured_cpu
from onnxq.report.terminal import TextView
from onnxq.runtime import CPU_KINDS, detect_cpu
from tests.pipeline.models import images, residual


@pytest.mark.parametrize("cpu", [None, "any", *CPU_COSTS])
def test_plan_and_report_say_what_was_placed_for(cpu: str | None) -> None:
    result = onnxq.quantize(residual(), images(), overrides={"effort": "fast", "latency": False, "cpu": cpu})
    assert result.plan.placement.cpu == (cpu or "any")
    assert result.report.cpu == (cpu or "any")
    assert json.loads(write_json(result.report))["cpu"] == (cpu or "any")
    assert onnxq.make_plan(residual(), images(), overrides={"cpu": cpu}).placement.cpu == (cpu or "any")
    again = onnxq.apply(residual(), result.plan, overrides={"latency": False})
    assert again.report.cpu == (cpu or "any")
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)


def test_the_summary_names_the_kind_that_timed() -> None:
    result = onnxq.quantize(residual(), images(), overrides={"effort": "fast", "cpu": "avx2"})
    assert result.report.latency is not None
    assert result.report.latency.cpu == detect_cpu()
    assert json.loads(write_json(result.report))["latency"]["cpu"] == detect_cpu()
    out = io.StringIO()
    show(result.report, TextView(stream=out, width=200))
    assert "placement by rules for x86 with AVX2, without VNNI" in out.getvalue()
    assert f"x 1x32x8x8, on {CPU_KINDS[detect_cpu()]})" in out.getvalue()


def test_a_measured_placement_is_for_this_machine() -> None:
    result = onnxq.quantize(
        residual(), images(), overrides={"placement": "measured", "effort": "fast", "latency": False}
    )
    assert result.plan.placement.cpu == detect_cpu()
    with pytest.raises(ConfigError, match="cpu") as caught:
        onnxq.quantize(residual(), images(), overrides={"placement": "measured", "cpu": "vnni"})
    assert "placement: rules" in str(caught.value)


def test_on_an_arm_the_tool_says_that_nobody_measured_it() -> None:
    plan = onnxq.make_plan(residual(), images())
    (line,) = warn_unmeasured_cpu(plan, "arm64")
    assert "nobody has measured" in line
    assert "`placement='measured'`" in line
    for kind in ("vnni", "avx2", "x86", "unknown"):
        assert warn_unmeasured_cpu(plan, kind) == ()
    virtual = onnxq.make_plan(residual(), images(), overrides={"target": "virtual"})
    assert warn_unmeasured_cpu(virtual, "arm64") == ()
