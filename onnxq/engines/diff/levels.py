"""The real values of the integers inside a graph, a file's or the one ORT makes of it: (q - zero_point) * scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.graph import GraphIndex, NodeRef
from onnxq.sites import TensorId

Array = NDArray[np.generic]

# Where a kernel's inputs hold the scale and zero point of its output.
_OUTPUT_SCALE = {
    "QuantizeLinear": (1, 2),
    "QLinearConv": (6, 7),
    "QLinearMatMul": (6, 7),
    "QLinearAdd": (6, 7),
    "QLinearMul": (6, 7),
    "QGemm": (7, 8),
    "QLinearWhere": (7, 8),
    "QLinearAveragePool": (3, 4),
    "QLinearGlobalAveragePool": (3, 4),
    "QLinearLeakyRelu": (3, 4),
    "QLinearReduceMean": (3, 4),
    "QLinearSigmoid": (3, 4),
    "QLinearSoftmax": (3, 4),
    "QLinearConcat": (0, 1),
}
# They move integers and leave them as they are.
_MOVERS = frozenset(
    {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather", "MaxPool", "Resize", "Expand",
     "DepthToSpace", "SpaceToDepth", "Identity", "Split", "Upsample"}
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """The affine map of one tensor with a single scale."""

    scale: float
    zero_point: int

    def to_real(self, value: Array) -> Array:
        """float64 values of integers; the value itself when it is float already."""
        if value.dtype.kind == "f":
            return value
        return (value.astype(np.float64) - self.zero_point) * self.scale


def find_level(index: GraphIndex, tensor: str) -> Level | None:
    """The scale of a main-graph tensor that holds integers; None when it has none, or one per channel."""
    node = index.producer(TensorId(tensor))
    for _ in range(len(index.nodes)):
        if node is None:
            return None
        positions = _OUTPUT_SCALE.get(node.op_type)
        if positions is not None:
            return _read_level(index, node, *positions)
        if node.op_type not in _MOVERS or not node.inputs:
            return None
        node = index.producer(TensorId(node.inputs[0]))
    return None


def _read_level(index: GraphIndex, node: NodeRef, scale_at: int, zero_at: int) -> Level | None:
    scale, zero = (index.input_value(node, k) for k in (scale_at, zero_at))
    if scale is None or scale.size != 1 or (zero is not None and zero.size != 1):
        return None
    return Level(float(scale.reshape(())), int(zero.reshape(())) if zero is not None else 0)
