"""Calibration: the scales and zero points of a plan, from samples and weights."""

from onnxq.calibrate.float_errors import measure_float_errors
from onnxq.calibrate.run import DEFAULT_MEMORY_LIMIT, calibrate

__all__ = ["DEFAULT_MEMORY_LIMIT", "calibrate", "measure_float_errors"]
