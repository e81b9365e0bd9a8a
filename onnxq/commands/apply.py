"""`onnxq apply`: carry out a plan on its model, or on the same network exported again."""

from dataclasses import replace
from pathlib import Path

from onnxq.annotate import find_existing
from onnxq.calibrate.contents import note_contents, recognize_model
from onnxq.config import Command, Config, change_fields
from onnxq.errors import OnnxqError, PlanError, suggest_names
from onnxq.files import AnyPath, read_text
from onnxq.graph import GraphIndex, compute_fingerprint
from onnxq.graph.identity import hash_topology
from onnxq.passes import FloatState, RunContext, Timers, build_file
from onnxq.passes.equalization.passes import replay_scalings
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, open_run
from onnxq.pipeline.both_models import renew_numbers
from onnxq.pipeline.finalize import Result, finalize_run, write_result
from onnxq.pipeline.prepared import list_preparations, load_state, read_data
from onnxq.plan import Plan, check_specs, from_json
from onnxq.planner import Existing, fit_plan
from onnxq.progress import Progress, silent

# A plan has some 500 bytes for a site; one of a million sites is no plan.
_MOST_BYTES = 2**29
_WRITE = "write one with `onnxq plan`, or `onnxq quantize` with `plan_out=…`"


def read_plan(plan: Plan | AnyPath) -> Plan:
    """A Plan, or the JSON file one was written to."""
    if isinstance(plan, Plan):
        return plan
    text = read_text(plan, PlanError, _WRITE, limit=_MOST_BYTES, code="Q401")
    return from_json(text, source=Path(plan))


def _with_own_numbers(plan: Plan, existing: Existing) -> Plan:
    """The plan with the model's own numbers at the pairs that it keeps. PlanError for one the model does not have."""
    # By the pair's DequantizeLinear, whose name no pass changes; the plan may have been made from other weights.
    own = {site.dequantize: site for site in existing.sites}
    sites = []
    for site in plan.existing:
        current = own.get(site.dequantize)
        if current is None or current.qparams is None:
            cause = "the plan keeps this pair, and the model has none"
            raise PlanError(site.name, cause, "plan this model again", code="Q404")
        sites.append(replace(site, qparams=current.qparams))
    return replace(plan, existing=tuple(sites))


def apply(
    model: ModelSource,
    plan: Plan | AnyPath,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Result:
    """Carry out a plan on its model, or on the same network exported again.

    data is needed only for sites without numbers; when given, the result is checked on it. The override `new_weights`
    says that the weights were trained further; their scales are computed again. See `quantize` for the rest.
    Raises PlanError when the plan does not fit.
    """
    with open_run(model, config, overrides, Command.APPLY, out=out, force=force) as chosen:
        result = _carry_out(model, plan, data, chosen, progress)
        return write_result(result, chosen, out, force, progress)


def _carry_out(
    model: ModelSource, plan: Plan | AnyPath, data: object, config: Config, progress: Progress
) -> Result:
    """Carry out a plan: the same model and plan give the same bytes anywhere.

    Activations without numbers, or with numbers for another spec than the plan says, are calibrated on the data. A plan
    of weights alone, or with scales of each run, is checked on made-up inputs where there is no data.
    """
    fitted = read_plan(plan)
    _check_prepare(fitted)
    ctx = RunContext(
        config=config,
        timers=Timers(progress),
        progress=progress,
        memory_limit=config.data.memory_limit,
    )
    with ctx.timers.run("prepare", "preparing the model"):
        state = _load_as_planned(model, fitted, ctx)
        # Before the plan is fitted: its anchors are structural ids of the equalized model.
        prepared = state.model
        renew = config.apply.new_weights
        # Other weights hold other values: then names and structure alone decide.
        recognized = None if renew else recognize_model(fitted, prepared)
        state = replay_scalings(state, fitted.scalings, recognized)
        index = GraphIndex(state.model)
        fitted = fit_plan(
            fitted,
            index,
            compute_fingerprint(state.model),
            new_weights=renew,
            recognized=recognized,
        )
        fitted = fitted if recognized is None else note_contents(fitted, prepared)
        check_specs(fitted, index)
        if fitted.existing:
            fitted = _with_own_numbers(fitted, find_existing(state.model))
        if data is not None:
            ctx = ctx.add_samples(read_data(state, data, config, progress=progress))
    with ctx.timers.run("calibrate", "calibrating"):
        fitted, lines = renew_numbers(ctx, state, fitted)
    # Nothing was calibrated on the made-up inputs, so a check on them is fair, if not telling.
    if (
        data is None
        and fitted.sites
        and all(site.role.is_weight or site.spec.dynamic for site in fitted.sites)
    ):
        ctx = make_samples(ctx, state)
    with ctx.timers.run("emit", "making the quantized model"):
        quantized = build_file(state, fitted)
    result = finalize_run(ctx, state.add_plan(fitted), quantized, source=model)
    return result.change_report(warnings=(*result.report.warnings, *lines))


def _load_as_planned(model: ModelSource, plan: Plan, ctx: RunContext) -> FloatState:
    """The model, or the part of it that ONNX Runtime can run, whichever the plan was made for."""
    own = replace(ctx, journal=[])
    state = load_state(model, own, plan=plan)
    if state.rest is not None and hash_topology(state.index) != plan.topology:
        # Where weights alone are rounded, by their values, the part behind is planned as well.
        other = replace(own, journal=[])
        whole = load_state(model, other, plan=plan, whole=True)
        if hash_topology(whole.index) == plan.topology:
            state = whole
            own = other
    ctx.journal.extend(own.journal)
    return state


def make_samples(ctx: RunContext, state: FloatState) -> RunContext:
    """The context with seeded inputs for a check that nothing was chosen on, and without timing, if any fit."""
    try:
        quiet = change_fields(ctx.config.verify, latency=False)
        samples = read_data(state, None, ctx.config, progress=ctx.progress)
    except OnnxqError:
        # Inputs that nothing can be made up for: the check is a courtesy, which `apply` can do without.
        return ctx
    ctx = replace(ctx, config=change_fields(ctx.config, verify=quiet))
    return ctx.add_samples(samples)


def _check_prepare(plan: Plan) -> None:
    """PlanError for a preparation pass that does not exist: the model would not be the one that was planned."""
    known = list_preparations()
    for name in plan.prepare:
        if name not in known:
            fix = suggest_names(name, known)
            raise PlanError(f"prepare: {name[:60]!r}", "is no pass of this onnxq", fix, code="Q403")
