"""Tables of embeddings in few bits: chosen by the planner, kept where samples show that the outputs bear it."""

from __future__ import annotations

import math
from dataclasses import replace

from onnxq.calibrate import calibrate
from onnxq.graph import get_index
from onnxq.passes.base import Pass, RunContext, Stage
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.state import State
from onnxq.planner import EMBEDDING_ROWS, Table, choose_tables, explain_loss
from onnxq.sites import Unquantized, split_unquantized

NAME = "embeddings"
# dB that tables may cost the outputs; above the second figure a loss changes no answers. all-MiniLM-L6 loses 0.0 of
# 24.4 dB with int8 activations, 0.3 of 34 dB with weights alone.
_MAY_COST_DB, _GOOD_DB = 0.5, 30.0
# dB above a wish that tables alone must have: as much noise again is left for all other tensors.
_MARGIN_DB = 3.0


def quantize_tables(ctx: RunContext, state: State) -> tuple[State, PassReport]:
    """The plan with tables of embeddings in few bits, and those that nobody asked for where the outputs bear it."""
    assert state.problem is not None
    plan = state.planned
    tables, reasons = choose_tables(state.problem, get_index(state.model), plan.sites)
    after = _add_tables(state, tables, reasons)
    figures: tuple[float, float] | None = None
    free = tuple(table for table in tables if not table.named)
    if free and ctx.config.embeddings == "auto" and plan.calibrated and not ctx.data.synthetic:
        before, found = (ctx.data.judge.measure(state, one, progress=ctx.progress) for one in (plan, after.planned))
        pairs = [(one.sqnr_db, other.sqnr_db) for one, other in zip(before, found, strict=True)]
        figures = min(pairs, key=lambda pair: pair[1], default=None)
        if any(other < min(one - _MAY_COST_DB, _GOOD_DB) for one, other in pairs) or _stand_in_the_way(ctx, after):
            assert figures is not None
            losses = explain_loss(free, *figures)
            after = _add_tables(state, tuple(table for table in tables if table.named), (*reasons, *losses))
            tables = ()
    if not tables:
        return after, PassReport(NAME, outcome=Outcome.NO_GAIN if figures is None else Outcome.WORSE, trial_db=figures)
    elements = sum(table.elements for table in tables)
    stored = sum(table.elements * table.spec.storage_bits for table in tables)
    line = f"{len(tables)} {'tables' if len(tables) > 1 else 'table'}, {4 * elements:,} bytes in {stored // 8:,}"
    told = None if figures is None or not all(map(math.isfinite, figures)) else figures
    return after, PassReport(NAME, (line,), trial_db=told)


def _stand_in_the_way(ctx: RunContext, state: State) -> bool:
    """True where an accuracy is asked for that is hard to meet with these tables even if all else becomes float."""
    wanted = ctx.request.min_sqnr
    if wanted is None:
        return False
    sites = tuple(site for site in state.planned.sites if site.rule == EMBEDDING_ROWS)
    alone = replace(state.planned, sites=sites, existing=(), biases=())
    return any(one.sqnr_db < wanted + _MARGIN_DB for one in ctx.data.judge.measure(state, alone))


def _add_tables(state: State, tables: tuple[Table, ...], reasons: tuple[Unquantized, ...]) -> State:
    """The state with these tables in its plan, and in every plan that is made of its problem later."""
    assert state.problem is not None
    problem = replace(state.problem, tables=tables)
    plan = problem.with_tables(state.planned)
    refusals, left_float = split_unquantized((*plan.refusals, *plan.left_float, *reasons))
    plan = replace(plan, refusals=refusals, left_float=left_float)
    if state.planned.calibrated and not plan.calibrated:
        # Scales of constants need no samples.
        plan = calibrate(state.model, plan)
    return replace(state, problem=problem, plan=plan)


def _has_tables(ctx: RunContext, state: State) -> bool:
    if not (ctx.config.rules or ctx.config.embeddings != "float") or state.problem is None:
        return False
    return any(choose_tables(state.problem, get_index(state.model), state.planned.sites))


EMBEDDINGS = Pass(
    NAME, Stage.REFINE, quantize_tables, "quantizing embeddings", fast=True,
    applies=_has_tables,
)  # fmt: skip
