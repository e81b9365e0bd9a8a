"""Results as text: short where a notebook prints them, whole by one function."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import onnx
import pytest
from onnx import parser

import onnxq
from onnxq.errors import ConfigError
from onnxq.wording import abbreviate
from tests.pipeline.models import images, residual

RULES = [{"op": "*", "set": {"quantize": True}}]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """A result of each kind that is quick to get."""
    model, data = residual(), images()
    fast = {"effort": "fast", "latency": False, "rules": RULES}
    made = onnxq.quantize(model, data, overrides=fast)
    return {
        "quantize": made,
        "report": made.report,
        "plan": made.plan,
        "diff": onnxq.diff(model, made.model, data, overrides={"engines": ["ort"], "layers": True}),
        "prove": onnxq.prove(made.model, overrides={"engine": "ort"}),
        "bench": onnxq.bench([model, made.model], overrides={"engine": "ort", "seconds": 0.01}),
        "profile": onnxq.profile_model(model, made.model, data, overrides={"by": ["node"]}),
        "inspect": onnxq.inspect(made.model),
    }


KINDS = ("quantize", "report", "plan", "diff", "prove", "bench", "profile", "inspect")


@pytest.mark.parametrize("kind", KINDS)
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


def test_what_is_no_result_has_no_summary() -> None:
    model: onnx.ModelProto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1] x) => (float[1] y) { y = Identity(x) }'
    )
    with pytest.raises(ConfigError, match="ModelProto has no summary") as caught:
        onnxq.summarize(model)
    assert caught.value.code == "Q304"
