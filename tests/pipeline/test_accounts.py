"""What each pass did stands in the summary, and a dry run says what it leaves out."""

from __future__ import annotations

import io

import pytest

import onnxq
from onnxq.commands.results import show
from onnxq.config import Config
from onnxq.passes.equalization import passes
from onnxq.passes.registry import PASSES
from onnxq.report.terminal import TextView
from tests.pipeline.models import EVERYTHING, images, residual

BALANCED = EVERYTHING.model_copy(update={"effort": "balanced"})


def shown(result: onnxq.Result) -> str:
    stream = io.StringIO()
    show(result.report, TextView(stream=stream))
    return stream.getvalue()


def test_every_pass_has_a_line_and_none_has_two() -> None:
    result = onnxq.quantize(residual(), images(24), BALANCED, overrides={"latency": False})
    names = [line.partition(":")[0] for line in result.report.accounts]
    assert names == [entry.name for entry in PASSES if entry.name in names]
    wanted = {"cross_layer_equalization", "bias_absorption", "smoothquant", "ranges", "sensitive_ops", "rounding"}
    assert wanted <= set(names)
    text = shown(result)
    assert all(line in text for line in result.report.accounts)
    assert not any(line.startswith(tuple(f"{name}:" for name in names)) for line in result.report.rewrites)


def test_a_rollback_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([30.0, 20.0, 30.0, 30.0, 30.0])
    monkeypatch.setattr(passes, "_score", lambda *_: next(scores))
    text = shown(onnxq.quantize(residual(), images(24), BALANCED, overrides={"latency": False}))
    assert "cross_layer_equalization: rolled back: 30.0 to 20.0 dB in a trial" in text


@pytest.mark.parametrize(("config", "told"), [(EVERYTHING, False), (BALANCED, True)])
def test_a_dry_run_says_what_it_leaves_out(config: Config, told: bool) -> None:
    plan = onnxq.make_plan(residual(), images(8), config)
    assert any("is not in this plan" in line for line in plan.warnings) == told


def test_no_account_where_nothing_was_asked_for() -> None:
    assert onnxq.quantize(residual(), images(8), EVERYTHING, overrides={"latency": False}).report.accounts == ()
