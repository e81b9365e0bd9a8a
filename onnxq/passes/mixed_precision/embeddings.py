"""Tables of embeddings in few bits: chosen by the planner, kept where samples show that the outputs bear it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from onnxq.calibrate import calibrate
from onnxq.graph import get_index
from onnxq.passes.base import Pass, SampledContext, Stage
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import THRESHOLDS
from onnxq.passes.state import PlacedState, PlacedStep
from onnxq.plan import Plan
from onnxq.planner import Table, choose_tables, explain_loss
from onnxq.sites import Unquantized, split_unquantized

NAME = "embeddings"
# dB above a wish that tables alone must have: as much noise again is left for all other tensors.
_MARGIN_DB = 3.0


def quantize_tables(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The plan with tables of embeddings in few bits, and those that nobody asked for where the outputs bear it."""
    plan = state.planned
    tables, reasons = choose_tables(state.problem, get_index(state.model), plan.sites)
    after = _add_tables(ctx, state, tables, reasons)
    figures: tuple[float, float] | None = None
    free = tuple(table for table in tables if not table.named)
    if free and ctx.config.embeddings == "auto" and plan.calibrated and not ctx.data.synthetic:
        judge = ctx.data.judge
        before = [output.sqnr_db for output in judge.measure(state, plan, progress=ctx.progress)]
        alone = [output.sqnr_db for output in judge.measure(state, _isolate_tables(after.planned, free))]
        pairs = [(db, add_noises(db, tables_db)) for db, tables_db in zip(before, alone, strict=True)]
        figures = min(pairs, key=lambda pair: pair[1], default=None)
        if not all(THRESHOLDS[NAME].allows(*pair) for pair in pairs) or _break_request(ctx, alone):
            assert figures is not None
            losses = explain_loss(free, *figures)
            after = _add_tables(ctx, state, tuple(table for table in tables if table.named), (*reasons, *losses))
            tables = ()
    if not tables:
        return after, PassReport(NAME, outcome=Outcome.NO_GAIN if figures is None else Outcome.WORSE, trial_db=figures)
    elements = sum(table.elements for table in tables)
    stored = sum(table.elements * table.spec.storage_bits for table in tables)
    line = f"{len(tables)} {'tables' if len(tables) > 1 else 'table'}, {4 * elements:,} bytes in {stored // 8:,}"
    finite = figures is not None and all(map(math.isfinite, figures))
    return after, PassReport(NAME, (line,), trial_db=figures if finite else None)


def _break_request(ctx: SampledContext, alone: Sequence[float]) -> bool:
    """True where an accuracy is asked for that is hard to meet with these tables even if all else becomes float."""
    wanted = ctx.request.min_sqnr
    return wanted is not None and any(db < wanted + _MARGIN_DB for db in alone)


def _isolate_tables(plan: Plan, tables: Sequence[Table]) -> Plan:
    """The plan of the lookups in these tables alone.

    With all of a plan on a handful of samples, chance moves the outputs by more than tables do: all-MiniLM-L6's static
    plan has 18.5 dB without and 17.7 dB with them on two texts, 19.1 and 19.2 on 200.
    """
    lookups = {table.tensor: table.lookups for table in tables}
    sites = [replace(site, consumers=lookups[site.site], group="") for site in plan.sites if site.site in lookups]
    return replace(plan, sites=tuple(sites), existing=(), biases=())


def add_noises(first_db: float, second_db: float) -> float:
    """The SQNR in dB with the noise of both, which know nothing of each other."""
    if max(first_db, second_db) == math.inf:
        return min(first_db, second_db)
    return -10 * math.log10(10 ** (-first_db / 10) + 10 ** (-second_db / 10))


def _add_tables(
    ctx: SampledContext, state: PlacedState, tables: tuple[Table, ...], reasons: tuple[Unquantized, ...]
) -> PlacedState:
    """The state with these tables in its plan, and in every plan that is made of its problem later."""
    problem = replace(state.problem, tables=tables)
    plan = problem.with_tables(state.planned)
    refusals, left_float = split_unquantized((*plan.refusals, *plan.left_float, *reasons))
    plan = replace(plan, refusals=refusals, left_float=left_float)
    if state.planned.calibrated and not plan.calibrated:
        # Scales of constants need no samples.
        plan = calibrate(state.model, plan, crew=ctx.crew)
    return replace(state, problem=problem, plan=plan)


def _has_tables(ctx: SampledContext, state: PlacedState) -> bool:
    if not (ctx.config.rules or ctx.config.embeddings != "float"):
        return False
    return any(choose_tables(state.problem, get_index(state.model), state.planned.sites))


EMBEDDINGS = Pass(
    NAME, Stage.REFINE, quantize_tables, "quantizing embeddings", fast=True,
    applies=_has_tables,
)  # fmt: skip
