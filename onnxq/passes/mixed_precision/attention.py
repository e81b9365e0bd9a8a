"""Attention in integers where it keeps the answers, in float where it does not: both are tried on held-back samples."""

from __future__ import annotations

import math
from dataclasses import replace

from onnxq.backends import find_target
from onnxq.passes.base import Pass, SampledContext, Stage
from onnxq.passes.journal import PassReport
from onnxq.passes.judging import THRESHOLDS
from onnxq.passes.mixed_precision.float_types import find_high_precision
from onnxq.passes.rounding.passes import ROUNDED, round_again
from onnxq.passes.state import Note, PlacedState, PlacedStep
from onnxq.plan import AttentionChoice, AttentionKind, Plan
from onnxq.spec import FloatType

NAME, AGAIN = "attention", "attention_after_rounding"
# The same placement without attention, where attention is to be tried; the planning of the run leaves it.
PLAIN: Note[Plan] = Note(NAME)


def without_attention(whole: Plan, plain: Plan) -> Plan:
    """`plain`, whose sites are among those of `whole`, with the numbers of `whole`."""
    known = {site.site: site for site in whole.sites}
    sites = []
    for site in plain.sites:
        same = known.get(site.site, site)
        sites.append(replace(site, qparams=same.qparams, values=same.values))
    return replace(
        plain, sites=tuple(sites), biases=whole.biases, nodes={**whole.nodes, **plain.nodes}, data=whole.data,
        warnings=whole.warnings, scalings=whole.scalings,
    )  # fmt: skip


def choose_attention(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """Attention quantized if that answers as well as float, else the plan without it, with the same numbers."""
    whole, judge = state.planned, ctx.data.judge
    plain = without_attention(whole, PLAIN.read(state))
    both = {"quantized": whole, "float": plain}
    figures = {}
    for name, plan in both.items():
        figures[name] = [output.sqnr_db for output in judge.measure(state, plan, progress=ctx.progress)]
    worst = {name: min(values, default=math.inf) for name, values in figures.items()}
    # In float16 the engine fuses attention that stays float as well: integers there save no kernel.
    narrow = find_high_precision(ctx.config, state.types) is not FloatType.FLOAT32
    threshold = THRESHOLDS["attention beside float16" if narrow else NAME]
    count = len(judge.samples)
    choice = AttentionChoice(
        kind=AttentionKind.FLOAT,
        float_db=round(worst["float"], 1),
        quantized_db=round(worst["quantized"], 1),
        samples=count,
    )
    if all(map(threshold.allows, figures["float"], figures["quantized"])):
        plan = replace(whole, attention=replace(choice, kind=AttentionKind.QUANTIZED))
        return replace(state, plan=plan), PassReport(NAME, ("quantized",))
    reason = (
        f"attention stays float: quantized it costs more than {-threshold.gain:g} dB ({worst['quantized']:.1f} dB "
        f"quantized, {worst['float']:.1f} dB in float, on {count} held-back samples)"
    )
    # The person reads why these stay float, and not that their rules are off.
    rules = find_target(plain.target).attention_rules
    names = {edge.node for site in whole.sites for edge in site.consumers or () if site.rule in rules}
    left_float = tuple(
        replace(left, reason=reason) if left.rule in rules and left.subject in names else left
        for left in plain.left_float
    )
    plan = replace(plain, left_float=left_float, attention=choice)
    return replace(state, plan=plan), PassReport(NAME, ("float",))


def reconsider_attention(ctx: SampledContext, state: PlacedState) -> PlacedStep:
    """Attention chosen anew with rounded weights, and in float, where that is chosen, with weights rounded for it.

    Rounding makes other errors smaller, and so those of attention larger beside them; never the other way.
    """
    chosen, report = choose_attention(ctx, state)
    if chosen.planned.quantizes_attention:
        return chosen, report
    # Rounded with attention in integers before it, they would make up for errors that are gone.
    plan = chosen.planned
    bare = replace(
        without_attention(ROUNDED.read(state).before, PLAIN.read(state)),
        refusals=plan.refusals, left_float=plan.left_float, placement=plan.placement, attention=plan.attention,
    )  # fmt: skip
    return round_again(ctx, chosen, bare, AGAIN)


def has_attention_rules(ctx: SampledContext, state: PlacedState) -> bool:
    """True where the rules for attention made the plan."""
    return ctx.config.attention == "quantized" or state.planned.quantizes_attention


def _is_rounded_and_quantized(ctx: SampledContext, state: PlacedState) -> bool:
    rounded = PLAIN.find(state) is not None and ROUNDED.find(state) is not None
    return rounded and state.planned.quantizes_attention


ATTENTION = Pass(
    NAME, Stage.REFINE, choose_attention, "trying attention in integers", fast=True,
    applies=lambda _, state: PLAIN.find(state) is not None,
)  # fmt: skip
ATTENTION_AGAIN = Pass(
    AGAIN, Stage.REFINE, reconsider_attention, "trying attention with rounded weights", fast=True,
    applies=_is_rounded_and_quantized,
)  # fmt: skip
