"""One contract for every pass: a context and a state in, a state and a report out. The runner does the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from onnxq.config import Config
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.graph import ModelLike, compute_structural_ids
from onnxq.passes.journal import PassReport
from onnxq.passes.mixed_precision.request import AccuracyRequest
from onnxq.passes.samples import Samples
from onnxq.passes.state import State
from onnxq.passes.time_budget import TimeBudget
from onnxq.passes.timers import Timers
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.runtime.crew import Crew
from onnxq.sites import TensorId


class Stage(Enum):
    """When a pass runs."""

    # On the float graph, which computes the same afterwards.
    REWRITE = "rewrite"
    # On the float graph, which computes the same afterwards and is easier to quantize, as samples show.
    EQUALIZE = "equalize"
    # On the calibrated plan.
    REFINE = "refine"


@dataclass(frozen=True, eq=False)
class FloatReference:
    """The float model that equalized ones are compared with, on the samples for that."""

    model: ModelLike
    samples: Samples

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
        return FloatOutputs(self.model, self.samples.equalizing)


@dataclass(frozen=True, eq=False)
class RunContext:
    """All that passes may look at besides the state; each field has a default, so that tests give some.

    skip: names of passes left out. place: the planner, which makes the plan of a state's model, without numbers.
    reference: for equalization. scores: results of its trials, by the identity of models. computes: for rewrites, the
    narrow ONNX type that the model came in, whose constants are rounded to it; 0 for float32. crew: runs samples and
    trials.
    """

    config: Config = field(default_factory=Config)
    skip: frozenset[str] = frozenset()
    samples: Samples | None = None
    place: Callable[[State, Progress], Plan] | None = None
    reference: FloatReference | None = None
    request: AccuracyRequest = field(default_factory=AccuracyRequest)
    budget: TimeBudget = field(default_factory=TimeBudget)
    timers: Timers = field(default_factory=Timers)
    progress: Progress = silent
    memory_limit: int | None = None
    journal: list[PassReport] = field(default_factory=list)
    scores: dict[int, tuple[ModelLike, float | None]] = field(default_factory=dict)
    computes: int = 0
    crew: Crew = field(default_factory=Crew)

    @property
    def base(self) -> FloatReference:
        """The reference, in the stage that has one."""
        assert self.reference is not None
        return self.reference

    @property
    def data(self) -> Samples:
        """The samples, in stages that have some."""
        assert self.samples is not None
        return self.samples


Run = Callable[[RunContext, State], tuple[State, PassReport]]


def always(ctx: RunContext, state: State) -> bool:
    """True: the pass looks for itself whether there is something to do."""
    return True


def has_real_samples(ctx: RunContext, state: State) -> bool:
    """True where samples are real: sums of errors over made-up ones say nothing."""
    return not ctx.data.synthetic


@dataclass(frozen=True)
class Trial:
    """How the runner judges a pass.

    score: SQNR in dB of the quantized outputs of a state; None where it cannot be told. keeps: of the states and scores
    before and after, whether the pass is kept.
    """

    score: Callable[[RunContext, State], float | None]
    keeps: Callable[[RunContext, State, State, float, float], bool]


@dataclass(frozen=True)
class Pass:
    """One pass.

    name: by which `skip` leaves it out. title: the progress line; "" for passes too short for one. time_share: of the
    time that is left, where there is a budget; 0: not limited. fast: it runs at effort `fast` too. applies: False where
    there is nothing for it. retry: another attempt, where the trial took the first one back.
    """

    name: str
    stage: Stage
    run: Run
    title: str = ""
    time_share: float = 0.0
    fast: bool = False
    applies: Callable[[RunContext, State], bool] = always
    trial: Trial | None = None
    retry: Run | None = None


def rewriting(function: Callable[[ModelLike, RunContext], tuple[ModelLike, PassReport]]) -> Run:
    """The function of a model as a pass's `run`."""

    def run(ctx: RunContext, state: State) -> tuple[State, PassReport]:
        model, report = function(state.model, ctx)
        return replace(state, model=model), report

    return run
