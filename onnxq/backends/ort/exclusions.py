"""Operators that stay float in ONNX Runtime whatever they would gain."""

from __future__ import annotations

from onnxq.backends.base import ExclusionRule, Operator, Operators
from onnxq.sites import TensorId

# What may stand between a graph input and the stem.
_PREPROCESSING = frozenset(
    ("Cast", "Sub", "Add", "Mul", "Div", "Transpose", "Reshape", "Unsqueeze", "Identity", "Pad", "Slice")
)
# Channels of pictures, with one for transparency; more come from another network.
_STEM_CHANNELS = 4
# Pixels of the map, of a picture of 224 pixels behind a stem of stride 2.
_STEM_DEPTHWISE_PIXELS = 112 * 112
# Nodes between a graph input and the stem; more are a network and no preprocessing.
_PREPROCESSED = 16


def _explain_stem(ops: Operators, op: Operator) -> str | None:
    if op.node.op_type != "Conv":
        return None
    weight = ops.candidate(op.node).shape(1)
    if weight is None or len(weight) != 4 or weight[1] > _STEM_CHANNELS or int(op.node.attrs.get("group", 1)) != 1:
        return None
    if not _reads_graph_input(ops, op.data[0][1]):
        return None
    return "the first convolution: slower in int8, and its noise reaches everything behind it"


def _reads_graph_input(ops: Operators, tensor: TensorId) -> bool:
    for _ in range(_PREPROCESSED):
        producer = ops.index.producer(tensor)
        if producer is None:
            return tensor.scope == "" and any(value.name == tensor.name for value in ops.index.inputs)
        source = ops.index.resolve(producer.inputs[0], producer.scope)
        if producer.op_type not in _PREPROCESSING or source is None or ops.index.is_constant(source):
            return False
        tensor = source
    return False


def _explain_stem_depthwise(ops: Operators, op: Operator) -> str | None:
    if op.node.op_type != "Conv":
        return None
    weight, shape = ops.candidate(op.node).shape(1), ops.candidate(op.node).shape(0)
    depthwise = weight is not None and weight[1] == 1 and int(op.node.attrs.get("group", 1)) > 1
    producer = ops.by_out.get(op.data[0][1])
    if not depthwise or producer is None or shape is None or len(shape) != 4:
        return None
    if _explain_stem(ops, producer) is None or shape[2] * shape[3] < _STEM_DEPTHWISE_PIXELS:
        return None
    return "depthwise right behind a float stem, on a large map: int8 gains nothing and amplifies the noise"


# EfficientNet-Lite0: .805 -> .859 and 2.0-2.3x -> 2.2-2.6x with the two rules.
STEM = ExclusionRule(name="stem", test=_explain_stem)
STEM_DEPTHWISE = ExclusionRule(name="stem-depthwise", test=_explain_stem_depthwise)
