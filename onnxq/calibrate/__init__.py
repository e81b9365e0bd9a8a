"""Calibration: the scales and zero points of a plan, from samples and weights."""

from onnxq.calibrate.run import DEFAULT_MEMORY_LIMIT, calibrate

__all__ = ["DEFAULT_MEMORY_LIMIT", "calibrate"]
