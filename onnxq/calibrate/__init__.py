"""A plan and samples in, the plan with its numbers out."""

from onnxq.calibrate.run import DEFAULT_MEMORY_LIMIT, calibrate

__all__ = ["DEFAULT_MEMORY_LIMIT", "calibrate"]
