"""One contract for every pass: a context and a state in, a state and a report out. The runner does the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Generic, TypeVar

from onnxq.backends import find_target
from onnxq.calibrate import calibrate
from onnxq.calibrate.parts import Part
from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.metric import AccuracyRequest
from onnxq.graph import ModelLike, compute_structural_ids, is_large_model
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import SampleSets, Trial, judge_change
from onnxq.passes.state import FloatState, extend
from onnxq.passes.time_budget import TimeBudget, Timers
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.runtime.crew import Crew
from onnxq.sites import TensorId


class Stage(Enum):
    """When a pass runs."""

    # On the float graph, which computes the same afterwards: a `RunContext` and a `FloatState`.
    REWRITE = "rewrite"
    # On the float graph, which computes the same afterwards and is easier to quantize, as samples show: an
    # `EqualizeContext` and a `FloatState`.
    EQUALIZE = "equalize"
    # On the calibrated plan: a `SampledContext` and a `PlacedState`.
    REFINE = "refine"


@dataclass(frozen=True, eq=False)
class RunContext:
    """All that passes may look at besides the state, before there are samples.

    skip: names of passes left out. repeated: of those that a plan says have run, which run again without a question.
    crew: runs samples and trials. Each field has a default, so that tests give some.
    """

    config: Config = field(default_factory=Config)
    skip: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()
    request: AccuracyRequest = field(default_factory=AccuracyRequest)
    budget: TimeBudget = field(default_factory=TimeBudget)
    timers: Timers = field(default_factory=Timers)
    progress: Progress = silent
    memory_limit: int | None = None
    journal: list[PassReport] = field(default_factory=list)
    crew: Crew = field(default_factory=Crew)

    @property
    def samples(self) -> SampleSets | None:
        """The samples; None where there are none."""
        return None

    def calibrate(
        self,
        model: ModelLike,
        plan: Plan,
        samples: Dataset | None,
        *,
        observed: Part | None = None,
        progress: Progress = silent,
    ) -> Plan:
        """The plan with numbers at every site that had none, by the crew and within the memory of this run."""
        return calibrate(
            model,
            plan,
            samples,
            batch=self.config.data.batch,
            memory_limit=self.memory_limit,
            crew=self.crew,
            observed=observed,
            progress=progress,
        )

    def add_samples(self, samples: SampleSets) -> SampledContext:
        """The context with samples."""
        return extend(SampledContext, self, data=samples)


@dataclass(frozen=True, eq=False, kw_only=True)
class SampledContext(RunContext):
    """The context of a run that has samples."""

    data: SampleSets

    @property
    def samples(self) -> SampleSets:
        """The samples."""
        return self.data

    def take_samples(self, count: int) -> Dataset:
        """So many of the calibration samples, the same in every pass."""
        return self.data.calibration.take(count, self.config.data.seed)

    def add_reference(self, model: ModelLike, place: Planner) -> EqualizeContext:
        """The context with the float model that is to be equalized, and the planner."""
        return extend(EqualizeContext, self, base=FloatReference(model, self.data), place=place)


@dataclass(frozen=True, eq=False, kw_only=True)
class EqualizeContext(SampledContext):
    """The context of equalization.

    base: the float model before it. place: makes the plan of a state's model, without scales.
    """

    base: FloatReference
    place: Planner


Planner = Callable[[FloatState, Progress], Plan]


@dataclass(frozen=True, eq=False)
class FloatReference:
    """The float model that equalized ones are compared with, on the samples for that.

    scores: of the quantized forms of models, by the identity of the model, which stands beside its score.
    """

    model: ModelLike
    samples: SampleSets
    scores: dict[int, tuple[ModelLike, float | None]] = field(default_factory=dict)

    @cached_property
    def ids(self) -> dict[TensorId, str]:
        """Structural identities of its tensors, by which a plan finds them in another export."""
        return compute_structural_ids(self.model)

    @cached_property
    def validation(self) -> FloatOutputs:
        """Its outputs on the validation samples."""
        return FloatOutputs(self.model, self.samples.validation)

    @cached_property
    def trial(self) -> FloatOutputs:
        """Its outputs on the samples that equalized models are calibrated for and judged on."""
        return FloatOutputs(self.model, self.samples.equalizing, threads=None)


ContextT = TypeVar("ContextT", bound=RunContext)
StateT = TypeVar("StateT", bound=FloatState)


def always(ctx: RunContext, state: FloatState) -> bool:
    """True: the pass looks for itself whether there is something to do."""
    return True


def never(ctx: RunContext, state: FloatState) -> bool:
    """False: the pass is left out for the targets that leave it out."""
    return False


def has_real_samples(ctx: SampledContext, state: FloatState) -> bool:
    """True where samples are real: sums of errors over made-up ones say nothing."""
    return not ctx.data.synthetic


def is_for_whole_graphs(ctx: RunContext, state: FloatState) -> bool:
    """True for a target whose engine takes graphs as a whole."""
    return find_target(ctx.config.target).whole


@dataclass(frozen=True)
class Pass(Generic[ContextT, StateT]):
    """One pass, with the context and the state of its stage.

    name: by which `skip` leaves it out. title: the progress line; "" for passes too short for one. time_share: of the
    time that is left, where there is a budget; 0: not limited. fast: it runs at effort `fast` too. applies: False where
    there is nothing for it. required: True where it runs for targets that leave it out, too. trial: how the judge
    compares the states before and after it; None: it does no harm. retry: another attempt, where the judge took the
    first one back.
    """

    name: str
    run: Callable[[ContextT, StateT], tuple[StateT, PassReport]]
    title: str = ""
    time_share: float = 0.0
    stage: Stage = Stage.REFINE
    fast: bool = False
    applies: Callable[[ContextT, StateT], bool] = always
    required: Callable[[ContextT, StateT], bool] = never
    trial: Trial[ContextT, StateT] | None = None
    retry: Callable[[ContextT, StateT], tuple[StateT, PassReport]] | None = None


def run_stage(
    passes: Iterable[Pass[Any, Any]], stage: Stage, ctx: RunContext, state: StateT
) -> StateT:
    """Run the passes of one stage in their order; `ctx.journal` gets a report of each that was attempted.

    A pass that gains nothing, does harm or takes too long leaves the state as it was.
    """
    skips = find_target(ctx.config.target).skips
    hurried = stage is not Stage.REWRITE and ctx.config.effort == "fast"
    for entry in passes:
        if entry.stage is not stage or entry.name in ctx.skip or (hurried and not entry.fast):
            continue
        if entry.name not in ctx.repeated:
            if entry.name in skips and not entry.required(ctx, state):
                continue
            # Last of the questions: it may look at the whole model.
            if not entry.applies(ctx, state):
                continue
        timer = ctx.timers.run(entry.name, entry.title)
        share = ctx.budget.limit(entry.name, entry.time_share, ctx.progress)
        with timer, share as progress:
            if progress is None:
                continue
            own = replace(ctx, progress=progress)
            # A large model is in memory once.
            beside = ctx.crew.plain and not is_large_model(state.model)
            after = state
            reports = []
            # Both attempts begin with the state before, and both are reported: the second must not hide a rollback.
            for attempt in (entry.run, entry.retry):
                if attempt is None:
                    break
                after, report = judge_change(
                    entry.trial, own, state, *attempt(own, state), beside=beside
                )
                reports.append(report)
                if report.outcome is not Outcome.WORSE:
                    break
            # Last, so that an attempt out of time leaves no trace.
            ctx.journal.extend(reports)
            state = after
    return state


def run_pass(entry: Pass[Any, Any], ctx: RunContext, state: StateT) -> StateT:
    """`run_stage` of a single pass."""
    return run_stage((entry,), entry.stage, ctx, state)
