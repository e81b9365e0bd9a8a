"""Bits of weights by an average: which get more than the fewest, by the cost of each at the outputs.

Widths are chosen greedily by the error removed per bit. A weight's error at the outputs is measured once, at its fewest
bits, and falls by 6 dB with each further bit, as rounding errors do. Errors of different weights add up (they are
nearly uncorrelated). So the gain of a width follows from one measurement. The greedy choice is the optimum of the
relaxed problem; with whole weights it misses that by at most one weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxq import backends
from onnxq.calibrate import calibrate
from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, get_index
from onnxq.passes.base import Pass, SampledContext, Stage
from onnxq.passes.journal import PassReport
from onnxq.passes.mixed_precision.weight_errors import measure_isolated
from onnxq.passes.rounding.layerwise import augment_samples
from onnxq.passes.rounding.passes import NAME as ROUNDING
from onnxq.passes.state import PlacedState, PlacedStep
from onnxq.plan import Plan, SitePlan
from onnxq.planner.sums import read_constant
from onnxq.sites import Role, Site
from onnxq.spec import PerBlock, QuantSpec

NAME = "weight_bits"
# Samples to round weights with, and others to judge them on.
_FITTED, _JUDGED = 32, 8
# Widest that bits are spent on; wider weights have no kernels, and no error to speak of.
_MOST_BITS = 8


def check_budget(config: Config) -> None:
    """ConfigError where the average cannot be kept with the fewest bits, or must not be spent at all."""
    budget, fewest = config.weight_bits_budget, config.weights.bits
    if budget is None:
        return
    where = config.where("weight_bits_budget")
    if fewest > budget:
        fix = f"write `weights: {{bits: {max(2, min(int(budget), 8))}}}`, or start from ort-w4a8"
        raise ConfigError(where, f"weights of {fewest} bits cannot be {budget:g} on average", fix, code="Q308")
    wrong = [bits for bits in config.weight_bits if bits < fewest]
    if wrong:
        raise ConfigError(
            config.where("weight_bits"), f"{wrong[0]} is less than the {fewest} bits that weights have",
            "name wider ones, or lower `weights: {bits: …}`", code="Q308")  # fmt: skip


def spread_bits(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """More bits for the weights that need them.

    Weights that a rule gave another width keep it, and count. The cost of each is measured on samples that its rounding
    did not see; all weights are then within `config.weight_bits_budget` bits on average over their elements.
    """
    config, plan, calibration = ctx.config, state.planned, ctx.data.calibration
    assert config.weight_bits_budget is not None
    index = get_index(state.model)
    weights = [site for site in plan.sites if site.role is Role.WEIGHT]
    constants = {site.site: read_constant(index, site.site) for site in weights}
    elements = {site: 0 if value is None else int(value.size) for site, value in constants.items()}
    widths = {site.site: _list_widths(index, site, config) if elements[site.site] else () for site in weights}
    if not any(widths.values()):
        return state, PassReport(NAME, ("no weight can have more bits on this target",))
    fitted, judged = _split_samples(calibration, config.data.seed)
    samples = list(fitted.samples())
    errors = measure_isolated(
        state.model, plan, samples, judged.samples(), others=augment_samples(samples, plan, ctx.skip),
        rounded=config.effort != "fast" and ROUNDING not in ctx.skip and not calibration.synthetic,
        crew=ctx.crew, progress=ctx.progress,
    )  # fmt: skip
    measured = [site for site in weights if widths[site.site] and site.site in errors]
    # What no error is known of, or has no other widths, keeps its bits, which count.
    fixed = [site for site in weights if site not in measured]
    others = sum(elements[s.site] for s in fixed), sum(elements[s.site] * s.spec.bits for s in fixed)
    open_ = [WeightChoice(elements[s.site], s.spec.bits, errors[s.site], widths[s.site]) for s in measured]
    chosen = spend_budget(open_, config.weight_bits_budget, others)
    bits: dict[Site, int] = {site.site: width for site, width in zip(measured, chosen, strict=True)}
    after = replace(state, plan=_widen_weights(ctx, state, plan, bits))
    return after, PassReport(NAME, (_describe_bits(weights, elements, bits, config),))


def _split_samples(calibration: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    samples = calibration.take(_FITTED + _JUDGED, seed)
    return samples.split(max(1, min(_JUDGED, len(samples) // 3)), seed)


def _list_widths(index: GraphIndex, site: SitePlan, config: Config) -> tuple[int, ...]:
    """The widths that a weight of the fewest bits may get instead, ascending."""
    if site.spec.bits != config.weights.bits or site.spec.is_float or site.group:
        return ()
    op_type = index.node(site.consumers[0].node).op_type if site.consumers else ""
    engine = backends.find_target(config.target, config.mode)
    widths = config.weight_bits or range(site.spec.bits + 1, _MOST_BITS + 1)
    specs = {bits: _widen_spec(site.spec, bits) for bits in sorted(set(widths)) if bits > site.spec.bits}
    # Blocks are for size, and in a file 5 bits take the room of 8.
    blocked = isinstance(site.spec.granularity, PerBlock)
    wider = {bits: spec for bits, spec in specs.items() if spec.fills_storage or not blocked}
    return tuple(bits for bits, spec in wider.items() if engine.capability(spec, Role.WEIGHT, op_type) is not None)


def _widen_spec(spec: QuantSpec, bits: int) -> QuantSpec:
    """The same spec with more bits, in the next packed type or a byte where it was packed into less."""
    wider = f"{'' if spec.signed else 'u'}int4" if bits <= 4 else ""
    storage = spec.storage if bits <= spec.storage_bits else wider
    return replace(spec, bits=bits, storage=storage)


def _widen_weights(ctx: SampledContext, state: PlacedState, plan: Plan, bits: dict[Site, int]) -> Plan:
    """The plan with these widths, and numbers to match."""
    changed = {site.site for site in plan.sites if site.role is Role.WEIGHT and bits.get(site.site, 0) > site.spec.bits}
    if not changed:
        return plan
    sites = []
    for site in plan.sites:
        if site.site in changed and site.role is Role.WEIGHT:
            site = replace(site, spec=_widen_spec(site.spec, bits[site.site]), qparams=None, values=None)
        elif site.derived is not None and site.derived[1] in changed:
            # Its scale is the product of the weight's with the input's.
            site = replace(site, qparams=None, values=None)
        sites.append(site)
    plan = replace(plan, sites=tuple(sites))
    return calibrate(state.model, plan, ctx.data.calibration, crew=ctx.crew)


def _describe_bits(
    weights: Sequence[SitePlan], elements: dict[Site, int], bits: dict[Site, int], config: Config
) -> str:
    now = [bits.get(site.site, site.spec.bits) for site in weights]
    mean = compute_mean_bits([elements[site.site] for site in weights], now)
    counts = ", ".join(f"{count} at {width}" for width, count in sorted(Counter(now).items()))
    return f"weights of {mean:.2f} bits on average (at most {config.weight_bits_budget:g}): {counts}"


@dataclass(frozen=True)
class WeightChoice:
    """A weight. elements: their number. bits: its fewest. error: at the outputs with these. widths: other choices."""

    elements: int
    bits: int
    error: float
    widths: tuple[int, ...]


def spend_budget(weights: Sequence[WeightChoice], average: float, others: tuple[int, int] = (0, 0)) -> list[int]:
    """Bits of each weight, so that the average over elements is at most `average`, or unchanged if it is above.

    others: (elements, sum of their bits) of weights that count towards the average and cannot change.
    """
    bits = [weight.bits for weight in weights]
    elements = others[0] + sum(weight.elements for weight in weights)
    room = average * elements - others[1] - sum(weight.elements * weight.bits for weight in weights)
    while True:
        best: tuple[float, int, int] | None = None
        for k, weight in enumerate(weights):
            for width in weight.widths:
                cost = (width - bits[k]) * weight.elements
                if width <= bits[k] or cost > room or cost <= 0:
                    continue
                # 6 dB a bit: a quarter of the power.
                gain = weight.error * (4.0 ** (weight.bits - bits[k]) - 4.0 ** (weight.bits - width)) / cost
                if best is None or gain > best[0]:
                    best = gain, k, width
        if best is None or best[0] <= 0:
            return bits
        _, k, width = best
        room -= (width - bits[k]) * weights[k].elements
        bits[k] = width


def compute_mean_bits(elements: Sequence[int], bits: Sequence[int]) -> float:
    """Average bits over elements; 0 without elements."""
    total = sum(elements)
    return sum(n * b for n, b in zip(elements, bits, strict=True)) / total if total else 0.0


WEIGHT_BITS = Pass(
    NAME,
    Stage.REFINE,
    spread_bits,
    "spreading bits over the weights",
    0.4,
    fast=True,
    applies=lambda ctx, _: ctx.config.weight_bits_budget is not None,
)
