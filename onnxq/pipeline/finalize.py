"""From a plan to the result of quantize and apply: the model built and checked, and the files it is written to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import onnx

from onnxq.annotate import BITS_ATTRIBUTE_WARNING, find_pairs, find_saturating, write_bits
from onnxq.backends import find_backend, find_compiler, find_target, list_parts, split_target
from onnxq.backends.base import WEIGHTED_OPS
from onnxq.config import Config
from onnxq.data.synthetic import make_synthetic
from onnxq.emit import leave_out_notes
from onnxq.engines.shapes import demand_sizes
from onnxq.evaluation.compare import check_interface
from onnxq.files import write_text
from onnxq.graph import fix_sizes, get_index, name_file, name_nodes, save_model, verify_graph
from onnxq.graph.light import ModelLike, attach_weights, is_large_model, measure_size
from onnxq.graph.precision.widen import emulate_types, widen_model
from onnxq.graph.save import name_data_file
from onnxq.graph.subgraph import give_outputs
from onnxq.passes import PlacedState, PlannedState, RunContext, SampledContext
from onnxq.passes.journal import Shortage
from onnxq.passes.mixed_precision.promotion import PROMOTED
from onnxq.passes.patterns import find_logits
from onnxq.passes.ranges import is_observed, read_range
from onnxq.passes.registry import list_rewrites
from onnxq.pipeline import check
from onnxq.pipeline.accuracy import answer_request
from onnxq.pipeline.configuration import OutputPath, describe_journal
from onnxq.pipeline.engine_check import check_on_engine
from onnxq.pipeline.prepared import count_existing, list_preparations
from onnxq.plan import PlacementMethod, Plan, to_json
from onnxq.planner import weigh_forced
from onnxq.progress import Progress, count_items, silent
from onnxq.report import format_count, sentences
from onnxq.report.model import EngineCheck, LatencyRatio, Report
from onnxq.runtime import Rest, UnknownOperatorError, detect_cpu, find_front
from onnxq.sites import Caution, Cautions, Lines, Names
from onnxq.wording import format_counts, show_as_summary


@show_as_summary
@dataclass(frozen=True, eq=False)
class Result:
    """The quantized model, the plan it was made by (with its numbers), and the account of the run.

    light: the model with its large weights beside it, which may be in files. inputs: the files of the float model,
    which nothing is written over.
    """

    light: ModelLike
    plan: Plan
    report: Report
    inputs: tuple[Path, ...] = ()

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The quantized model, weights and all; over 2 GB it cannot be serialized, but `save` writes it."""
        return attach_weights(self.light)

    def change_report(self, **changes: Any) -> Result:
        """The result with other fields of its report."""
        return replace(self, report=replace(self.report, **changes))

    def save(
        self, path: str | Path, *, force: bool = False, external: bool | None = None
    ) -> Result:
        """Write the model atomically; OutputError when `path` exists (unless force) or is one of `inputs`."""
        save_model(self.light, Path(path), external=external, overwrite=force, inputs=self.inputs)
        return self.change_report(output=str(path), output_bytes=count_bytes(Path(path)))

    def leave_out_notes(self, level: Literal["full", "names", "none"]) -> Result:
        """The result with a model whose notes are those of the level, see docs/cli.md; the plan stays beside it."""
        if level == "full":
            return self
        light = leave_out_notes(self.light, level)
        return replace(self, light=light).change_report(output_bytes=measure_size(light))

    def plan_json(self) -> str:
        """The plan as JSON, numbers included."""
        return to_json(self.plan)


def list_files(path: Path) -> tuple[Path, ...]:
    """The model file and, when there is one, the external data file written beside it."""
    # Written only for a model too large for one file, or where that was asked for.
    data = name_data_file(path)
    return (path, data) if os.path.exists(data) else (path,)


def count_bytes(path: Path) -> int:
    """The size of a model's file and of the data beside it."""
    return sum(part.stat().st_size for part in list_files(path))


def write_plan(plan: Plan, out: OutputPath, force: bool, progress: Progress = silent) -> None:
    """Write a plan as JSON. out: the file; none: nothing is written."""
    if out:
        with progress("writing"):
            write_text(Path(out), to_json(plan), overwrite=force)


def write_result(
    result: Result, config: Config, out: OutputPath, force: bool, progress: Progress
) -> Result:
    """The result with the notes and bits that the configuration asks for, its model and its plan written."""
    options = config.output
    with progress("writing"):
        if options.bits_attribute:
            model = write_bits(result.model, find_pairs(result.model))
            warnings = (*result.report.warnings, BITS_ATTRIBUTE_WARNING)
            result = replace(result, light=model).change_report(warnings=warnings)
        # Behind the bits, which are read from the notes, and in front of the compiler, which reads what
        # is written.
        result = result.leave_out_notes(options.notes)
        report = result.report
        if 2 * report.output_bytes > report.source_bytes:
            noted = report.output_bytes - result.leave_out_notes("none").report.output_bytes
            # PyTorch notes the lines of source of each node: more than the weights of a small network.
            if 4 * noted > report.output_bytes or report.output_bytes > report.source_bytes:
                result = result.change_report(note_bytes=noted)
        if options.compiled:
            from onnxq.backends.building import compile_model

            engine = find_compiler(result.plan.target).with_options(config.runtime)
            # The NPU's compiler refuses graphs with free sizes.
            demand_sizes(get_index(result.light), {}, engine.title)
            compile_model(engine, result.light, Path(options.compiled), overwrite=force)
        if out is not None:
            result = result.save(out, force=force, external=options.external_data or None)
        write_plan(result.plan, options.plan, force)
        return result


# Seconds that timing both models needs with their sessions, and takes about. On a busy machine the medians do not
# settle however long it takes, and 8 s were up to a third of a network's run; `bench` measures for longer.
_TIMING_SECONDS = 4.0
_TIMED_SECONDS = 2
# Standard error of the medians. The summary has three digits; half of this would take four times as long.
_TIMED_PRECISION = 0.01
# Samples calibrated with that are looked at too, where those held back tell too little.
_MORE = 8
# Inputs made up for a check where no samples were needed.
_MADE_UP = 2
_UNCHECKED = "nothing was checked against the float model: no samples were given"


# The model made for one of several engines alone; None where it is as it stands.
MakeOwn = Callable[[str], ModelLike | None]


def finalize_run(
    ctx: RunContext,
    state: PlannedState,
    model: ModelLike,
    *,
    source: object,
    make_own: MakeOwn = lambda _: None,
) -> Result:
    """Check the finished model and write the account. make_own: called where several engines share it, to time both."""
    plan, samples, config = state.plan, ctx.samples, ctx.config
    whole = _join_rest(state, state.source.proto, model)
    dynamic = sum(site.spec.dynamic for site in plan.sites)
    # Scales of each run need no samples, and the summary says what the check ran on.
    static = not dynamic and config.mode != "dynamic"
    trial, times = _measure(ctx, state, model, make_own, here=find_target(plan.target).times_itself)
    on_engines = _check_on_engines(ctx, state, model, times)
    has_request = PROMOTED.is_left(state) or ctx.request.asked
    promotion = answer_request(ctx, state, model, trial) if has_request else None
    rewrites, accounts = _describe_passes(ctx, rewritten=model is not state.named)
    account = Report(
        source=name_file(source),
        target=plan.target,
        config=config.source,
        mode=config.mode,
        effort=config.effort,
        engines=on_engines,
        placement=sentences.placement_text(plan),
        cpu=plan.placement.cpu if plan.placement is not None else "",
        data=plan.data,
        code=_name_code(ctx),
        synthetic=static and samples is not None and samples.synthetic,
        source_bytes=state.source.size_bytes,
        output_bytes=measure_size(whole),
        checks=trial.outputs,
        choices=trial.choices,
        checked=trial.samples,
        segments=trial.segments,
        made_up=_name_made_up(ctx, trial),
        unchecked="" if samples is not None or trial.outputs else _UNCHECKED,
        seen=samples.seen if samples is not None else "",
        latency=min(times.values(), key=lambda time: time.ratio, default=None),
        pairs=len(plan.sites),
        roles=tuple(sorted(plan.by_role().items())),
        dynamic=dynamic,
        ops=check.count_ops(state.index, plan),
        sites=tuple(map(sentences.make_site_line, plan.sites)),
        refusals=plan.refusals,
        left_float=plan.left_float,
        forced=weigh_forced(state.problem) if isinstance(state, PlacedState) else None,
        float_types=plan.precision,
        rewrites=rewrites,
        accounts=accounts,
        promotion=promotion,
        already=count_existing(state),
        kept=plan.kept,
        saturating=_explain_drift(model, trial),
        warnings=_list_warnings(ctx, state, trial),
        stages=tuple(ctx.timers.costs),
    )
    return Result(whole, plan, account, state.source.files)


def _describe_passes(ctx: RunContext, *, rewritten: bool) -> tuple[Lines, Lines]:
    """Lines on the rewrites that prepared the model; and on the passes, and all that the budget cut short.

    rewritten: False where the file is without them.
    """
    budget = ctx.budget
    if budget.over():
        budget.note("the run", Shortage.EXCEEDED, seconds=budget.spent())
    rewrites = []
    accounts = []
    for entry in ctx.journal:
        if entry.name not in list_preparations():
            accounts.append(sentences.describe_pass(entry))
        elif entry.changed and (rewritten or entry.name not in list_rewrites()):
            rewrites.append(sentences.describe_rewrite(entry))
    return tuple(rewrites), (*accounts, *map(sentences.describe_shortage, budget.shortened))


def _list_warnings(ctx: RunContext, state: PlannedState, trial: check.ModelCheck) -> Cautions:
    plan = state.plan
    return (
        *state.source.notes,
        *dict.fromkeys((*describe_rest(state.rest), *plan.warnings)),
        *warn_unmeasured_cpu(plan),
        *_warn_one_sided(state.model, plan),
        *trial.notes,
        *describe_journal(ctx.crew),
    )


def _join_rest(state: PlannedState, source: ModelLike, model: ModelLike) -> ModelLike:
    """The whole finished model, checked against the file that was loaded: preparation names nodes and may add types."""
    plan = state.plan
    rest = state.rest
    whole = model
    fixed: Names = ()
    if rest is not None:
        # What the part that was not run reads has the types that it came with.
        whole = rest.join(model)
        fixed = (*rest.reads, *rest.outputs)
        verify_graph(whole, kept=(*plan.kept, *rest.nodes))
    # Sizes that were asked to be fixed are free in the file that was loaded, and no fault of the
    # result.
    source = fix_sizes(source, state.sizes) if state.sizes else source
    check_interface(
        source, whole, None if plan.precision is None else plan.precision.io, fixed=fixed
    )
    return whole


def describe_rest(rest: Rest | None) -> Cautions:
    """A warning that names the operators that were not run, what stands behind them, and the outputs not checked."""
    if rest is None:
        return ()
    names = list(rest.stops)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    products = {op: count for op, count in sorted(rest.count_ops().items()) if op in WEIGHTED_OPS}
    kinds = " and ".join(sorted(set(rest.stops.values())))
    behind = format_count(len(rest.nodes), "node")
    if products:
        behind += f", {format_counts(products)} among them"
    text = (
        f"ONNX Runtime does not have {kinds} (node {names[0]!r}{more}): only the part in front was run, quantized and "
        f"checked, at the tensors that it gives. All from there on, {behind}, "
        f"is as it came. Not checked: {', '.join(rest.outputs) or 'no output'}"
    )
    return (Caution("W131", text),)


def _name_code(ctx: RunContext) -> Lines:
    """The code that was run besides our own, but for functions that gave data."""
    code = list(ctx.config.runtime.libraries)
    if ctx.request.metric is not None:
        code.append(ctx.request.metric.name)
    if ctx.config.scale.dask:
        code.append(f"objects of {ctx.config.scale.dask}")
    return tuple(code)


def _measure(
    ctx: RunContext, state: PlannedState, model: ModelLike, make_own: MakeOwn, *, here: bool
) -> tuple[check.ModelCheck, dict[str, LatencyRatio]]:
    """The check of the finished model, and the times of both on each engine that can be timed here, by target.

    here: the engine is ONNX Runtime on this machine.
    """
    large = is_large_model(state.named)
    with ctx.timers.run("check", "checking the quantized model"):
        if large:
            # Two models that do not fit into memory are compared a segment at a time, on one
            # another's inputs.
            trial = check.check_segments(ctx, state, model)
        elif not isinstance(ctx, SampledContext):
            trial = _check_unrun(ctx, state, model, here=here)
        else:
            trial = _check(ctx, state, model, optimized=here)
    changed = state.plan.sites or find_target(state.plan.target).writes_matrices
    timed = ctx.config.verify.latency and changed
    if large or not isinstance(ctx, SampledContext) or not timed:
        return trial, {}
    return trial, _time(ctx, state, model, make_own)


def _check_on_engines(
    ctx: RunContext, state: PlannedState, model: ModelLike, times: Mapping[str, LatencyRatio]
) -> tuple[EngineCheck, ...]:
    """The model on the engines of its target: all of several, one alone where its answers are not those of a session.

    times: by target.
    """
    checks = []
    parts = list_parts(state.plan.target)
    for part in parts:
        engine = part.local
        if engine is not None and (engine.judges or len(parts) > 1):
            account = EngineCheck(
                engine=engine.title, target=part.name, latency=times.get(part.name)
            )
            with ctx.timers.run(part.name, f"checking on {engine.title}"):
                checks.append(check_on_engine(ctx, state, model, engine, account))
    return tuple(filter(None, checks))


def _name_made_up(ctx: RunContext, trial: check.ModelCheck) -> str:
    """The name of the samples of the check; "" where they were given."""
    if ctx.samples is not None and not ctx.samples.synthetic:
        return ""
    return f"{format_count(trial.samples, 'made-up input')}, seed {ctx.config.data.seed}"


def _time(
    ctx: SampledContext, state: PlannedState, model: ModelLike, make_own: MakeOwn
) -> dict[str, LatencyRatio]:
    """Float and quantized model side by side on each engine, by target, as far as the budget has time left for it."""
    budget = ctx.budget
    threads = ctx.config.verify.threads
    plan = state.plan
    names = split_target(plan.target)
    timers = {}
    for name in names:
        timer = check.find_timer(
            name, threads or 1, ctx.config.runtime.plugins, _TIMED_SECONDS, _TIMED_PRECISION
        )
        if timer is not None:
            timers[name] = timer
    times: dict[str, LatencyRatio] = {}
    # Samples are float32, as the float model is that they are compared on.
    wide = widen_model(model) if state.types.interface else model
    if not timers:
        return times
    with ctx.timers.run("time", "timing float and quantized model"):
        for name, timer in timers.items():
            # The reserve was for writing and checking, of which only the writing is left.
            if budget.left() + budget.reserve < _TIMING_SECONDS:
                budget.note("timing", Shortage.LEFT_OUT)
                break
            title = find_backend(name).title
            own = make_own(name) if len(names) > 1 else None
            reason = check.explain_slowness(plan, title)
            time = check.time_both(
                state.named, wide, ctx.data.first, timer, own=own, threads=threads, reason=reason
            )
            if time is not None:
                times[name] = replace(time, engine=title)
    return times


def _check(
    ctx: SampledContext, state: PlannedState, model: ModelLike, *, optimized: bool
) -> check.ModelCheck:
    """Float and quantized model on the samples held back, as far as the budget goes."""
    test = ctx.data.test
    others = () if ctx.data.seen else ctx.data.calibration.take(_MORE).samples()
    with ctx.progress("running float and quantized model", len(test)) as task:
        return check.check_model(
            state.named,
            model,
            count_items(ctx.budget.take_while_left("check", test), task),
            # ONNX Runtime rounds nothing to narrow types between operators, and may not have them at all.
            exact=emulate_types(model) if check.is_narrow(state) else None,
            other_samples=others,
            threads=ctx.config.verify.threads,
            optimized=optimized,
            everywhere=ctx.config.verify.optimized,
        )


def _check_unrun(
    ctx: RunContext, state: PlannedState, model: ModelLike, *, here: bool
) -> check.ModelCheck:
    """The check without samples: the file is loaded, and the part in front of operators that are lacking is run."""
    try:
        before, rest = find_front(state.named)
        after, _ = find_front(model)
    except UnknownOperatorError:
        # Nothing stands in front of it.
        return check.ModelCheck((), 0)
    names = {value.name for value in before.graph.output} & {
        value.name for value in after.graph.output
    }
    if rest is None or not names:
        return check.ModelCheck((), 0, check.load_file(after, optimized=here))
    before, after = (give_outputs(each, names) for each in (before, after))
    samples = make_synthetic(
        get_index(before).inputs, samples=_MADE_UP, seed=ctx.config.data.seed, model=before
    )
    return check.check_model(
        before,
        after,
        samples.samples(),
        exact=emulate_types(name_nodes(after)) if check.is_narrow(state) else None,
        optimized=here,
    )


def warn_unmeasured_cpu(plan: Plan) -> Cautions:
    """A warning where the plan was placed by costs of other kinds of CPU than this machine's."""
    how = plan.placement
    if (
        detect_cpu() != "arm64"
        or how is None
        or how.method is not PlacementMethod.RULES
        or not how.cpu
    ):
        return ()
    warning = (
        "this machine is an ARM, and nobody has measured what int8 costs there: the placement "
        f"(cpu: {how.cpu}) goes by times of x86. In mode `static` and for one engine, `placement='measured'` times "
        "placements on this machine"
    )
    return (Caution("W115", warning),)


def _warn_one_sided(model: ModelLike, plan: Plan) -> Cautions:
    """A warning that names the quantized logits of scores that were on one side of 0 in all samples.

    Their range ends there. How far the other side reaches nobody knows, and a range that is wider for nothing would
    cost the side that was seen.
    """
    # A Softmax has no such middle.
    logits = find_logits(get_index(model), "Sigmoid")
    # A tensor may be read in two types.
    names = sorted(
        {
            site.quantized_tensor.name
            for site in plan.sites
            if site.quantized_tensor in logits
            and is_observed(site)
            and not site.spec.dynamic
            and 0 in read_range(site)
        }
    )
    if not names:
        return ()
    text = (
        f"the logits of a Sigmoid are on one side of 0 in all samples ({', '.join(names)}), so that no score of the "
        "quantized model comes to the other side of .5: give samples of the other kind, too"
    )
    return (Caution("W150", text),)


def _explain_drift(model: ModelLike, trial: check.ModelCheck) -> str:
    """Which weights can explain that ONNX Runtime's optimizations change the answers; "" where they do not."""
    if not any(output.drifts for output in trial.outputs):
        return ""
    return sentences.saturation_summary(find_saturating(get_index(name_nodes(model))))
