"""quantize(): the one orchestration, and the other commands' functions."""

from onnxq.annotate import Inspection
from onnxq.pipeline.api import annotate_bits, apply, inspect, make_plan, quantize
from onnxq.pipeline.result import Result

__all__ = ["Inspection", "Result", "annotate_bits", "apply", "inspect", "make_plan", "quantize"]
