"""Models in ONNX's text form, as tests of all rooms write them, and what ONNX Runtime makes of a model."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper, parser

from onnxq.graph.scopes import walk_graphs

# What Python 3.10 has is older.
RECENT_ORT = tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 31)


def parse_text(text: str, *domains: str, opset: int = 17, ir: int = 8, **arrays: Any) -> onnx.ModelProto:
    """The model of a "g (…) => (…) {…}" text. domains: those of its operators beside ONNX's own.

    arrays: initializers by name, as arrays, tensors, or numbers of Python, which become float32.
    """
    imports = ", ".join([f'"" : {opset}', *(f'"{domain}" : 1' for domain in domains)])
    proto = parser.parse_model(f"<ir_version: {ir}, opset_import: [{imports}]>\n{text}")
    add_arrays(proto.graph, **arrays)
    return proto


def add_arrays(graph: onnx.GraphProto, **arrays: Any) -> None:
    """Give a graph initializers, as `parse_text` does."""
    for name, value in arrays.items():
        if isinstance(value, TensorProto):
            graph.initializer.add().CopyFrom(value)
            graph.initializer[-1].name = name
        else:
            array = value if isinstance(value, (np.ndarray, np.generic)) else np.float32(value)
            graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))


def open_session(model: str | Path | onnx.ModelProto, *, optimize: bool = True) -> onnxruntime.InferenceSession:
    """ONNX Runtime's own session, with one thread, that prints nothing."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def count_ops(model: onnx.ModelProto) -> Counter[str]:
    """How many nodes of each type, in all scopes."""
    return Counter(node.op_type for _, graph in walk_graphs(model.graph) for node in graph.node)
