"""Networks of one operator, and calibrated plans to round."""

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxq
from onnxq.calibrate import calibrate
from onnxq.config import Config, TensorConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.state import FloatState
from onnxq.pipeline.prepared import load_state
from onnxq.plan import Plan
from tests.pipeline.models import EVERYTHING

ALL = EVERYTHING.rules

FOUR = Config(
    rules=ALL,
    effort="balanced",
    skip=("cross_layer_equalization", "smoothquant"),
    weights=TensorConfig(granularity="channel", bits=4, narrow_range=True),
)


def calibrated(
    proto: onnx.ModelProto, feeds: Any, config: Config
) -> tuple[FloatState, Plan, list[dict[str, np.ndarray]]]:
    prepared = load_state(proto)
    data = load_data(feeds, GraphIndex(prepared.model).inputs)
    plan = onnxq.make_plan(proto, feeds, config)
    return prepared, calibrate(prepared.model, plan, data), list(data.samples())


def one_node(op: str, w: np.ndarray, x: tuple[Any, ...], **attrs: Any) -> onnx.ModelProto:
    held = [numpy_helper.from_array(w, "w")]
    node = helper.make_node(op, ["x", "w"], ["y"], name="op", **attrs)
    info = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [info("x", 1, x)], [info("y", 1, [None] * len(x))], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
