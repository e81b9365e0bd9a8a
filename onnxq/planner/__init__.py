"""Decides: graph, target and configuration in, plan out."""

from onnxq.planner.build import Draft, draft
from onnxq.planner.choose import Choice
from onnxq.planner.match import rebase

__all__ = ["Choice", "Draft", "draft", "rebase"]
