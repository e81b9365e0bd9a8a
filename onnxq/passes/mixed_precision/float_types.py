"""The float type of what is not quantized: float16 or bfloat16 wherever samples show that it is enough, else float32.

Ranges and errors of every tensor say which nodes stay in float32 (`planner.precision`). Then the whole network is
judged beside the same one in float32; where it answers worse, the nodes that lose most stay in float32 as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxq.backends import find_target
from onnxq.calibrate import measure_float_errors
from onnxq.config import Config
from onnxq.emit import emit_types
from onnxq.evaluation.compare import ModelErrors
from onnxq.evaluation.trials import TrialModel, measure_each
from onnxq.graph import find_opset, get_index, infer_shapes
from onnxq.graph.precision.widen import SourceTypes, emulate_types
from onnxq.passes.assembly import write_pairs
from onnxq.passes.base import Pass, SampledContext, Stage
from onnxq.passes.journal import PassReport
from onnxq.passes.judging import make_trial
from onnxq.passes.mixed_precision.limits import LIMITS
from onnxq.passes.state import PlacedState, PlacedStep
from onnxq.plan import KeptFloat32, PrecisionPlan
from onnxq.planner import PrecisionProblem, add_precision, choose_types, find_suspects, find_type_opset
from onnxq.spec import FloatType

NAME = "high_precision"
# What float types may cost the outputs, dB: rounding falls out otherwise here and there, by some tenths on few samples.
_MAY_COST_DB = 0.5
# Above these a loss changes no answers, with pairs and without.
_GOOD_DB, _GOOD_FLOAT_DB = 50.0, 40.0
# Of outputs that cannot be compared, since their shapes differ or values are not finite: -inf has no mean.
_LEAST_DB = -100.0


def find_high_precision(config: Config, types: SourceTypes) -> FloatType:
    """The float type asked for, or the target's; in place of float16 bfloat16 for a model that came in it."""
    if config.high_precision is not None:
        return FloatType(config.high_precision)
    usual = find_target(config.target, config.mode).high_precision
    narrow = usual is not FloatType.FLOAT32 and types.computes == FloatType.BFLOAT16.onnx_type
    return FloatType.BFLOAT16 if narrow else usual


def choose_float_types(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The plan with its float types."""
    kind, plan, io = find_high_precision(ctx.config, state.types), state.planned, _find_io(ctx.config)
    if kind is FloatType.FLOAT32:
        chosen = PrecisionPlan(type=kind, io=io)
        return replace(state, plan=replace(plan, precision=chosen)), PassReport(NAME, (f"inputs and outputs: {io}",))
    problem = _state_problem(ctx, state, kind)
    chosen = replace(choose_types(problem), io=io)
    figures: tuple[float, float] | None = None
    if plan.calibrated and not ctx.data.synthetic:
        chosen, figures = _try_types(ctx, state, problem, chosen)
    if figures is not None and math.isinf(figures[0]):
        figures = None
    line = f"{chosen.nodes} nodes in {kind}, {len(chosen.kept)} in float32"
    after = replace(state, plan=add_precision(plan, chosen, state.problem))
    return after, PassReport(NAME, (line,), trial_db=figures)


def _state_problem(ctx: SampledContext, state: PlacedState, kind: FloatType) -> PrecisionProblem:
    model = infer_shapes(state.model)
    samples = ctx.data.calibration.take(LIMITS[NAME].samples, ctx.config.data.seed)
    errors = measure_float_errors(model, kind, samples.samples(), progress=ctx.progress)
    io = _find_io(ctx.config)
    values = (*model.graph.input, *model.graph.output)
    interface = dict(state.types.interface) if io is None else {value.name: io.onnx_type for value in values}
    return PrecisionProblem(
        index=get_index(model), plan=state.planned, kind=kind, requests=state.problem.requests,
        engine=state.problem.engine, errors=errors, io=interface,
        opset=max(state.planned.opset, find_opset(model), find_type_opset(state.planned, kind)),
    )  # fmt: skip


def _find_io(config: Config) -> FloatType | None:
    return None if config.io_types is None else FloatType(config.io_types)


def _try_types(
    ctx: SampledContext, state: PlacedState, problem: PrecisionProblem, chosen: PrecisionPlan
) -> tuple[PrecisionPlan, tuple[float, float]]:
    """The first types that cost the outputs little, with ever more nodes in float32; those given if none do."""
    suspects = list(find_suspects(problem, chosen))
    floats = ctx.data.judges.float_outputs(state.model)
    with ctx.progress("judging float32", len(floats.samples)) as task:
        before = measure_each(make_trial(state, state.planned), floats, ctx.crew, task)
    first: tuple[float, float] | None = None
    count, tried = 0, chosen
    while True:
        with ctx.progress("judging float types", len(ctx.data.judges.samples)) as task:
            after = measure_each(_make_trial(state, tried), floats, ctx.crew, task)
        figures = _find_worst(before), _find_worst(after)
        first = first or figures
        if not _is_worse(before, after, _GOOD_DB if state.planned.all_sites else _GOOD_FLOAT_DB):
            return tried, figures
        count = max(1, 2 * count)
        if count > len(suspects) // LIMITS[NAME].one_of:
            return chosen, first
        more: Mapping[str, KeptFloat32] = {suspect.node: suspect for suspect in suspects[:count]}
        tried = replace(choose_types(problem, more=more), io=chosen.io)


def _make_trial(state: PlacedState, chosen: PrecisionPlan) -> TrialModel:
    """The network with these types, rounded to the bit as an engine that has them rounds."""
    plan = add_precision(state.planned, chosen, state.problem)
    return TrialModel(emulate_types(emit_types(write_pairs(state, plan), plan, state.types)))


def _find_worst(each: Sequence[ModelErrors]) -> float:
    """The SQNR in dB of the worst output, the mean over the samples."""
    by_output: dict[str, list[float]] = {}
    for errors in each:
        for output in errors.results():
            by_output.setdefault(output.name, []).append(max(output.sqnr_db, _LEAST_DB))
    return min((statistics.fmean(values) for values in by_output.values()), default=math.inf)


def _limit(sqnr_db: float, most: float) -> float:
    return max(min(sqnr_db, most), _LEAST_DB)


def _is_worse(before: Sequence[ModelErrors], after: Sequence[ModelErrors], good: float) -> bool:
    """True where an output loses more than it may, and the samples agree that it loses.

    With pairs around, the least change rounds some values to another level, for better or worse.
    """
    names = [output.name for output in before[0].results()] if before else []
    losses: dict[str, list[float]] = {name: [] for name in names}
    for sample in zip(before, after, strict=True):
        figures = [{output.name: output.sqnr_db for output in errors.results()} for errors in sample]
        for name in names:
            if name in figures[0] and name in figures[1]:
                limited = [_limit(figure[name], good + _MAY_COST_DB) for figure in figures]
                losses[name].append(limited[0] - limited[1])
    for lost in losses.values():
        error = statistics.stdev(lost) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
        if lost and statistics.fmean(lost) > max(_MAY_COST_DB, error):
            return True
    return False


def _is_asked(ctx: SampledContext, state: PlacedState) -> bool:
    return find_high_precision(ctx.config, state.types) is not FloatType.FLOAT32 or ctx.config.io_types is not None


FLOAT_TYPES = Pass(NAME, Stage.REFINE, choose_float_types, "choosing float types", fast=True, applies=_is_asked)
