"""Decides: graph, target and configuration in, plan out."""

from onnxq.planner.build import Draft, anchored, draft, float_nodes
from onnxq.planner.choose import Choice
from onnxq.planner.edited import needed_opset, site_weights
from onnxq.planner.existing import NOTHING, Existing
from onnxq.planner.match import rebase
from onnxq.planner.operators import KEPT
from onnxq.planner.sums import bind_sums, count_saturating, mend_sums

__all__ = [
    "KEPT",
    "NOTHING",
    "Choice",
    "Draft",
    "Existing",
    "anchored",
    "bind_sums",
    "count_saturating",
    "draft",
    "float_nodes",
    "mend_sums",
    "needed_opset",
    "rebase",
    "site_weights",
]
