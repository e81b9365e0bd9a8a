"""The one orchestration: load, prepare, plan, calibrate, emit, check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import onnx

from onnxq import targets
from onnxq.calibrate import calibrate
from onnxq.config import Config, check_limits, load_config
from onnxq.data import Dataset, load_data
from onnxq.errors import CalibrationError, ConfigError
from onnxq.graph import GraphIndex
from onnxq.pipeline import check
from onnxq.pipeline.attention import settle_attention
from onnxq.pipeline.measured import choose_measured
from onnxq.pipeline.prepared import PreparedModel, load, prove_equal
from onnxq.pipeline.realise import realise
from onnxq.pipeline.result import Result
from onnxq.pipeline.scaled import Scene, scale_channels
from onnxq.pipeline.stages import Stages
from onnxq.pipeline.sweeping import swept
from onnxq.plan import Plan, Scaling
from onnxq.planner import Draft, draft
from onnxq.report import Progress, Report, silent, site_line
from onnxq.runtime import observe_shapes
from onnxq.sites import Role
from onnxq.verify import Array, check_interface

# Shapes are looked at on a few samples; where branches depend on the data, on many.
_SHAPE_SAMPLES, _BRANCH_SAMPLES = 2, 256
_EQUALITY_SAMPLES = 2
_TIMING_SAMPLES = 8
_MOST_HELD = 16
SYNTHETIC = (
    "SYNTHETIC DATA: no samples were given; ranges that come from random inputs make answers nobody can trust. "
    "Pass --data with real samples."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller may ask for beside model, data and configuration; None leaves the configuration's value."""

    samples: int | None = None
    seed: int | None = None
    batch: int | None = None
    memory_limit: int | None = None
    placement: str | None = None
    effort: str | None = None
    holdout: int | None = None
    threads: int | None = None
    latency: bool | None = None


DEFAULT_OPTIONS = Options()


def configured(config: Config | str | Path | None, target: str | None, options: Options) -> Config:
    """The configuration with the caller's options on top."""
    if config is None and target is not None:
        config = f"{target}-int8"
    given = load_config(config) if not isinstance(config, Config) else config
    if target is not None and target != given.target:
        raise ConfigError(
            f"target {target!r}", f"the configuration {given.source!r} is for {given.target!r}", "choose one"
        )
    data = {k: v for k in ("samples", "seed", "batch") if (v := getattr(options, k)) is not None}
    check_ = {k: v for k in ("holdout", "threads", "latency") if (v := getattr(options, k)) is not None}
    update: dict[str, object] = {}
    if data:
        update["data"] = given.data.model_copy(update=data)
    if check_:
        update["verify"] = given.verify.model_copy(update=check_)
    for name in ("placement", "effort"):
        if (value := getattr(options, name)) is not None:
            update[name] = value
    return check_limits(given.model_copy(update=update) if update else given)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The samples in three sets: for ranges and rewrites, for choosing between plans, for the figures reported.

    They share no sample while there are enough; `trial` is `held` where nothing is chosen. seen: what the samples in
    `held` were also used for, in words, "" where nothing was.
    """

    calibration: Dataset
    trial: Dataset
    held: Dataset
    seen: str
    first: Mapping[str, Array]
    description: str
    synthetic: bool


def read_data(prepared: PreparedModel, data: object, config: Config) -> Inputs:
    """Load the samples; hold some back for the check, and others for what has to be chosen."""
    dataset = load_data(data, prepared.before.inputs, config.data, prepared.named)
    count, holdout, seed = len(dataset), config.verify.holdout, config.data.seed
    usual = min(_MOST_HELD, count // 8)
    if holdout is None:
        holdout = max(1, usual)
    seen = "calibration" if holdout == 0 or count == 1 else ""
    # Two samples disagree less about a choice than one; a quarter is as much as calibration can spare.
    choice = max(1, usual, min(2, count // 4)) if _chooses(config) and holdout else 0
    calibration, held = dataset.split(holdout + choice, seed)
    trial = held
    if choice and len(held) > 1:
        trial, held = held.split(holdout, seed) if len(held) > holdout else held.split(1, seed)
    elif choice:
        trial = calibration
    first = next(iter(held.samples()))
    return Inputs(calibration, trial, held, seen, first, dataset.describe(), dataset.synthetic)


def _chooses(config: Config) -> bool:
    """True when plans are compared on samples."""
    return config.effort != "fast" or config.attention == "auto"


def look(prepared: PreparedModel, inputs: Inputs, config: Config, name: str) -> Draft:
    """Observe shapes and which bodies run, then draft the placement."""
    index = GraphIndex(prepared.proto)
    enough = _BRANCH_SAMPLES if len(index.scopes) > 1 else _SHAPE_SAMPLES
    shapes = observe_shapes(prepared.proto, islice(inputs.calibration.samples(), enough))
    reached = {""} | {tensor.scope for tensor in shapes}
    return draft(
        prepared.proto,
        config,
        shapes=shapes,
        closed=_closed(index, reached),
        before=prepared.before,
        prepare=prepared.passes,
        name=name,
    )


def _closed(index: GraphIndex, reached: set[str]) -> dict[str, str]:
    """Bodies that hold compute nodes but gave no tensors, with the reason."""
    working = {node.scope for node in index.nodes if node.op_type in ("Conv", "Gemm", "MatMul")}
    closed = {}
    for scope in index.scopes:
        if scope in reached or not any(one == scope or one.startswith(scope + "/") for one in working):
            continue
        holder = index.holder(scope)
        op = holder.op_type if holder is not None else ""
        closed[scope] = (
            "calibration never ran this branch, so its ranges are unknown"
            if op == "If"
            else f"it is the body of a {op}: its tensors cannot be observed from outside"
        )
    return closed


def quantize(
    model: str | Path | onnx.ModelProto,
    data: object = None,
    config: Config | str | Path | None = None,
    *,
    target: str | None = None,
    options: Options = DEFAULT_OPTIONS,
    progress: Progress = silent,
) -> Result:
    """Quantize an ONNX model and check the result against the float one.

    model: path or ModelProto, never changed. data: anything `onnxq.data.load_data` reads; None makes
    seeded synthetic inputs and a warning. config: preset name, YAML file or Config.
    Raises an OnnxqError subclass for everything the caller can mend.
    """
    stages = Stages()
    wished = configured(config, target, options)
    with stages.run("prepare"):
        prepared = load(model, skip=wished.skip, target=wished.target)
        inputs = read_data(prepared, data, wished)
        prove_equal(prepared, islice(inputs.trial.samples(), _EQUALITY_SAMPLES))
    prepared, scalings = _scaled(prepared, inputs, wished, options, stages, progress)
    with stages.run("plan"):
        plan, plain = _placed(prepared, inputs, wished, _name(model), progress)
    plan = replace(plan, data=inputs.description, warnings=_warnings(plan, inputs), scalings=scalings)
    with stages.run("calibrate"):
        plan = calibrate(
            prepared.proto,
            plan,
            inputs.calibration,
            batch=wished.data.batch,
            memory_limit=options.memory_limit,
            progress=progress,
        )
    missing = [site for site in plan.sites if site.qparams is None]
    if missing:
        reasons = {refusal.subject: refusal.reason for refusal in plan.refusals}
        subject = str(missing[0].site)
        cause = reasons.get(subject, "no sample of the calibration data reached it")
        raise CalibrationError(subject, cause, "give samples that reach it, or leave it float with a rule")
    if plain is not None:
        with stages.run("attention"):
            plan = settle_attention(prepared, plan, plain, inputs.trial, threads=wished.verify.threads)
    if wished.effort != "fast":
        with stages.run("sweep"):
            prepared, plan = swept(
                prepared, plan, inputs.calibration, inputs.trial,
                effort=wished.effort, skip=wished.skip, seed=wished.data.seed, progress=progress,
            )  # fmt: skip
    with stages.run("emit"):
        quantized = realise(prepared, plan)
    return finish(prepared, plan, quantized, inputs, wished, stages, source=model)


def _scaled(
    prepared: PreparedModel, inputs: Inputs, config: Config, options: Options, stages: Stages, progress: Progress
) -> tuple[PreparedModel, tuple[Scaling, ...]]:
    """The prepared model with its channels scaled, where the effort and the mode ask for it."""
    if config.effort == "fast" or config.mode != "static":
        return prepared, ()
    scene = Scene(
        calibration=inputs.calibration,
        held=inputs.trial,
        place=lambda model: look(model, inputs, config, "").default(),
        progress=progress,
        batch=config.data.batch,
        memory_limit=options.memory_limit,
    )
    with stages.run("scale channels"):
        return scale_channels(prepared, scene, skip=config.skip)


def _placed(
    prepared: PreparedModel, inputs: Inputs, config: Config, name: str, progress: Progress
) -> tuple[Plan, Plan | None]:
    """The plan of the rules, or of the placement that ran fastest here; and the plan to fall back on, if there is one.

    With `attention: auto` the first one quantizes attention and the second does not.
    """
    drafted = look(prepared, inputs, config, name)
    if config.placement != "measured" or config.mode != "static":
        plain = drafted.default()
        whole = drafted.default(attention=True) if config.attention != "float" else plain
        differs = {site.site for site in whole.sites} != {site.site for site in plain.sites}
        return whole, plain if differs and config.attention == "auto" else None
    few = inputs.calibration.take(_TIMING_SAMPLES, config.data.seed)
    threads = config.verify.threads or 1
    chosen = choose_measured(drafted, prepared, few, inputs.first, threads=threads, progress=progress)
    return chosen, None


def _warnings(plan: Plan, inputs: Inputs) -> tuple[str, ...]:
    ranged = any(site.role is not Role.WEIGHT for site in plan.sites)
    return (SYNTHETIC, *plan.warnings) if inputs.synthetic and ranged else plan.warnings


def _name(model: object) -> str:
    return Path(model).name if isinstance(model, (str, Path)) else "model"


def finish(
    prepared: PreparedModel,
    plan: Plan,
    model: onnx.ModelProto,
    inputs: Inputs | None,
    config: Config,
    stages: Stages,
    *,
    source: object,
) -> Result:
    """Check the finished model and write the account."""
    check_interface(prepared.source.proto, model)
    engine = targets.target(plan.target)
    trial, timing = None, None
    if inputs is not None:
        with stages.run("check"):
            samples, threads = inputs.held.samples(), config.verify.threads
            trial = check.try_out(prepared.named, model, samples, threads=threads, optimized=engine.times_itself)
        if config.verify.latency and engine.times_itself and plan.sites:
            with stages.run("time"):
                timing = check.time_both(prepared.named, model, inputs.first, threads=config.verify.threads or 1)
    index = GraphIndex(prepared.proto)
    account = Report(
        source=str(source) if isinstance(source, (str, Path)) else "",
        target=plan.target,
        config=config.source,
        placement=_placement(plan),
        data=plan.data,
        synthetic=inputs.synthetic if inputs is not None else False,
        source_bytes=prepared.source.size_bytes,
        output_bytes=model.ByteSize(),
        checks=trial.outputs if trial else (),
        checked=trial.samples if trial else 0,
        seen=inputs.seen if inputs is not None else "",
        latency=timing,
        pairs=len(plan.sites),
        roles=tuple(sorted(plan.by_role().items())),
        ops=check.op_counts(index, plan),
        sites=tuple(site_line(site) for site in plan.sites),
        refusals=plan.refusals,
        rewrites=prepared.rewrites,
        kept=plan.kept,
        warnings=(*prepared.source.notes, *plan.warnings, *((trial.note,) if trial and trial.note else ())),
        stages=tuple(stages.done),
    )
    return Result(model, plan, account)


def _placement(plan: Plan) -> str:
    chosen, attention = plan.choice.get("chosen"), plan.choice.get("attention")
    how = plan.choice.get("placement", "rules")
    return (f"{how}: {chosen}" if chosen else how) + (f"; attention {attention}" if attention else "")


def make_plan(
    model: str | Path | onnx.ModelProto,
    data: object = None,
    config: Config | str | Path | None = None,
    *,
    target: str | None = None,
    options: Options = DEFAULT_OPTIONS,
    progress: Progress = silent,
) -> Plan:
    """The plan without numbers; see `onnxq.make_plan`."""
    wished = configured(config, target, options)
    prepared = load(model, skip=wished.skip, target=wished.target)
    inputs = read_data(prepared, data, wished)
    whole, plain = _placed(prepared, inputs, wished, _name(model), progress)
    plan = whole if plain is None else plain
    return replace(plan, data=inputs.description, warnings=_warnings(plan, inputs))
