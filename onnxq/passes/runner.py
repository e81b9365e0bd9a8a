"""The runner of passes: which are left out, the time of each, which results are kept, the journal. Once, for all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

from onnxq.passes.base import Pass, RunContext, Stage
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.state import State
from onnxq.progress import Progress

Attempt = tuple[State, tuple[PassReport, ...]]


def run_stage(passes: Iterable[Pass], stage: Stage, ctx: RunContext, state: State) -> State:
    """Run the passes of one stage in their order; `ctx.journal` gets a report of each that was attempted."""
    for entry in passes:
        if entry.stage is stage:
            state = run_pass(entry, ctx, state)
    return state


def run_pass(entry: Pass, ctx: RunContext, state: State) -> State:
    """The state after the pass, or as it was where the pass is left out, gains nothing or does harm."""
    if entry.name in ctx.skip or entry.target not in ("", ctx.config.target):
        return state
    if entry.stage is not Stage.REWRITE and not entry.fast and ctx.config.effort == "fast":
        return state
    applies = entry.applies(ctx, state)
    if isinstance(applies, Outcome):
        ctx.journal.append(PassReport(entry.name, outcome=applies))
        return state
    if not applies:
        return state

    def work(progress: Progress) -> Attempt:
        return _attempt(entry, replace(ctx, progress=progress), state)

    with ctx.timers.run(entry.name, entry.title) if entry.title else nullcontext():
        if entry.time_share:
            unchanged: Attempt = (state, ())
            state, reports = ctx.budget.tried(entry.name, entry.time_share, ctx.progress, work, unchanged)
        else:
            state, reports = work(ctx.progress)
    ctx.journal.extend(reports)
    return state


def _attempt(entry: Pass, ctx: RunContext, state: State) -> Attempt:
    """The pass, and its second attempt where its comparison takes the first back."""
    after, report = _judge(entry, ctx, state, *entry.run(ctx, state))
    if report.outcome is not Outcome.WORSE or entry.retry is None:
        return after, (report,)
    second, again = _judge(entry, ctx, state, *entry.retry(ctx, state))
    return second, (report, again)


def _judge(entry: Pass, ctx: RunContext, before: State, after: State, report: PassReport) -> tuple[State, PassReport]:
    """The state that the comparison prefers, and the report with its figures."""
    if report.outcome is not Outcome.KEPT or entry.trial is None:
        return after, report
    scores = entry.trial.score(ctx, before), entry.trial.score(ctx, after)
    if scores[0] is not None and scores[1] is not None:
        figures = scores[0], scores[1]
        if entry.trial.keeps(ctx, before, after, *figures):
            return after, replace(report, trial_db=figures)
        return before, replace(report, outcome=Outcome.WORSE, trial_db=figures, changed=())
    return before, replace(report, outcome=Outcome.WORSE, changed=())
