"""The end of a run: the finished model checked against the float one, and the account of everything."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import onnx

from onnxq import targets
from onnxq.annotate import find_saturating
from onnxq.config import Config
from onnxq.graph import filled, index_of, name_nodes
from onnxq.pipeline import check
from onnxq.pipeline.budget import Budget
from onnxq.pipeline.inputs import Inputs
from onnxq.pipeline.prepared import PreparedModel
from onnxq.pipeline.result import Result
from onnxq.pipeline.stages import Stages
from onnxq.plan import PlacementMethod, Plan
from onnxq.progress import counted
from onnxq.report import Promotion, Report, duration, placement_text, saturation_summary, site_line
from onnxq.report.model import DRIFT_DB
from onnxq.runtime import cpu_kind
from onnxq.sites import Caution
from onnxq.verify import check_interface

# What timing both models takes, about.
_TIMING_SECONDS = 4.0
_UNCHECKED = "nothing was checked against the float model: no samples were given"


def finish(
    prepared: PreparedModel,
    plan: Plan,
    model: onnx.ModelProto,
    inputs: Inputs | None,
    config: Config,
    stages: Stages,
    *,
    source: object,
    promotion: Promotion | None = None,
    budget: Budget | None = None,
) -> Result:
    """Check the finished model and write the account. promotion: for a wish, whose outcome the check decides."""
    budget = Budget() if budget is None else budget
    check_interface(prepared.source.proto, model)
    engine = targets.target(plan.target)
    trial, timing = None, None
    if inputs is not None:
        with stages.run("check"):
            trial = _checked(prepared, model, inputs, config, stages, budget, optimized=engine.times_itself)
        if config.verify.latency and engine.times_itself and plan.sites:
            if budget.left() + budget.reserve < _TIMING_SECONDS:
                budget.lines.append("timing: left out, the budget leaves no time for it")
            else:
                with stages.run("time"):
                    timing = check.time_both(prepared.named, model, inputs.first, threads=config.verify.threads or 1)
    model = filled(model)
    if budget.over():
        budget.lines.append(f"the budget was too small: {duration(budget.spent())} is what the least of it takes")
    account = Report(
        source=str(source) if isinstance(source, (str, Path)) else "",
        target=plan.target,
        config=config.source,
        placement=placement_text(plan),
        cpu=plan.placement.cpu if plan.placement is not None else "",
        data=plan.data,
        synthetic=inputs is not None and inputs.synthetic,
        source_bytes=prepared.source.size_bytes,
        output_bytes=model.ByteSize(),
        checks=trial.outputs if trial else (),
        checked=trial.samples if trial else 0,
        unchecked=_UNCHECKED if inputs is None else "",
        seen=inputs.seen if inputs is not None else "",
        latency=timing,
        pairs=len(plan.sites),
        roles=tuple(sorted(plan.by_role().items())),
        ops=check.op_counts(index_of(prepared.proto), plan),
        sites=tuple(site_line(site) for site in plan.sites),
        refusals=plan.refusals,
        left_float=plan.left_float,
        rewrites=prepared.rewrites,
        accounts=(*prepared.accounts, *(f"budget: {line}" for line in budget.lines)),
        promotion=None if promotion is None else _decided(promotion, trial, engine.times_itself),
        already=prepared.already,
        kept=plan.kept,
        saturating=_saturating(model, trial),
        warnings=_gather_warnings(prepared, plan, trial),
        stages=tuple(stages.done),
    )
    return Result(model, plan, account, prepared.source.files)


def _checked(
    prepared: PreparedModel,
    model: onnx.ModelProto,
    inputs: Inputs,
    config: Config,
    stages: Stages,
    budget: Budget,
    *,
    optimized: bool,
) -> check.Trial:
    """Float and quantized model on the samples held back, as far as the budget goes."""
    with stages.progress("running float and quantized model", len(inputs.held)) as task:
        samples = counted(budget.while_left("check", inputs.held.samples()), task)
        return check.try_out(prepared.named, model, samples, threads=config.verify.threads, optimized=optimized)


def _gather_warnings(prepared: PreparedModel, plan: Plan, trial: check.Trial | None) -> tuple[Caution, ...]:
    found = (*prepared.source.notes, *plan.warnings, *unmeasured_cpu(plan, cpu_kind()))
    return found if trial is None else (*found, *trial.notes)


def unmeasured_cpu(plan: Plan, kind: str) -> tuple[Caution, ...]:
    """A warning where the plan was placed by costs of other kinds of CPU than this machine's, of `runtime.cpu_kind`."""
    how = plan.placement
    if kind != "arm64" or how is None or how.method is not PlacementMethod.RULES or not how.cpu:
        return ()
    warning = (
        "this machine is an ARM, and nobody has measured what int8 costs there: the placement "
        f"(cpu: {how.cpu}) goes by times of x86. `placement='measured'` times placements on this machine"
    )
    return (Caution("W115", warning),)


def _saturating(model: onnx.ModelProto, trial: check.Trial | None) -> str:
    """Which weights can explain that ONNX Runtime's optimizations change the answers; "" where they do not."""
    drifted = any(one.sqnr_db[1] < one.sqnr_db[0] - DRIFT_DB for one in (trial.outputs if trial else ()))
    return saturation_summary(find_saturating(index_of(name_nodes(model)))) if drifted else ""


def _decided(promotion: Promotion, trial: check.Trial | None, optimized: bool) -> Promotion:
    """The account with what the finished model shows on samples that nothing was chosen on."""
    if promotion.unit != "dB":
        return promotion
    checks = trial.outputs if trial is not None else ()
    values = [min(one.sqnr_db) if optimized and one.optimized else one.sqnr_db[0] for one in checks]
    worst = min(values, default=math.inf)
    if not values:
        return replace(promotion, value=math.nan, met=False)  # no output holds numbers: nothing is known
    return replace(promotion, value=worst, met=worst >= promotion.least)
