"""Bits of activations, operator by operator, for engines that compute in two widths: few, and more where that pays.

Such an engine reads and writes an operator's activations in one width, and converts between operators of different
ones. Ranges are chosen for the narrow width, in which they matter; weights are rounded beside the wide one, so that
their errors and not those of activations decide. Then operators are narrowed one after another, those first that make
the least noise for the work they save, until the noise of the whole is twice what it was: three decibels. At most half
of them stay wide; where that is too few for it, work no longer counts, and more of them do if the outputs would have
less than 20 dB, or what was asked for.

An operator that is narrow rounds its inputs and its result. Each tensor's noise at the outputs is measured alone, and
those of different tensors add up, as rounding errors do. The order is fixed by that; how far it goes, by the outputs of
models in which the first half, the first quarter … are narrow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from onnxq.arrays import as_float64, as_int32
from onnxq.backends import find_target
from onnxq.evaluation.accumulator import db_to_noise
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.trials import measure_models
from onnxq.passes.base import Pass, SampledContext
from onnxq.passes.journal import MEASURED, Outcome, PassReport, report_changes
from onnxq.passes.judging import make_trial
from onnxq.passes.mixed_precision.candidates import (
    SwitchedPlan,
    carry_qparams,
    may_choose_widths,
    may_widen,
    replace_problem,
)
from onnxq.passes.mixed_precision.cross_validation import answer_samples, estimate_new, widen_ranges
from onnxq.passes.state import Note, PlacedState, PlacedStep
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Edge, Names, NameSet, Role, Site, TensorId

NAME = "activation_bits"
WIDEN = "wide_activations"
# The plan in the fewest bits, with the ranges that were chosen for it.
_NARROW: Note[Plan] = Note(NAME)
# By how much ranges in the most bits reach further than the samples did: there are steps enough for it. Without it a
# ViT in 16 bits has 44 dB on new images, with it 56.
_HEADROOM = 1.25
_FINE_BITS = 16
# Wide operators, with which the noise is this many times that of all in wide; fewer take what gains least, for half of
# the work. The noise of each rounding is measured on these samples; choices are judged on more.
_MOST_NOISE = 2.0
_ONE_OF = 2
_SAMPLES = 4
# Below this outputs are so far from float's that answers change.
_GOOD_DB = 20.0


def widen_activations(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The plan in the most bits that are offered; the one in the fewest is kept for `narrow_activations`.

    Without a choice, only ranges of 16 bits are widened.
    """
    if not may_choose_widths(ctx, state):
        plan = widen_ranges(state.model, state.plan, _HEADROOM, least_bits=_FINE_BITS)
        line = f"ranges in {_FINE_BITS} bits reach {_HEADROOM:g} times as far as the samples"
        changed = plan is not state.plan
        return replace(state, plan=plan), PassReport(WIDEN, (line,) if changed else ())
    narrow = state.plan
    wide = max(ctx.config.activation_bits)
    names = _list_free(state)
    # Finer inputs make finer biases, which must not overflow: weights are scaled anew.
    bare = narrow.with_sites(
        replace(site, qparams=None) if site.role.is_weight else site for site in narrow.sites
    )
    plan = _place_widths(ctx, state, dict.fromkeys(names, wide), (bare,))
    plan = widen_ranges(state.model, plan, _HEADROOM)
    state = _NARROW.write(replace(state, plan=plan), narrow)
    return state, PassReport(
        WIDEN, (f"{len(names)} operators in {wide} bits until weights are rounded",)
    )


def _find_most(fewest: int, largest: int, holds: Callable[[int], bool]) -> int:
    """The largest number of narrow operators with which a plan holds; `fewest` - 1 where there is none."""
    # All at once first: many networks need no wide operator but those that are never narrow.
    low = fewest - 1
    high = largest + 1
    middle = largest
    while high - low > 1:
        low, high = (middle, high) if holds(middle) else (low, middle)
        middle = (low + high) // 2
    return low


def narrow_activations(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """As many operators as may be in the fewest bits, at twice the noise of the wide plan."""
    wide_plan = state.plan
    least, *_, most = sorted(ctx.config.activation_bits)
    narrow_plan = _NARROW.find(state)
    if narrow_plan is None:
        return state, report_changes(NAME)
    calibration = ctx.take_samples(_SAMPLES)
    samples = calibration.joined(ctx.data.validation)
    floats = answer_samples(ctx, state, samples)
    # There are hundreds of roundings: each alone is measured on fewer samples than a choice is judged on.
    alone = answer_samples(ctx, state, calibration)
    noises = _measure_noises(ctx, state, narrow_plan, alone)
    estimate = find_target(state.plan.target).estimate_work
    by_name = state.problem.ops.by_name
    amounts = {name: estimate(by_name[name].candidate) for name in _list_free(state)}
    total = sum(amounts.values()) or 1.0
    work = {name: amount / total for name, amount in amounts.items()}
    wide = _list_always_wide(state, narrow_plan)
    order = _order_operators(state, work, noises, wide)

    def choose_widths(order: Names, count: int) -> dict[str, int]:
        return {name: least if k < count else most for k, name in enumerate(order)}

    # The plan that holds is asked for again, and calibration is most of its time.
    @cache
    def place(order: Names, count: int) -> Plan:
        return _place_widths(ctx, state, choose_widths(order, count), (wide_plan, narrow_plan))

    def measure(plan: Plan) -> float:
        with ctx.progress("judging widths", len(samples)) as task:
            return measure_models([make_trial(state, plan)], floats, ctx.crew, task)[0].noise()

    wanted = ctx.request.min_sqnr
    allowed = _MOST_NOISE * measure(wide_plan) if wanted is None else db_to_noise(wanted)

    def estimate_plan(count: int) -> float:
        return estimate_new(ctx, replace(state, plan=place(order, count)))

    choosable = len(order) - len(wide)
    # What is asked for may take all; by default no more than some are wide.
    fewest = 0 if wanted is not None else min(choosable, len(order) - len(order) // _ONE_OF)
    low = _find_most(fewest, choosable, lambda count: measure(place(order, count)) <= allowed)
    if wanted is not None:
        # Samples that had no part in the ranges are to have it, too.
        low = _find_most(0, low, lambda count: estimate_plan(count) >= wanted)
    elif low < fewest:
        # As many wide operators as may be are too few: each is where it mends most, whatever its work. More are wide
        # only where answers would change.
        order = _order_operators(state, dict.fromkeys(work, 0.0), noises, wide)
        good = db_to_noise(_GOOD_DB)
        low = _find_most(0, fewest, lambda count: measure(place(order, count)) <= good)
    low = max(low, 0)
    best = place(order, low)
    problem = replace_problem(state.problem, widths=choose_widths(order, low))
    line = _describe_widths(work, order[low:], best, least, most)
    report = PassReport(NAME, (line,), outcome=Outcome.KEPT if low else Outcome.NO_GAIN)
    return _NARROW.erase(replace(state, plan=best, problem=problem)), report


def _list_free(state: PlacedState) -> Names:
    """Operators in integers whose width is theirs to choose: what moves values has that of its maker."""
    sites = {site.site for site in state.plan.sites}
    return tuple(op.name for op in state.problem.ops if op.out in sites and not op.rule.shares)


def _place_widths(
    ctx: SampledContext, state: PlacedState, widths: dict[str, int], known: Sequence[Plan]
) -> Plan:
    """The plan with these widths. A tensor has the numbers that one of the known plans has for it in that width."""
    problem = replace_problem(state.problem, widths=widths)
    plan = carry_qparams(known[0], problem.default(), problem.index)
    # Of the first plan that has some.
    numbers = {
        (site.quantized_tensor, site.spec): site.qparams
        for other in reversed(known)
        for site in reversed(other.sites)
        if site.role.is_measured and site.qparams is not None
    }
    sites = []
    for site in plan.sites:
        if site.role.is_bias:
            # The site of its input may be the same, with another scale.
            site = site.without_numbers()
        elif site.role.is_measured and site.qparams is None:
            site = replace(site, qparams=numbers.get((site.quantized_tensor, site.spec)))
        sites.append(site)
    done = ctx.calibrate(state.model, plan.with_sites(sites), ctx.data.ranges)
    before = {site.site: site for site in known[0].sites if site.role.is_bias}
    return done.with_sites(_move_bias(before.get(site.site), site) for site in done.sites)


def _move_bias(before: SitePlan | None, after: SitePlan) -> SitePlan:
    """The site of a bias with its values before, in the scale that it has now."""
    if (
        before is None
        or before.values is None
        or after.values is not None
        or before.qparams is None
        or after.qparams is None
    ):
        return after
    # What rounding added to a bias is in units of an accumulator whose scale is another now.
    ratio = as_float64(before.qparams.scale) / as_float64(after.qparams.scale)
    limit = np.iinfo(np.int32)
    values = np.clip(np.rint(as_float64(before.values) * ratio), limit.min, limit.max)
    return replace(after, values=as_int32(values))


# Noise at the outputs of single roundings to the fewest bits: of an input that only its operator reads so, and of a
# result whose every reader does.
_Noises = Mapping[Edge | TensorId, float]


def _measure_noises(
    ctx: SampledContext, state: PlacedState, narrow: Plan, floats: FloatOutputs
) -> _Noises:
    """Each input rounded alone, and each result for all that read it; weights stay as they were."""
    ops = state.problem.ops
    wide = state.plan
    sites = {site.quantized_tensor: site for site in narrow.sites if site.role.is_measured}
    edges = {
        edge: tensor
        for name in _list_free(state)
        for edge, tensor in ops.by_name[name].data
        if tensor in sites
    }
    # Whatever a model gives out is rounded where it is made; what is read, in front of each reader.
    outputs = {tensor: site for tensor, site in sites.items() if site.role is Role.OUTPUT}
    others = [
        outputs.get(site.quantized_tensor, site) for site in wide.sites if site.site not in edges
    ]
    rounded = [
        replace(
            sites[tensor],
            site=edge,
            role=Role.ACTIVATION,
            consumers=(edge,),
            tensor=tensor,
            group="",
        )
        for edge, tensor in edges.items()
    ]
    switched = SwitchedPlan(ctx, state, wide.with_sites((*others, *rounded)))
    switches = {switch.site: switch for switch in switched.list_pairs(*MEASURED)}
    rounding: dict[Edge | TensorId, list[Site]] = {edge: [edge] for edge in edges}
    rounding |= {tensor: [tensor] if tensor in outputs else [] for tensor in sites}
    for edge, tensor in edges.items():
        rounding[tensor].append(edge)
    settings = {
        key: frozenset(switches[str(site)] for site in places if str(site) in switches)
        for key, places in rounding.items()
    }
    errors = switched.measure_settings([*settings.values()], floats, "measuring each rounding")
    return {key: error.noise() for key, error in zip(settings, errors, strict=True)}


def _list_always_wide(state: PlacedState, narrow: Plan) -> NameSet:
    """The operators whose kernels in the fewest bits are poorer than their results there."""
    results = {
        site.quantized_tensor: site.qparams for site in narrow.sites if site.role.is_measured
    }
    wide = []
    for name in _list_free(state):
        op = state.problem.ops.by_name[name]
        result = results.get(op.out)
        # The NPU's Softmax of 8 bits computes in steps of 1/256, whatever scale its result has (a
        # ViT: 4.9 -> 23.5 dB).
        coarse = result is not None and op.rule.coarse(result)
        if coarse or op.rule.bits is not None:
            wide.append(name)
    return frozenset(wide)


def _order_operators(
    state: PlacedState, work: Mapping[str, float], noises: _Noises, wide: NameSet
) -> Names:
    """The operators in the order in which they are narrowed: those first that make the least noise for their work.

    Each counts as one of them, too, besides its share of the work. wide: those that come last, and are not narrowed.
    """
    ops = state.problem.ops
    # In their order.
    narrowed: dict[str, None] = {}
    rounded = set()

    def find_price(name: str) -> tuple[bool, float]:
        op = ops.by_name[name]
        inputs = [noises.get(edge, 0.0) for edge, tensor in op.data if tensor not in rounded]
        # Beside operators that are narrow: a rounded result is so for all its readers.
        read = [noises[edge] for edge, _ in ops.list_consumers(op.out) if edge.node in narrowed]
        noise = sum(inputs) + max(noises.get(op.out, 0.0) - sum(read), 0.0)
        return name in wide, noise / (work[name] + 1 / len(work))

    while len(narrowed) < len(work):
        best = min((name for name in work if name not in narrowed), key=find_price)
        narrowed[best] = None
        rounded.add(ops.by_name[best].out)
    return tuple(narrowed)


def _describe_widths(
    work: Mapping[str, float], wide: Sequence[str], plan: Plan, least: int, most: int
) -> str:
    """How many operators are wide, and how much of the work they are."""
    share = sum(work[name] for name in wide)
    converts = sum(
        not isinstance(site.site, TensorId) and site.role is Role.ACTIVATION for site in plan.sites
    )
    return (
        f"{len(wide)} of {len(work)} operators in {most} bits, {share:.0%} of the work; the others in {least}; "
        f"{converts} conversions"
    )


WIDE_ACTIVATIONS = Pass(
    WIDEN, widen_activations, "widening activations", fast=True, applies=may_widen
)
ACTIVATION_BITS = Pass(
    NAME,
    narrow_activations,
    "choosing bits of activations",
    fast=True,
    applies=may_choose_widths,
)
