"""Placements that are measured: time a handful of placements on this machine and take the fastest that pays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from onnxq.backends import find_backend
from onnxq.calibrate import calibrate
from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.engines.bench import demand_timer, time_placements
from onnxq.errors import ConfigError, OnnxqError, VerificationError
from onnxq.evaluation.compare import MatchedRunner, ReferenceRunner, compare_models
from onnxq.graph import ModelLike
from onnxq.passes import FloatState, build_quantized
from onnxq.pipeline.check import Timer, find_timer
from onnxq.plan import PlacementChoice, PlacementMethod, Plan
from onnxq.planner import Choice, OnnxPlacement
from onnxq.progress import Progress, count_items
from onnxq.runtime import Feeds, Session, detect_cpu
from onnxq.sites import LeftFloat, NameSet

# A placement must beat float by this in median and in minimum, or float is shipped.
_PAYS = 1.02
# Placements within this of the fastest are a tie, which accuracy decides.
_TIE = 1.03
# Candidates that are timed a second time, in twice the rounds.
_FINALISTS = 4
_ROUNDS = 9
# What counts as perfect, dB, so that a candidate of one exact output does not win by infinity.
_PERFECT_DB = 200.0
_FLOAT = "float"


@dataclass(frozen=True, eq=False)
class _Candidate:
    name: str
    chosen: NameSet
    model: ModelLike
    sqnr_db: float


def choose_timer(config: Config) -> tuple[Timer, int]:
    """The times to choose by: TensorRT's on this machine's GPU, or an engine's on the CPU; and its threads.

    Raises VerificationError where the engine cannot be timed here, ConfigError for a target that nothing here times.
    """
    threads = config.verify.threads or 1
    timer = find_timer(config.target, threads, config.runtime.plugins)
    if timer is not None:
        return timer, threads
    if not find_backend(config.target).engines:
        cause = f"onnxq runs no engine of target {config.target} that could time placements"
        raise ConfigError(config.where("placement"), cause, "write `placement: rules`", code="Q307")
    demand_timer(config.target, "placement: measured")
    return partial(time_placements, config.target, plugins=config.runtime.plugins), 0


def choose_measured(
    problem: OnnxPlacement,
    state: FloatState,
    samples: Dataset,
    feeds: Feeds,
    *,
    measure: Timer,
    threads: int,
    progress: Progress,
) -> Plan:
    """Emit every candidate with quick ranges, time all interleaved, the best again, and return the winner's plan.

    feeds: one sample to time. samples: a few to calibrate and judge ties on. measure: times models on the engine.
    threads: of ONNX Runtime. The plan (without numbers) names the chosen candidate and the speed of each; when nothing
    beats float it has no sites.
    """
    trials = []
    candidates = problem.candidates()
    with progress("timing placements", len(candidates) + 2) as task:
        for name, chosen in count_items(candidates.items(), task):
            trial = _build(problem, state, samples, name, chosen)
            if trial is not None:
                trials.append(trial)
        first = _measure_speeds(state, trials, feeds, measure, _ROUNDS)
        task.advance()
        # An engine may refuse a candidate.
        timed = [trial for trial in trials if trial.name in first]
        order = sorted(timed, key=lambda trial: -first[trial.name].median)[:_FINALISTS]
        # The best of many timings is partly luck; those measured again count with the second figure.
        second = _measure_speeds(state, order, feeds, measure, 2 * _ROUNDS)
        task.advance()
    speeds = {**first, **second}
    # Two decimals: the noise of a timing is larger.
    speedups = {trial.name: round(speeds[trial.name].median, 2) for trial in timed}
    cpu = detect_cpu() if problem.engine.costs else ""
    how = PlacementChoice(method=PlacementMethod.MEASURED, cpu=cpu, speedups=speedups)
    fit = [
        trial for trial in order if min(speeds[trial.name].median, speeds[trial.name].best) > _PAYS
    ]
    if not fit:
        left = LeftFloat(
            "placement", "no placement ran faster than float on this machine", "measured", "F105"
        )
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


def _build(
    problem: OnnxPlacement, state: FloatState, samples: Dataset, name: str, chosen: NameSet
) -> _Candidate | None:
    """The candidate with minmax ranges of a few samples; None when it cannot be made."""
    plan = problem.placed(Choice(chosen), PlacementChoice(cpu=detect_cpu())) if chosen else None
    if plan is None or not plan.sites:
        return None
    try:
        model = build_quantized(state, calibrate(state.model, plan, samples))
        reference = ReferenceRunner(state.model)
        other = MatchedRunner(reference, Session(reference.selections.take_choices(model)))
        outputs = compare_models({"q": (reference, other)}, samples.samples())["q"].results()
    except OnnxqError:
        # One candidate fewer is no reason to fail: the others can be timed, and float can.
        return None
    finite = [min(output.sqnr_db, _PERFECT_DB) for output in outputs]
    return _Candidate(name, chosen, model, float(np.mean(finite)) if finite else 0.0)


@dataclass(frozen=True)
class _Speed:
    """Float time over a candidate's: median of the rounds' ratios, and ratio of the best times."""

    median: float
    best: float


def _measure_speeds(
    state: FloatState, trials: Sequence[_Candidate], feeds: Feeds, measure: Timer, rounds: int
) -> dict[str, _Speed]:
    """The speeds of the candidates that the engine takes. VerificationError where it does not take the float model."""
    models = {_FLOAT: state.named, **{trial.name: trial.model for trial in trials}}
    latencies = dict(measure(models, feeds, rounds))
    base = latencies.pop(_FLOAT, None)
    if base is None:
        cause = "the engine does not take the float model, so nothing can be compared with it"
        raise VerificationError("placement", cause, "see `onnxq prove` for the reason", code="Q710")
    return {
        name: _Speed(latency.speedup(base), base.min_ms / latency.min_ms)
        for name, latency in latencies.items()
    }
