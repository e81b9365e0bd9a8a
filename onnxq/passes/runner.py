"""The runner of passes: which are left out, the time of each, which results are kept, the journal. Once, for all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

from onnxq.backends import find_target
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
    if entry.name in ctx.skip or entry.name in find_target(ctx.config.target).skips:
        return state
    if entry.stage is not Stage.REWRITE and not entry.fast and ctx.config.effort == "fast":
        return state
    # Last of the questions: it may look at the whole model.
    if not entry.applies(ctx, state):
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
    # From the state before, and with reports of both, so that a rollback is not hidden by what came of it.
    second, again = _judge(entry, ctx, state, *entry.retry(ctx, state))
    return second, (report, again)


def _judge(entry: Pass, ctx: RunContext, before: State, after: State, report: PassReport) -> tuple[State, PassReport]:
    """The state that the comparison prefers, and the report with its figures."""
    if report.outcome is not Outcome.KEPT or entry.trial is None:
        return after, report
    old, new = entry.trial.score(ctx, before), entry.trial.score(ctx, after)
    # What cannot be judged is not kept: every pass is an improvement that was shown.
    figures = None if old is None or new is None else (old, new)
    if figures is not None and entry.trial.keeps(ctx, before, after, *figures):
        return after, replace(report, trial_db=figures)
    return before, replace(report, outcome=Outcome.WORSE, trial_db=figures, changed=())
