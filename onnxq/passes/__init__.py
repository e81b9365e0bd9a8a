"""Passes: rewrites of the float graph, equalization, and everything that makes a calibrated plan better.

`registry.PASSES` lists them in their order, `runner` runs them, `base` defines their arguments and results.
"""

from onnxq.passes.assembly import build_file, build_quantized, run_metric
from onnxq.passes.base import EqualizeContext, RunContext, SampledContext
from onnxq.passes.journal import LOST_DB, PassReport, Promotion
from onnxq.passes.judging import SampleSets
from onnxq.passes.state import FloatState, PlacedState, PlannedState
from onnxq.passes.time_budget import Timers

__all__ = [
    "LOST_DB",
    "EqualizeContext",
    "FloatState",
    "PassReport",
    "PlacedState",
    "PlannedState",
    "Promotion",
    "RunContext",
    "SampleSets",
    "SampledContext",
    "Timers",
    "build_file",
    "build_quantized",
    "run_metric",
]
