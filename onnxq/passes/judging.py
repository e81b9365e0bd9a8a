"""Plans compared on the samples kept for choosing: results of one stage are not computed again by the next."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from onnxq.backends import find_target
from onnxq.data import Dataset
from onnxq.evaluation.accumulator import OutputAccuracy
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.evaluation.trials import TrialModel, measure_each, measure_models
from onnxq.graph import ModelLike
from onnxq.passes.assembly.model import build_quantized, write_pairs
from onnxq.passes.rounding.low_bit_core import NARROW_BITS
from onnxq.passes.state import State
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.runtime.crew import Crew
from onnxq.sites import Role

# The errors of so many plans are kept, those judged last.
_PLANS = 4
# Above this an output is as good as float, dB; one such output must not outweigh the others.
_PERFECT_DB = 80.0


class Evaluator:
    """Plans against the float model on one set of samples. Models and plans are known by their identity.

    crew: runs the models.
    """

    def __init__(self, samples: Dataset, crew: Crew | None = None) -> None:
        self.samples, self.crew = samples, crew or Crew()
        self._floats: FloatOutputs | None = None
        self._errors: OrderedDict[tuple[int, int], tuple[ModelLike, Plan, tuple[OutputAccuracy, ...]]] = OrderedDict()

    def float_outputs(self, model: ModelLike) -> FloatOutputs:
        """The outputs of a float model; those of the last one asked for are kept."""
        if self._floats is None or self._floats.proto is not model:
            self._floats = FloatOutputs(model, self.samples)
        return self._floats

    def measure(self, state: State, plan: Plan, *, progress: Progress = silent) -> tuple[OutputAccuracy, ...]:
        """Errors of the model that the plan gives, as `make_trial` runs it, against the float model."""
        key = (id(state.model), id(plan))
        if key not in self._errors:
            with progress("judging", len(self.samples)) as task:
                floats = self.float_outputs(state.model)
                (found,) = measure_models([make_trial(state, plan)], floats, self.crew, task)
            self._errors[key] = (state.model, plan, found.results())
            # Each holds a model and a plan with all its integers.
            if len(self._errors) > _PLANS:
                self._errors.popitem(last=False)
        return self._errors[key][2]

    def measure_each(
        self, state: State, plan: Plan, *, progress: Progress = silent
    ) -> list[tuple[OutputAccuracy, ...]]:
        """`measure` of each sample alone, in their order."""
        with progress("judging sample by sample", len(self.samples)) as task:
            found = measure_each(make_trial(state, plan), self.float_outputs(state.model), self.crew, task)
        return [one.results() for one in found]

    def score(self, state: State, plan: Plan, *, progress: Progress = silent) -> float:
        """Mean SQNR in dB over the outputs of the model that the plan gives."""
        return _mean_db(self.measure(state, plan, progress=progress))

    def is_worse(self, state: State, plan: Plan, than: Plan, *, progress: Progress = silent) -> bool:
        """True where the samples, one by one, agree that `plan` answers worse: by more than their standard error.

        `score` may hang on one sample alone: one letter of a line of text that is read otherwise.
        """
        # Both on each sample, so that hard and easy ones count alike: only the differences have a spread.
        each = [self.measure_each(state, one, progress=progress) for one in (plan, than)]
        gains = [_mean_db(one) - _mean_db(other) for one, other in zip(*each, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        return statistics.fmean(gains) < -error


def _mean_db(found: Iterable[OutputAccuracy]) -> float:
    return float(np.mean([np.clip(one.sqnr_db, -_PERFECT_DB, _PERFECT_DB) for one in found] or [0.0]))


def must_judge_as_run(plan: Plan) -> bool:
    """True where this machine may compute something else than the file says, so that only running it tells."""
    engine = find_target(plan.target)
    return plan.saturation == "allow" and engine.saturates and engine.times_itself


def make_trial(state: State, plan: Plan) -> TrialModel:
    """The model that the plan gives, to be run as the file says, or as users run it where the two may part."""
    if must_judge_as_run(plan):
        return TrialModel(build_quantized(state, plan), optimize=True)
    # Weights in float once, where ORT would dequantize them in every run.
    return TrialModel(write_pairs(state, plan), dequantize=True)


def has_few_bits(plan: Plan) -> bool:
    """True where any weight has so few that everything hangs on its rounding."""
    return any(site.role is Role.WEIGHT and site.spec.bits <= NARROW_BITS for site in plan.sites)


def ignore_rounding(plan: Plan) -> Plan:
    """The plan to judge scalings and ranges by, before sequential rounding: without weights if they have few bits.

    Rounded to nearest these drown the losses of activations: EfficientNet-Lite0 has -3 dB with weights of 4 bits
    whatever its ranges are, and 26 or 28 dB by the ranges once weights are rounded sequentially. Weight-only plans stay
    as they are. 16-bit sums are left out too: rounding to nearest loses three times as much by them as sequential
    rounding, which hides the gain of smoothing (MiniLM: 19.5 dB in the end with them, 24.4 without).
    """
    activations = tuple(site for site in plan.sites if site.role not in (Role.WEIGHT, Role.BIAS))
    if activations and has_few_bits(plan):
        return replace(plan, sites=activations, biases=())
    if not any(site.sum_orders for site in plan.sites):
        return plan
    return replace(plan, sites=tuple(replace(site, sum_orders=()) for site in plan.sites))
