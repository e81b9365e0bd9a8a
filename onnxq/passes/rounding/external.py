"""Roundings that others hand in: the door for block reconstruction, which needs gradients that the engine has not.

A rounder is any callable of the prepared float model, the plan after sequential rounding and the samples it was made
with. It gives its results block by block, in the order the model runs; each is kept where the outputs of the quantized
model come nearer to float on samples held back from both. The engine knows nothing of how the values were found:

    from onnxq.passes.rounding.external import ExternalRounding, register_rounder

    def rounder(proto, plan, samples):
        for block in blocks_of(proto):
            yield ExternalRounding(block.name, {site: levels, ...})

    register_rounder("brecq", rounder)          # then: onnxq.quantize(model, data, effort="high")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from onnxq.arrays import Array
from onnxq.errors import PlanError
from onnxq.graph import ModelLike
from onnxq.numerics import limit_sums
from onnxq.plan import BiasPlan, Plan, SitePlan
from onnxq.planner.sums import count_saturating
from onnxq.runtime import Feeds
from onnxq.sites import Edge, Role, Site
from onnxq.spec import QParams


@dataclass(frozen=True, eq=False)
class ExternalRounding:
    """One block's better numbers. Sites and edges are those of the plan; sites not named stay as they were.

    levels: weight -> quantized values of its shape, within its spec's limits. Where the site has `sum_orders`, those
        that break a sum (`onnxq.numerics.saturation`) are moved.
    numbers: weight -> scale and zero point, where they changed too.
    biases: input that reads a float bias -> its values.
    """

    block: str
    levels: Mapping[Site, Array]
    numbers: Mapping[Site, QParams] = field(default_factory=dict)
    biases: Mapping[Edge, Array] = field(default_factory=dict)


class Rounder(Protocol):
    """The type of the callables that `register_rounder` takes."""

    def __call__(self, proto: ModelLike, plan: Plan, samples: Sequence[Feeds]) -> Iterable[ExternalRounding]:
        """Blocks in the order the model runs. proto: not to be changed."""


_ROUNDERS: dict[str, Rounder] = {}


def register_rounder(name: str, rounder: Rounder | None) -> None:
    """Ask this one too, at effort `high`, in the order of registration; None takes it out."""
    if rounder is None:
        _ROUNDERS.pop(name, None)
    else:
        _ROUNDERS[name] = rounder


def list_rounders() -> Mapping[str, Rounder]:
    """Those to ask."""
    return dict(_ROUNDERS)


def apply_rounding(plan: Plan, block: ExternalRounding) -> tuple[Plan, tuple[str, ...]]:
    """The plan with a block's numbers, and a line for each weight whose integers had to be moved.

    They are moved where they overflow 16-bit sums of the target's kernels, to the nearest that do not.
    Raises PlanError, naming block and site, for numbers that do not fit.
    """
    sites = {site.site: site for site in plan.sites}
    lines = []
    for site in {**block.levels, **block.numbers}:
        old = sites.get(site)
        if old is None or old.role is not Role.WEIGHT:
            raise PlanError(
                f"{block.block}: {site}", "is not a quantized weight of this plan", "hand in what it has", code="Q408"
            )
        sites[site], moved = _keep_sums(_replace_values(old, block))
        lines += [f"{block.block}: {site}: {moved}"] if moved else []
    kept = tuple(bias for bias in plan.biases if bias.edge not in block.biases)
    biases = tuple(BiasPlan(edge=edge, values=np.asarray(v, np.float32)) for edge, v in block.biases.items())
    return replace(plan, sites=tuple(sites[site.site] for site in plan.sites), biases=(*kept, *biases)), tuple(lines)


def _keep_sums(site: SitePlan) -> tuple[SitePlan, str]:
    """The site with integers that keep its 16-bit sums, and how many did not ("": none)."""
    assert site.values is not None
    _, sums = count_saturating(site.values, site.sum_orders)
    if not sums:
        return site, ""
    # The rounder knows why it chose them, so they are what to stay near to, not the float weight.
    kept = limit_sums(site.values, site.values, site.sum_orders)
    return replace(site, values=kept), f"{sums} sums of its integers would overflow 16 bits: moved to the nearest"


def _replace_values(old: SitePlan, block: ExternalRounding) -> SitePlan:
    qparams = block.numbers.get(old.site, old.qparams)
    levels = block.levels.get(old.site)
    if levels is None or qparams is None or old.qparams is None:
        cause = "comes without levels: those it has belong to other numbers"
        raise PlanError(f"{block.block}: {old.site}", cause, "hand in both", code="Q408")
    found, spec = np.asarray(levels), old.spec
    shaped = old.values is None or found.shape == old.values.shape
    whole = found.dtype.kind in "iu" and (not found.size or (found.min() >= spec.qmin and found.max() <= spec.qmax))
    if not shaped or not whole or np.shape(qparams.scale) != np.shape(old.qparams.scale):
        cause = f"its levels must be integers from {spec.qmin} to {spec.qmax}, of the weight's shape"
        raise PlanError(f"{block.block}: {old.site}", cause, "clip them, and keep the shape of its scale", code="Q408")
    kind = np.dtype(spec.numpy_storage)
    return replace(old, qparams=replace(qparams, origin=f"handed in by {block.block}"), values=found.astype(kind))
