"""Warnings for weights that the exported file rounds otherwise than their quantizers did in training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from onnxq.graph import GraphIndex
from onnxq.interop import Marked
from onnxq.numerics import quantize
from onnxq.plan import Plan, SitePlan
from onnxq.planner.sums import count_saturating, read_constant
from onnxq.sites import Caution, Role
from torch_frontend.quantizers import Quantizer


def warn_of_moved_weights(marked: Marked, quantizers: Iterable[Quantizer]) -> Plan:
    """The plan, with a warning for every weight whose 16-bit sums are kept in the file or in training, not in both.

    A QuantModel keeps those of its own target; quantizers made by hand, or for another target, may not.
    """
    index = GraphIndex(marked.model)
    lines = []
    for quantizer in quantizers:
        for place in marked.sites[quantizer.site] if quantizer.role is Role.WEIGHT else ():
            line = _explain_difference(quantizer, marked.plan.site(place), index)
            lines += [Caution("W107", f"{quantizer.site}: {line}")] if line else []
    return replace(marked.plan, warnings=(*marked.plan.warnings, *lines))


def _explain_difference(quantizer: Quantizer, planned: SitePlan, index: GraphIndex) -> str:
    """How the file's weight differs from training's; "" if it does not."""
    trained = bool(quantizer.sum_orders())
    if trained and not planned.sum_orders:
        return "kept 16-bit sums in training that the kernels of this file do not have: rounded to nearest here"
    # The float file holds the baked weight, whose integers are those of training.
    value = read_constant(index, planned.site)
    if trained or not planned.sum_orders or planned.qparams is None or value is None:
        return ""
    # The file keeps sums that training did not: it matters only where the trained integers overflow one.
    _, sums = count_saturating(quantize(value, planned.qparams, planned.spec), planned.sum_orders)
    if not sums:
        return ""
    return (
        f"{sums} sums would overflow 16 bits on CPUs without VNNI: the file has other integers than training had; "
        "train a QuantModel made for this target, or call `bind_sums` of the quantizer"
    )
