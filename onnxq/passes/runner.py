"""The runner of passes: which are left out, the time of each, which results are kept, the journal. Once, for all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from onnxq.backends import find_target
from onnxq.passes.base import Pass, RunContext, Stage
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import judge_change
from onnxq.passes.state import FloatState

StateT = TypeVar("StateT", bound=FloatState)


def run_stage(passes: Iterable[Pass[Any, Any]], stage: Stage, ctx: RunContext, state: StateT) -> StateT:
    """Run the passes of one stage in their order; `ctx.journal` gets a report of each that was attempted.

    A pass that gains nothing, does harm or takes too long leaves the state as it was.
    """
    for entry in passes:
        if entry.stage is not stage or not _is_due(entry, ctx, state):
            continue
        timer = ctx.timers.run(entry.name, entry.title)
        share = ctx.budget.limit(entry.name, entry.time_share, ctx.progress)
        with timer, share as progress:
            if progress is None:
                continue
            own = replace(ctx, progress=progress)
            after: StateT = state
            reports: list[PassReport] = []
            # Both attempts begin with the state before, and both are reported: the second must not hide a rollback.
            for attempt in (entry.run, entry.retry):
                if attempt is None:
                    break
                after, report = judge_change(entry.trial, own, state, *attempt(own, state))
                reports.append(report)
                if report.outcome is not Outcome.WORSE:
                    break
            # Last, so that an attempt out of time leaves no trace.
            ctx.journal.extend(reports)
            state = after
    return state


def run_pass(entry: Pass[Any, Any], ctx: RunContext, state: StateT) -> StateT:
    """`run_stage` of a single pass."""
    return run_stage((entry,), entry.stage, ctx, state)


def _is_due(entry: Pass[Any, Any], ctx: RunContext, state: FloatState) -> bool:
    if entry.name in ctx.skip or entry.name in find_target(ctx.config.target).skips:
        return False
    if entry.stage is not Stage.REWRITE and not entry.fast and ctx.config.effort == "fast":
        return False
    # Last of the questions: it may look at the whole model.
    return entry.applies(ctx, state)
