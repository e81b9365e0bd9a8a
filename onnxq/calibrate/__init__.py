"""A plan and samples in, the plan with its numbers out."""

from onnxq.calibrate.activations import Progress, Task
from onnxq.calibrate.run import DEFAULT_MEMORY_LIMIT, calibrate

__all__ = ["DEFAULT_MEMORY_LIMIT", "Progress", "Task", "calibrate"]
