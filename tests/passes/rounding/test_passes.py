"""Rounding as the runner judges it: what makes it worse is rolled back, parts that help are kept."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.data import Dataset, load_data
from onnxq.evaluation.compare import ModelErrors
from onnxq.graph import GraphIndex
from onnxq.passes.base import SampledContext, Stage, run_stage
from onnxq.passes.journal import Outcome
from onnxq.passes.judging import Evaluator
from onnxq.passes.rounding import passes
from onnxq.passes.rounding.sequential import round_sequentially
from onnxq.passes.state import FloatState, PlacedState
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.sites import Role
from tests.passes.context import make_context, place
from tests.passes.rounding.kit import FOUR, calibrated
from tests.pipeline.models import images, residual


@pytest.fixture(scope="module")
def calibration() -> tuple[FloatState, Plan, Dataset]:
    state, plan, _ = calibrated(residual(), images(16), FOUR)
    return state, plan, load_data(images(16), GraphIndex(state.model).inputs)


def round_in_a_run(
    state: FloatState, plan: Plan, data: Dataset, effort: str = "balanced"
) -> tuple[PlacedState, SampledContext]:
    """The rounding passes by the runner, judged on the samples they see."""
    ctx = make_context(data, effort=effort)
    return run_stage(passes.ROUNDING, Stage.REFINE, ctx, place(state, plan)), ctx


@pytest.mark.parametrize(
    ("harmed", "kept"), [(("w0", "w1", "w2", "w3"), set()), (("w3",), {"w0", "w1", "w2"})], ids=["all", "the last"]
)
def test_what_makes_it_worse_is_rolled_back_and_parts_that_help_are_kept(
    monkeypatch: pytest.MonkeyPatch, calibration: Any, harmed: tuple[str, ...], kept: set[str]
) -> None:
    def harmful(proto: onnx.ModelProto, plan: Plan, samples: object, **given: object) -> object:
        found = round_sequentially(proto, plan, samples, **given)  # type: ignore[arg-type]
        sites = tuple(
            replace(s, values=-s.values) if s.values is not None and str(s.site) in harmed else s
            for s in found.plan.sites
        )
        return replace(found, plan=replace(found.plan, sites=sites))

    monkeypatch.setattr(passes, "round_sequentially", harmful)
    after, ctx = round_in_a_run(*calibration)
    rounded = {str(s.site) for s in after.plan.sites if s.values is not None and s.role is Role.WEIGHT}
    assert rounded == kept
    assert (after.plan is calibration[1]) == (not kept)
    second = Outcome.KEPT if kept else Outcome.NO_GAIN
    assert [report.outcome for report in ctx.journal] == [Outcome.WORSE, second]


@pytest.mark.parametrize(
    ("before", "effort", "sweeps"), [(45.0, "balanced", 1), (45.0, "high", 3), (35.0, "balanced", 3)]
)
def test_no_stretches_are_looked_for_where_no_answer_hangs_on_it(
    monkeypatch: pytest.MonkeyPatch, calibration: Any, before: float, effort: str, sweeps: int
) -> None:
    state, plan, data = calibration
    counts: list[int] = []
    monkeypatch.setattr(
        passes, "round_sequentially", lambda *args, **given: counts.append(1) or round_sequentially(*args, **given)
    )
    monkeypatch.setattr(Evaluator, "score", lambda _, state, judged, **__: before if judged is plan else before - 1.0)
    monkeypatch.setattr(Evaluator, "is_worse", lambda *_, **__: True)
    after, ctx = round_in_a_run(state, plan, data, effort=effort)
    assert after.plan is plan
    assert len(counts) == sweeps
    assert ctx.journal[0].outcome is Outcome.WORSE
    assert ctx.journal[0].trial_db == (before, before - 1.0)


def test_one_sample_that_says_worse_is_chance(monkeypatch: pytest.MonkeyPatch, calibration: Any) -> None:
    """All together lose by one sample what the others gain: the sweep stays; where most lose, it goes."""
    prepared, plan, data = calibration
    swept = round_sequentially(prepared.model, plan, data.samples(), progress=silent).plan
    judge = Evaluator(data)
    assert not judge.is_worse(prepared, swept, plan)
    assert judge.is_worse(prepared, plan, swept)
    assert not judge.is_worse(prepared, plan, plan)
    real = Evaluator.run_samples
    lost = ModelErrors()
    lost.update({}, {"y": np.ones(4)}, {"y": np.full(4, 4.0)})

    def one_lost(self: Evaluator, state: FloatState, judged: Plan, *, progress: Progress = silent) -> list[ModelErrors]:
        found = real(self, state, judged, progress=progress)
        return [*found[:3], lost, *found[4:]] if judged is swept else found

    monkeypatch.setattr(Evaluator, "run_samples", one_lost)
    assert not judge.is_worse(prepared, swept, plan)
