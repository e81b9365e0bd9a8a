"""Plans compared on the samples kept for choosing: what one stage found out, the next does not compute again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import onnx

from onnxq.data import Dataset
from onnxq.evaluation.accumulator import OutputError
from onnxq.evaluation.float_outputs import FloatOutputs
from onnxq.graph import holding
from onnxq.graph.dequantized import weights_dequantized
from onnxq.passes.sweep import NARROW_BITS
from onnxq.pipeline.prepared import PreparedModel
from onnxq.pipeline.realise import paired, realise
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.runtime import Session
from onnxq.sites import Role
from onnxq.targets import target

# Errors of the last few plans are kept.
_PLANS = 4
# Samples of the calibration among the judges.
_SEEN = 8


def judges_of(calibration: Dataset, trial: Dataset, seed: int) -> Dataset:
    """The samples whose outputs tell whether ranges and rounded weights are kept: `trial` and some of the calibration.

    Those hold the extremes, which are never held back and show what clipping costs (a ViT for TensorRT: 36.4 -> 36.4 dB
    on 8 held back, 35.7 -> 29.0 with 8 more, 34.6 -> 32.7 on new ones); and of a few held back none may be hard (four
    lines of text: the sweep seemed to cost 31 -> 28 dB, and brought 19 -> 23 on 160 others).
    """
    return calibration.take(_SEEN, seed).joined(trial)


class Evaluator:
    """Plans against the float model on one set of samples: what one stage found, the next does not compute again.

    Models and plans are known by their identity, and held so that nothing else takes their place.
    """

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples
        self._floats: FloatOutputs | None = None
        self._errors: OrderedDict[tuple[int, int], tuple[onnx.ModelProto, Plan, tuple[OutputError, ...]]]
        self._errors = OrderedDict()

    def float_outputs(self, proto: onnx.ModelProto) -> FloatOutputs:
        """The outputs of a float model; those of the last one asked for are kept."""
        if self._floats is None or self._floats.proto is not proto:
            self._floats = FloatOutputs(proto, self.samples)
        return self._floats

    def measure(self, prepared: PreparedModel, plan: Plan, *, progress: Progress = silent) -> tuple[OutputError, ...]:
        """Errors of the model that the plan gives, as `trial_session` runs it, against the prepared float model."""
        key = (id(prepared.proto), id(plan))
        if key not in self._errors:
            with progress("judging", len(self.samples)) as task:
                session = trial_session(prepared, plan)
                found = self.float_outputs(prepared.proto).measure(session, tick=task.advance).results()
            self._errors[key] = (prepared.proto, plan, found)
            if len(self._errors) > _PLANS:
                self._errors.popitem(last=False)
        return self._errors[key][2]

    def measure_each(
        self, prepared: PreparedModel, plan: Plan, *, progress: Progress = silent
    ) -> list[tuple[OutputError, ...]]:
        """`measure` of each sample alone, in their order."""
        with progress("judging sample by sample", len(self.samples)) as task:
            session = trial_session(prepared, plan)
            found = self.float_outputs(prepared.proto).measure_each(session, tick=task.advance)
        return [one.results() for one in found]


def judged_as_run(plan: Plan) -> bool:
    """True where this machine may compute something else than the file says, so that only running it tells."""
    engine = target(plan.target)
    return plan.saturation == "allow" and engine.saturates and engine.times_itself


def trial_session(prepared: PreparedModel, plan: Plan) -> Session:
    """The model that the plan gives, to be run as the file says, or as users run it where the two may part.

    Its weights are let go of with the session.
    """
    with holding():
        if judged_as_run(plan):
            return Session(realise(prepared, plan))
        return Session(weights_dequantized(paired(prepared, plan)), optimize=False)


def few_bits(plan: Plan) -> bool:
    """True where any weight has so few that everything hangs on its rounding."""
    return any(site.role is Role.WEIGHT and site.spec.bits <= NARROW_BITS for site in plan.sites)


def before_rounding(plan: Plan) -> Plan:
    """What to judge scalings and ranges by, before the sweep has rounded the weights: of few bits, without them.

    Rounded to nearest these drown what activations lose: EfficientNet-Lite0 has -3 dB with weights of 4 bits whatever
    its ranges are, and 26 or 28 dB by the ranges once they are swept. Weight-only plans stay as they are.
    16-bit sums are left out too: rounding to nearest loses three times by them what the sweep does, which hides what
    smoothing gains (MiniLM: 19.5 dB in the end with them, 24.4 without).
    """
    activations = tuple(site for site in plan.sites if site.role not in (Role.WEIGHT, Role.BIAS))
    if activations and few_bits(plan):
        return replace(plan, sites=activations, biases=())
    if not any(site.sum_orders for site in plan.sites):
        return plan
    return replace(plan, sites=tuple(replace(site, sum_orders=()) for site in plan.sites))
