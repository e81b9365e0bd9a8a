"""Scales beside those of the configuration's observers: fixed in place of those of each run, and told in words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from onnxq.calibrate import calibrate
from onnxq.passes.base import SampledContext
from onnxq.passes.state import FloatState
from onnxq.plan import Plan
from onnxq.planner.place import intersect_bounds
from onnxq.sites import Role
from onnxq.spec import ObserverSpec

MEASURED = (Role.ACTIVATION, Role.OUTPUT)
# Sites that a line names for each observer; a network has hundreds.
_SHOWN = 4


def list_replaced(before: Plan, after: Plan, roles: Collection[Role], why: str) -> str:
    """The sites of these roles whose scale changed, by the observer that gave the one before; "" where none did.

    why: the reason, and how to keep the observer's scales.
    """
    scales = {site.site: site.qparams.scale for site in before.sites if site.qparams is not None}
    replaced: dict[str, list[str]] = {}
    for site in after.sites:
        if site.role not in roles or site.site not in scales or site.qparams is None:
            continue
        if not np.array_equal(scales[site.site], site.qparams.scale):
            replaced.setdefault(name_observer(site.observer), []).append(str(site.site))
    parts = []
    for observer, names in replaced.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{observer} at {', '.join(names[:_SHOWN])}{more}")
    return f"in place of the observer {', of '.join(parts)}: {why}" if parts else ""


def name_observer(observer: ObserverSpec) -> str:
    """percentile (percentile 99.9)."""
    options = ", ".join(f"{key} {value}" for key, value in observer.options)
    return f"{observer.name} ({options})" if options else observer.name


def fix_scales(ctx: SampledContext, state: FloatState, plan: Plan) -> Plan:
    """The plan with scales that all samples share, as in one batch, in place of those of each run.

    For passes that choose where outliers spoil a batch: samples that run one by one hide the tensor that does it
    (MiniLM, in batches of 20, 19.6 dB with it).
    """
    if not any(site.spec.dynamic for site in plan.sites):
        return plan
    sites = []
    for site in plan.sites:
        if site.spec.dynamic:
            bound = intersect_bounds((site.bound, site.clip))
            site = replace(site, spec=replace(site.spec, dynamic=False), bound=bound, clip=(None, None))
        sites.append(site)
    samples, batch, limit = ctx.data.ranges, ctx.config.data.batch, ctx.memory_limit
    return calibrate(
        state.model, plan.with_sites(tuple(sites)), samples, batch=batch, memory_limit=limit, crew=ctx.crew
    )
