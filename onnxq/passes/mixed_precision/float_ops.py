"""Operators left float in `mode: auto`, where they gain little time and make much of the noise.

A few convolutions in front of a transformer may spoil what all its products keep (an audio encoder: 39.4 dB with its
three in int8, 52.0 without, in nearly the same time). Those that read the loudest pairs are taken, as far as the
predicted time on each kind of CPU allows, and kept where the outputs gain enough for that time.
"""

from __future__ import annotations

from dataclasses import replace

from onnxq.passes.base import Pass, SampledContext, Stage
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import THRESHOLDS, Threshold, Trial, ignore_rounding
from onnxq.passes.mixed_precision.attention import has_attention_rules
from onnxq.passes.mixed_precision.candidates import Ways, calibrate_missing, list_quantized_ops
from onnxq.passes.mixed_precision.dynamic_scales import is_automatic, measure_alone
from onnxq.passes.mixed_precision.request import FLOAT
from onnxq.passes.state import PlacedState
from onnxq.planner import OnnxPlacement
from onnxq.planner.choose import choose_ops, compare_times, predict_times
from onnxq.sites import Role

NAME = "float_ops"
# The predicted time of the network may be so much longer.
_LONGEST = 1.15
# Of the noise that all pairs make, each alone.
_LEAST = 0.05
# Decibels that the outputs must gain for each percent of time.
_DB_A_PERCENT = 0.6
_REASON = "it gains little time, and what it reads makes much of the noise at the outputs"


def leave_float(ctx: SampledContext, state: PlacedState) -> tuple[PlacedState, PassReport]:
    """The plan without the operators that read the loudest pairs, as far as time allows. Deterministic."""
    problem, plan = state.problem, state.planned
    noise = measure_alone(ctx, state, plan)
    ways = Ways(problem, plan, FLOAT, has_attention_rules(ctx, state), _REASON)
    least = _LEAST * sum(noise.values())
    loud = [name for name in list_quantized_ops(problem, plan) if noise.get(name, 0.0) > least]
    before, left = predict_times(problem, choose_ops(problem).chosen), problem
    keys: frozenset[str] = frozenset()
    for name in sorted(loud, key=lambda name: -noise[name]):
        if _is_forced(problem, name):
            continue
        more = ways.left(keys | {name})
        if compare_times(before, predict_times(problem, choose_ops(more).chosen)) <= _LONGEST:
            keys, left = keys | {name}, more
    if not keys:
        return state, PassReport(NAME, outcome=Outcome.NO_GAIN)
    changed = calibrate_missing(ctx, state, ways.placed(keys))
    line = f"{', '.join(sorted(keys))} stay float: {_REASON}"
    return replace(state, plan=changed, problem=left), PassReport(NAME, (line,))


def _is_forced(problem: OnnxPlacement, name: str) -> bool:
    op = problem.ops.by_name[name]
    return problem.requests.is_forced(op.node, [(Role.ACTIVATION, tensor) for _, tensor in op.data])


def _find_threshold(_ctx: SampledContext, before: PlacedState, after: PlacedState) -> Threshold:
    times = (predict_times(before.problem, choose_ops(one).chosen) for one in (before.problem, after.problem))
    percent = 100 * (compare_times(*times) - 1)
    return Threshold(gain=max(THRESHOLDS[NAME].gain, _DB_A_PERCENT * percent))


FLOAT_OPS = Pass(
    NAME, Stage.REFINE, leave_float, "looking for operators that gain little", 0.2, applies=is_automatic,
    trial=Trial(
        score=lambda ctx, state: ctx.data.judge.score(state, ignore_rounding(state.planned), progress=ctx.progress),
        threshold=_find_threshold,
    ),
)  # fmt: skip
