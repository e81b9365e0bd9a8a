"""Scales and zero points that a person's edit of the plan has outdated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxq.errors import PlanError
from onnxq.numerics import bias_qparams
from onnxq.plan.model import Plan, SitePlan
from onnxq.sites import Role, Site
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec


def is_stale(site: SitePlan) -> bool:
    """True when the site's scale and zero point were computed for another spec than it has now."""
    numbers = site.qparams
    return numbers is not None and numbers.computed_for not in ("", site.spec.levels)


def drop_stale(plan: Plan) -> tuple[Plan, dict[Site, str]]:
    """The plan without outdated numbers, and the reason for each removal, by site.

    A weight loses its quantized values with its scale. A bias takes the granularity of its weight, and loses its
    numbers, without a reason of its own, when its input or its weight does. Numbers that a person wrote stay.
    Raises PlanError where sites that share a scale have different specs or scales.
    """
    _check_groups(plan)
    lines: dict[Site, str] = {}
    for site in plan.sites:
        if is_stale(site) and site.qparams is not None:
            cause = f"its scale was computed for {site.qparams.computed_for}, and the plan says {site.spec.levels}"
            lines[site.site] = cause
    numbers = {site.site: site.qparams for site in plan.all_sites if site.site not in lines}
    specs = {site.site: site.spec for site in plan.all_sites}
    sites = []
    for site in plan.sites:
        if site.site in lines:
            site = replace(site, qparams=None, values=None)
        elif site.role is Role.BIAS and site.derived is not None:
            x, w = (numbers.get(part) for part in site.derived)
            site, cause = _update_bias(site, x, w, specs.get(site.derived[1]))
            lines |= {site.site: cause} if cause else {}
        sites.append(site)
    return replace(plan, sites=tuple(sites)), lines


def _update_bias(
    site: SitePlan, x: QParams | None, w: QParams | None, weight: QuantSpec | None
) -> tuple[SitePlan, str]:
    """The bias with the granularity of its weight, and the reason if its numbers are removed for a scale of its own.

    x, w: numbers of its input and its weight, None where they were removed. weight: the spec of the weight.
    """
    held = site.qparams
    grain = PerChannel(0) if weight is not None and isinstance(weight.granularity, PerChannel) else PerTensor()
    if weight is not None and grain != site.spec.granularity:
        return replace(site, spec=replace(site.spec, granularity=grain), qparams=None, values=None), ""
    if held is None:
        return site, ""
    if x is None or w is None:
        return replace(site, qparams=None, values=None), ""
    size = np.size(w.scale)
    if np.size(x.scale) != 1 or np.ndim(w.scale) > 1 or not size or held.scale.size % size:
        # Not to be judged here: computing the bias raises an error that names the shapes.
        return site, ""
    wanted = bias_qparams(x, w, held.scale.size).scale
    if wanted.shape == held.scale.shape and np.array_equal(wanted, held.scale):
        return site, ""
    return replace(site, qparams=None, values=None), "its scale was not that of its input times that of its weight"


def _check_groups(plan: Plan) -> None:
    """Raise PlanError for a sharing group whose members have different specs or numbers."""
    first: dict[str, SitePlan] = {}
    for site in plan.all_sites:
        if not site.group or site.role in (Role.WEIGHT, Role.BIAS):
            continue
        other = first.setdefault(site.group, site)
        shares, members = f"shares its scale with {other.site}, and", f"give all sites of group {site.group!r}"
        if other.spec.levels != site.spec.levels:
            cause = f"{shares} they are quantized differently: {site.spec.levels} here, {other.spec.levels} there"
            fix = f"{members} one spec, or take `group` out of this one"
            raise PlanError(str(site.site), cause, fix, code="Q403")
        mine, theirs = site.qparams, other.qparams
        same = mine is None or theirs is None or np.array_equal(mine.scale, theirs.scale)
        if not same or (mine is not None and theirs is not None and (mine.zero_point != theirs.zero_point).any()):
            fix = f"{members} the same scale and zero_point"
            raise PlanError(str(site.site), f"{shares} their numbers differ", fix, code="Q403")
