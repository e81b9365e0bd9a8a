"""The one orchestration: load, prepare, plan, calibrate, emit, check."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from onnxq.annotate import find_existing
from onnxq.arrays import InputShapes
from onnxq.backends import find_target
from onnxq.calibrate import calibrate
from onnxq.calibrate.contents import note_contents
from onnxq.calibrate.parts import read_part
from onnxq.config import Config, change_fields
from onnxq.data import Dataset
from onnxq.errors import DataError, ModelError, OnnxqError, VerificationError
from onnxq.evaluation.metric import AccuracyRequest, make_request
from onnxq.graph import GraphIndex, ModelLike, ModelSource, is_large_model
from onnxq.passes import EqualizeContext, RunContext, SampledContext, SampleSets, registry
from onnxq.passes.assembly import build_file, build_quantized, run_metric
from onnxq.passes.base import Pass, Stage, run_pass, run_stage
from onnxq.passes.equalization.passes import SCALINGS, TOKENS, add_token_rule
from onnxq.passes.mixed_precision.candidates import leave_missing_float
from onnxq.passes.mixed_precision.float_parts import FLOAT_TYPES, PLAIN
from onnxq.passes.mixed_precision.promotion import NAME as PROMOTION
from onnxq.passes.mixed_precision.weight_bits import EMBEDDINGS
from onnxq.passes.ranges import has_observed_range, widen_scarce_ranges
from onnxq.passes.state import FloatState, PlacedState
from onnxq.passes.time_budget import TimeBudget, Timers
from onnxq.pipeline.configuration import name_model, open_crew
from onnxq.pipeline.finalize import Result, describe_rest, finalize_run
from onnxq.pipeline.fixed_sizes import settle_sizes
from onnxq.pipeline.placement_search import choose_measured, choose_timer
from onnxq.pipeline.prepared import count_existing, load_state, prove_equal, read_data
from onnxq.plan import Plan
from onnxq.planner import OnnxPlacement, choose_tables, state_placement
from onnxq.progress import Progress, count_items, silent
from onnxq.report.model import SYNTHETIC, Report
from onnxq.runtime import Session, UnknownOperatorError, has_custom, observe_shapes
from onnxq.sites import Caution, Refusal, is_within
from onnxq.workers import use_threads


def find_obstacle(
    state: FloatState, config: Config, *, measuring: bool
) -> UnknownOperatorError | None:
    """The operator that ONNX Runtime lacks, where the weights can be quantized all the same; None elsewhere.

    measuring: samples or a demand on the accuracy were given, which only a run can serve.
    """
    if not rounds_alone(config, measuring=measuring):
        return None
    # Whether a custom operator needs a library, only ORT knows. A session of a large model takes seconds, so only those
    # are tried that may fail.
    if not has_custom(state.named):
        return None
    try:
        Session(state.named, optimize=False)
    except UnknownOperatorError as error:
        return error
    return None


def rounds_alone(config: Config, *, measuring: bool) -> bool:
    """True where weights alone are rounded, and no error at the outputs says with how many bits.

    measuring: as for `find_obstacle`.
    """
    return not measuring and config.mode == "weight-only" and config.weight_bits_budget is None


def plan_unrun(
    state: FloatState, config: Config, name: str, obstacle: UnknownOperatorError | None
) -> Plan:
    """The plan of the weights, by shapes that stand in the model alone. obstacle: as `prepare_run` returns it."""
    problem = state_placement(
        state.model, config, before=state.before, prepare=state.rewrites, name=name
    )
    ctx = RunContext(config=config, skip=frozenset(config.skip))
    plan = run_pass(EMBEDDINGS, ctx, state.add_placement(problem, problem.default())).plan
    reason = "weights alone need none"
    if obstacle is not None:
        reason = f"nothing was run, ONNX Runtime does not have {obstacle.subject}"
    return replace(plan, data=f"none: {reason}")


def quantize_unrun(
    ctx: RunContext,
    state: FloatState,
    *,
    source: object,
    name: str,
    obstacle: UnknownOperatorError | None,
) -> Result:
    """Round the weights by their values alone. Without an obstacle they are compared with those of the float model."""
    with ctx.timers.run("plan", "planning"):
        plan = plan_unrun(state, ctx.config, name, obstacle)
    with ctx.timers.run("calibrate", "calibrating"):
        plan = ctx.calibrate(state.model, plan, None, progress=ctx.progress)
    with ctx.timers.run("emit", "making the quantized model"):
        quantized = build_file(state, plan, ctx.progress)
    # The context has no samples, so that the end of the run checks the interface, and large models by made-up inputs.
    result = finalize_run(ctx, state.add_plan(plan), quantized, source=source)
    if obstacle is None:
        return result
    notes = (_explain(obstacle, result.report), *result.report.warnings)
    return result.change_report(warnings=notes)


def _explain(obstacle: UnknownOperatorError, report: Report) -> Caution:
    if report.checks:
        names = ", ".join(check.name for check in report.checks)
        return Caution(
            "W131",
            f"ONNX Runtime does not have {obstacle.subject}, so the result was compared with the float model in front "
            f"of it only, at {names}, and not timed. Give the library that implements it (`ort_library`) to check all.",
        )
    return Caution(
        "W123",
        f"NOTHING WAS RUN: ONNX Runtime does not have {obstacle.subject}, so the result was neither compared with the "
        "float model nor timed. Give the library that implements it (`ort_library`) to check it.",
    )


# Shapes are looked at on a few samples; where branches depend on the data, on many.
_SHAPE_SAMPLES = 2
_BRANCH_SAMPLES = 256
# SampleSets on which the rewrites are proved to have changed nothing; a wrong one shows on the first.
_EQUALITY_SAMPLES = 2
# SampleSets that a measured placement is calibrated with, which is for its speed.
_TIMING_SAMPLES = 8


def draft_placement(
    state: FloatState,
    samples: SampleSets,
    config: Config,
    name: str = "",
    *,
    identified: bool = True,
    progress: Progress = silent,
) -> OnnxPlacement:
    """Observe shapes and which bodies run, then draft the placement."""
    index = state.index
    enough = _BRANCH_SAMPLES if len(index.scopes) > 1 else _SHAPE_SAMPLES
    with progress("observing shapes", min(enough, len(samples.calibration))) as task:
        shapes = observe_shapes(
            state.model, count_items(islice(samples.calibration.samples(), enough), task)
        )
    # A body that no sample entered gave no tensors, and calibration would find none either.
    reached = {""} | {tensor.scope for tensor in shapes}
    return state_placement(
        state.model,
        add_token_rule(config, state),
        shapes=shapes,
        # Scales of each run and weights need no samples: bodies that none enters or shows are quantized too.
        closed={}
        if config.mode in ("dynamic", "weight-only")
        else _list_closed_scopes(index, reached),
        before=state.before,
        prepare=state.rewrites,
        name=name,
        identified=identified,
        existing=find_existing(state.model),
    )


def _list_closed_scopes(index: GraphIndex, reached: set[str]) -> dict[str, Refusal]:
    """Bodies that hold compute nodes but gave no tensors, with the refusal of each."""
    working = {node.scope for node in index.nodes if node.op_type in ("Conv", "Gemm", "MatMul")}
    closed = {}
    for scope in index.scopes:
        if scope in reached or not any(is_within(inner, scope) for inner in working):
            continue
        parent = index.parent(scope)
        op = parent.op_type if parent is not None else ""
        reason = f"it is the body of a {op}: its tensors cannot be observed from outside"
        fix = "quantize its weights alone (`mode: weight-only`), or unroll it in the export"
        if op == "If":
            reason = "calibration never ran this branch, so its ranges are unknown"
            fix = "give samples that reach it"
        closed[scope] = Refusal(scope, reason, fix, "scope", "R104")
    return closed


def quantize(
    model: ModelSource, data: object, config: Config, *, progress: Progress = silent
) -> Result:
    """Quantize an ONNX model and check the result against the float one; see `onnxq.quantize`."""
    name = name_model(model)
    with open_context(model, data, config, progress) as ctx:
        ctx, state, obstacle = prepare_run(model, data, ctx, measuring=True)
        if not isinstance(ctx, EqualizeContext):
            return quantize_unrun(ctx, state, source=model, name=name, obstacle=obstacle)
        placed = calibrate_run(ctx, state, name)
        placed = run_stage(list_passes(ctx), Stage.REFINE, ctx, placed)
        with ctx.timers.run("emit", "making the quantized model"):
            placed = replace(placed, plan=note_contents(placed.plan, state.model))
            quantized = build_file(placed, placed.plan, ctx.progress)
        return finalize_run(
            ctx, placed, quantized, source=model, make_own=partial(_make_own, model, ctx, placed)
        )


def _make_own(
    model: ModelSource, ctx: SampledContext, shared: PlacedState, target: str
) -> ModelLike | None:
    """The model as it is placed for one of its engines alone; None where that is as in the file that they share.

    Its ranges are quick ones, which times do not depend on.
    """
    alone = replace(
        ctx, config=change_fields(ctx.config, target=target), journal=[], progress=silent
    )
    try:
        state = load_state(model, alone, sizes=shared.sizes)
        plan = draft_placement(state, ctx.data, alone.config, identified=False).default()
        same = plan.by_site.keys() == shared.plan.by_site.keys()
        if not plan.sites or (same and state.rewrites == shared.rewrites):
            return None
        samples = ctx.data.calibration.take(_TIMING_SAMPLES, ctx.config.data.seed)
        return build_quantized(state, calibrate(state.model, plan, samples))
    except OnnxqError:
        # A comparison less is no reason to fail.
        return None


@contextmanager
def open_context(
    model: object, data: object, config: Config, progress: Progress
) -> Iterator[RunContext]:
    """The context of a run, before there are samples. Its crew ends with the block."""
    config = _settle_mode(config, data)
    with use_threads(config.scale.threads), open_crew(config.scale, model) as crew:
        request = make_request(config, data)
        # A request is carried out whatever the configuration leaves out.
        carried_out = {PROMOTION} if request.asked else set()
        yield RunContext(
            config=config,
            skip=frozenset(config.skip) - carried_out,
            request=request,
            budget=TimeBudget(config.budget),
            timers=Timers(progress),
            progress=progress,
            memory_limit=config.data.memory_limit,
            crew=crew,
        )


def prepare_run(
    model: ModelSource, data: object, ctx: RunContext, *, measuring: bool = False, computes: int = 0
) -> tuple[RunContext, FloatState, UnknownOperatorError | None]:
    """The rewritten model, and the context with its samples; without them where it is not to be run.

    measuring: with the float model's figure of the metric that was asked for. computes: see `load_state`. The third is
    what keeps the model from running; None also where weights alone need no run: of a large model, or of one that no
    inputs can be made up for.
    """
    config = ctx.config
    running = data is not None
    with ctx.timers.run("prepare", "preparing the model"):
        # A metric is of all outputs.
        alone = rounds_alone(config, measuring=running)
        whole = alone or config.accuracy.metric is not None
        sizes: InputShapes = {}
        if config.fix or find_target(config.target).whole:
            data, sizes = settle_sizes(model, data, config, ctx.progress)
        load = partial(load_state, model, ctx, whole=whole, sizes=sizes, computes=computes)
        state = load()
        obstacle = find_obstacle(state, config, measuring=running)
        # Weights alone of a large model need no session, which would hold it.
        if obstacle is None and not (alone and is_large_model(state.model)):
            # Before anything that takes long: a mistake in the person's function shows here.
            ctx = replace(ctx, request=_measure_float(ctx, state)) if measuring else ctx
            try:
                samples = _read_samples(state, data, ctx)
            except DataError:
                if not alone:
                    raise
                # No inputs can be made up, and weights alone need none.
                return ctx, state, None
            except VerificationError:
                if "masks" not in state.rewrites:
                    raise
                ctx.journal.clear()
                state = load(masked_rows=True)
                samples = _read_samples(state, data, ctx)
            ctx = ctx.add_samples(samples).add_reference(
                state.model,
                lambda equalized, shown: draft_placement(
                    equalized, samples, config, identified=False, progress=shown
                ).default(),
            )
    return ctx, state, obstacle


def _measure_float(ctx: RunContext, state: FloatState) -> AccuracyRequest:
    """The request with the float model's figure of its metric, if it has one."""
    metric = ctx.request.metric
    if metric is None:
        return ctx.request
    with ctx.progress(f"running {metric.name} on the float model"):
        value = run_metric(metric, ctx.config, state, state.named)
        return replace(ctx.request, float_value=value)


def calibrate_run(ctx: EqualizeContext, state: FloatState, name: str = "") -> PlacedState:
    """The equalized model with its calibrated plan, to be refined. name: of the model."""
    placed = plan_run(ctx, state, name)
    with ctx.timers.run("calibrate", "calibrating"):
        return widen_scarce_ranges(ctx, _calibrate(ctx, placed))


def plan_run(ctx: EqualizeContext, state: FloatState, name: str) -> PlacedState:
    """The equalized model with its plan, to be calibrated. name: of the model, for the plan."""
    ctx.budget.prepared()
    # Channels are scaled before there is a plan, since they change which tensors need what.
    state = run_stage(list_passes(ctx), Stage.EQUALIZE, ctx, state)
    with ctx.timers.run("plan", "planning"):
        placed = _place(ctx, state, name)
    _demand_float(placed, name, ctx.config.mode)
    return placed


def list_passes(ctx: RunContext) -> Sequence[Pass[Any, Any]]:
    """The passes of a run."""
    return (FLOAT_TYPES,) if ctx.config.mode == "float" else registry.PASSES


def _settle_mode(config: Config, data: object) -> Config:
    """Without samples `auto` means scales of each run: there is nothing to calibrate others on."""
    if config.mode == "auto" and data is None:
        return change_fields(config, mode="dynamic")
    return config


def _read_samples(state: FloatState, data: object, ctx: RunContext) -> SampleSets:
    """The samples, on the first of which the rewrites are proved to have changed nothing."""
    samples = read_data(state, data, ctx.config, choosing=ctx.request.asked, progress=ctx.progress)
    samples = replace(samples, crew=ctx.crew)
    first = islice(samples.validation.samples(), _EQUALITY_SAMPLES)
    prove_equal(state, first, progress=ctx.progress)
    return samples


def _demand_float(state: PlacedState, name: str, mode: str) -> None:
    """ModelError for a model that is quantized already and of which the plan quantizes nothing more."""
    already = count_existing(state)
    plan = state.plan
    if plan.sites or not already or mode == "float":
        return
    if choose_tables(state.problem, state.index, ())[0]:
        return
    # One example of why the rest of it stays float is enough.
    reasons = [f"{node.subject}: {node.reason}" for node in plan.unquantized]
    floats = f"; what is float stays so, e.g. {reasons[0]}" if reasons else ""
    fix = "use it as it is, `onnxq convert` it for another engine, or quantize the float model it was made from"
    raise ModelError(name, f"{already}, and nothing is left to quantize{floats}", fix, code="Q125")


def _calibrate(ctx: SampledContext, state: PlacedState) -> PlacedState:
    """The state with numbers at every site, and float where calibration had none."""
    ranges = ctx.config.scale.ranges
    observed = read_part(ranges) if ranges else None

    def work(samples: Dataset, shown: Progress) -> Plan:
        return ctx.calibrate(state.model, state.plan, samples, observed=observed, progress=shown)

    if observed is None:
        plan = ctx.budget.fitting(
            "calibration", ctx.data.ranges, ctx.config.data.seed, ctx.progress, work
        )
    else:
        # Parts are of all samples, whatever time is left.
        plan = work(ctx.data.ranges, ctx.progress)
    state = leave_missing_float(ctx, replace(state, plan=plan))
    plan = state.plan
    # Before calibration made-up inputs only gave shapes, which are right.
    if ctx.data.synthetic and any(map(has_observed_range, plan.sites)):
        plan = replace(plan, warnings=(SYNTHETIC, *plan.warnings))
    return replace(state, plan=plan)


def _place(ctx: SampledContext, state: FloatState, name: str) -> PlacedState:
    """The state with its placement problem, the plan of the rules or of the fastest placement, and the one to fall back
    on, if any.

    With `attention: auto` the plan quantizes attention and the note of that pass does not.
    """
    config = ctx.config
    samples = ctx.data
    # Of the equalized model, whose tensors are not those of the plan that equalization asked for.
    problem = draft_placement(state, samples, config, name, progress=ctx.progress)
    plain = None
    if config.placement != "measured" or config.mode != "static":
        without = problem.default()
        plan = problem.default(attention=True) if config.attention != "float" else without
        # Where the rules for attention find none, both are the same plan and there is nothing to try.
        if config.attention == "auto" and plan.by_site.keys() != without.by_site.keys():
            plain = without
    else:
        timing_samples = samples.calibration.take(_TIMING_SAMPLES, config.data.seed)
        measure, threads = choose_timer(config)
        plan = choose_measured(
            problem,
            state,
            timing_samples,
            samples.first,
            measure=measure,
            threads=threads,
            progress=ctx.progress,
        )
    plan = replace(
        plan, data=samples.description, sizes=state.sizes, scalings=SCALINGS.find(state) or ()
    )
    placed = state.add_placement(problem, plan)
    return placed if plain is None else PLAIN.write(placed, plain)


def make_plan(
    model: ModelSource, data: object, config: Config, *, progress: Progress = silent
) -> Plan:
    """The plan without numbers; see `onnxq.make_plan`."""
    config = _settle_mode(config, data)
    ctx = RunContext(config=config, skip=frozenset(config.skip), progress=progress)
    sampled, state, obstacle = prepare_run(model, data, ctx)
    if not isinstance(sampled, EqualizeContext):
        return plan_unrun(state, config, name_model(model), obstacle)
    samples = sampled.data
    named = state.model
    with progress("planning"):
        state = run_pass(TOKENS, sampled, state)
        placed = _place(sampled, state, name_model(model))
        # Whether attention may be quantized is for samples to say, once there are scales.
        placed = replace(placed, plan=PLAIN.find(placed) or placed.plan)
        placed = run_pass(EMBEDDINGS, sampled, placed) if config.mode != "float" else placed
        plan = run_pass(FLOAT_TYPES, sampled, placed).plan
    # Without samples these passes have nothing to go by, and scales of each run need none.
    runs = config.effort != "fast" and not (samples.synthetic and config.mode == "dynamic")
    text = (
        f"effort {config.effort!r} is not in this plan: equalization, rounding and promotion need a calibrated model. "
        "`onnxq quantize` runs them and gives a plan with what they did; `onnxq apply` only calibrates"
    )
    left_out = (Caution("W114", text),) if runs else ()
    warnings = (*describe_rest(state.rest), *plan.warnings, *left_out)
    return note_contents(replace(plan, data=samples.description, warnings=warnings), named)
