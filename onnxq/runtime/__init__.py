"""ONNX Runtime: sessions, tapped runs, shapes, timings. The only user of onnxruntime, which loads at first use."""

from onnxq.numerics.machine import CPU_KINDS, detect_cpu, trim_memory
from onnxq.runtime.faults import KernelError, NodeError, UnknownOperatorError
from onnxq.runtime.fronts import Rest, find_front, has_custom
from onnxq.runtime.kernel_types import declare_types
from onnxq.runtime.session import (
    Feeds,
    Session,
    check_libraries,
    check_provider,
    find_runnable_opset,
    optimize_graph,
)
from onnxq.runtime.tap import Shapes, Tapped, observe_shapes, tap_tensors
from onnxq.runtime.timing import Latency, convert_floats, summarize_rounds, time_models

__all__ = [
    "CPU_KINDS",
    "Feeds",
    "KernelError",
    "Latency",
    "NodeError",
    "Rest",
    "Session",
    "Shapes",
    "Tapped",
    "UnknownOperatorError",
    "check_libraries",
    "check_provider",
    "convert_floats",
    "declare_types",
    "detect_cpu",
    "find_front",
    "find_runnable_opset",
    "has_custom",
    "observe_shapes",
    "optimize_graph",
    "summarize_rounds",
    "tap_tensors",
    "time_models",
    "trim_memory",
]
