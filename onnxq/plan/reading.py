"""Plans that come from people, files and other tools: to JSON and back, outdated numbers, checks against the target.

Plan to JSON and back is without loss; a person can read and edit the text. Its keys are the fields of `Plan`.
Planning checks the configuration and every site it places; a plan from elsewhere, and numbers from observers and
calibration caches, are checked again before pairs are written.
"""

import json
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np

from onnxq.arrays import Array, are_finite
from onnxq.backends import Target, find_modes
from onnxq.config import Frozen
from onnxq.config.document import shorten_value
from onnxq.config.rows import read_fields, write_fields
from onnxq.config.schema import JsonText, SchemaNumber
from onnxq.errors import CauseAndFix, PlanError, escape_json
from onnxq.files import find_calibrator
from onnxq.graph import GraphIndex, release_pages
from onnxq.numerics import bias_qparams
from onnxq.plan.model import SCHEMA, Plan, SitePlan
from onnxq.sites import Site
from onnxq.spec import PerChannel, PerTensor, QParams, QuantSpec, describe_spec

# By the tool that wrote a calibration file.
_CALIBRATIONS = {
    "TensorRT": "`onnxq import-calibration` makes a plan of it",
    "ONNX Runtime": "give `quantize` the samples that it was made of: it finds ranges of its own",
}
_WRITE = "write it with `onnxq plan`"
_FRESH = "compare with a fresh `onnxq plan`"


class _PlanFile(Frozen):
    version: SchemaNumber


def to_json(plan: Plan) -> str:
    """The plan as JSON text; equal plans give equal bytes."""
    fields = {"schema": plan.schema, **write_fields(plan)}
    return escape_json(json.dumps(fields, indent=1, ensure_ascii=False)) + "\n"


def from_json(text: str, *, source: str | FilePath = "plan") -> Plan:
    """The plan of JSON text.

    source: the file it was read from, or a name for text from elsewhere.
    Raises PlanError naming the line and the entry at fault.
    """
    try:
        return _read_plan(text, str(source))
    except PlanError as error:
        if isinstance(source, FilePath):
            raise error.name_file(source) from error
        raise


def _read_plan(text: str, source: str) -> Plan:
    # Some editors save UTF-8 with a byte order mark.
    read = JsonText(source, text.removeprefix("\ufeff"))
    if tool := find_calibrator(text):
        raise PlanError(
            source,
            f"is a calibration file of {tool}, and no plan",
            _CALIBRATIONS[tool],
            code="Q401",
        )
    raw = read.parse(PlanError, _WRITE, code="Q401")
    if not isinstance(raw, dict) or "schema" not in raw:
        raise PlanError(source, "not a plan: no `schema`", _WRITE, code="Q401")
    # Before the rest: a file of another version has other keys, and telling of those would mislead.
    if raw["schema"] != SCHEMA:
        cause = f"plan schema {shorten_value(raw['schema'])}, this onnxq reads {SCHEMA}"
        raise PlanError(source, cause, "plan the model again", code="Q401")
    return read_fields(read, Plan, PlanError, _FRESH, code="Q403", base=_PlanFile)


def drop_stale(plan: Plan) -> tuple[Plan, dict[Site, str]]:
    """The plan without outdated numbers, and the reason for each removal, by site.

    A weight loses its quantized values with its scale. A bias takes the granularity of its weight, and loses its
    numbers, without a reason of its own, when its input or its weight does. Numbers that a person wrote stay.
    Raises PlanError where sites that share a scale have different specs or scales.
    """
    _check_groups(plan)
    lines = {
        site.site: f"its scale was computed for {site.qparams.computed_for}, and the plan says {site.spec.levels}"
        for site in plan.sites
        if site.qparams is not None and site.qparams.computed_for not in ("", site.spec.levels)
    }
    qparams = {site.site: site.qparams for site in plan.all_sites if site.site not in lines}
    specs = {site.site: site.spec for site in plan.all_sites}
    sites = []
    for site in plan.sites:
        if site.site in lines:
            site = site.without_numbers()
        elif site.role.is_bias and site.derived is not None:
            x, w = map(qparams.get, site.derived)
            site, cause = _update_bias(site, x, w, specs.get(site.derived[1]))
            lines |= {site.site: cause} if cause else {}
        sites.append(site)
    return plan.with_sites(sites), lines


def _update_bias(
    site: SitePlan, x: QParams | None, w: QParams | None, weight: QuantSpec | None
) -> tuple[SitePlan, str]:
    """The bias with the granularity of its weight, and the reason if its numbers are removed for a scale of its own.

    x, w: numbers of its input and its weight, None where they were removed. weight: the spec of the weight.
    """
    qparams = site.qparams
    grain = PerChannel(0) if weight is not None and weight.has_channels else PerTensor()
    if weight is not None and grain != site.spec.granularity:
        return replace(site.without_numbers(), spec=replace(site.spec, granularity=grain)), ""
    if qparams is None:
        return site, ""
    if x is None or w is None:
        return site.without_numbers(), ""
    size = np.size(w.scale)
    if np.size(x.scale) != 1 or np.ndim(w.scale) > 1 or not size or qparams.scale.size % size:
        # Not to be judged here: computing the bias raises an error that names the shapes.
        return site, ""
    wanted = bias_qparams(x, w, qparams.scale.size).scale
    if wanted.shape == qparams.scale.shape and np.array_equal(wanted, qparams.scale):
        return site, ""
    return site.without_numbers(), "its scale was not that of its input times that of its weight"


def _check_groups(plan: Plan) -> None:
    """Raise PlanError for a sharing group whose members have different specs or numbers."""
    first: dict[str, SitePlan] = {}
    for site in plan.all_sites:
        if not site.group or site.role.is_constant:
            continue
        other = first.setdefault(site.group, site)
        shares = f"shares its scale with {other.site}, and"
        members = f"give all sites of group {site.group!r}"
        if other.spec.levels != site.spec.levels:
            cause = f"{shares} they are quantized differently: {site.spec.levels} here, {other.spec.levels} there"
            fix = f"{members} one spec, or take `group` out of this one"
            raise PlanError(site.name, cause, fix, code="Q403")
        mine = site.qparams
        theirs = other.qparams
        if mine is None or theirs is None:
            continue
        same = np.array_equal(mine.scale, theirs.scale)
        if not same or (mine.zero_point != theirs.zero_point).any():
            fix = f"{members} the same scale and zero_point"
            raise PlanError(site.name, f"{shares} their numbers differ", fix, code="Q403")


def check_specs(plan: Plan, index: GraphIndex) -> None:
    """Raise PlanError for the first site whose spec the plan's target has no kernel for.

    index: of the prepared model. Only strict targets refuse specs; a bias must be int32 for all.
    """
    engines = _find_strict_targets(plan)
    for site in plan.sites:
        spec = site.spec
        if site.role.is_bias:
            if spec.storage != "int32" or spec.bits != 32 or not spec.symmetric:
                cause = f"a bias is 32 bits in int32, symmetric, not {describe_spec(spec)}"
                raise PlanError(
                    site.name,
                    cause,
                    "write it so, or take this site out of the plan",
                    code="Q403",
                )
            if engines and not any(engine.int32_bias for engine in engines):
                cause = f"{plan.target} takes biases in float only"
                raise PlanError(site.name, cause, "take this site out of the plan", code="Q406")
            continue
        op_type = index.find_node(site.consumers[0].node).op_type if site.consumers else ""
        if engines and not any(
            engine.capability(spec, site.role, op_type) is not None for engine in engines
        ):
            what = f"{describe_spec(spec)} {site.role}s" + (f" of {op_type}" if op_type else "")
            fix = (
                f"plan the model again for {plan.target}, or give the site a spec from a fresh plan"
            )
            raise PlanError(site.name, f"{plan.target} has no kernel for {what}", fix, code="Q406")


def check_numbers(plan: Plan) -> None:
    """Raise PlanError for the first site whose scale or zero point the plan's target cannot use.

    Sites without numbers pass.
    """
    engines = _find_strict_targets(plan)
    signed = any(engine.signed_scales for engine in find_modes(plan.target).values())
    for site in plan.sites:
        if site.clip != (None, None):
            _check_clip(site)
        qparams = site.qparams
        if qparams is None:
            continue
        subject = site.name
        scale = np.asarray(qparams.scale)
        zero = np.asarray(qparams.zero_point)
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
        cause = "`clip` is for sites on scales of each run, and this one has its range"
        raise PlanError(site.name, cause, "take `clip` out", code="Q403")
    if low > 0 or high < 0 or low == high:
        cause = f"`clip` {list(site.clip)} does not hold 0 and a value beside it"
        raise PlanError(
            site.name, cause, "give the lowest value, at most 0, and the highest", code="Q403"
        )


def _find_fault(site: SitePlan, scale: Array, zero: Array, *, signed: bool) -> CauseAndFix | None:
    """The fault of a scale and zero point, and its fix; None without one. signed: scales of blocks may be negative."""
    again = "correct it, or take scale and zero_point out of the plan to have them computed"
    blocks = site.role.is_weight and site.spec.has_blocks
    if not (are_finite(scale) and (scale.all() if signed and blocks else (scale > 0).all())):
        return "its scale is 0, negative or not finite", again
    if site.spec.has_one_scale and scale.shape != ():
        return (
            f"its scale has shape {list(scale.shape)} where one number of shape [] must stand",
            "give one scale",
        )
    if scale.shape != zero.shape:
        return (
            f"its scale has shape {list(scale.shape)}, its zero point {list(zero.shape)}",
            "give both one shape",
        )
    # FP8 has no zero point: 0 must stand there.
    low, high = (0, 0) if site.spec.is_float else (site.spec.qmin, site.spec.qmax)
    if zero.size and (zero.min() < low or zero.max() > high):
        outside = int(zero.min() if zero.min() < low else zero.max())
        return f"its zero point {outside} is outside {low}…{high}", again
    return None


def _find_strict_targets(plan: Plan) -> tuple[Target, ...]:
    """The plan's target in each mode, if it refuses files with other specs; a plan does not say its mode."""
    return tuple(engine for engine in find_modes(plan.target).values() if engine.strict)
