"""Attention in integers where it keeps the answers, in float where it does not: both are tried on held-back samples."""

from __future__ import annotations

import math
from dataclasses import replace

from onnxq.data import Dataset
from onnxq.pipeline.judging import plan_errors
from onnxq.pipeline.prepared import PreparedModel
from onnxq.plan import AttentionChoice, AttentionKind, Plan
from onnxq.progress import Progress, silent
from onnxq.targets import target

# What integers in attention may cost in SQNR. A decibel is well inside the spread of a few held-back samples.
_MAY_COST_DB = 1.0
# Above this a loss changes no answers: every model kept its metric there.
_GOOD_DB = 25.0


def without_attention(whole: Plan, plain: Plan) -> Plan:
    """`plain`, whose sites are among those of `whole`, with the numbers of `whole`."""
    held = {site.site: site for site in whole.sites}
    sites = tuple(
        replace(site, qparams=held[site.site].qparams, values=held[site.site].values) if site.site in held else site
        for site in plain.sites
    )
    return replace(
        plain, sites=sites, biases=whole.biases, nodes={**whole.nodes, **plain.nodes}, data=whole.data,
        warnings=whole.warnings, scalings=whole.scalings,
    )  # fmt: skip


def settle_attention(
    prepared: PreparedModel, whole: Plan, plain: Plan, held: Dataset, progress: Progress = silent
) -> Plan:
    """`whole`, with attention quantized, if it answers as well as `plain`, without; else `plain` with its numbers.

    whole: calibrated. plain: the same choice without attention; its sites are among those of `whole`.
    """
    plain = without_attention(whole, plain)
    both = {"quantized": whole, "float": plain}
    found = {name: plan_errors(prepared, plan, held, progress=progress) for name, plan in both.items()}
    worst = {name: min((output.sqnr_db for output in outputs), default=math.inf) for name, outputs in found.items()}
    kept = [
        b.sqnr_db >= min(a.sqnr_db - _MAY_COST_DB, _GOOD_DB)
        for a, b in zip(found["float"], found["quantized"], strict=True)
    ]
    choice = AttentionChoice(
        kind=AttentionKind.FLOAT,
        float_db=round(worst["float"], 1),
        quantized_db=round(worst["quantized"], 1),
        samples=len(held),
    )
    if all(kept):
        return replace(whole, attention=replace(choice, kind=AttentionKind.QUANTIZED))
    reason = (
        f"attention stays float: quantized it costs more than {_MAY_COST_DB:g} dB ({worst['quantized']:.1f} dB "
        f"quantized, {worst['float']:.1f} dB in float, on {len(held)} held-back samples)"
    )
    rules = target(plain.target).attention_rules
    names = {edge.node for site in whole.sites for edge in site.consumers or () if site.rule in rules}
    left_float = tuple(
        replace(one, reason=reason) if one.rule in rules and one.subject in names else one for one in plain.left_float
    )
    return replace(plain, left_float=left_float, attention=choice)
