"""Calibration: the scales and zero points of a plan, from samples and weights."""

from onnxq.calibrate.float_errors import measure_float_errors
from onnxq.calibrate.run import calibrate

__all__ = ["calibrate", "measure_float_errors"]
