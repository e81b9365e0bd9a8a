"""Operators that stay float in ONNX Runtime whatever they would gain."""

from __future__ import annotations

from onnxq.backends.base import Candidate

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


# EfficientNet-Lite0: .805 -> .859 and 2.0-2.3x -> 2.2-2.6x with the two rules.
def explain_stem(candidate: Candidate, _: Candidate | None = None) -> str | None:
    """The first convolution of a network of pictures."""
    if candidate.node.op_type != "Conv":
        return None
    weight = candidate.shape(1)
    if weight is None or len(weight) != 4 or weight[1] > _STEM_CHANNELS or int(candidate.attr("group", 1)) != 1:
        return None
    if not _reads_graph_input(candidate):
        return None
    return "the first convolution: slower in int8, and its noise reaches everything behind it"


def _reads_graph_input(candidate: Candidate) -> bool:
    index, tensor = candidate.index, candidate.tensor(0)
    for _ in range(_PREPROCESSED):
        producer = None if tensor is None else index.producer(tensor)
        if tensor is None or producer is None:
            return tensor is not None and not tensor.scope and any(value.name == tensor.name for value in index.inputs)
        tensor = index.resolve(producer.inputs[0], producer.scope)
        if producer.op_type not in _PREPROCESSING or tensor is None or index.is_constant(tensor):
            return False
    return False


def explain_stem_depthwise(candidate: Candidate, maker: Candidate | None) -> str | None:
    """A depthwise convolution of a large map, with a stem in front of it."""
    if candidate.node.op_type != "Conv":
        return None
    weight, shape = candidate.shape(1), candidate.shape(0)
    depthwise = weight is not None and weight[1] == 1 and int(candidate.attr("group", 1)) > 1
    if not depthwise or maker is None or shape is None or len(shape) != 4:
        return None
    if explain_stem(maker) is None or shape[2] * shape[3] < _STEM_DEPTHWISE_PIXELS:
        return None
    return "depthwise right behind a float stem, on a large map: int8 gains nothing and amplifies the noise"
