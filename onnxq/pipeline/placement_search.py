"""Placements that are measured: time a handful of placements on this machine and take the fastest that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxq.calibrate import calibrate
from onnxq.data import Dataset
from onnxq.errors import OnnxqError
from onnxq.evaluation.accumulator import Array
from onnxq.evaluation.compare import compare_models
from onnxq.graph import ModelLike
from onnxq.passes.assembly.model import build_quantized
from onnxq.passes.state import State
from onnxq.plan import PlacementChoice, PlacementMethod, Plan
from onnxq.planner import Choice, OnnxPlacement
from onnxq.progress import Progress, count_items, silent
from onnxq.runtime import Session, detect_cpu, time_models
from onnxq.sites import LeftFloat

# A placement must beat float by this in median and in minimum, or float is shipped.
_PAYS = 1.02
# Placements within this of the fastest are a tie, which accuracy decides.
_TIE = 1.03
# Candidates that are timed a second time, in twice the rounds.
_FINALISTS = 4
_ROUNDS = 9
# What counts as perfect, dB, so that a candidate of one exact output does not win by infinity.
_PERFECT_DB = 200.0


@dataclass(frozen=True, eq=False)
class _Trial:
    name: str
    chosen: frozenset[str]
    model: ModelLike
    sqnr_db: float


def choose_measured(
    problem: OnnxPlacement,
    state: State,
    samples: Dataset,
    feeds: Mapping[str, Array],
    *,
    threads: int = 1,
    progress: Progress = silent,
) -> Plan:
    """Emit every candidate with quick ranges, time all interleaved, the best again, and return the winner's plan.

    feeds: one sample to time. samples: a few to calibrate and judge ties on. The plan (without numbers)
    names the chosen candidate and the speed of each; when nothing beats float it has no sites.
    """
    trials = []
    candidates = problem.candidates()
    with progress("timing placements", len(candidates) + 2) as task:
        for name, chosen in count_items(candidates.items(), task):
            trial = _build(problem, state, samples, name, chosen)
            trials += [] if trial is None else [trial]
        first = _measure_speeds(state, trials, feeds, threads, _ROUNDS)
        task.advance()
        order = sorted(trials, key=lambda trial: -first[trial.name].median)[:_FINALISTS]
        # The best of many timings is partly luck; those measured again count with the second figure.
        second = _measure_speeds(state, order, feeds, threads, 2 * _ROUNDS)
        task.advance()
    speeds = {**first, **second}
    # Two decimals: the noise of a timing is larger.
    speedups = {trial.name: round(speeds[trial.name].median, 2) for trial in trials}
    how = PlacementChoice(method=PlacementMethod.MEASURED, cpu=detect_cpu(), speedups=speedups)
    fit = [trial for trial in order if min(speeds[trial.name].median, speeds[trial.name].best) > _PAYS]
    if not fit:
        left = LeftFloat("placement", "no placement ran faster than float on this machine", "measured", "F105")
        return problem.placed(Choice(frozenset(), (left,)), how)
    fastest = max(speeds[trial.name].median for trial in fit)
    tied = [trial for trial in fit if speeds[trial.name].median * _TIE >= fastest]
    best = max(tied, key=lambda trial: (round(trial.sqnr_db, 1), -len(trial.chosen)))
    reason = f"float was faster here: placement {best.name!r} won the timing"
    left_float = tuple(
        LeftFloat(op.name, reason, "measured", "F105")
        for op in problem.ops
        if op.rule.compute and op.name not in best.chosen
    )
    how = replace(how, candidate=best.name, threads=threads)
    return problem.placed(Choice(best.chosen, left_float), how)


def _build(problem: OnnxPlacement, state: State, samples: Dataset, name: str, chosen: frozenset[str]) -> _Trial | None:
    """The candidate with minmax ranges of a few samples; None when it cannot be made."""
    plan = problem.placed(Choice(chosen), PlacementChoice()) if chosen else None
    if plan is None or not plan.sites:
        return None
    try:
        model = build_quantized(state, calibrate(state.model, plan, samples))
        pair = {"q": (Session(state.model), Session(model))}
        found = compare_models(pair, samples.samples())["q"]
    except OnnxqError:
        # One candidate fewer is no reason to fail: the others can be timed, and float can.
        return None
    finite = [min(output.sqnr_db, _PERFECT_DB) for output in found]
    return _Trial(name, chosen, model, float(np.mean(finite)) if finite else 0.0)


@dataclass(frozen=True)
class _Speed:
    """Float time over a candidate's: median of the rounds' ratios, and ratio of the best times."""

    median: float
    best: float


def _measure_speeds(
    state: State, trials: Sequence[_Trial], feeds: Mapping[str, Array], threads: int, rounds: int
) -> dict[str, _Speed]:
    models = {"float": state.named, **{trial.name: trial.model for trial in trials}}
    found = time_models(models, feeds, threads=threads, rounds=rounds)
    base = found["float"]
    return {
        trial.name: _Speed(found[trial.name].speedup(base), base.min_ms / found[trial.name].min_ms) for trial in trials
    }
