"""Sections that serve one command: in a file as on the command line."""

from __future__ import annotations

from pathlib import Path

from onnxq.backends import load_config
from onnxq.config import Config

FULL = """
budget: 10m
accuracy: {metric: eval.py:accuracy, max_drop: 1%, promote_to: uint16}
apply: {new_weights: true}
diff: {engines: [ort], layers: true, min_sqnr: 30, min_agreement: .99, top_k: 5, load: run.json}
prove: {engine: ort, require_int8: [Conv, /head/], timeout: 90s, shapes: "x:1x3x8x8"}
profile: {by: site, samples: 2}
data: {memory_limit: 2GB}
output: {plan: plan.json, external_data: true}
"""


def test_every_section_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FULL)
    config = load_config(tmp_path / "c.yaml")
    assert config.budget == 600
    wanted = config.accuracy
    assert (wanted.metric, wanted.max_drop, wanted.promote_to, wanted.min_sqnr) == (
        "eval.py:accuracy", "1%", "uint16", None,
    )  # fmt: skip
    assert config.apply.new_weights
    assert (config.diff.engines, config.diff.layers, config.diff.load) == (("ort",), True, ("run.json",))
    assert (config.diff.min_sqnr, config.diff.min_agreement, config.diff.top_k) == (30.0, 0.99, 5)
    assert (config.prove.require_int8, config.prove.timeout, config.prove.shapes) == (
        ("Conv", "/head/"), 90.0, ("x:1x3x8x8",),
    )  # fmt: skip
    assert (config.profile.by, config.profile.samples) == (("site",), 2)
    assert config.data.memory_limit == 2_000_000_000
    assert (config.output.plan, config.output.external_data) == ("plan.json", True)


def test_without_them_nothing_is_asked() -> None:
    config = Config()
    assert (config.accuracy.min_sqnr, config.accuracy.metric, config.budget) == (None, None, None)
    assert config.diff.engines == config.profile.by == config.prove.require_int8 == ()
    assert (config.prove.engine, config.prove.timeout) == (None, 600.0)
    assert config.verify.latency
