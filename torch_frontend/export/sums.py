"""Weights that the exported file rounds otherwise than their quantizers did in training, said in its plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from onnxq.graph import GraphIndex
from onnxq.interop import Marked
from onnxq.numerics import quantize
from onnxq.plan import Plan
from onnxq.planner.sums import count_saturating
from onnxq.sites import Edge, Site, TensorId
from torch_frontend.quantizers import Quantizer


def warn_of_moved(marked: Marked, quantizers: Iterable[Quantizer]) -> Plan:
    """The plan, with a warning for every weight that the target makes keep 16-bit sums and training did not.

    Quantizers that a QuantModel made for this target keep them; those made by hand, or for another target, may not.
    """
    index = GraphIndex(marked.model)
    free = {quantizer.site for quantizer in quantizers if not quantizer.sum_orders()}
    lines = []
    for site, places in marked.sites.items():
        for place in places if site in free else ():
            planned, value = marked.plan.site(place), index.constant(_tensor(index, place))
            if planned.qparams is None or value is None or not planned.sum_orders:
                continue
            rows, sums = count_saturating(quantize(value, planned.qparams, planned.spec), planned.sum_orders)
            if sums:
                lines.append(
                    f"{site}: {sums} sums in {rows} rows would overflow 16 bits on CPUs without VNNI: the file has "
                    "other integers than training had; train a QuantModel made for this target, or call `bind_sums` "
                    "of the quantizer"
                )
    return replace(marked.plan, warnings=(*marked.plan.warnings, *lines))


def _tensor(index: GraphIndex, place: Site) -> TensorId:
    if isinstance(place, TensorId):
        return place
    assert isinstance(place, Edge)
    return index.resolve(index.node(place.node).inputs[place.index], place.scope) or TensorId("")
