"""Both ends of the range of an activation, as its scale and zero point have them: read, moved, stretched."""

from __future__ import annotations

from onnxq.numerics import clip_bounds, qparams_from_range
from onnxq.passes.scales import MEASURED
from onnxq.plan import SitePlan
from onnxq.spec import QParams


def is_observed(site: SitePlan) -> bool:
    """True for an activation in integers that has a range from samples."""
    return site.role in MEASURED and site.qparams is not None and not (site.spec.dynamic or site.spec.is_float)


def read_range(site: SitePlan) -> tuple[float, float]:
    """Lowest and highest value that a calibrated site can hold."""
    assert site.qparams is not None
    low, high = clip_bounds(site.qparams, site.spec)
    return float(low), float(high)


def set_range(site: SitePlan, low: float, high: float, note: str = "") -> QParams:
    """Scale and zero point of a calibrated site for another range. note: goes with the origin of its numbers."""
    assert site.qparams is not None
    return qparams_from_range(low, high, site.spec, origin=site.qparams.origin + note, bound=site.bound)


def scale_range(site: SitePlan, factor: float, note: str = "") -> QParams:
    """Scale and zero point for a range that reaches so many times as far."""
    low, high = read_range(site)
    return set_range(site, factor * low, factor * high, note)
