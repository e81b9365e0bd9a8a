"""What a strict target's engine would refuse, or read wrongly, found in the plan: the site is named, nothing is built.

The configuration is checked when it is read and every unit when it is placed; plans also come from people, from
older versions and from other tools, and numbers from observers and calibration caches.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from onnxq.errors import PlanError
from onnxq.graph import GraphIndex
from onnxq.plan.model import Plan, SitePlan
from onnxq.sites import Role
from onnxq.targets import TARGETS, Target, describe


def check_specs(plan: Plan, index: GraphIndex) -> None:
    """PlanError for the first site whose spec the plan's target has no kernel for. `index`: of the prepared model."""
    engines = _strict(plan)
    for site in plan.sites if engines else ():
        if site.role is Role.BIAS:
            if not any(engine.int32_bias for engine in engines):
                raise PlanError(
                    str(site.site),
                    f"{plan.target} takes biases in float only",
                    "take this site out of the plan",
                    code="Q406",
                )
            continue
        edge = site.consumers[0] if site.consumers else None
        op_type = index.node(edge.node).op_type if edge is not None else ""
        if not any(engine.capability(site.spec, site.role, op_type) is not None for engine in engines):
            what = f"{describe(site.spec)} {site.role}s" + (f" of {op_type}" if op_type else "")
            raise PlanError(
                str(site.site),
                f"{plan.target} has no kernel for {what}",
                f"plan the model again for {plan.target}, or give the site a spec from a fresh plan",
                code="Q406",
            )


def check_numbers(plan: Plan) -> None:
    """PlanError for the first site whose numbers the plan's target cannot use. Sites without numbers pass."""
    engines = _strict(plan)
    for site in plan.sites if engines else ():
        fault = _fault(site, engines)
        if fault:
            raise PlanError(str(site.site), f"{fault[0]}, which {plan.target} refuses", fault[1], code="Q406")


def _fault(site: SitePlan, engines: Iterable[Target]) -> tuple[str, str] | None:
    numbers = site.qparams
    if numbers is None:
        return None
    scale, zero = np.asarray(numbers.scale), np.asarray(numbers.zero_point)
    if zero.any() and not any(engine.zero_points for engine in engines):
        return f"its zero point is {int(zero.ravel()[np.flatnonzero(zero)[0]])}", "quantize it symmetrically, around 0"
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return "its scale is 0, negative or not finite", "calibrate this site again"
    if site.role is not Role.WEIGHT and scale.shape != ():
        return f"its scale has shape {list(scale.shape)} where one number of shape [] must stand", "give one scale"
    return None


def _strict(plan: Plan) -> tuple[Target, ...]:
    return tuple(engine for (name, _), engine in TARGETS.items() if name == plan.target and engine.strict)
