"""Ranges of activations in a run: chosen site by site, and kept unless the outputs get worse by it."""

from __future__ import annotations

from collections.abc import Iterable

from onnxq.data import Dataset
from onnxq.passes import PassReport
from onnxq.passes.ranges import choose_ranges
from onnxq.pipeline.judging import Evaluator, before_rounding, judges_of
from onnxq.pipeline.observed import MEASURED, list_replaced
from onnxq.pipeline.prepared import PreparedModel, reported
from onnxq.pipeline.sweeping import Trial, enough
from onnxq.plan import Plan
from onnxq.progress import Progress

NAME = "ranges"
# Errors of layers are judged on few samples: they have many positions each.
_JUDGES = 4
# What the outputs, of which there are few, may seem to lose: less is chance, and the layers gained.
_NOISE_DB = 0.5
_WHY = "what reads these loses less so; `skip: [ranges]` keeps the observer's"


def ranged(
    prepared: PreparedModel, plan: Plan, calibration: Dataset, trial: Dataset, *,
    effort: str, skip: Iterable[str] = (), seed: int = 0, outputs: Evaluator | None = None, progress: Progress,
) -> tuple[PreparedModel, Plan]:  # fmt: skip
    """The plan with the range of each activation that disturbs the operators behind it least, and the account of it.

    effort "fast", `skip` with "ranges" in it, made-up samples and weight-only plans leave the plan as it is.
    outputs: judges outputs, on `judges_of` the other samples where it is None. Rolled back where the quantized
    model's outputs are further from the float ones by more than chance on them.
    """
    if effort == "fast" or NAME in skip or calibration.synthetic:
        return prepared, plan
    few = enough(calibration, plan, effort, seed)
    judges = trial.take(_JUDGES, seed) if len(trial) > _JUDGES else trial
    done = choose_ranges(prepared.proto, plan, few.samples(), judges.samples(), progress=progress)
    if not done.taken:
        return reported(prepared, PassReport(NAME, ("nothing to gain",))), plan
    judge = Trial(prepared, outputs or Evaluator(judges_of(calibration, trial, seed)), progress)
    before, after = (judge.score(before_rounding(one)) for one in (plan, done.plan))
    if not after > before - _NOISE_DB:
        line = f"rolled back: the outputs fell from {before:.1f} to {after:.1f} dB in a trial"
        return reported(prepared, PassReport(NAME, (line,))), plan
    replaced = list_replaced(plan, done.plan, MEASURED, _WHY)
    line = f"{done.line()} {replaced}; {before:.1f} to {after:.1f} dB in a trial"
    return reported(prepared, PassReport(NAME, (line,))), done.plan
