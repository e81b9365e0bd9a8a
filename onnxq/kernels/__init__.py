"""The fake-quant kernels without torch: what they are called with, where their sources are, how they are built.

abi       the argument of every entry point
layout    a tensor's memory as [outer, channels, inner]
launch    which CUDA kernels run, on which grid
"""

from onnxq.kernels.abi import Call, Divisor, DType, Flag
from onnxq.kernels.launch import THREADS, Launch, Plan, backward_plan, forward_plan
from onnxq.kernels.layout import Layout, layout_of

__all__ = [
    "THREADS",
    "Call",
    "DType",
    "Divisor",
    "Flag",
    "Launch",
    "Layout",
    "Plan",
    "backward_plan",
    "forward_plan",
    "layout_of",
]
