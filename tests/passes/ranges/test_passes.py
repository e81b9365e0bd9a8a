"""The pass in a run: told, skipped, rolled back."""

from __future__ import annotations

import re

import pytest

import onnxq
from onnxq.config import Config, TensorConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.base import Stage
from onnxq.passes.journal import Outcome
from onnxq.passes.judging import Evaluator
from onnxq.passes.ranges import passes
from onnxq.passes.ranges.search import choose_ranges
from onnxq.passes.runner import run_stage
from onnxq.progress import silent
from tests.passes.context import make_context, place
from tests.passes.ranges.kit import ALL, MINMAX, deaf, linear, prepared_plan, tokens
from tests.pipeline.models import images


def test_in_a_run_it_is_told_skipped_and_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MINMAX.model_copy(
        update={"effort": "balanced", "skip": ("cross_layer_equalization", "smoothquant", "rounding", "promotion")}
    )
    feeds = images(48)
    feeds["x"][[10, 20], 0, 0, 0] = 40.0

    def told(config: Config, data: object = feeds) -> list[str]:
        found = onnxq.quantize(deaf(), data, config, overrides={"latency": False})
        return [line for line in found.report.accounts if line.startswith("ranges: ")]

    line = told(config)[0]
    assert "in a trial" in line
    assert re.search(r"in place of the observer minmax at \w+.*: what reads these loses less so", line)
    assert "`skip: [ranges]` keeps the observer's" in line
    assert told(config.model_copy(update={"skip": (*config.skip, "ranges")})) == []
    assert told(config.model_copy(update={"effort": "fast"})) == []
    assert told(config, None) == []
    scores = iter((20.0, 19.0))
    monkeypatch.setattr(Evaluator, "score", lambda *_, **__: next(scores))
    state, plan = prepared_plan(deaf(), feeds)
    ctx = make_context(load_data(feeds, GraphIndex(state.model).inputs))
    after = run_stage(passes.RANGES, Stage.REFINE, ctx, place(state, plan))
    assert after.plan is plan
    assert [report.outcome for report in ctx.journal] == [Outcome.WORSE]


def test_weights_alone_have_no_ranges_to_choose() -> None:
    config = Config(mode="weight-only", rules=ALL, weights=TensorConfig(granularity="channel"))
    prepared, plan = prepared_plan(linear(1.0), tokens(8), config)
    samples = list(load_data(tokens(8), GraphIndex(prepared.model).inputs).samples())
    assert choose_ranges(prepared.model, plan, samples, samples, observed=len(samples), progress=silent).plan == plan
