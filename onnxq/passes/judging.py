"""The judge of passes: which samples decide, which figure, by which threshold a change is kept or taken back.

Figures of one stage are not computed again by the next.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Generic, TypeVar

import numpy as np

from onnxq.arrays import Arrays
from onnxq.backends import find_target
from onnxq.data import Dataset
from onnxq.evaluation.accumulator import OutputAccuracy, db_to_noise
from onnxq.evaluation.compare import FloatOutputs, ModelErrors
from onnxq.evaluation.trials import TrialModel, measure_each
from onnxq.graph import ModelLike
from onnxq.numerics.machine import work_beside
from onnxq.passes.assembly import build_quantized, write_pairs
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.rounding.low_bit_core import NARROW_BITS
from onnxq.passes.state import FloatState
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.runtime.crew import Crew

# The errors of so many plans are kept, those judged last.
_PLANS = 4
# Above this an output is as good as float, dB; one such output must not outweigh the others.
_PERFECT_DB = 80.0
# Samples of the calibration among the judges of ranges and rounded weights.
_JUDGES_OF_CALIBRATION = 8
# Samples of the calibration in the comparison with an equalized model, which is calibrated anew for it: few do.
_TRIAL = 4


class Evaluator:
    """Plans against the float model on one set of samples. Models and plans are known by their identity.

    crew: runs the models. wider: an evaluator on these samples and others, whose errors count here too.
    """

    def __init__(
        self, samples: Dataset, crew: Crew | None = None, wider: Evaluator | None = None
    ) -> None:
        self.samples = samples
        self.crew = crew or Crew()
        self._wider = wider
        self._floats: FloatOutputs | None = None
        self._lock = threading.Lock()
        # Of each sample.
        self._errors: OrderedDict[tuple[int, int], tuple[ModelLike, Plan, list[ModelErrors]]] = (
            OrderedDict()
        )

    def float_outputs(self, model: ModelLike) -> FloatOutputs:
        """The outputs of a float model; those of the last one asked for are kept."""
        # Two plans of one model may be scored at a time.
        with self._lock:
            if self._floats is None or self._floats.proto is not model:
                self._floats = FloatOutputs(model, self.samples, threads=None)
            return self._floats

    def measure(
        self, state: FloatState, plan: Plan, *, progress: Progress = silent
    ) -> tuple[OutputAccuracy, ...]:
        """The errors of all samples of `run_samples`."""
        sums = ModelErrors()
        for errors in self.run_samples(state, plan, progress=progress):
            sums.merge(errors)
        return sums.results()

    def run_samples(
        self, state: FloatState, plan: Plan, *, progress: Progress = silent
    ) -> list[ModelErrors]:
        """Errors of each sample, in their order, of the model that the plan gives, as `make_trial` runs it."""
        key = (id(state.model), id(plan))
        if self._wider is not None and key in self._wider._errors:
            whole = self._wider._errors[key][2]
            return [whole[k] for k in self._wider.samples.find_positions(self.samples)]
        if key not in self._errors:
            with progress("judging", len(self.samples)) as task:
                floats = self.float_outputs(state.model)
                errors = measure_each(make_trial(state, plan), floats, self.crew, task)
            self._errors[key] = (state.model, plan, errors)
            # Each holds a model and a plan with all its integers.
            if len(self._errors) > _PLANS:
                self._errors.popitem(last=False)
        return self._errors[key][2]

    def list_db(self, state: FloatState, plan: Plan, *, progress: Progress = silent) -> list[float]:
        """The SQNR of each output, as `measure` has it."""
        return [output.sqnr_db for output in self.measure(state, plan, progress=progress)]

    def score(self, state: FloatState, plan: Plan, *, progress: Progress = silent) -> float:
        """Mean SQNR in dB over the outputs of the model that the plan gives."""
        return _mean_db(self.measure(state, plan, progress=progress))

    def is_worse(
        self, state: FloatState, plan: Plan, than: Plan, *, progress: Progress = silent
    ) -> bool:
        """True where the samples, one by one, agree that `plan` answers worse: by more than their standard error.

        `score` may hang on one sample alone: one letter of a line of text that is read otherwise.
        """
        # Both on each sample, so that hard and easy ones count alike: only the differences have a spread.
        both = (self.run_samples(state, judged, progress=progress) for judged in (plan, than))
        gains = [
            _mean_db(left.results()) - _mean_db(right.results())
            for left, right in zip(*both, strict=True)
        ]
        mean, error = estimate_mean(gains)
        return mean < -error


@dataclass(frozen=True, eq=False)
class SampleSets:
    """The samples in three sets: for rewrites and weights, for choosing between plans, for the figures reported.

    They share no sample while there are enough; `validation` is `test` where nothing is chosen. ranges: those that
    activations are observed on, calibration and validation, but no more than were asked for: all plans compared have
    these ranges alike, and a range misses values it has not seen. seen: the other use of the samples in `test`, ""
    where there was none. first: of them all, which is timed as `bench` does.
    crew: runs plans that are judged.
    """

    calibration: Dataset
    ranges: Dataset
    validation: Dataset
    test: Dataset
    seen: str
    first: Arrays
    description: str
    synthetic: bool
    seed: int = 0
    crew: Crew = field(default_factory=Crew)

    @cached_property
    def judge(self) -> Evaluator:
        """Scores plans on `validation`."""
        return Evaluator(self.validation, self.crew, self.judges)

    @cached_property
    def judges(self) -> Evaluator:
        """Scores ranges and rounded weights, on some of the calibration samples as well.

        Those hold the extremes, which are never held back and show the cost of clipping (a ViT for TensorRT: 36.4 ->
        36.4 dB on 8 held back, 35.7 -> 29.0 with 8 more, 34.6 -> 32.7 on new ones); and of a few held back none may be
        hard (four lines of text: sequential rounding seemed to cost 31 -> 28 dB, and brought 19 -> 23 on 160 others).
        """
        return Evaluator(
            self.calibration.take(_JUDGES_OF_CALIBRATION, self.seed).joined(self.validation),
            self.crew,
        )

    @cached_property
    def equalizing(self) -> Dataset:
        """The samples that equalized models are calibrated for and judged on."""
        return self.calibration.take(_TRIAL).joined(self.validation)


def _mean_db(outputs: Iterable[OutputAccuracy]) -> float:
    figures = [np.clip(output.sqnr_db, -_PERFECT_DB, _PERFECT_DB) for output in outputs]
    return float(np.mean(figures or [0.0]))


def add_noises(first_db: float, second_db: float) -> float:
    """The SQNR in dB with the noise of both, which know nothing of each other."""
    # No noise on one side: 10 ** -inf would do, but not with both infinite.
    if max(first_db, second_db) == math.inf:
        return min(first_db, second_db)
    return -10 * math.log10(db_to_noise(first_db) + db_to_noise(second_db))


def estimate_mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean of some values, and its standard error; of a single one that is 0, as nothing tells."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


@dataclass(frozen=True)
class Threshold:
    """The change in SQNR, dB, that keeps the result of a pass.

    gain: at least so much; negative: it may seem to lose so much, which is chance on few samples; 0: any gain.
    enough: from here on a loss counts for nothing.
    """

    gain: float = 0.0
    enough: float = math.inf

    def allows(self, before: float, after: float) -> bool:
        """True where the result is kept."""
        if after >= self.enough:
            return True
        # An equal result is not worth other bytes.
        return after >= before + self.gain if self.gain else after > before


# By the name of the pass. A pass that is not here is not judged by a figure.
THRESHOLDS: Mapping[str, Threshold] = {
    # A rotation changes weights and names all over the model; half a decibel is the chance of few samples.
    "rotation": Threshold(gain=0.5),
    # By nearest rounding: a decoder of 6 million weights gained 1.0 so, and lost 1.2 when they were rounded by moments,
    # which make use of inputs that differ in size; with outliers it gained 5.4, and 8.6.
    "rotation of weights alone": Threshold(gain=3.0),
    # What seems to be lost on a few samples was lost indeed (a small ResNet: 0.3 dB of 42, and 3.2 of 39.7 in the end),
    # and gains of half a decibel and more were gains of networks below 25 dB.
    "cross_layer_equalization": Threshold(),
    "bias_absorption": Threshold(),
    # What smoothing brings shows after rounding; errors on a few samples are this uncertain.
    "smoothquant": Threshold(gain=-0.5),
    # Outputs, of which there are few, may seem to lose so much: less is chance, and the layers gained.
    "ranges": Threshold(gain=-0.5),
    # 6 dB are a bit of every integer. Scales of each run gain less in batches than on single samples (MiniLM: 23.9 dB
    # alone, 19.6 in batches of 20, where calibrated scales have 24.4 and 24.3).
    "float_ops": Threshold(gain=1.0),
    "dynamic_scales": Threshold(gain=1.0),
    # A decibel is well inside the spread of a few samples. Above 25 dB every model kept its metric.
    "attention": Threshold(gain=-1.0, enough=25.0),
    # Where attention in float is one kernel too, integers there save nothing.
    "attention beside float16": Threshold(gain=-0.1),
    # Of tables alone. all-MiniLM-L6 loses 0.0 of 24.4 dB with int8 activations, 0.3 of 34 dB with weights alone.
    "embeddings": Threshold(gain=-0.5, enough=30.0),
    # Searches and roundings that fit the samples they were made with: any gain on others.
    "rounding": Threshold(),
    "low_bit_search": Threshold(),
    "external_rounding": Threshold(),
    "attention_after_rounding": Threshold(),
    "rounding_after_promotion": Threshold(),
}

ContextT = TypeVar("ContextT")
StateT = TypeVar("StateT", bound=FloatState)


@dataclass(frozen=True)
class Trial(Generic[ContextT, StateT]):
    """How the states before and after a pass are compared.

    score: SQNR in dB of the quantized outputs of a state; None where it cannot be told. threshold: a fixed one, or one
    of both states. is_worse: asked where the threshold says no; False keeps the result all the same.
    """

    score: Callable[[ContextT, StateT], float | None]
    threshold: Threshold | Callable[[ContextT, StateT, StateT], Threshold]
    is_worse: Callable[[ContextT, StateT, StateT], bool] | None = None

    def allows(
        self, ctx: ContextT, before: StateT, after: StateT, before_db: float, after_db: float
    ) -> bool:
        """True where the result is kept."""
        threshold = (
            self.threshold
            if isinstance(self.threshold, Threshold)
            else self.threshold(ctx, before, after)
        )
        if threshold.allows(before_db, after_db):
            return True
        return self.is_worse is not None and not self.is_worse(ctx, before, after)


def judge_change(
    trial: Trial[ContextT, StateT] | None,
    ctx: ContextT,
    before: StateT,
    after: StateT,
    report: PassReport,
    *,
    beside: bool = False,
) -> tuple[StateT, PassReport]:
    """The state that a pass leaves: the one after it where that may be kept, and the report with both figures.

    trial: None: the pass does no harm. A pass that gave up itself is not judged. beside: score both at a time, in
    threads.
    """
    if report.outcome is not Outcome.KEPT or trial is None:
        return after, report
    # To write a model and to open a session keep one core, so that two scores fill both.
    with work_beside(partial(trial.score, ctx, before), allowed=beside) as wait_for_before:
        after_db = trial.score(ctx, after)
        before_db = wait_for_before()
    # What cannot be judged is not kept: every pass is an improvement that was shown.
    figures = None if before_db is None or after_db is None else (before_db, after_db)
    if figures is not None and trial.allows(ctx, before, after, *figures):
        return after, replace(report, trial_db=figures)
    return before, replace(report, outcome=Outcome.WORSE, trial_db=figures, changed=())


def make_trial(state: FloatState, plan: Plan) -> TrialModel:
    """The model that the plan gives, to be run as the file says, or as users run it where the two may part."""
    # This machine may compute something else than the file says, so that only running it tells.
    engine = find_target(plan.target)
    if plan.saturation == "allow" and engine.saturates and engine.times_itself:
        return TrialModel(build_quantized(state, plan), fuse_pairs=True)
    return TrialModel(write_pairs(state, plan, fold_constants=True))


def has_few_bits(plan: Plan) -> bool:
    """True where any weight has so few that everything hangs on its rounding."""
    return any(site.role.is_weight and site.spec.bits <= NARROW_BITS for site in plan.sites)


def ignore_rounding(plan: Plan) -> Plan:
    """The plan to judge scalings and ranges by, before sequential rounding: without weights if they have few bits.

    Rounded to nearest these drown the losses of activations: EfficientNet-Lite0 has -3 dB with weights of 4 bits
    whatever its ranges are, and 26 or 28 dB by the ranges once weights are rounded sequentially. Weight-only plans stay
    as they are. 16-bit sums are left out too: rounding to nearest loses three times as much by them as sequential
    rounding, which hides the gain of smoothing (MiniLM: 19.5 dB in the end with them, 24.4 without).
    """
    activations = tuple(site for site in plan.sites if site.role.is_measured)
    if activations and has_few_bits(plan):
        return replace(plan, sites=activations, biases=())
    if not any(site.sum_orders for site in plan.sites):
        return plan
    return plan.with_sites(replace(site, sum_orders=()) for site in plan.sites)
