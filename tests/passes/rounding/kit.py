"""Networks of one operator, calibrated plans to round, and the rounding strategies on bare arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import onnxq
from onnxq.calibrate import calibrate
from onnxq.config import Config, TensorConfig
from onnxq.data import load_data
from onnxq.graph import GraphIndex
from onnxq.passes.rounding import gptq_core, low_bit_core
from onnxq.passes.rounding.gptq_core import ErrorFeedback, RoundedWeight, RoundingProblem
from onnxq.passes.rounding.low_bit_core import FACTORS
from onnxq.passes.rounding.second_moments import Accumulator, Part
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


Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class _HeldColumns:
    x: Array
    y: Array

    def take_columns(self, first: int, last: int, *, both: bool) -> Sequence[Array]:
        return [columns[:, :, first:last] for columns in ((self.y, self.x) if both else (self.y,))]


def add_samples(sums: Accumulator, x: Array, y: Array, parts: Sequence[Part] | None = None) -> None:
    """Add x and y, float32 [groups, K, n]. parts: means over all positions, if x and y hold only some."""
    count = x.shape[2]
    if count and parts is None:
        parts = [(count, x.mean(axis=2, dtype=np.float64), y.mean(axis=2, dtype=np.float64))]
    sums.add_columns(_HeldColumns(x, y), count, parts or ())
    for block in sums.take_blocks():
        sums.add_products(block.multiply_columns())


def pose(
    w: Array,
    feedback: ErrorFeedback,
    scale: Array,
    zero: Array,
    limits: tuple[int, int],
    partner: Array | None = None,
    **more: Any,
) -> RoundingProblem:
    """The problem of these arrays, each [groups, rows, K]."""
    return RoundingProblem(w, scale, zero, limits, feedback, partner=partner, **more)


def round_with_feedback(w: Array, feedback: ErrorFeedback, *arrays: Any) -> NDArray[np.int32]:
    return gptq_core.round_with_feedback(pose(w, feedback, *arrays)).codes


def round_to_nearest(
    w: Array, scale: Array, zero: Array, limits: tuple[int, int], partner: Array | None = None
) -> NDArray[np.int32]:
    # It asks for no second moments.
    return gptq_core.round_to_nearest(pose(w, None, scale, zero, limits, partner)).codes  # type: ignore[arg-type]


def round_within_sums(w: Array, feedback: ErrorFeedback, *arrays: Any) -> RoundedWeight:
    return gptq_core.round_within_sums(pose(w, feedback, *arrays))


def round_low_bit(w: Array, feedback: ErrorFeedback, *arrays: Any, **more: Any) -> RoundedWeight:
    return low_bit_core.round_low_bit(pose(w, feedback, *arrays, factors=FACTORS, **more))
