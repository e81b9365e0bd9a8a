"""The sweep in a run: on a few samples, kept where the outputs of the emitted model come nearer to the float ones."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.data import Dataset, views
from onnxq.graph import GraphIndex, at_opset
from onnxq.passes import PassReport
from onnxq.passes.sweep import SEARCHED, Swept, sweep
from onnxq.passes.sweep_ops import Operator, operators
from onnxq.pipeline.harder import harder
from onnxq.pipeline.judging import few_bits, judges_of, plan_errors, sample_errors
from onnxq.pipeline.observed import list_replaced
from onnxq.pipeline.prepared import PreparedModel, reported
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.runtime import Feeds
from onnxq.sites import Role
from onnxq.verify import OutputError

NAME, VIEWS = "sweep", "views"
_SAMPLES = {"balanced": 32, "high": 64}
# Small samples give few positions and cost little: as many as make up so many input values, up to 128. Large ones give
# many and cost memory: no more than make up so many, and at least 8.
_VALUES, _MOST = 1 << 18, 128
_TOO_MANY, _TOO_MANY_NARROW, _FEWEST = 9 << 18, 1 << 23, 8
# With other views of them, which are held as well, but not in the first layers.
_MOST_SEEN = 1 << 25
# Above this an output is as good as float; one such output must not outweigh the others.
_PERFECT_DB = 80.0
# Where all operators together make it worse: so many stretches of the network, each tried on top of those that helped.
_STRETCHES = 4
# From here on no answer hangs on it, and looking for the stretches costs twice what the sweep does.
_GOOD_DB = 40.0
_WHY = "the rounding of few bits, or within 16-bit sums, finds its own; `skip: [sweep]` keeps the observer's"


@dataclass(frozen=True, eq=False)
class Trial:
    """What sweeps are judged by: samples that they did not see."""

    prepared: PreparedModel
    held: Dataset
    progress: Progress = silent

    def score(self, plan: Plan) -> float:
        """Mean SQNR of the outputs in dB, of the model as the file says."""
        return _mean_db(plan_errors(self.prepared, plan, self.held, progress=self.progress))

    def worse(self, plan: Plan, than: Plan) -> bool:
        """True where the samples, one by one, agree that `plan` answers worse: by more than their standard error.

        `score` may hang on one sample alone: one letter of a line of text that is read otherwise.
        """
        each = [sample_errors(self.prepared, one, self.held, progress=self.progress) for one in (plan, than)]
        gains = [_mean_db(one) - _mean_db(other) for one, other in zip(*each, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
        return statistics.fmean(gains) < -error


def _mean_db(found: Iterable[OutputError]) -> float:
    return float(np.mean([np.clip(one.sqnr_db, -_PERFECT_DB, _PERFECT_DB) for one in found] or [0.0]))


def swept(
    prepared: PreparedModel, plan: Plan, calibration: Dataset, held: Dataset, *,
    effort: str, skip: Iterable[str] = (), seed: int = 0, outputs: Dataset | None = None, progress: Progress,
) -> tuple[PreparedModel, Plan]:  # fmt: skip
    """The plan with swept weights and biases, and the model with the account of it among its reports.

    effort: "balanced" takes up to 32 samples, "high" 64, as `enough` says; "fast" leaves the plan as it is. So does
    `skip` with "sweep" in it, and so do made-up samples: corrections for inputs that never come are errors for those
    that do.
    outputs: samples to judge outputs on, `judges_of` the others where it is None. What makes those worse by more than
    chance is rolled back: first everything, then stretch by stretch.
    """
    if effort not in _SAMPLES or NAME in skip or calibration.synthetic:
        return prepared, plan
    few = enough(calibration, plan, effort, seed)
    trial = Trial(prepared, judges_of(calibration, held, seed) if outputs is None else outputs, progress)
    before = trial.score(plan)
    others = other_views(list(few.samples()), plan, skip)
    first = sweep(prepared.proto, plan, few.samples(), others=others, progress=progress)
    if not first.done:
        line = "; ".join(first.lines()) or "nothing to treat"
        return reported(prepared, PassReport(NAME, (line,))), plan
    done: Swept | None = first
    after, told = trial.score(first.plan), ""
    if not after > before and trial.worse(first.plan, plan):
        whole, done = after, None
        told = f"all operators together made it worse ({before:.1f} to {whole:.1f} dB)"
        if effort == "high" or before < _GOOD_DB:
            done, after = _stretches(trial, plan, few, others, before, progress)
            told += ", so by stretches; " + ("none of them helped" if done is None else "")
    if done is None:
        return reported(prepared, PassReport(NAME, (f"rolled back: {told}",))), plan
    found, more = done.plan, ""
    if effort == "high":
        # What a longer search gains on its own samples does not hold on others, so those alone judge it.
        judge = Trial(prepared, held, progress)
        begun = judge.score(done.plan)
        found, reached, more = harder(prepared.proto, judge.score, plan, done, begun, few, others, progress)
        after = trial.score(found) if reached != begun else after
    lines = "; ".join(done.lines())
    searched = found.with_sites(tuple(s for s in found.sites if s.qparams is not None and s.qparams.origin == SEARCHED))
    replaced = list_replaced(plan, searched, (Role.WEIGHT,), _WHY)
    more += f"; scales of weights {replaced}" if replaced else ""
    left = f"; no sample reached {', '.join(done.skipped)}" if done.skipped else ""
    line = f"{told}{before:.1f} to {after:.1f} dB in a trial; {lines}{left}{more}"
    return reported(prepared, PassReport(NAME, (line,))), found


def enough(calibration: Dataset, plan: Plan, effort: str, seed: int) -> Dataset:
    """Samples to walk through the network with, all held at once: more where they are small, fewer where large.

    Weights of few bits, for which everything hangs on their rounding, get more of the large ones.
    """
    size = max(sum(value.size for value in calibration[0].values()), 1)
    wanted = max(_SAMPLES[effort], min(_VALUES // size, _MOST))
    most = _TOO_MANY_NARROW if few_bits(plan) else _TOO_MANY
    return calibration.take(max(min(wanted, most // size), _FEWEST), seed)


def other_views(samples: Sequence[Feeds], plan: Plan, skip: Iterable[str]) -> list[Feeds]:
    """What second moments are to see besides the samples, all of them alike often; nothing but for weights of few bits.

    There pictures are shown in other ways too: see `onnxq.data.augment`.
    """
    if VIEWS in skip or not samples or not few_bits(plan):
        return []
    each = [views(sample) for sample in samples]
    size = max(sum(np.asarray(value).size for value in samples[0].values()), 1)
    rounds = min(_MOST_SEEN // (size * len(samples)) - 1, *map(len, each))
    return [one[k] for k in range(rounds) for one in each]


def _stretches(
    trial: Trial, plan: Plan, few: Dataset, others: Sequence[Feeds], before: float, progress: Progress
) -> tuple[Swept | None, float]:
    """Stretches of the network, from its end to its start, each kept if it helps those kept before."""
    chosen: frozenset[str] = frozenset()
    best: Swept | None = None
    score = before
    for part in _cut(_operators(trial.prepared, plan)):
        nodes = chosen | part
        tried = sweep(trial.prepared.proto, plan, few.samples(), others=others, nodes=nodes, progress=progress)
        now = trial.score(tried.plan)
        if now > score:
            chosen, best, score = nodes, tried, now
    return best, score


def _operators(prepared: PreparedModel, plan: Plan) -> list[Operator]:
    return operators(GraphIndex(at_opset(prepared.proto, plan.opset)), plan)


def _cut(found: Sequence[Operator]) -> list[frozenset[str]]:
    """Operators of one kind together where there are several kinds, else stretches of the network, last first."""
    kinds = {one.kind for one in found}
    if len(kinds) > 1:
        return [frozenset(one.node.name for one in found if one.kind == kind) for kind in sorted(kinds)]
    size = -(-len(found) // _STRETCHES)
    parts = [found[k : k + size] for k in range(0, len(found), size)]
    return [frozenset(one.node.name for one in part) for part in reversed(parts)]
