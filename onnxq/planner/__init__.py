"""Decides: graph, target and configuration in, plan out."""

from onnxq.planner.build import (
    EMBEDDING_ROWS,
    OnnxPlacement,
    Table,
    anchor_sites,
    choose_tables,
    find_needed_opset,
    state_placement,
)
from onnxq.planner.choose import Choice, Forced, weigh_forced
from onnxq.planner.match import fit_plan
from onnxq.planner.place import find_float_nodes, list_weighted
from onnxq.planner.precision.choose import (
    add_precision,
    choose_types,
    find_suspects,
    find_type_opset,
)
from onnxq.planner.precision.reasons import PrecisionProblem, TensorErrors
from onnxq.planner.problem import KEPT, NOTHING, Existing
from onnxq.planner.sums import bind_sums, digest_weights

__all__ = [
    "EMBEDDING_ROWS",
    "KEPT",
    "NOTHING",
    "Choice",
    "Existing",
    "Forced",
    "OnnxPlacement",
    "PrecisionProblem",
    "Table",
    "TensorErrors",
    "add_precision",
    "anchor_sites",
    "bind_sums",
    "choose_tables",
    "choose_types",
    "digest_weights",
    "find_float_nodes",
    "find_needed_opset",
    "find_suspects",
    "find_type_opset",
    "fit_plan",
    "list_weighted",
    "state_placement",
    "weigh_forced",
]
