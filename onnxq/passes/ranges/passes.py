"""The pass that chooses ranges of activations, site by site; kept unless the outputs get worse by it."""

from __future__ import annotations

from dataclasses import replace

from onnxq.numerics import clip_bounds
from onnxq.passes.base import Pass, RunContext, Stage, Trial, has_real_samples
from onnxq.passes.fixed_scales import fix_scales
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import ignore_rounding
from onnxq.passes.observed import MEASURED, list_replaced
from onnxq.passes.ranges.core import WHOLE
from onnxq.passes.ranges.search import Ranged, choose_ranges
from onnxq.passes.rounding.samples import take_enough
from onnxq.passes.state import State
from onnxq.plan import Plan

NAME = "ranges"
# Errors of layers are judged on few samples: they have many positions each.
_JUDGES = 4
# Outputs, of which there are few, may seem to lose so much, dB: less is chance, and the layers gained.
_NOISE_DB = 0.5
_WHY = "what reads these loses less so; `skip: [ranges]` keeps the observer's"


def improve_ranges(ctx: RunContext, state: State) -> tuple[State, PassReport]:
    """The range of each activation that disturbs the operators behind it least."""
    samples, seed, plan = ctx.data, ctx.config.data.seed, state.planned
    few = take_enough(samples.calibration, plan, ctx.config.effort, seed)
    # Others than those that candidates are made of: a range fits the values that it was made from.
    judges = samples.validation.take(_JUDGES, seed)
    shared = fix_scales(ctx, state, plan)
    done = choose_ranges(
        state.model, shared, few.samples(), judges.samples(), observed=len(samples.ranges), progress=ctx.progress,
        crew=ctx.crew,
    )  # fmt: skip
    if not done.taken:
        return state, PassReport(NAME, outcome=Outcome.NO_GAIN)
    line = f"{done.line()} {list_replaced(shared, done.plan, MEASURED, _WHY)}"
    return replace(state, plan=_keep_dynamic(plan, done)), PassReport(NAME, (line,))


def _keep_dynamic(plan: Plan, done: Ranged) -> Plan:
    """The plan with the numbers chosen; a site on scales of each run clips to the range that was chosen for it."""
    chosen = {site.site: site for site in done.plan.sites}
    sites = []
    for site in plan.sites:
        one = chosen[site.site]
        if not site.spec.dynamic:
            site = one
        elif one.qparams is not None and done.taken.get(site.site, WHOLE) != WHOLE:
            low, high = clip_bounds(one.qparams, one.spec)
            site = replace(site, clip=(float(low), float(high)))
        sites.append(site)
    return replace(done.plan, sites=tuple(sites))


_TRIAL = Trial(
    score=lambda ctx, state: ctx.data.judges.score(state, ignore_rounding(state.planned), progress=ctx.progress),
    keeps=lambda _ctx, _before, _after, before, after: after > before - _NOISE_DB,
)
RANGES: tuple[Pass, ...] = (
    Pass(
        NAME, Stage.REFINE, improve_ranges, "choosing ranges", 0.3,
        applies=has_real_samples, trial=_TRIAL,
    ),
)  # fmt: skip
