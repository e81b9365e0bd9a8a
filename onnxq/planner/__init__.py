"""Decides: graph, target and configuration in, plan out."""

from onnxq.planner.build import Draft, anchored, draft, float_nodes
from onnxq.planner.choose import Choice
from onnxq.planner.match import rebase, site_weights

__all__ = ["Choice", "Draft", "anchored", "draft", "float_nodes", "rebase", "site_weights"]
