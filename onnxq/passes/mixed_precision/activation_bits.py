"""Bits of activations, operator by operator, for engines that compute in two widths: few, and more where that pays.

Such an engine reads and writes an operator's activations in one width, and converts between operators of different
ones. Ranges are chosen for the narrow width, in which they matter; weights are rounded beside the wide one, so that
their errors and not those of activations decide. Then operators are narrowed one after another, those first that make
the least noise for the work they save, until the noise of the whole is twice what it was: three decibels.

An operator that is narrow rounds its inputs and its result. Each tensor's noise at the outputs is measured alone, and
those of different tensors add up, as rounding errors do. The order is fixed by that; how far it goes, by the outputs of
models in which the first half, the first quarter … are narrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxq.backends import find_target
from onnxq.evaluation.compare import FloatOutputs
from onnxq.evaluation.trials import measure_models
from onnxq.passes.base import Pass, SampledContext, Stage
from onnxq.passes.journal import Outcome, PassReport
from onnxq.passes.judging import make_trial
from onnxq.passes.mixed_precision.candidates import calibrate_missing, carry_qparams, replace_problem
from onnxq.passes.mixed_precision.search import SwitchedPlan
from onnxq.passes.state import Note, PlacedState, PlacedStep
from onnxq.plan import Plan, SitePlan
from onnxq.planner.problem import QuantizableOp
from onnxq.sites import Names, Role, TensorId
from onnxq.spec import QParams, QuantSpec

NAME, WIDEN = "activation_bits", "wide_activations"
# The plan in the fewest bits, with the ranges that were chosen for it.
_NARROW: Note[Plan] = Note(NAME)
# Noise of the mixed plan over that of the wide one: what 16 bits would still gain is not worth their work.
_NOISE = 2.0
# Samples of the calibration on which the noise of tensors is measured, beside those of validation.
_MEASURED = 4
_ACTIVATIONS = (Role.ACTIVATION, Role.OUTPUT)


def widen_activations(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """The plan in the most bits that are offered; the one in the fewest is kept for `narrow_activations`."""
    narrow, wide = state.planned, _list_widths(ctx)[-1]
    names = _list_free(state)
    plan = _place_widths(ctx, state, dict.fromkeys(names, wide), (narrow,))
    state = _NARROW.write(replace(state, plan=plan), narrow)
    return state, PassReport(WIDEN, (f"{len(names)} operators in {wide} bits until weights are rounded",))


def narrow_activations(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """As many operators as may be in the fewest bits, at twice the noise of the wide plan."""
    wide_plan, (least, *_, most) = state.planned, _list_widths(ctx)
    narrow_plan = _NARROW.read(state)
    order = _order_operators(ctx, state, narrow_plan)
    samples = ctx.data.calibration.take(_MEASURED, ctx.config.data.seed).joined(ctx.data.validation)
    floats = FloatOutputs(state.model, samples, threads=ctx.config.verify.threads)

    def place(count: int) -> Plan:
        widths = {name: least if k < count else most for k, name in enumerate(order)}
        return _place_widths(ctx, state, widths, (wide_plan, narrow_plan))

    def measure(plan: Plan) -> float:
        with ctx.progress("judging widths", len(samples)) as task:
            return measure_models([make_trial(state, plan)], floats, ctx.crew, task)[0].noise()

    plans = {0: wide_plan}
    allowed = _NOISE * measure(wide_plan)
    low, high = 0, len(order) + 1
    while high - low > 1:
        # All at once first: many networks need no wide operator.
        middle = len(order) if len(plans) == 1 else (low + high) // 2
        plans[middle] = place(middle)
        low, high = (middle, high) if measure(plans[middle]) <= allowed else (low, middle)
    widths = {name: least if k < low else most for k, name in enumerate(order)}
    problem = replace_problem(state.problem, widths=widths)
    line = _describe(state, widths, plans[low], least, most)
    report = PassReport(NAME, (line,), outcome=Outcome.KEPT if low else Outcome.NO_GAIN)
    return _NARROW.erase(replace(state, plan=plans[low], problem=problem)), report


def _list_widths(ctx: SampledContext) -> list[int]:
    return sorted(ctx.config.activation_bits)


def _list_free(state: PlacedState) -> Names:
    """Operators in integers whose width is theirs to choose: what moves values has that of its maker."""
    problem, sites = state.problem, {site.site for site in state.planned.sites}
    return tuple(op.name for op in problem.ops if op.out in sites and not op.rule.shares)


def _place_widths(ctx: SampledContext, state: PlacedState, widths: dict[str, int], known: Sequence[Plan]) -> Plan:
    """The plan with these widths. A tensor has the numbers that one of the known plans has for it in that width."""
    problem = replace_problem(state.problem, widths=widths)
    plan = carry_qparams(known[0], problem.default(), problem.index)
    numbers: dict[tuple[TensorId, QuantSpec], QParams] = {}
    for other in known:
        for site in other.sites:
            if site.role in _ACTIVATIONS and site.qparams is not None:
                numbers.setdefault((site.quantized_tensor, site.spec), site.qparams)
    sites = []
    for site in plan.sites:
        if site.role in _ACTIVATIONS and site.qparams is None:
            site = replace(site, qparams=numbers.get((site.quantized_tensor, site.spec)))
        sites.append(site)
    plan = calibrate_missing(ctx, state, plan.with_sites(tuple(sites)))
    return _move_biases(known[0], plan)


def _move_biases(before: Plan, after: Plan) -> Plan:
    """The plan with the biases of another in its own scales."""
    old = {site.site: site for site in before.sites if site.role is Role.BIAS}
    sites = [_move_bias(old[site.site], site) if site.site in old else site for site in after.sites]
    return after.with_sites(tuple(sites))


def _move_bias(before: SitePlan, after: SitePlan) -> SitePlan:
    if before.values is None or after.values is not None or before.qparams is None or after.qparams is None:
        return after
    ratio = np.asarray(before.qparams.scale, np.float64) / np.asarray(after.qparams.scale, np.float64)
    limit = np.iinfo(np.int32)
    values = np.clip(np.rint(np.asarray(before.values, np.float64) * ratio), limit.min, limit.max)
    return replace(after, values=values.astype(np.int32))


def _order_operators(ctx: SampledContext, state: PlacedState, narrow: Plan) -> list[str]:
    """The operators in the order in which they are narrowed: least noise for the work first."""
    problem, work = state.problem, find_target(ctx.config.target).estimate_work
    switched = SwitchedPlan(ctx, state, narrow)
    pairs = switched.list_pairs(*_ACTIVATIONS)
    samples = ctx.data.calibration.take(_MEASURED, ctx.config.data.seed).joined(ctx.data.validation)
    floats = FloatOutputs(state.model, samples, threads=ctx.config.verify.threads)
    errors = switched.measure_settings([frozenset([pair]) for pair in pairs], floats, "measuring each tensor")
    noise = {pair.site: error.noise() for pair, error in zip(pairs, errors, strict=True)}
    free = _list_free(state)
    ops = [problem.ops.by_name[name] for name in free]
    touched = {op.name: {str(tensor) for _, tensor in op.data} | {str(op.out)} for op in ops}
    saved = {op.name: max(work(problem.ops.candidate(op.node)), 1.0) for op in ops}
    order, narrowed = list[str](), set[str]()
    while len(order) < len(ops):
        # A tensor that an operator beside it has narrowed costs nothing more.
        left = [name for name in free if name not in set(order)]
        best = min(left, key=lambda name: sum(noise.get(t, 0.0) for t in touched[name] - narrowed) / saved[name])
        order.append(best)
        narrowed |= touched[best]
    return order


def _describe(state: PlacedState, widths: dict[str, int], plan: Plan, least: int, most: int) -> str:
    """How many operators are wide, and what that costs."""
    ops: list[QuantizableOp] = [state.problem.ops.by_name[name] for name in widths]
    work = find_target(plan.target).estimate_work
    costs = {op.name: work(state.problem.ops.candidate(op.node)) for op in ops}
    total = sum(costs.values()) or 1.0
    wide = [name for name, bits in widths.items() if bits == most]
    share = sum(costs[name] for name in wide) / total
    converts = sum(not isinstance(site.site, TensorId) and site.role is Role.ACTIVATION for site in plan.sites)
    return (
        f"{len(wide)} of {len(widths)} operators in {most} bits, {share:.0%} of the work; the others in {least}; "
        f"{converts} conversions"
    )


def _may_choose(ctx: SampledContext, state: PlacedState) -> bool:
    return len(ctx.config.activation_bits) > 1 and bool(state.planned.sites) and not ctx.data.synthetic


def _was_widened(_ctx: SampledContext, state: PlacedState) -> bool:
    return _NARROW.find(state) is not None


WIDE_ACTIVATIONS = Pass(WIDEN, Stage.REFINE, widen_activations, "", fast=True, applies=_may_choose)
ACTIVATION_BITS = Pass(
    NAME, Stage.REFINE, narrow_activations, "choosing bits of activations", fast=True, applies=_was_widened
)
