"""An equalized model: proved to be the float function still, and quantized for a comparison."""

from __future__ import annotations

from dataclasses import replace

from onnxq.calibrate import calibrate
from onnxq.errors import OnnxqError
from onnxq.passes.base import RunContext, Trial
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import ignore_rounding, trial_session
from onnxq.passes.state import State
from onnxq.runtime import Session

# Rewrites reorder float32 arithmetic; anything below this, in dB, is a different function.
EQUIVALENT_DB = 60.0
# Samples that both float models are run on.
_PROOF = 2
# Errors on a few samples are this uncertain, in dB.
_NOISE_DB = 0.5
# An output that agrees better than this is as good as equal, dB.
_PERFECT_DB = 200.0


def check_equivalent(ctx: RunContext, after: State, report: PassReport) -> PassReport:
    """The report with the largest change of a float output; NOT_EQUIVALENT where that is more than rounding."""
    floats = ctx.base.validation
    with ctx.progress("comparing with the model before", min(_PROOF, len(floats.samples))) as task:
        found = floats.measure(Session(after.model, optimize=False), limit=_PROOF, tick=task.advance).results()
    worst = max((one.max_abs for one in found), default=0.0)
    # An output of zeros has no decibels, and rounding alone makes it another.
    if all(one.whole_db >= EQUIVALENT_DB or one.max_abs < 1e-6 for one in found):
        return replace(report, difference=worst)
    return PassReport(report.name, outcome=Outcome.NOT_EQUIVALENT, difference=worst)


def score_equalized(ctx: RunContext, state: State) -> float | None:
    """SQNR in dB of the worst output of the model quantized on a few samples; None if it cannot be.

    Judged on the samples that gave the ranges: the clipping of others is chance, and not the subject of scaling.
    """
    # By identity, and with the model itself, so that no other one can have its id.
    known = ctx.scores.get(id(state.model))
    if known is None:
        known = ctx.scores[id(state.model)] = state.model, _score(ctx, state)
    return known[1]


def _score(ctx: RunContext, state: State) -> float | None:
    floats = ctx.base.trial
    assert ctx.place is not None
    try:
        plan = ignore_rounding(ctx.place(state, ctx.progress))
        done = calibrate(state.model, plan, floats.samples, memory_limit=ctx.memory_limit, progress=ctx.progress)
        if not done.sites or not done.calibrated:
            return None
        with ctx.progress("judging", len(floats.samples)) as task:
            found = floats.measure(trial_session(state, done), tick=task.advance).results()
    except OnnxqError:
        # Equalization is given up rather than the run: the model before it may well be quantized.
        return None
    return min((min(one.sqnr_db, _PERFECT_DB) for one in found), default=None)


# Twice the uncertainty: weights and names change all over the model, which should be for something.
ROTATED = Trial(score_equalized, lambda _ctx, _before, _after, before, after: after >= before + _NOISE_DB)
EQUALIZED = Trial(score_equalized, lambda _ctx, _before, _after, before, after: after >= before - _NOISE_DB)
