"""The runner of passes, with passes made up here: who is left out, what a trial keeps, the time, the words."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from onnxq.config import Config, DataConfig
from onnxq.data import Dataset, load_data
from onnxq.errors import OnnxqError
from onnxq.graph import GraphIndex, ValueInfo
from onnxq.passes.base import Pass, RunContext, Stage, run_pass, run_stage
from onnxq.passes.journal import MEASURED, Outcome, PassReport, Shortage, Shortened, list_replaced
from onnxq.passes.judging import THRESHOLDS, Threshold, Trial
from onnxq.passes.mixed_precision.program import PrecisionProgram
from onnxq.passes.mixed_precision.promotion_search import PromotionSearch
from onnxq.passes.registry import PASSES
from onnxq.passes.state import FloatState, Note
from onnxq.passes.time_budget import TimeBudget, Timers
from onnxq.plan import Plan, SitePlan
from onnxq.progress import OutOfTime, Progress, silent
from onnxq.sites import Role, TensorId
from onnxq.spec import ObserverSpec, QParams, QuantSpec
from tests.cli.test_progress import Log
from tests.passes.context import Clock, make_context
from tests.passes.kit import make_state, parse

INPUTS = GraphIndex(parse("g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }")).inputs
KEPT = PassReport("made up", changed=("node: renamed",))


def state(*rewrites: str) -> FloatState:
    return replace(make_state(onnx.ModelProto()), rewrites=rewrites)


def context(**changes: Any) -> RunContext:
    config = Config.model_validate(changes.pop("config", {}))
    return RunContext(config=config, skip=frozenset(config.skip), **changes)


def mark(name: str, report: PassReport = KEPT) -> Callable[[RunContext, FloatState], tuple[FloatState, PassReport]]:
    """A pass that writes its name into the state."""
    return lambda ctx, before: (replace(before, rewrites=(*before.rewrites, name)), report)


def made_up(**changes: Any) -> Pass:
    return Pass(**{"name": "made up", "stage": Stage.REFINE, "run": mark("made up"), **changes})


def by_length(*values: float | None) -> Trial:
    """Scores by the number of passes in a state; the better one is kept."""
    return Trial(lambda ctx, one: values[len(one.rewrites)], Threshold())


@pytest.mark.parametrize(
    ("entry", "config", "runs"),
    [
        pytest.param({}, {}, True, id="nothing against it"),
        pytest.param({}, {"skip": ("made up",)}, False, id="skipped by name"),
        pytest.param({"name": "dead"}, {"skip": ("gemm",)}, True, id="another one is skipped"),
        pytest.param({"name": "pool"}, {"target": "ort"}, True, id="for this target"),
        pytest.param({"name": "pool"}, {"target": "trt"}, False, id="not for this target"),
        pytest.param({}, {"effort": "fast"}, False, id="refines at effort fast"),
        pytest.param({"fast": True}, {"effort": "fast"}, True, id="refines at effort fast, being fast"),
        pytest.param({"stage": Stage.EQUALIZE}, {"effort": "fast"}, False, id="equalizes at effort fast"),
        pytest.param({"stage": Stage.REWRITE}, {"effort": "fast"}, True, id="rewrites at effort fast"),
        pytest.param({"applies": lambda ctx, before: False}, {}, False, id="has nothing to do"),
    ],
)
def test_a_pass_that_is_left_out_neither_runs_nor_writes_into_the_journal(entry, config, runs):
    one, before, ctx = made_up(**entry), state("first"), context(config=config)
    after = run_pass(one, ctx, before)
    assert after.rewrites == (("first", "made up") if runs else ("first",))
    assert (after is before) != runs
    assert ctx.journal == ([KEPT] if runs else [])


def test_applies_sees_the_state_and_the_context():
    ctx = context(config={"effort": "high"})
    one = made_up(applies=lambda held, before: held.config.effort == "high" and before.rewrites == ("a",))
    assert run_pass(one, ctx, state("a")).rewrites == ("a", "made up")
    assert run_pass(one, ctx, state("b")).rewrites == ("b",)


@pytest.mark.parametrize(
    ("scores", "kept", "outcome", "figures"),
    [
        pytest.param((10.0, 12.0), True, Outcome.KEPT, (10.0, 12.0), id="better"),
        pytest.param((10.0, 9.0), False, Outcome.WORSE, (10.0, 9.0), id="worse"),
        pytest.param((None, 9.0), False, Outcome.WORSE, None, id="no score before"),
        pytest.param((10.0, None), False, Outcome.WORSE, None, id="no score after"),
    ],
)
def test_a_trial_keeps_or_takes_back(scores, kept, outcome, figures):
    before, ctx = state(), context()
    after = run_pass(made_up(trial=by_length(*scores)), ctx, before)
    assert after.rewrites == (("made up",) if kept else ())
    assert (after is before) == (not kept)
    (report,) = ctx.journal
    assert (report.outcome, report.trial_db) == (outcome, figures)
    # What was taken back has changed nothing.
    assert report.changed == (KEPT.changed if kept else ())


@pytest.mark.parametrize("outcome", [Outcome.NO_GAIN, Outcome.NOT_EQUIVALENT, Outcome.WORSE])
def test_a_pass_that_gave_up_itself_is_not_judged(outcome):
    def fail(ctx: RunContext, one: FloatState) -> float:
        raise AssertionError("judged")

    ctx = context()
    report = PassReport("made up", outcome=outcome, difference=0.5)
    one = made_up(run=lambda held, before: (before, report), trial=Trial(fail, Threshold()))
    before = state()
    assert run_pass(one, ctx, before) is before
    assert ctx.journal == [report]


def test_a_threshold_may_depend_on_both_states():
    seen = []

    def choose(ctx: RunContext, *states: FloatState) -> Threshold:
        seen.append(states)
        return Threshold(gain=1.5)

    before, ctx = state("a"), context()
    after = run_pass(made_up(trial=Trial(lambda ctx, one: float(len(one.rewrites)), choose)), ctx, before)
    assert after is before
    assert [(one, other.rewrites) for one, other in seen] == [(before, ("a", "made up"))]
    assert ctx.journal[0].trial_db == (1.0, 2.0)


@pytest.mark.parametrize("worse", [True, False])
def test_a_result_below_the_threshold_is_kept_where_it_is_not_worse_for_sure(worse):
    trial = Trial(lambda ctx, one: -float(len(one.rewrites)), Threshold(), lambda ctx, before, after: worse)
    assert run_pass(made_up(trial=trial), context(), state()).rewrites == (() if worse else ("made up",))


@pytest.mark.parametrize(
    ("threshold", "after", "kept"),
    [
        pytest.param(Threshold(), 20.0, False, id="equal results bring nothing"),
        pytest.param(Threshold(), 20.1, True, id="any gain"),
        pytest.param(Threshold(gain=-0.5), 19.5, True, id="a loss that is chance"),
        pytest.param(Threshold(gain=-0.5), 19.4, False, id="a loss"),
        pytest.param(Threshold(gain=1.0), 20.9, False, id="too small a gain"),
        pytest.param(Threshold(gain=1.0), 21.0, True, id="the gain that is asked for"),
        pytest.param(Threshold(gain=1.0, enough=18.0), 18.0, True, id="good enough, whatever is lost"),
    ],
)
def test_one_rule_says_what_is_kept(threshold, after, kept):
    assert threshold.allows(20.0, after) is kept


def test_every_threshold_is_of_a_pass():
    names = {entry.name for entry in PASSES}
    assert {name for name in THRESHOLDS if name.split(" ")[0] not in names} == set()


RETRY = PassReport("made up", changed=("node: half as far",))


@pytest.mark.parametrize(
    ("first", "second", "rewrites", "outcomes"),
    [
        pytest.param(2.0, 9.0, ("first",), [Outcome.KEPT], id="the first attempt is kept"),
        pytest.param(0.0, 2.0, ("a", "second"), [Outcome.WORSE, Outcome.KEPT], id="the second is kept"),
        pytest.param(0.0, 0.0, (), [Outcome.WORSE, Outcome.WORSE], id="neither"),
        pytest.param(None, 2.0, ("first",), [Outcome.NO_GAIN], id="the first gained nothing"),
    ],
)
def test_a_second_attempt_follows_one_that_was_taken_back(first, second, rewrites, outcomes):
    scores = {(): 1.0, ("first",): first, ("a", "second"): second}

    def retry(ctx: RunContext, before: FloatState) -> tuple[FloatState, PassReport]:
        # It starts where the first attempt did.
        assert before.rewrites == ()
        return replace(before, rewrites=("a", "second")), RETRY

    trial = Trial(lambda ctx, one: scores[one.rewrites], Threshold())
    report = KEPT if first is not None else PassReport("made up", outcome=Outcome.NO_GAIN)
    ctx = context()
    assert run_pass(made_up(run=mark("first", report), retry=retry, trial=trial), ctx, state()).rewrites == rewrites
    assert [report.outcome for report in ctx.journal] == outcomes


def test_the_passes_of_one_stage_run_in_their_order():
    passes = [
        made_up(name="c", run=mark("c"), stage=Stage.REFINE),
        made_up(name="a", run=mark("a"), stage=Stage.REWRITE),
        made_up(name="b", run=mark("b"), stage=Stage.REFINE),
    ]
    assert run_stage(passes, Stage.REFINE, context(), state()).rewrites == ("c", "b")
    assert run_stage(passes, Stage.REWRITE, context(), state()).rewrites == ("a",)
    assert run_stage(passes, Stage.EQUALIZE, context(), state("a")).rewrites == ("a",)


def test_a_title_is_announced_and_timed():
    log = Log()
    ctx = context(timers=Timers(log))
    run_pass(made_up(name="one", title="trying one"), ctx, state())
    run_pass(made_up(name="short"), ctx, state())
    assert log.begun == ["trying one"]
    assert [cost.name for cost in ctx.timers.costs] == ["one"]
    assert ctx.timers.costs[0].seconds >= 0
    assert ctx.timers.costs[0].peak_bytes > 0


def working(clock: Clock, seconds: float) -> Callable[[RunContext, FloatState], tuple[FloatState, PassReport]]:
    """A pass that takes so long, in ten steps."""

    def run(ctx: RunContext, before: FloatState) -> tuple[FloatState, PassReport]:
        steps(clock, 10, seconds / 10)(ctx.progress)
        return mark("worked")(ctx, before)

    return run


def limited(seconds: float) -> tuple[RunContext, Clock]:
    clock = Clock()
    return context(budget=TimeBudget(seconds, clock, reserve=0.0)), clock


@pytest.mark.parametrize(
    ("took", "share", "kept"),
    [
        pytest.param(4.0, 0.5, True, id="within its share"),
        pytest.param(8.0, 0.5, False, id="over its share"),
        pytest.param(8.0, 1.0, True, id="a larger share"),
        pytest.param(80.0, 0.0, True, id="without a share nobody stops it"),
    ],
)
def test_a_pass_over_its_share_of_the_time_is_given_up(took, share, kept):
    ctx, clock = limited(10)
    before = state()
    after = run_pass(made_up(run=working(clock, took), time_share=share), ctx, before)
    assert after.rewrites == (("worked",) if kept else ())
    assert (after is before) != kept
    assert ctx.journal == ([KEPT] if kept else [])
    assert ctx.budget.shortened == ([] if kept else [Shortened("made up", Shortage.GIVEN_UP, 10, 5.0)])
    # One step more than its share at most.
    assert kept or clock.now <= 5.0 + took / 10


def test_the_second_attempt_counts_into_the_same_share():
    ctx, clock = limited(10)
    one = made_up(run=working(clock, 4), retry=working(clock, 4), time_share=0.5, trial=by_length(1.0, 0.0))
    assert run_pass(one, ctx, state()).rewrites == ()
    # Given up in the middle of the second attempt: the first one's report goes with it.
    assert ctx.journal == []
    assert clock.now == pytest.approx(5.2)


def test_a_pass_without_time_is_left_out_and_recorded():
    ctx, clock = limited(10)
    clock.now = 9.9
    before = state()
    assert run_pass(made_up(time_share=0.5), ctx, before) is before
    assert [(one.name, one.how) for one in ctx.budget.shortened] == [("made up", Shortage.LEFT_OUT)]


def test_a_pass_finds_what_another_one_noted_under_its_name():
    note: Note[int] = Note("made up")
    before = state("a")
    assert note.find(before) is None
    with pytest.raises(KeyError, match="made up"):
        note.read(before)
    after = note.write(before, 3)
    assert (note.read(after), note.find(before), after.rewrites) == (3, None, ("a",))
    assert note.find(note.erase(after)) is None


def test_contexts_say_by_their_type_whether_there_are_samples():
    ctx = context()
    assert ctx.samples is None
    samples = make_context(load_data({"x": np.zeros((2, 1, 4), np.float32)}, INPUTS)).data
    sampled = ctx.add_samples(samples)
    assert sampled.samples is sampled.data is samples
    model = onnx.ModelProto()
    equalizing = sampled.add_reference(model, lambda state, progress: None)  # type: ignore[arg-type,return-value]
    assert (equalizing.data, equalizing.base.model, equalizing.journal) == (samples, model, ctx.journal)


def budget(seconds: float) -> tuple[TimeBudget, Clock]:
    clock = Clock()
    return TimeBudget(seconds, clock, reserve=1.0), clock


def steps(clock: Clock, count: int, each: float):
    def work(progress: Progress) -> str:
        with progress("work", count) as task:
            for _ in range(count):
                clock.now += each
                task.advance()
        return "done"

    return work


def test_without_a_limit_nobody_looks_at_the_clock() -> None:
    made = TimeBudget(None, clock=Clock())
    with made.limit("rounding", 0.1, silent) as progress:
        assert progress is not None
        assert steps(Clock(), 1000, 100.0)(progress) == "done"
    assert made.shortened == []
    assert not made.over()


def make_data(count: int) -> Dataset:
    x = ValueInfo("x", onnx.TensorProto.FLOAT, (1, 2))
    return load_data({"x": np.zeros((count, 1, 2), np.float32)}, [x], DataConfig())


def test_calibration_takes_as_many_samples_as_fit() -> None:
    made, clock = budget(11)
    # A second is kept for what must follow.
    assert made.left() == 10
    seen = []

    def work(samples, progress: Progress) -> int:
        seen.append(len(samples))
        steps(clock, len(samples), 0.5)(progress)
        return len(samples)

    count = made.fitting("calibration", make_data(40), 0, silent, work)
    assert 1 <= count < 40
    assert seen[0] == 40
    assert seen[-1] == count
    assert made.spent() <= 11
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (count, 40))


def test_one_sample_is_always_checked() -> None:
    made, clock = budget(2)
    clock.now += 5
    assert len(list(made.take_while_left("check", make_data(5)))) == 1
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (1, 5))


def test_nothing_but_the_budget_catches_it() -> None:
    assert not issubclass(OutOfTime, OnnxqError)


def test_promotion_takes_the_best_that_was_judged_in_time() -> None:
    made, clock = budget(100)
    proposals = iter(frozenset(str(k) for k in range(count)) for count in range(1, 10))

    class Search(PromotionSearch):
        def __init__(self) -> None:
            self.late, self._noises, self.program = False, {}, PrecisionProgram({})  # type: ignore[misc]

        def is_expired(self) -> bool:
            return made.left() <= 0

        def _propose_keys(self, *_: object, **__: object) -> frozenset[str]:
            return next(proposals)

        ways: Any = SimpleNamespace(to="float")

    def judge(keys: frozenset[str]) -> float:
        clock.now += 30
        return -abs(len(keys) - 2.0)

    search = Search()
    met = search.meet_figure(judge, 1.0)
    assert (len(met.keys), met.holds, len(met.figures)) == (2, False, 4)
    assert search.explain_end() == "the budget ran out"


MSE = ObserverSpec("mse")
SHARE = ObserverSpec("percentile", (("bins", 2048), ("percentile", 99.9)))


def site(name: str, scale: float | None, role: Role = Role.ACTIVATION, observer: ObserverSpec = MSE) -> SitePlan:
    held = None if scale is None else QParams(np.array(scale, np.float32), np.array(0, np.int32))
    return SitePlan(site=TensorId(name), role=role, spec=QuantSpec(), qparams=held, observer=observer)


def plan(*sites: SitePlan) -> Plan:
    return Plan(target="ort", model="", topology="", weights="", sites=sites)


ONE, TWO = [site("a", 1.0)], [site("a", 2.0)]
TOLD = "in place of the observer mse at a: because"
MOVED = QParams(np.array(1.0, np.float32), np.array(3, np.int32))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        pytest.param(ONE, ONE, "", id="as it was"),
        pytest.param(ONE, TWO, TOLD, id="another scale"),
        pytest.param([site("a", 1.0, Role.OUTPUT)], [site("a", 2.0, Role.OUTPUT)], TOLD, id="of an output"),
        pytest.param([site("a", 1.0, Role.WEIGHT)], [site("a", 2.0, Role.WEIGHT)], "", id="of a weight"),
        pytest.param([site("a", None)], TWO, "", id="none before"),
        pytest.param(ONE, [site("a", None)], "", id="none after"),
        pytest.param([], TWO, "", id="a new site"),
        pytest.param(ONE, [], "", id="a site that went"),
        pytest.param(ONE, [replace(ONE[0], qparams=MOVED)], "", id="another zero point alone"),
        pytest.param(
            [*ONE, site("b", 1.0, observer=SHARE), site("c", 1.0)],
            [*TWO, site("b", 2.0, observer=SHARE), site("c", 2.0)],
            "in place of the observer mse at a, c, of percentile (bins 2048, percentile 99.9) at b: because",
            id="by the observer",
        ),
        pytest.param(
            [site(name, 1.0) for name in "abcdef"],
            [site(name, 2.0) for name in "abcdef"],
            "in place of the observer mse at a, b, c, d and 2 more: because",
            id="four by name",
        ),
    ],
)
def test_replaced_scales_are_listed(before, after, told):
    assert list_replaced(plan(*before), plan(*after), MEASURED, "because") == told


def test_roles_are_those_asked_for():
    before, after = plan(site("w", 1.0, Role.WEIGHT)), plan(site("w", 2.0, Role.WEIGHT))
    assert "at w" in list_replaced(before, after, (Role.WEIGHT,), "because")
