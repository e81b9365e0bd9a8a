"""The parts left float: their type, and attention where integers would change the answers.

Ranges and errors of every tensor say which nodes stay in float32 (`planner.precision`). Then the whole network is
judged beside the same one in float32; where it answers worse, the nodes that lose most stay in float32 as well.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from onnxq.backends import find_target
from onnxq.calibrate import measure_float_errors
from onnxq.config import Config
from onnxq.emit import emit_types
from onnxq.evaluation.compare import ModelErrors
from onnxq.evaluation.trials import TrialModel, measure_each
from onnxq.graph import SourceTypes, emulate_types, find_opset, get_index, infer_shapes
from onnxq.graph.scopes import map_end_types
from onnxq.passes.assembly import write_pairs
from onnxq.passes.base import Pass, RunContext, SampledContext
from onnxq.passes.journal import PassReport, TrialFigures
from onnxq.passes.judging import THRESHOLDS, estimate_mean
from onnxq.passes.rounding.passes import ROUNDED, round_again
from onnxq.passes.state import FloatState, Note, PlacedState, PlacedStep
from onnxq.plan import AttentionChoice, AttentionKind, Plan, PrecisionPlan
from onnxq.planner import add_precision, choose_types, find_suspects, find_type_opset
from onnxq.planner.precision.reasons import PrecisionProblem
from onnxq.spec import FloatType

_TYPES = "high_precision"
# Nodes in float32 beside float16: with more of the suspects there than one of so many the type is not worth it. Ranges
# are measured on so many samples, the extreme ones among them.
_ONE_OF = 2
_SAMPLES = 16
# What float types may cost the outputs, dB: rounding falls out otherwise here and there, by some tenths on few samples.
_MAY_COST_DB = 0.5
# Above these a loss changes no answers, with pairs and without.
_GOOD_DB = 50.0
_GOOD_FLOAT_DB = 40.0
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
    kind = find_high_precision(ctx.config, state.types)
    plan = state.plan
    io = _find_io(ctx.config)
    if kind is FloatType.FLOAT32:
        chosen = PrecisionPlan(type=kind, io=io)
        return replace(state, plan=replace(plan, precision=chosen)), PassReport(
            _TYPES, (f"inputs and outputs: {io}",)
        )
    problem = _state_problem(ctx, state, kind)
    chosen = replace(choose_types(problem), io=io)
    figures = None
    if plan.calibrated and not ctx.data.synthetic:
        chosen, figures = _try_types(ctx, state, problem, chosen)
        if math.isinf(figures[0]):
            figures = None
    line = f"{chosen.nodes} nodes in {kind}, {len(chosen.kept)} in float32"
    after = replace(state, plan=add_precision(plan, chosen, state.problem))
    return after, PassReport(_TYPES, (line,), trial_db=figures)


def _state_problem(ctx: SampledContext, state: PlacedState, kind: FloatType) -> PrecisionProblem:
    model = infer_shapes(state.model)
    samples = ctx.take_samples(_SAMPLES)
    errors = measure_float_errors(model, kind, samples.samples(), progress=ctx.progress)
    io = _find_io(ctx.config)
    interface = (
        dict(state.types.interface)
        if io is None
        else dict.fromkeys(map_end_types(model.graph), io.onnx_type)
    )
    return PrecisionProblem(
        index=get_index(model),
        plan=state.plan,
        kind=kind,
        requests=state.problem.requests,
        engine=state.problem.engine,
        errors=errors,
        io=interface,
        opset=max(state.plan.opset, find_opset(model), find_type_opset(state.plan, kind)),
    )


def _find_io(config: Config) -> FloatType | None:
    return None if config.io_types is None else FloatType(config.io_types)


def _try_types(
    ctx: SampledContext, state: PlacedState, problem: PrecisionProblem, chosen: PrecisionPlan
) -> tuple[PrecisionPlan, TrialFigures]:
    """The first types that cost the outputs little, with ever more nodes in float32; those given if none do."""
    suspects = list(find_suspects(problem, chosen))
    judges = ctx.data.judges
    floats = judges.float_outputs(state.model)
    before = judges.run_samples(state, state.plan, progress=ctx.progress)
    first = None
    count = 0
    tried = chosen
    while True:
        with ctx.progress("judging float types", len(floats.samples)) as task:
            # Rounded to the bit as an engine that has these types rounds.
            plan = add_precision(state.plan, tried, state.problem)
            typed = emit_types(write_pairs(state, plan), plan, state.types)
            after = measure_each(TrialModel(emulate_types(typed)), floats, ctx.crew, task)
        figures = _find_worst(before), _find_worst(after)
        first = first or figures
        if not _is_worse(before, after, _GOOD_DB if state.plan.all_sites else _GOOD_FLOAT_DB):
            return tried, figures
        # Doubling takes few trials, and leaves at most twice as many in float32 as are needed.
        count = max(1, 2 * count)
        if count > len(suspects) // _ONE_OF:
            return chosen, first
        more = {suspect.node: suspect for suspect in suspects[:count]}
        tried = replace(choose_types(problem, more=more), io=chosen.io)


def _find_worst(each: Sequence[ModelErrors]) -> float:
    """The SQNR in dB of the worst output, the mean over the samples."""
    by_output = defaultdict(list)
    for errors in each:
        for name, db in _read_decibels(errors).items():
            by_output[name].append(db)
    return min(map(statistics.fmean, by_output.values()), default=math.inf)


def _is_worse(before: Sequence[ModelErrors], after: Sequence[ModelErrors], good: float) -> bool:
    """True where an output loses more than it may, and the samples agree that it loses.

    With pairs around, the least change rounds some values to another level, for better or worse.
    """
    # Beyond what is good all figures are alike: a fall from 90 to 60 dB changes no answer.
    most = good + _MAY_COST_DB
    losses = defaultdict(list)
    for sample in zip(before, after, strict=True):
        first, second = map(_read_decibels, sample)
        for name in first.keys() & second.keys():
            losses[name].append(min(first[name], most) - min(second[name], most))
    return any(
        mean > max(_MAY_COST_DB, error) for mean, error in map(estimate_mean, losses.values())
    )


def _read_decibels(errors: ModelErrors) -> dict[str, float]:
    """The SQNR in dB of each output on one sample."""
    return {output.name: max(output.sqnr_db, _LEAST_DB) for output in errors.results()}


def chooses_types(ctx: RunContext, state: FloatState) -> bool:
    """True where something may be written in another type than float32."""
    return (
        find_high_precision(ctx.config, state.types) is not FloatType.FLOAT32
        or ctx.config.io_types is not None
    )


FLOAT_TYPES = Pass(
    _TYPES,
    choose_float_types,
    "choosing float types",
    fast=True,
    applies=chooses_types,
)


_ATTENTION = "attention"
AGAIN = "attention_after_rounding"
# The same placement without attention, where attention is to be tried; the planning of the run leaves it.
PLAIN: Note[Plan] = Note(_ATTENTION)


def without_attention(whole: Plan, plain: Plan) -> Plan:
    """`plain`, whose sites are among those of `whole`, with the numbers of `whole`."""
    known = whole.by_site
    same_sites = ((site, known.get(site.site, site)) for site in plain.sites)
    return replace(
        plain,
        sites=tuple(
            replace(site, qparams=same.qparams, values=same.values) for site, same in same_sites
        ),
        biases=whole.biases,
        nodes={**whole.nodes, **plain.nodes},
        data=whole.data,
        warnings=whole.warnings,
        scalings=whole.scalings,
    )


def choose_attention(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """Attention quantized if that answers as well as float, else the plan without it, with the same numbers."""
    whole = state.plan
    judge = ctx.data.judge
    plain = without_attention(whole, PLAIN.read(state))
    figures = [judge.list_db(state, plan, progress=ctx.progress) for plan in (whole, plain)]
    quantized_db, float_db = (min(values, default=math.inf) for values in figures)
    # In float16 the engine fuses attention that stays float as well: integers there save no kernel.
    narrow = find_high_precision(ctx.config, state.types) is not FloatType.FLOAT32
    threshold = THRESHOLDS["attention beside float16" if narrow else _ATTENTION]
    count = len(judge.samples)
    choice = AttentionChoice(
        kind=AttentionKind.FLOAT,
        float_db=round(float_db, 1),
        quantized_db=round(quantized_db, 1),
        samples=count,
    )
    if all(map(threshold.allows, figures[1], figures[0])):
        plan = replace(whole, attention=replace(choice, kind=AttentionKind.QUANTIZED))
        return replace(state, plan=plan), PassReport(_ATTENTION, ("quantized",))
    reason = (
        f"attention stays float: quantized it costs more than {-threshold.gain:g} dB ({quantized_db:.1f} dB "
        f"quantized, {float_db:.1f} dB in float, on {count} held-back samples)"
    )
    # The person reads why these stay float, and not that their rules are off.
    rules = find_target(plain.target).attention_rules
    names = {
        edge.node for site in whole.sites for edge in site.named_consumers if site.rule in rules
    }
    left_float = tuple(
        replace(left, reason=reason) if left.rule in rules and left.subject in names else left
        for left in plain.left_float
    )
    plan = replace(plain, left_float=left_float, attention=choice)
    return replace(state, plan=plan), PassReport(_ATTENTION, ("float",))


def reconsider_attention(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """Attention chosen anew with rounded weights, and in float, where that is chosen, with weights rounded for it.

    Rounding makes other errors smaller, and so those of attention larger beside them; never the other way.
    """
    chosen, report = choose_attention(ctx, state)
    if chosen.plan.quantizes_attention:
        return chosen, report
    # Rounded with attention in integers before it, they would make up for errors that are gone.
    plan = chosen.plan
    bare = replace(
        without_attention(ROUNDED.read(state).before, PLAIN.read(state)),
        refusals=plan.refusals,
        left_float=plan.left_float,
        placement=plan.placement,
        attention=plan.attention,
    )
    return round_again(ctx, chosen, bare, AGAIN)


def has_attention_rules(ctx: SampledContext, state: PlacedState) -> bool:
    """True where the rules for attention made the plan."""
    return ctx.config.attention == "quantized" or state.plan.quantizes_attention


def _is_rounded_and_quantized(ctx: SampledContext, state: PlacedState) -> bool:
    rounded = PLAIN.is_left(state) and ROUNDED.is_left(state)
    return rounded and state.plan.quantizes_attention


ATTENTION = Pass(
    _ATTENTION,
    choose_attention,
    "trying attention in integers",
    fast=True,
    applies=lambda _, state: PLAIN.is_left(state),
)
ATTENTION_AGAIN = Pass(
    AGAIN,
    reconsider_attention,
    "trying attention with rounded weights",
    fast=True,
    applies=_is_rounded_and_quantized,
)
