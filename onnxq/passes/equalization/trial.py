"""An equalized model: proved to be the float function still, and quantized for a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from onnxq.calibrate import calibrate
from onnxq.errors import OnnxqError
from onnxq.evaluation.trials import measure_models
from onnxq.passes.base import EqualizeContext
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import THRESHOLDS, Trial, has_few_bits, ignore_rounding, make_trial
from onnxq.passes.state import FloatState
from onnxq.plan import Plan
from onnxq.runtime import Session
from onnxq.sites import Role

# Rewrites reorder float32 arithmetic; anything below this, in dB, is a different function.
EQUIVALENT_DB = 60.0
# Samples that both float models are run on.
_PROOF = 2
# Noise that rounding by moments takes from weights, a network's mean, dB.
_ROUNDED_DB = 9.0
# An output that agrees better than this is as good as equal, dB.
_PERFECT_DB = 200.0


def check_equivalent(ctx: EqualizeContext, after: FloatState, report: PassReport) -> PassReport:
    """The report with the largest change of a float output; NOT_EQUIVALENT where that is more than rounding."""
    floats = ctx.base.validation
    with ctx.progress("comparing with the model before", min(_PROOF, len(floats.samples))) as task:
        other = Session(floats.selections.take_choices(after.model), optimize=False)
        outputs = floats.measure(other, limit=_PROOF, tick=task.advance).results()
    worst = max((output.max_abs for output in outputs), default=0.0)
    # An output of zeros has no decibels, and rounding alone makes it another.
    if all(output.whole_db >= EQUIVALENT_DB or output.max_abs < 1e-6 for output in outputs):
        return replace(report, difference=worst)
    return PassReport(report.name, outcome=Outcome.NOT_EQUIVALENT, difference=worst)


def score_equalized(ctx: EqualizeContext, state: FloatState) -> float | None:
    """SQNR in dB of the worst output of the model quantized on a few samples; None if it cannot be.

    Judged on the samples that gave the ranges: the clipping of others is chance, and not the subject of scaling.
    """
    # By identity, and with the model itself, so that no other one can have its id.
    known = ctx.base.scores.get(id(state.model))
    if known is None:
        known = ctx.base.scores[id(state.model)] = state.model, _score(ctx, state)
    return known[1]


def score_rotated(ctx: EqualizeContext, state: FloatState) -> float | None:
    """As `score_equalized`; beside activations, weights of few bits count with the noise that rounding will leave."""
    activations, weights = score_equalized(ctx, state), _score(ctx, state, _keep_few_bits)
    if activations is None or weights is None:
        return activations
    return -10.0 * math.log10(10.0 ** (-activations / 10) + 10.0 ** (-(weights + _ROUNDED_DB) / 10))


def gains_by_rotation(ctx: EqualizeContext, before: float, after: float) -> bool:
    """True where a rotation is worth weights and names that change all over the model."""
    row = "rotation of weights alone" if ctx.config.mode == "weight-only" else "rotation"
    return THRESHOLDS[row].allows(before, after)


def _keep_few_bits(plan: Plan) -> Plan:
    """The weights of a plan that `ignore_rounding` takes them from; a plan of nothing for any other."""
    weights = tuple(site for site in plan.sites if site.role is Role.WEIGHT)
    return replace(plan, sites=weights if has_few_bits(plan) and len(weights) < len(plan.sites) else (), biases=())


def _score(ctx: EqualizeContext, state: FloatState, choose: Callable[[Plan], Plan] = ignore_rounding) -> float | None:
    floats = ctx.base.trial
    try:
        plan = choose(ctx.place(state, ctx.progress))
        if not plan.sites:
            return None
        done = calibrate(
            state.model, plan, floats.samples, memory_limit=ctx.memory_limit, crew=ctx.crew, progress=ctx.progress
        )
        if not done.sites or not done.calibrated:
            return None
        with ctx.progress("judging", len(floats.samples)) as task:
            (errors,) = measure_models([make_trial(state, done)], floats, ctx.crew, task)
    except OnnxqError:
        # Equalization is given up rather than the run: the model before it may well be quantized.
        return None
    return min((min(output.sqnr_db, _PERFECT_DB) for output in errors.results()), default=None)


EQUALIZED = Trial(score_equalized, THRESHOLDS["smoothquant"])
