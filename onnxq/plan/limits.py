"""Checks of a plan against its target: specs without a kernel, and numbers that no engine can use.

Planning checks the configuration and every site it places. Plans also come from people, from older versions and from
other tools, and numbers from observers and calibration caches, so both are checked again before pairs are written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.backends import Target, describe_spec, find_modes
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex
from onnxq.graph.stored import release_pages
from onnxq.plan.model import Plan, SitePlan
from onnxq.sites import Role
from onnxq.spec import PerBlock, PerTensor


def check_specs(plan: Plan, index: GraphIndex) -> None:
    """Raise PlanError for the first site whose spec the plan's target has no kernel for.

    index: of the prepared model. Only strict targets refuse specs; a bias must be int32 for all.
    """
    engines = _find_strict_targets(plan)
    for site in plan.sites:
        if site.role is Role.BIAS:
            if site.spec.storage != "int32" or site.spec.bits != 32 or not site.spec.symmetric:
                cause = f"a bias is 32 bits in int32, symmetric, not {describe_spec(site.spec)}"
                raise PlanError(str(site.site), cause, "write it so, or take this site out of the plan", code="Q403")
            if engines and not any(engine.int32_bias for engine in engines):
                cause = f"{plan.target} takes biases in float only"
                raise PlanError(str(site.site), cause, "take this site out of the plan", code="Q406")
            continue
        edge = site.consumers[0] if site.consumers else None
        op_type = index.node(edge.node).op_type if edge is not None else ""
        if engines and not any(engine.capability(site.spec, site.role, op_type) is not None for engine in engines):
            what = f"{describe_spec(site.spec)} {site.role}s" + (f" of {op_type}" if op_type else "")
            fix = f"plan the model again for {plan.target}, or give the site a spec from a fresh plan"
            raise PlanError(str(site.site), f"{plan.target} has no kernel for {what}", fix, code="Q406")


def check_numbers(plan: Plan) -> None:
    """Raise PlanError for the first site whose scale or zero point the plan's target cannot use.

    Sites without numbers pass.
    """
    engines = _find_strict_targets(plan)
    signed = any(engine.signed_scales for engine in find_modes(plan.target).values())
    for site in plan.sites:
        if site.clip != (None, None):
            _check_clip(site)
        numbers = site.qparams
        if numbers is None:
            continue
        subject, scale, zero = str(site.site), np.asarray(numbers.scale), np.asarray(numbers.zero_point)
        if zero.any() and engines and not any(engine.zero_points for engine in engines):
            cause = f"its zero point is {int(zero.ravel()[np.flatnonzero(zero)[0]])}, which {plan.target} refuses"
            raise PlanError(subject, cause, "quantize it symmetrically, around 0", code="Q406")
        fault = _find_fault(site, scale, zero, signed=signed)
        if fault:
            raise PlanError(subject, *fault, code="Q407")
        release_pages(scale, zero)


def _check_clip(site: SitePlan) -> None:
    low, high = (0.0 if end is None else end for end in site.clip)
    if not site.spec.dynamic:
        cause, fix = "`clip` is for sites on scales of each run, and this one has its range", "take `clip` out"
        raise PlanError(str(site.site), cause, fix, code="Q403")
    if low > 0 or high < 0 or low == high:
        cause = f"`clip` {list(site.clip)} does not hold 0 and a value beside it"
        raise PlanError(str(site.site), cause, "give the lowest value, at most 0, and the highest", code="Q403")


def _find_fault(site: SitePlan, scale: NDArray[Any], zero: NDArray[Any], *, signed: bool) -> tuple[str, str] | None:
    """The fault of a scale and zero point, and its fix; None without one. signed: scales of blocks may be negative."""
    again = "correct it, or take scale and zero_point out of the plan to have them computed"
    blocks = site.role is Role.WEIGHT and isinstance(site.spec.granularity, PerBlock)
    if not (np.isfinite(scale).all() and (scale.all() if signed and blocks else (scale > 0).all())):
        return "its scale is 0, negative or not finite", again
    if isinstance(site.spec.granularity, PerTensor) and scale.shape != ():
        return f"its scale has shape {list(scale.shape)} where one number of shape [] must stand", "give one scale"
    if scale.shape != zero.shape:
        return f"its scale has shape {list(scale.shape)}, its zero point {list(zero.shape)}", "give both one shape"
    # FP8 has no zero point: 0 must stand there.
    low, high = (0, 0) if site.spec.is_float else (site.spec.qmin, site.spec.qmax)
    if zero.size and (zero.min() < low or zero.max() > high):
        return f"its zero point {int(zero.min() if zero.min() < low else zero.max())} is outside {low}…{high}", again
    return None


def _find_strict_targets(plan: Plan) -> tuple[Target, ...]:
    """The plan's target in each mode, if it refuses files with other specs; a plan does not say its mode."""
    return tuple(engine for engine in find_modes(plan.target).values() if engine.strict)
