"""ONNX Runtime: sessions, tapped runs, shapes, timings. The only user of onnxruntime, which loads at first use."""

from onnxq.runtime.cpu import CPU_KINDS, detect_cpu
from onnxq.runtime.faults import NodeError, UnknownOperatorError
from onnxq.runtime.graphs import optimize_graph
from onnxq.runtime.libraries import list_open_libraries, use_libraries
from onnxq.runtime.memory import trim_memory
from onnxq.runtime.providers import CPU, find_provider, use_provider, use_runtime
from onnxq.runtime.session import Feeds, Session
from onnxq.runtime.shapes import ShapeProbe, Shapes, observe_shapes
from onnxq.runtime.tap import Tapped, tap_tensors
from onnxq.runtime.timing import Latency, convert_floats, measure_nodes, summarize_rounds, time_models

__all__ = [
    "CPU",
    "CPU_KINDS",
    "Feeds",
    "Latency",
    "NodeError",
    "Session",
    "ShapeProbe",
    "Shapes",
    "Tapped",
    "UnknownOperatorError",
    "convert_floats",
    "detect_cpu",
    "find_provider",
    "list_open_libraries",
    "measure_nodes",
    "observe_shapes",
    "optimize_graph",
    "summarize_rounds",
    "tap_tensors",
    "time_models",
    "trim_memory",
    "use_libraries",
    "use_provider",
    "use_runtime",
]
