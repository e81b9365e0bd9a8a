"""Bits of weights by their cost at the outputs: which get more than the fewest, and which tables of embeddings few.

Widths are chosen greedily by the error removed per bit. A weight's error at the outputs is measured once, at its fewest
bits, and falls by 6 dB with each further bit, as rounding errors do. Errors of different weights add up (they are
nearly uncorrelated). So the gain of a width follows from one measurement. The greedy choice is the optimum of the
relaxed problem; with whole weights it misses that by at most one weight.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from onnxq import backends
from onnxq.arrays import Array, as_float32
from onnxq.calibrate.constants import dequantize_constant
from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.errors import ConfigError
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.toggled import ConstantSwitches
from onnxq.evaluation.trials import score_settings
from onnxq.graph import GraphIndex, ModelLike, ensure_opset, is_large_model, rebuild
from onnxq.passes.base import Pass, RunContext, SampledContext
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import THRESHOLDS, add_noises
from onnxq.passes.rounding.layerwise import augment_samples
from onnxq.passes.rounding.operators import Operator, list_operators
from onnxq.passes.rounding.passes import NAME as ROUNDING
from onnxq.passes.rounding.sequential import RoundingOptions, round_sequentially
from onnxq.passes.state import PlacedState, PlacedStep
from onnxq.plan import Plan, SitePlan
from onnxq.planner import EMBEDDING_ROWS, Table, choose_tables
from onnxq.planner.sums import read_constant
from onnxq.progress import Progress
from onnxq.runtime import Feeds
from onnxq.runtime.crew import Crew
from onnxq.sites import Edge, LeftFloat, Role, Site, UnquantizedNodes, split_unquantized
from onnxq.spec import QuantSpec, name_int


def measure_isolated(
    proto: ModelLike,
    plan: Plan,
    fitted: Sequence[Feeds],
    judged: Dataset,
    *,
    rounded: bool,
    others: Sequence[Feeds] = (),
    crew: Crew | None = None,
    progress: Progress,
) -> dict[Site, float]:
    """Squared error at the float outputs over their power, with only this weight quantized; activations stay float.

    plan: calibrated for `proto`, the prepared float model. rounded: each weight is rounded by the second moments of
    `fitted` and its bias corrected, as sequential rounding does it; else it is as the plan has it. judged: samples that
    `fitted` does not hold: with few samples a layer of many columns fits those it saw. others: as of
    `round_sequentially`. The model is loaded once, with the weights as inputs. crew: rounds and
    measures the weights; the result does not depend on it.
    """
    proto = ensure_opset(proto, plan.opset)
    alone = plan
    if rounded:
        # With `alone`, each weight is rounded as if no other was, in one pass over the samples.
        alone = round_sequentially(
            proto,
            plan,
            fitted,
            others=others,
            options=RoundingOptions(alone=True),
            crew=crew,
            progress=progress,
        ).plan
    constants = ConstantSwitches(proto, large=is_large_model(proto))
    feeds: dict[Site, list[str]] = {}
    for operator in list_operators(GraphIndex(proto), plan):
        for edge, plain, changed in _list_constants(operator, alone):
            feed = constants.feed_constant(f"onnxq/{edge}", [edge], changed, plain)
            feeds.setdefault(operator.site.site, []).append(feed)
    reference = FloatOutputs(proto, judged)
    model = reference.selections.take_choices(rebuild(proto, constants.proto))
    board = constants.open_board(model)
    with progress("measuring weights", len(feeds) * len(judged)) as task:
        errors = score_settings(board, reference, list(feeds.values()), crew, task)
    # Of labels and indices a step is no smaller for a smaller error.
    exact = reference.run(0, judged[0]).items() if len(judged) else ()
    floats = {name for name, value in exact if hasattr(value, "dtype") and value.dtype.kind == "f"}
    return {site: sums.noise(floats) for site, sums in zip(feeds, errors, strict=True)}


def _list_constants(operator: Operator, plan: Plan) -> Iterator[tuple[Edge, Array, Array]]:
    """The inputs that read the weight and the bias, with the float values there and those of the plan."""
    sites = plan.by_site
    weight = dequantize_constant(sites[operator.site.site], operator.weight)
    yield operator.node.make_edge(1), operator.weight, weight
    edge = operator.bias_edge
    if edge is None:
        return
    # Of integers only those that rounding chose: those of calibration are the model's own bias, rounded.
    site = None if operator.bias_site is None else sites[operator.bias_site.site]
    bias = operator.bias
    if site is not None and site.values is not None:
        bias = dequantize_constant(site, bias)
    for correction in plan.biases:
        bias = correction.values if correction.edge == edge else bias
    shape = operator.bias_shape
    yield edge, operator.bias.reshape(shape), as_float32(bias.reshape(shape))


_WEIGHT_BITS = "weight_bits"
# Samples to round weights with, and others to judge them on.
_FITTED = 32
_JUDGED = 8
# Widest that bits are spent on; wider weights have no kernels, and no error to speak of.
_MOST_BITS = 8


def check_budget(config: Config) -> None:
    """ConfigError where the average cannot be kept with the fewest bits, or must not be spent at all."""
    budget = config.weight_bits_budget
    fewest = config.weights.bits
    if budget is None:
        return
    where = config.where("weight_bits_budget")
    if fewest > budget:
        # At most 8 bits can be stored, and ONNX has no type of one bit.
        fix = f"write `weights: {{bits: {max(2, min(int(budget), 8))}}}`, or start from ort-w4a8"
        raise ConfigError(
            where, f"weights of {fewest} bits cannot be {budget:g} on average", fix, code="Q308"
        )
    wrong = [bits for bits in config.weight_bits if bits < fewest]
    if wrong:
        raise ConfigError(
            config.where("weight_bits"),
            f"{wrong[0]} is less than the {fewest} bits that weights have",
            "name wider ones, or lower `weights: {bits: …}`",
            code="Q308",
        )


def spread_bits(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """More bits for the weights that need them.

    Weights that a rule gave another width keep it, and count. The cost of each is measured on samples that its rounding
    did not see; all weights are then within `config.weight_bits_budget` bits on average over their elements.
    """
    config = ctx.config
    plan = state.plan
    calibration = ctx.data.calibration
    assert config.weight_bits_budget is not None
    index = state.index
    weights = [site for site in plan.sites if site.role.is_weight]
    constants = {site.site: read_constant(index, site.site) for site in weights}
    elements = {site: 0 if value is None else int(value.size) for site, value in constants.items()}
    widths = {
        site.site: _list_widths(index, site, config) if elements[site.site] else ()
        for site in weights
    }
    if not any(widths.values()):
        return state, PassReport(_WEIGHT_BITS, ("no weight can have more bits on this target",))
    few = ctx.take_samples(_FITTED + _JUDGED)
    # A third at most: rounding needs samples more than judging does.
    fitted, judged = few.split(max(1, min(_JUDGED, len(few) // 3)), config.data.seed)
    samples = list(fitted.samples())
    errors = measure_isolated(
        state.model,
        plan,
        samples,
        judged,
        others=augment_samples(samples, plan, ctx.skip),
        # As the weights of this run will be rounded later, so that the errors compare.
        rounded=config.effort != "fast" and ROUNDING not in ctx.skip and not calibration.synthetic,
        crew=ctx.crew,
        progress=ctx.progress,
    )
    choices = {
        site.site: WeightChoice(
            elements[site.site],
            site.spec.bits,
            errors.get(site.site, 0.0),
            # What no error is known of keeps its bits, which count.
            widths[site.site] if site.site in errors else (),
        )
        for site in weights
    }
    bits = spend_budget([*choices.values()], config.weight_bits_budget)
    after = _widen_weights(ctx, state, plan, dict(zip(choices, bits, strict=True)))
    mean = compute_mean_bits([*elements.values()], bits)
    counts = ", ".join(f"{count} at {width}" for width, count in sorted(Counter(bits).items()))
    line = (
        f"weights of {mean:.2f} bits on average (at most {config.weight_bits_budget:g}): {counts}"
    )
    return replace(state, plan=after), PassReport(_WEIGHT_BITS, (line,))


def _list_widths(index: GraphIndex, site: SitePlan, config: Config) -> tuple[int, ...]:
    """The widths that a weight of the fewest bits may get instead, ascending."""
    present = site.spec
    # Weights that a rule gave bits keep them; those of a group share a scale with another tensor.
    if present.bits != config.weights.bits or present.is_float or site.group:
        return ()
    op_type = index.find_node(site.consumers[0].node).op_type if site.consumers else ""
    engine = backends.find_target(config.target, config.mode)
    widths = config.weight_bits or range(present.bits + 1, _MOST_BITS + 1)
    specs = {
        bits: _widen_spec(present, bits) for bits in sorted(set(widths)) if bits > present.bits
    }
    # Blocks are for size, and in a file 5 bits take the room of 8.
    blocked = present.has_blocks
    wider = {bits: spec for bits, spec in specs.items() if spec.fills_storage or not blocked}
    return tuple(
        bits
        for bits, spec in wider.items()
        if engine.capability(spec, Role.WEIGHT, op_type) is not None
    )


def _widen_spec(spec: QuantSpec, bits: int) -> QuantSpec:
    """The same spec with more bits, in the next packed type or a byte where it was packed into less."""
    wider = name_int(4, signed=spec.signed) if bits <= 4 else ""
    # "" stands for the type of a byte.
    storage = spec.storage if bits <= spec.storage_bits else wider
    return replace(spec, bits=bits, storage=storage)


def _widen_weights(
    ctx: SampledContext, state: PlacedState, plan: Plan, bits: dict[Site, int]
) -> Plan:
    """The plan with these widths, and numbers to match."""
    # Scales and integers belong to the old width.
    changed = {
        site.site: replace(site.without_numbers(), spec=_widen_spec(site.spec, bits[site.site]))
        for site in plan.sites
        if site.role.is_weight and bits.get(site.site, 0) > site.spec.bits
    }
    if not changed:
        return plan
    return ctx.calibrate(state.model, plan.replace_sites(changed), ctx.data.calibration)


@dataclass(frozen=True)
class WeightChoice:
    """A weight. elements: their number. bits: its fewest. error: at the outputs with these. widths: other choices.

    Without any it keeps its bits, which count.
    """

    elements: int
    bits: int
    error: float
    widths: tuple[int, ...]


def spend_budget(weights: Sequence[WeightChoice], average: float) -> list[int]:
    """Bits of each weight, so that the average over elements is at most `average`, or unchanged if it is above."""
    bits = [weight.bits for weight in weights]
    elements = sum(weight.elements for weight in weights)
    room = average * elements - sum(weight.elements * weight.bits for weight in weights)

    def measure_gain(step: tuple[int, int, int]) -> float:
        """Gain per bit, since weights differ in size: the relaxed knapsack takes items in this order."""
        k, width, cost = step
        weight = weights[k]
        # 6 dB a bit: a quarter of the power.
        power = 4.0 ** (weight.bits - bits[k]) - 4.0 ** (weight.bits - width)
        return weight.error * power / cost

    while True:
        steps = (
            (k, width, (width - bits[k]) * weight.elements)
            for k, weight in enumerate(weights)
            for width in weight.widths
        )
        # One that no longer fits is passed over; a smaller weight may fit still.
        fitting = [step for step in steps if 0 < step[2] <= room]
        best = max(fitting, key=measure_gain, default=None)
        if best is None or measure_gain(best) <= 0:
            return bits
        k, width, cost = best
        room -= cost
        bits[k] = width


def compute_mean_bits(elements: Sequence[int], bits: Sequence[int]) -> float:
    """Average bits over elements; 0 without elements."""
    total = sum(elements)
    return sum(n * b for n, b in zip(elements, bits, strict=True)) / total if total else 0.0


WEIGHT_BITS = Pass(
    _WEIGHT_BITS,
    spread_bits,
    "spreading bits over the weights",
    0.4,
    fast=True,
    applies=lambda ctx, _: ctx.config.weight_bits_budget is not None,
)


_EMBEDDINGS = "embeddings"
# dB above a wish that tables alone must have: as much noise again is left for all other tensors.
_MARGIN_DB = 3.0


def quantize_tables(ctx: RunContext, state: PlacedState) -> PlacedStep:
    """The plan with tables of embeddings in few bits, and those that nobody asked for where the outputs bear it."""
    plan = state.plan
    tables, reasons = choose_tables(state.problem, state.index, plan.sites)
    after = _add_tables(ctx, state, tables, reasons)
    figures = None
    free = tuple(table for table in tables if not table.named)
    judged = ctx.config.embeddings == "auto" and plan.calibrated
    # Of large models no samples are run.
    samples = ctx.samples
    if free and judged and samples is not None and not samples.synthetic:
        judge = samples.judge
        before = judge.list_db(state, plan, progress=ctx.progress)
        # The lookups alone: with all of a plan on a handful of samples, chance moves the outputs by more than tables
        # do. all-MiniLM-L6's static plan has 18.5 dB without and 17.7 dB with them on two texts, 19.1 and 19.2 on 200.
        lookups = {table.tensor: table.lookups for table in free}
        sites = [
            replace(site, consumers=lookups[site.site], group="")
            for site in after.plan.sites
            if site.site in lookups
        ]
        alone = judge.list_db(
            state, replace(after.plan, sites=tuple(sites), existing=(), biases=())
        )
        pairs = [
            (db, add_noises(db, tables_db)) for db, tables_db in zip(before, alone, strict=True)
        ]
        # The worst output with tables speaks for all.
        figures = min(pairs, key=lambda pair: pair[1], default=None)
        # An accuracy is hard to meet with tables that have little more alone.
        wanted = -math.inf if ctx.request.min_sqnr is None else ctx.request.min_sqnr
        breaks = any(db < wanted + _MARGIN_DB for db in alone)
        if breaks or not all(THRESHOLDS[_EMBEDDINGS].allows(*pair) for pair in pairs):
            assert figures is not None
            # Tables that a rule names stay: they were asked for.
            losses = _explain_loss(free, *figures)
            named = tuple(table for table in tables if table.named)
            after = _add_tables(ctx, state, named, (*reasons, *losses))
            tables = ()
    if not tables:
        return after, PassReport(
            _EMBEDDINGS,
            outcome=Outcome.NO_GAIN if figures is None else Outcome.WORSE,
            trial_db=figures,
        )
    elements = sum(table.elements for table in tables)
    stored = sum(table.elements * table.spec.storage_bits for table in tables)
    # Float tables take 4 bytes an element.
    line = f"{len(tables)} {'tables' if len(tables) > 1 else 'table'}, {4 * elements:,} bytes in {stored // 8:,}"
    finite = figures is not None and all(map(math.isfinite, figures))
    return after, PassReport(_EMBEDDINGS, (line,), trial_db=figures if finite else None)


def _explain_loss(tables: Sequence[Table], before: float, after: float) -> list[LeftFloat]:
    """Why tables stay float that cost the outputs too much. before, after: SQNR in dB without and with them."""
    reason = f"in int8 the embeddings cost too much: {after:.1f} dB at the outputs, {before:.1f} dB without"
    nodes = [table.lookups[0].node for table in tables]
    return [LeftFloat(node, reason, EMBEDDING_ROWS, "F109") for node in nodes]


def _add_tables(
    ctx: RunContext,
    state: PlacedState,
    tables: tuple[Table, ...],
    reasons: UnquantizedNodes,
) -> PlacedState:
    """The state with these tables in its plan, and in every plan that is made of its problem later."""
    problem = replace(state.problem, tables=tables)
    plan = problem.with_tables(state.plan)
    refusals, left_float = split_unquantized((*plan.unquantized, *reasons))
    plan = replace(plan, refusals=refusals, left_float=left_float)
    if state.plan.calibrated and not plan.calibrated:
        # Scales of constants need no samples.
        plan = ctx.calibrate(state.model, plan, None)
    return replace(state, problem=problem, plan=plan)


def _has_tables(ctx: RunContext, state: PlacedState) -> bool:
    # A rule may name a table, whatever `embeddings` says of all.
    if not (ctx.config.rules or ctx.config.embeddings != "float"):
        return False
    return any(choose_tables(state.problem, state.index, state.plan.sites))


EMBEDDINGS = Pass(
    _EMBEDDINGS,
    quantize_tables,
    "quantizing embeddings",
    fast=True,
    applies=_has_tables,
)
