"""Roundings handed in: taken where they fit, kept where they help, refused by name where they do not fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.config import Config, TensorConfig
from onnxq.data import Dataset, load_data
from onnxq.errors import PlanError
from onnxq.evaluation.compare import ModelErrors
from onnxq.graph import GraphIndex
from onnxq.numerics import find_saturating_sums
from onnxq.passes.base import SampledContext, Stage, run_stage
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import Evaluator
from onnxq.passes.rounding import passes
from onnxq.passes.rounding.sequential import round_sequentially
from onnxq.passes.state import FloatState, PlacedState
from onnxq.pipeline.prepared import load_state
from onnxq.plan import Plan, SitePlan
from onnxq.progress import Progress, silent
from onnxq.sites import Role, TensorId
from tests.passes.context import make_context, place
from tests.passes.rounding.kit import ALL, FOUR, calibrated
from tests.pipeline.models import images, list_accounts, quantize, residual

HIGH = Config(
    effort="high",
    rules=ALL,
    skip=("cross_layer_equalization", "bias_absorption", "smoothquant", "ranges", "promotion"),
    weights=TensorConfig(granularity="channel", bits=3, narrow_range=True),
)
WIDE = HIGH.model_copy(update={"weights": TensorConfig(granularity="channel")})


def weights(plan: Plan) -> list[SitePlan]:
    return [site for site in plan.sites if site.role is Role.WEIGHT]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return quantize(residual(), images(32), HIGH).plan


@pytest.fixture
def name() -> Iterator[str]:
    yield "test"
    passes.register_rounder("test", None)
    assert "test" not in passes.list_rounders()


def test_levels_take_the_place_of_the_sweeps(plan: Plan) -> None:
    first = weights(plan)[0]
    negated = {first.site: -first.values.astype(np.int64)}
    found, lines = passes.apply_rounding(plan, passes.ExternalRounding("b", negated))
    assert lines == ()
    assert np.array_equal(found.site(first.site).values, -first.values)
    assert found.site(first.site).values.dtype == np.int8
    assert [s for s in found.sites if s.site != first.site] == [s for s in plan.sites if s.site != first.site]
    assert onnxq.apply(residual(), found).model.SerializeToString() != b""


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda v: v[:-1], "of the weight's shape"),
        (lambda v: v + 9, "from -3 to 3"),
        (lambda v: v.astype(np.float32), "must be integers"),
    ],
)
def test_levels_that_do_not_fit_name_block_and_site(plan: Plan, spoil: Any, says: str) -> None:
    first = weights(plan)[0]
    with pytest.raises(PlanError, match=says) as caught:
        passes.apply_rounding(plan, passes.ExternalRounding("block 7", {first.site: spoil(first.values)}))
    assert "block 7" in str(caught.value)
    assert str(first.site) in str(caught.value)


def test_what_is_no_weight_and_scales_without_levels_are_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match="not a quantized weight"):
        passes.apply_rounding(plan, passes.ExternalRounding("b", {TensorId("nowhere", ""): np.zeros(3, np.int8)}))
    first = weights(plan)[0]
    with pytest.raises(PlanError, match="without levels"):
        passes.apply_rounding(plan, passes.ExternalRounding("b", {}, numbers={first.site: first.qparams}))


def test_a_rounder_is_asked_at_high_effort_and_kept_block_by_block(name: str) -> None:
    seen: list[int] = []

    def rounder(proto: onnx.ModelProto, plan: Plan, samples: Sequence[Any]) -> Iterator[passes.ExternalRounding]:
        seen.append(len(samples))
        for site in weights(plan)[:2]:
            yield passes.ExternalRounding("harmful", {site.site: np.zeros_like(site.values)})
        yield passes.ExternalRounding("same", {site.site: site.values for site in weights(plan)})

    passes.register_rounder(name, rounder)
    done = quantize(residual(), images(16), HIGH)
    assert "test: 0 of 3 blocks kept" in list_accounts(done, "external_rounding")[0]
    assert list_accounts(done, "low_bit_search")
    assert all(site.values is None or site.values.any() for site in weights(done.plan))
    assert len(seen) == 1
    quantize(residual(), images(16), HIGH, effort="balanced")
    assert len(seen) == 1


@pytest.fixture(scope="module")
def good() -> Plan:
    """8-bit weights of a network that the sweep helps: to seed 0, rounding to nearest happens to be as kind."""
    return quantize(residual(1), images(32), WIDE).plan


def test_integers_that_overflow_a_sum_are_moved_and_said(good: Plan) -> None:
    first = weights(good)[0]
    assert first.sum_orders == ((0, 2, 3, 1),)
    full = np.full_like(first.values, 127)
    found, lines = passes.apply_rounding(good, passes.ExternalRounding("block 3", {first.site: full}))
    assert (found.site(first.site).values == 64).all()
    said = f"{full.size // 2} sums of its integers would overflow 16 bits: moved to the nearest"
    assert lines == (f"block 3: {first.site}: {said}",)
    onnxq.apply(residual(1), found)
    free = replace(first, sum_orders=())
    loose = replace(good, sites=tuple(free if site is first else site for site in good.sites))
    found, lines = passes.apply_rounding(loose, passes.ExternalRounding("block 3", {first.site: full}))
    assert lines == ()
    assert np.array_equal(found.site(first.site).values, full)


STATE = load_state(residual(1))
SAMPLES = load_data(images(32), GraphIndex(STATE.model).inputs)


def hand_in(plan: Plan) -> tuple[Plan, PassReport]:
    """The plan with the registered roundings, judged on the samples they see."""
    after, report = passes.round_externally(make_context(SAMPLES, effort="high"), place(STATE, plan))
    return after.plan, report


def score(plan: Plan) -> float:
    return Evaluator(SAMPLES).score(STATE, plan)


@pytest.fixture(scope="module")
def spoiled(good: Plan) -> Plan:
    """The plan whose first weight is rounded to zeros."""
    first = weights(good)[0]
    return passes.apply_rounding(good, passes.ExternalRounding("", {first.site: np.zeros_like(first.values)}))[0]


def test_a_better_block_is_kept(name: str, good: Plan, spoiled: Plan) -> None:
    first, second = weights(good)[:2]

    def rounder(proto: onnx.ModelProto, plan: Plan, samples: Sequence[Any]) -> Iterator[passes.ExternalRounding]:
        yield passes.ExternalRounding("worse", {second.site: np.zeros_like(second.values)})
        yield passes.ExternalRounding("better", {first.site: first.values})

    passes.register_rounder(name, rounder)
    plan, report = hand_in(spoiled)
    assert np.array_equal(plan.site(first.site).values, first.values)
    assert np.array_equal(plan.site(second.site).values, second.values)
    assert score(plan) == score(good) > score(spoiled)
    assert report.changed == (f"test: 1 of 2 blocks kept, {score(spoiled):.1f} to {score(good):.1f} dB",)


def test_moved_integers_of_a_kept_block_are_in_the_account(name: str, good: Plan, spoiled: Plan) -> None:
    first = weights(good)[0]
    broken = first.values.copy()
    broken[0, :2, 0, 0] = 127
    passes.register_rounder(name, lambda *_: [passes.ExternalRounding("block", {first.site: broken})])
    plan, report = hand_in(spoiled)
    values = plan.site(first.site).values
    assert (values[0, :2, 0, 0] == 64).all()
    assert not find_saturating_sums(values, first.sum_orders[0]).any()
    assert f"; block: {first.site}: 1 sums of its integers would overflow 16 bits" in report.changed[0]


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
    ("harmed", "kept", "biases"), [("0123", "", False), ("3", "012", False), ("0123", "0123", True)]
)
def test_what_makes_it_worse_is_rolled_back_and_parts_that_help_are_kept(
    monkeypatch: pytest.MonkeyPatch, calibration: Any, harmed: str, kept: str, biases: bool
) -> None:
    def harmful(proto: onnx.ModelProto, plan: Plan, samples: object, **given: object) -> object:
        found = round_sequentially(proto, plan, samples, **given)  # type: ignore[arg-type]
        worse = harmed if found.done[0].bias or not biases else ""
        sites = tuple(
            replace(s, values=-s.values) if s.values is not None and str(s.site)[1:] in {*worse} else s
            for s in found.plan.sites
        )
        return replace(found, plan=replace(found.plan, sites=sites))

    monkeypatch.setattr(passes, "round_sequentially", harmful)
    after, ctx = round_in_a_run(*calibration, effort="high" if biases else "balanced")
    rounded = [str(s.site)[1:] for s in after.plan.sites if s.values is not None and s.role is Role.WEIGHT]
    assert ("".join(sorted(rounded)), after.plan is calibration[1]) == (kept, not kept)
    assert not biases or "re-fitted, 0 with a new bias" in ctx.journal[1].changed[0]
    second = Outcome.KEPT if kept else Outcome.NO_GAIN
    assert [report.outcome for report in ctx.journal] == [Outcome.WORSE, second, *[Outcome.WORSE] * biases]
    assert not biases or ctx.journal[2].trial_db[1] > 20  # of the longer search, which leaves biases too


@pytest.mark.parametrize(
    ("before", "effort", "sweeps"), [(45.0, "balanced", 1), (45.0, "high", 4), (35.0, "balanced", 4)]
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
    assert (ctx.journal[0].outcome, ctx.journal[0].trial_db) == (Outcome.WORSE, (before, before - 1.0))


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
