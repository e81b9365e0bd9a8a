"""The pass that chooses ranges of activations, site by site; kept unless the outputs get worse by it."""

from __future__ import annotations

from dataclasses import replace

from onnxq.passes.base import Pass, SampledContext, Stage, has_real_samples
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import THRESHOLDS, Trial, ignore_rounding
from onnxq.passes.ranges.core import WHOLE
from onnxq.passes.ranges.ends import read_range
from onnxq.passes.ranges.scarce import find_scarce_sites
from onnxq.passes.ranges.search import ChosenRanges, choose_ranges
from onnxq.passes.rounding.samples import take_enough
from onnxq.passes.scales import MEASURED, fix_scales, list_replaced
from onnxq.passes.state import PlacedState, PlacedStep
from onnxq.plan import Plan

NAME = "ranges"
# Errors of layers are judged on few samples: they have many positions each.
_JUDGES = 4
_WHY = "what reads these loses less so; `skip: [ranges]` keeps the observer's"


def improve_ranges(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The range of each activation that disturbs the operators behind it least."""
    samples, seed, plan = ctx.data, ctx.config.data.seed, state.planned
    fitted = take_enough(samples.calibration, plan, ctx.config.effort, seed)
    # Others than those that candidates are made of: a range fits the values that it was made from.
    judges = samples.validation.take(_JUDGES, seed)
    shared = fix_scales(ctx, state, plan)
    chosen = choose_ranges(
        state.model, shared, fitted.samples(), judges.samples(), progress=ctx.progress, crew=ctx.crew,
        settled=find_scarce_sites(ctx, state),
    )  # fmt: skip
    if not chosen.taken:
        return state, PassReport(NAME, outcome=Outcome.NO_GAIN)
    line = f"{chosen.describe_taken()} {list_replaced(shared, chosen.plan, MEASURED, _WHY)}"
    return replace(state, plan=_keep_dynamic(plan, chosen)), PassReport(NAME, (line,))


def _keep_dynamic(plan: Plan, done: ChosenRanges) -> Plan:
    """The plan with the numbers chosen; a site on scales of each run clips to the range that was chosen for it."""
    chosen = {site.site: site for site in done.plan.sites}
    sites = []
    for site in plan.sites:
        better = chosen[site.site]
        if not site.spec.dynamic:
            site = better
        elif better.qparams is not None and done.taken.get(site.site, WHOLE) != WHOLE:
            site = replace(site, clip=read_range(better))
        sites.append(site)
    return replace(done.plan, sites=tuple(sites))


_TRIAL: Trial[SampledContext, PlacedState] = Trial(
    score=lambda ctx, state: ctx.data.judges.score(state, ignore_rounding(state.planned), progress=ctx.progress),
    threshold=THRESHOLDS[NAME],
)
RANGES: tuple[Pass[SampledContext, PlacedState], ...] = (
    Pass(
        NAME, Stage.REFINE, improve_ranges, "choosing ranges", 0.3,
        applies=has_real_samples, trial=_TRIAL,
    ),
)  # fmt: skip
