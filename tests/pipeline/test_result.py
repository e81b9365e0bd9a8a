"""Results as text: short where a notebook prints them, whole by one function, with a line for each pass."""

from dataclasses import is_dataclass
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.config import Config
from onnxq.errors import ConfigError
from onnxq.passes.equalization import passes
from onnxq.passes.registry import PASSES
from onnxq.wording import abbreviate
from tests.networks import parse_text
from tests.pipeline.models import BALANCED, EVERYTHING, images, quantize, residual
from tests.processes import build_here


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """A result of each kind that is quick to get."""
    model, data = residual(), images()
    made = quantize(model, data)
    with build_here():
        proof = onnxq.prove(made.model, overrides={"engine": "ort"})
        bench = onnxq.bench([model, made.model], overrides={"engine": "ort", "seconds": 0.01})
    return {
        "quantize": made,
        "report": made.report,
        "plan": made.plan,
        "diff": onnxq.diff(model, made.model, data, overrides={"engines": ["ort"], "layers": True}),
        "prove": proof,
        "bench": bench,
        "profile": onnxq.profile_model(model, made.model, data, overrides={"by": ["node"]}),
        "inspect": onnxq.inspect(made.model),
    }


@pytest.mark.parametrize("kind", ["quantize", "report", "plan", "diff", "prove", "bench", "profile", "inspect"])
def test_a_notebook_prints_a_line_and_the_summary_is_text(results: dict[str, Any], kind: str) -> None:
    line = repr(results[kind])
    assert line.startswith(f"{type(results[kind]).__name__}(")
    assert line.endswith(")")
    assert len(line) <= 501
    assert "\n" not in line
    text = onnxq.summarize(results[kind])
    assert text.endswith("\n")
    assert len(onnxq.summarize(results[kind], verbose=True)) >= len(text)
    assert max(map(len, onnxq.summarize(results[kind], width=60).splitlines())) <= 60


def test_the_summary_is_that_of_the_command(results: dict[str, Any]) -> None:
    assert onnxq.summarize(results["quantize"]) == onnxq.summarize(results["report"])
    assert "against float on" in onnxq.summarize(results["quantize"])


def test_short_forms_name_sizes_and_leave_out_what_is_empty(results: dict[str, Any]) -> None:
    plan = results["plan"]
    assert f"sites=<{len(plan.sites)}>" in repr(plan)
    assert "target='ort'" in repr(plan)
    assert "refusals" not in repr(plan)


def test_every_public_result_has_a_short_form() -> None:
    kinds = [kind for name in onnxq.__all__ if is_dataclass(kind := getattr(onnxq, name))]
    assert len(kinds) > 10
    assert [kind.__name__ for kind in kinds if vars(kind)["__repr__"] is not abbreviate] == []


def test_a_loop_in_which_nothing_changes_is_the_one_that_was_loaded() -> None:
    """Weights read from outside serve integers: ONNX Runtime computes with them slower than with those handed on."""
    text = """g (float[4] x) => (float[4] y) <int64 steps = {3}> { r, last = Loop(steps, , x, w) <body = step
        (int64 k, bool on, float[4] h, float[4,4] m) => (bool on, float[4] g, float[4,4] m) { g = MatMul(h, m) }>
        y = Relu(r) }"""
    proto = parse_text(text, opset=17, w=np.eye(4, dtype=np.float32))
    samples = {"x": np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)}
    result = quantize(proto, [{"x": row} for row in samples["x"]], Config())
    assert not result.plan.sites
    assert [list(node.input) for node in result.model.graph.node] == [list(node.input) for node in proto.graph.node]
    assert not result.report.rewrites


def test_what_is_no_result_has_no_summary() -> None:
    with pytest.raises(ConfigError, match="ModelProto has no summary") as caught:
        onnxq.summarize(onnx.ModelProto())
    assert caught.value.code == "Q304"


def test_every_pass_has_a_line_and_none_has_two() -> None:
    result = quantize(residual(), images(24), BALANCED)
    names = [line.partition(":")[0] for line in result.report.accounts]
    assert names == [entry.name for entry in PASSES if entry.name in names]
    wanted = {"cross_layer_equalization", "smoothquant", "ranges", "sensitive_ops", "rounding"}
    assert wanted <= set(names)
    text = onnxq.summarize(result)
    assert all(line in text for line in result.report.accounts)
    assert not any(line.startswith(tuple(f"{name}:" for name in names)) for line in result.report.rewrites)
    # Where no pass was asked for there is none.
    assert quantize(residual(), images(8)).report.accounts == ()


def test_a_rollback_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([30.0, 20.0, 30.0, 30.0, 30.0])
    monkeypatch.setattr(passes, "_score", lambda *_: next(scores))
    text = onnxq.summarize(quantize(residual(), images(24), BALANCED))
    assert "cross_layer_equalization: rolled back: 30.0 to 20.0 dB in a trial" in text


@pytest.mark.parametrize(("config", "told"), [(EVERYTHING, False), (BALANCED, True)])
def test_a_dry_run_says_what_it_leaves_out(config: Config, told: bool) -> None:
    plan = onnxq.make_plan(residual(), images(8), config)
    assert any("is not in this plan" in line for line in plan.warnings) == told
