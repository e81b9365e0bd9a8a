"""A linear layer whose input has an outlier, with its calibrated plan."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

import onnxq
from onnxq.calibrate import calibrate
from onnxq.config import Config, Rule
from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.state import FloatState
from onnxq.pipeline.prepared import load_state
from onnxq.plan import Plan
from tests.pipeline.models import residual

ALL = (Rule(op="*", set={"quantize": True}),)  # type: ignore[arg-type]

MINMAX = Config(rules=ALL)

LINEAR = """
agraph (float[N, 64, 4] x, int64[N, 64] attention_mask) => (float[N, 64, 6] y) { y = MatMul(x, w) }
"""


def linear(outlier: float) -> onnx.ModelProto:
    """A MatMul whose weights for channel 0 are this large."""
    weight = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    weight[0] = outlier * np.sign(weight[0])
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{LINEAR}')
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return proto


def tokens(count: int, *, seed: int = 0, padding: float = 1.0) -> dict[str, np.ndarray]:
    """Channel 0 is a hundred times as large as the others, in two samples; the last half of each sample is padding."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, 64, 4)).astype(np.float32)
    x[[0, 5], 0, 0] = 100.0
    x[:, 32:] *= padding
    mask = np.ones((count, 64), np.int64)
    mask[:, 32:] = 0
    return {"x": x, "attention_mask": mask}


def prepared_plan(
    proto: onnx.ModelProto, feeds: dict[str, np.ndarray], config: Config = MINMAX
) -> tuple[FloatState, Plan]:
    prepared = load_state(proto)
    data = load_data(feeds, GraphIndex(prepared.model).inputs)
    return prepared, calibrate(prepared.model, onnxq.make_plan(proto, feeds, config), data)


def deaf() -> onnx.ModelProto:
    """`residual` whose first convolution does not hear channel 0."""
    proto = residual()
    held = next(tensor for tensor in proto.graph.initializer if tensor.name == "w0")
    weight = numpy_helper.to_array(held).copy()
    weight[:, 0] = 0.0
    held.CopyFrom(numpy_helper.from_array(weight, "w0"))
    return proto
