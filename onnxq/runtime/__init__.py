"""ONNX Runtime: sessions, tapped runs, shapes, timings. The only user of onnxruntime, which loads at first use."""

from onnxq.runtime.cpu import CPU_KINDS, cpu_kind
from onnxq.runtime.faults import NodeError, UnknownOperatorError
from onnxq.runtime.graphs import optimized_graph
from onnxq.runtime.libraries import open_libraries, operator_libraries
from onnxq.runtime.memory import trim
from onnxq.runtime.session import Feeds, Session
from onnxq.runtime.shapes import ShapeProbe, Shapes, observe_shapes
from onnxq.runtime.tap import Tapped, tap
from onnxq.runtime.timing import Latency, latency, node_times

__all__ = [
    "CPU_KINDS",
    "Feeds",
    "Latency",
    "NodeError",
    "Session",
    "ShapeProbe",
    "Shapes",
    "Tapped",
    "UnknownOperatorError",
    "cpu_kind",
    "latency",
    "node_times",
    "observe_shapes",
    "open_libraries",
    "operator_libraries",
    "optimized_graph",
    "tap",
    "trim",
]
