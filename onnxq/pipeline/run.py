"""The one orchestration: load, prepare, plan, calibrate, emit, check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import onnx

from onnxq.annotate import find_existing
from onnxq.calibrate import calibrate
from onnxq.config import Config, check_limits, check_number, load_config, set_options
from onnxq.data import Dataset
from onnxq.errors import CalibrationError, ConfigError, ModelError
from onnxq.files import readable
from onnxq.graph import GraphIndex, holding, index_of
from onnxq.numerics.blas import one_blas_thread
from onnxq.pipeline.bit_budget import check_budget
from onnxq.pipeline.budget import Budget
from onnxq.pipeline.candidates import FLOAT, UINT16
from onnxq.pipeline.finish import finish, unmeasured_cpu
from onnxq.pipeline.improve import Improving, improved
from onnxq.pipeline.inputs import Inputs, read_data
from onnxq.pipeline.measured import choose_measured
from onnxq.pipeline.metric import load_metric, parse_drop
from onnxq.pipeline.prepared import PreparedModel, check_skip, load, prove_equal
from onnxq.pipeline.promotion import Wish
from onnxq.pipeline.realise import realise
from onnxq.pipeline.result import Result
from onnxq.pipeline.scaled import Scene, scale_channels
from onnxq.pipeline.stages import Stages
from onnxq.pipeline.unrun import find_obstacle, plan_unrun, quantize_unrun
from onnxq.plan import Plan, Scaling
from onnxq.planner import Draft, draft
from onnxq.progress import Progress, counted, silent
from onnxq.report.synthetic import SYNTHETIC
from onnxq.runtime import cpu_kind, observe_shapes, operator_libraries
from onnxq.sites import Caution, Role

# Shapes are looked at on a few samples; where branches depend on the data, on many.
_SHAPE_SAMPLES, _BRANCH_SAMPLES = 2, 256
_EQUALITY_SAMPLES = 2
_TIMING_SAMPLES = 8
# Share of the time that is left, where there is a budget.
_SCALING = 0.3


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller may ask for beside model, data and configuration; None leaves the configuration's value."""

    samples: int | None = None
    seed: int | None = None
    batch: int | None = None
    memory_limit: int | None = None
    placement: str | None = None
    cpu: str | None = None
    effort: str | None = None
    holdout: int | None = None
    threads: int | None = None
    latency: bool | None = None
    min_sqnr: float | None = None
    metric: str | Callable[[Any], float] | None = None
    max_drop: float | str | None = None
    promote_to: str | None = None
    weight_bits_budget: float | None = None
    budget: float | None = None
    ort_library: Sequence[str | Path] | str | Path = ()

    @property
    def libraries(self) -> tuple[str, ...]:
        """Paths of the libraries of custom operators."""
        given = self.ort_library
        return (str(given),) if isinstance(given, (str, Path)) else tuple(str(path) for path in given)

    def check(self) -> None:
        """ConfigError for a number that is none, or is out of its range."""
        check_number("min_sqnr", self.min_sqnr)
        check_number("budget", self.budget, low=0, above=True)
        check_number("memory_limit", self.memory_limit, low=1, whole=True)

    def wish(self) -> Wish:
        """What was asked of the accuracy. Raises ConfigError for what does not go together."""
        if self.metric is None and self.max_drop is not None:
            raise ConfigError(
                "max_drop", "says nothing without a metric", "give `metric=…`, a file.py:function, as well", code="Q308"
            )
        if self.metric is not None and self.min_sqnr is not None:
            raise ConfigError(
                "min_sqnr", "and a metric were given: promotion goes by one figure", "give one of them", code="Q308"
            )
        if self.promote_to not in (None, FLOAT, UINT16):
            raise ConfigError(
                f"promote_to: {self.promote_to}", "is no type to promote to", f"use {FLOAT} or {UINT16}", code="Q308"
            )
        metric = None if self.metric is None else load_metric(self.metric)
        drop = parse_drop(0.0 if self.max_drop is None else self.max_drop)
        return Wish(self.min_sqnr, metric, drop, self.promote_to or FLOAT)


DEFAULT_OPTIONS = Options()


def configured(config: Config | str | Path | None, target: str | None, options: Options) -> Config:
    """The configuration with the caller's options on top."""
    if config is None and target is not None:
        config = f"{target}-int8"
    given = load_config(config) if not isinstance(config, Config) else config
    if target is not None and target != given.target:
        raise ConfigError(
            f"target {target!r}",
            f"the configuration {given.source!r} is for {given.target!r}",
            "choose one",
            code="Q312",
        )
    options.check()
    paths = {name: f"data.{name}" for name in ("samples", "seed", "batch")}
    paths |= {name: f"verify.{name}" for name in ("holdout", "threads", "latency")}
    paths |= {name: name for name in ("placement", "cpu", "effort", "weight_bits_budget")}
    wished = set_options(given, {path: getattr(options, name) for name, path in paths.items()})
    if options.libraries:
        libraries = (*given.runtime.libraries, *options.libraries)
        wished = wished.model_copy(update={"runtime": given.runtime.model_copy(update={"libraries": libraries})})
    check_skip(wished)
    check_budget(wished)
    return check_limits(wished)


def look(
    prepared: PreparedModel,
    inputs: Inputs,
    config: Config,
    name: str,
    *,
    identified: bool = True,
    progress: Progress = silent,
) -> Draft:
    """Observe shapes and which bodies run, then draft the placement."""
    index = index_of(prepared.proto)
    enough = _BRANCH_SAMPLES if len(index.scopes) > 1 else _SHAPE_SAMPLES
    with progress("observing shapes", min(enough, len(inputs.calibration))) as task:
        shapes = observe_shapes(prepared.proto, counted(islice(inputs.calibration.samples(), enough), task))
    reached = {""} | {tensor.scope for tensor in shapes}
    return draft(
        prepared.proto,
        config,
        shapes=shapes,
        closed=_closed(index, reached),
        before=prepared.before,
        prepare=prepared.passes,
        name=name,
        identified=identified,
        existing=find_existing(prepared.proto),
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


@holding()
@one_blas_thread()
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
    wished, wish = configured(config, target, options), options.wish()
    with operator_libraries(wished.runtime.libraries):
        return _quantize(model, data, wished, wish, options, progress)


def _quantize(
    model: str | Path | onnx.ModelProto, data: object, wished: Config, wish: Wish, options: Options, progress: Progress
) -> Result:
    stages, budget = Stages(progress), Budget(options.budget)
    with stages.run("prepare"):
        prepared = load(model, skip=wished.skip, target=wished.target, progress=progress)
        obstacle = find_obstacle(prepared, wished, measuring=data is not None or wish.asked)
        if obstacle is None:
            inputs = _read_inputs(prepared, data, wished, wish, progress)
    if obstacle is not None:
        return quantize_unrun(prepared, wished, stages, source=model, name=_name(model), obstacle=obstacle)
    budget.prepared()
    prepared, scalings = _scaled(prepared, inputs, wished, options, stages, progress, budget)
    with stages.run("plan"):
        draft, plan, plain = _placed(prepared, inputs, wished, _name(model), progress)
    _demand_float(prepared, plan, _name(model))
    plan = replace(plan, data=inputs.description, warnings=_warnings(plan, inputs), scalings=scalings)

    def calibrated(samples: Dataset, shown: Progress) -> Plan:
        limit = options.memory_limit
        return calibrate(prepared.proto, plan, samples, batch=wished.data.batch, memory_limit=limit, progress=shown)

    with stages.run("calibrate"):
        plan = budget.fitting("calibration", inputs.ranges, wished.data.seed, progress, calibrated)
    _demand_numbers(plan)
    scene = Improving(inputs, wished, wish, budget, stages, progress, options.memory_limit)
    prepared, plan, promotion = improved(prepared, plan, plain, draft, scene)
    with stages.run("emit"):
        quantized = realise(prepared, plan)
    return finish(prepared, plan, quantized, inputs, wished, stages, source=model, promotion=promotion, budget=budget)


def _read_inputs(prepared: PreparedModel, data: object, config: Config, wish: Wish, progress: Progress) -> Inputs:
    """The samples, on the first of which preparation is proved to have changed nothing."""
    inputs = read_data(prepared, data, config, choosing=wish.asked, progress=progress)
    if inputs.synthetic and wish.asked:
        raise ConfigError(
            "data", "no samples were given: made-up inputs say nothing of accuracy", "pass `data=…`", code="Q319"
        )
    prove_equal(prepared, islice(inputs.trial.samples(), _EQUALITY_SAMPLES), progress=progress)
    return inputs


def _demand_float(prepared: PreparedModel, plan: Plan, name: str) -> None:
    """ModelError for a model that is quantized already and of which the plan quantizes nothing more."""
    already = prepared.already
    if plan.sites or not already:
        return
    reasons = [f"{one.subject}: {one.reason}" for one in plan.refusals]
    floats = f"; what is float stays so, e.g. {reasons[0]}" if reasons else ""
    fix = "use it as it is, or quantize the float model it was made from"
    raise ModelError(name, f"{already}, and nothing is left to quantize{floats}", fix, code="Q125")


def _demand_numbers(plan: Plan) -> None:
    """CalibrationError for the first site that calibration left without numbers."""
    missing = [site for site in plan.sites if site.qparams is None]
    if missing:
        reasons = {refusal.subject: refusal.reason for refusal in plan.refusals}
        subject = str(missing[0].site)
        cause = reasons.get(subject, "no sample of the calibration data reached it")
        raise CalibrationError(subject, cause, "give samples that reach it, or leave it float with a rule", code="Q502")


def _scaled(
    prepared: PreparedModel,
    inputs: Inputs,
    config: Config,
    options: Options,
    stages: Stages,
    progress: Progress,
    budget: Budget,
) -> tuple[PreparedModel, tuple[Scaling, ...]]:
    """The prepared model with its channels scaled, where the effort and the mode ask for it."""
    if config.effort == "fast" or inputs.synthetic:
        return prepared, ()
    # Equalizing and shifting channels serve the scales of activations.
    skip = config.skip if config.mode == "static" else (*config.skip, "equalize", "absorb")

    def work(shown: Progress) -> tuple[PreparedModel, tuple[Scaling, ...]]:
        scene = Scene(
            calibration=inputs.calibration,
            held=inputs.trial,
            place=lambda model: look(model, inputs, config, "", identified=False, progress=shown).default(),
            progress=shown,
            batch=config.data.batch,
            memory_limit=options.memory_limit,
        )
        return scale_channels(prepared, scene, skip=skip)

    with stages.run("scale channels"):
        nothing: tuple[PreparedModel, tuple[Scaling, ...]] = (prepared, ())
        return budget.tried("scaling of channels", _SCALING, progress, work, nothing)


def _placed(
    prepared: PreparedModel, inputs: Inputs, config: Config, name: str, progress: Progress
) -> tuple[Draft, Plan, Plan | None]:
    """The draft, the plan of the rules or of the placement that ran fastest here, and the plan to fall back on, if any.

    With `attention: auto` the first one quantizes attention and the second does not.
    """
    drafted = look(prepared, inputs, config, name, progress=progress)
    if config.placement != "measured" or config.mode != "static":
        plain = drafted.default()
        whole = drafted.default(attention=True) if config.attention != "float" else plain
        differs = {site.site for site in whole.sites} != {site.site for site in plain.sites}
        return drafted, whole, plain if differs and config.attention == "auto" else None
    few = inputs.calibration.take(_TIMING_SAMPLES, config.data.seed)
    threads = config.verify.threads or 1
    chosen = choose_measured(drafted, prepared, few, inputs.first, threads=threads, progress=progress)
    return drafted, chosen, None


def _warnings(plan: Plan, inputs: Inputs) -> tuple[Caution, ...]:
    ranged = any(site.role is not Role.WEIGHT for site in plan.sites)
    return (SYNTHETIC, *plan.warnings) if inputs.synthetic and ranged else plan.warnings


def _name(model: object) -> str:
    return readable(Path(model).name) if isinstance(model, (str, Path)) else "model"


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
    with operator_libraries(wished.runtime.libraries):
        return _make_plan(model, data, wished, progress)


def _make_plan(model: str | Path | onnx.ModelProto, data: object, wished: Config, progress: Progress) -> Plan:
    prepared = load(model, skip=wished.skip, target=wished.target, progress=progress)
    if (obstacle := find_obstacle(prepared, wished, measuring=data is not None)) is not None:
        return plan_unrun(prepared, wished, _name(model), obstacle)
    inputs = read_data(prepared, data, wished, progress=progress)
    with progress("planning"):
        _, whole, plain = _placed(prepared, inputs, wished, _name(model), progress)
    plan = whole if plain is None else plain
    told = (_left_out(wished.effort),) if wished.effort != "fast" else ()
    # Made-up inputs only gave shapes here: there are no ranges yet that could be wrong.
    warnings = (*plan.warnings, *unmeasured_cpu(plan, cpu_kind()), *told)
    return replace(plan, data=inputs.description, warnings=warnings)


def _left_out(effort: str) -> Caution:
    text = (
        f"effort {effort!r} is not in this plan: scaling of channels, the sweep and promotion need a calibrated model. "
        "`onnxq quantize` runs them and gives a plan with what they did; `onnxq apply` only calibrates"
    )
    return Caution("W114", text)
