"""Exclusion rules: operators that stay float whatever they would gain, as a table with reasons and measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from onnxq.backends import Target
from onnxq.planner.problem import QuantizableOp, QuantizableOps
from onnxq.sites import LeftFloat, TensorId

# What may stand between a graph input and the stem.
_PREPROCESSING = frozenset(
    ("Cast", "Sub", "Add", "Mul", "Div", "Transpose", "Reshape", "Unsqueeze", "Identity", "Pad", "Slice")
)
# What adds no function of its own between two convolutions of one front end (a filter, then a decimated transform).
_LINEAR = frozenset(
    ("Cast", "Identity", "Neg", "Concat", "Split", "Slice", "Pad", "Squeeze", "Unsqueeze", "Reshape", "Transpose")
)
# What may stand between a convolution and the Log behind it.
_SPECTRAL = _LINEAR | {
    *("Pow", "Mul", "Add", "Sub", "Div", "Sqrt", "Abs", "Clip", "Max", "Relu"),
    *("ReduceSum", "ReduceMean", "ReduceL2", "MatMul"),
}
# Channels of pictures, with one for transparency; more come from another network.
_STEM_CHANNELS = 4
# Pixels of the map, of a picture of 224 pixels behind a stem of stride 2.
_STEM_DEPTHWISE_PIXELS = 112 * 112
# Nodes between a graph input and the stem; more are a network and no preprocessing.
_PREPROCESSED = 16
# From so many weights on, reading a byte each instead of two or four repays a launch (about 2 us).
_ROW_WEIGHTS = 1 << 22
# Tensors behind a convolution after which the search for a logarithm ends.
_FRONT_END = 200


@dataclass(frozen=True, kw_only=True)
class ExclusionRule:
    """name, and the test: reason text for an operator that stays float, else None."""

    name: str
    test: Callable[[QuantizableOps, QuantizableOp], str | None]


def _explain_stem(ops: QuantizableOps, op: QuantizableOp) -> str | None:
    if op.node.op_type != "Conv":
        return None
    weight = ops.candidate(op.node).shape(1)
    if weight is None or len(weight) != 4 or weight[1] > _STEM_CHANNELS or int(op.node.attrs.get("group", 1)) != 1:
        return None
    if not _reads_graph_input(ops, op.data[0][1]):
        return None
    return "the first convolution: slower in int8, and its noise reaches everything behind it"


def _reads_graph_input(ops: QuantizableOps, tensor: TensorId) -> bool:
    for _ in range(_PREPROCESSED):
        producer = ops.index.producer(tensor)
        if producer is None:
            return tensor.scope == "" and any(value.name == tensor.name for value in ops.index.inputs)
        source = ops.index.resolve(producer.inputs[0], producer.scope)
        if producer.op_type not in _PREPROCESSING or source is None or ops.index.is_constant(source):
            return False
        tensor = source
    return False


def _explain_stem_depthwise(ops: QuantizableOps, op: QuantizableOp) -> str | None:
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


def _explain_log_front_end(ops: QuantizableOps, op: QuantizableOp) -> str | None:
    """A spectrogram front end: a convolution (STFT, CQT) whose output reaches a Log, or a filter in front of one."""
    if op.node.op_type != "Conv":
        return None
    # Not `op.out`, which is behind the activation that goes with it.
    made = op.node.result
    # Whether a linear path reaches the tensor: only such a path may go on through another convolution, so a tensor
    # that another path reached first is looked at again.
    seen = {made: True}
    index, pending = ops.index, [made]
    while pending:
        tensor = pending.pop()
        linear = seen[tensor]
        for edge in index.consumers(tensor):
            node = index.node(edge.node)
            if node.op_type == "Log":
                return f"its output reaches the logarithm {node.name}, which magnifies small errors"
            filtered = linear and node.op_type == "Conv" and edge.index == 0
            if not (filtered or node.op_type in _SPECTRAL) or len(seen) > _FRONT_END:
                continue
            for out in (TensorId(name, node.scope) for name in node.outputs if name):
                reached = filtered or (linear and node.op_type in _LINEAR)
                if out not in seen or (reached and not seen[out]):
                    seen[out] = reached
                    pending.append(out)
    return None


def _explain_one_row(ops: QuantizableOps, op: QuantizableOp) -> str | None:
    """A vector times a matrix, as the classifier behind a pooling is at batch 1."""
    if op.rule.weight is None or op.node.op_type not in ("Gemm", "MatMul"):
        return None
    candidate = ops.candidate(op.node)
    data, weight = candidate.shape(0), candidate.shape(op.rule.weight)
    if data is None or weight is None or math.prod(data[:-1]) != 1 or math.prod(weight) >= _ROW_WEIGHTS:
        return None
    return "a product with one row in the samples: int8 needs one more kernel, and so few weights do not repay it"


# A target names those that hold for it.
EXCLUSION_RULES: tuple[ExclusionRule, ...] = (
    # EfficientNet-Lite0: .805 -> .859 and 2.0-2.3x -> 2.2-2.6x with the two stem rules.
    ExclusionRule(name="stem", test=_explain_stem),
    ExclusionRule(name="stem-depthwise", test=_explain_stem_depthwise),
    # An audio net: 9 dB quantized, 36 dB with its front end float. The loss is in the numbers, not in the kernel.
    ExclusionRule(name="log-front-end", test=_explain_log_front_end),
    # In float product, bias and activation are one kernel, in int8 two; NVIDIA leaves GEMV out as well.
    ExclusionRule(name="one-row", test=_explain_one_row),
)


def find_excluded(ops: QuantizableOps, engine: Target) -> dict[str, LeftFloat]:
    """Operator name -> the reason of the first rule of the engine that keeps it float."""
    rules = [rule for rule in EXCLUSION_RULES if rule.name in engine.exclusions]
    found: dict[str, LeftFloat] = {}
    for op in ops:
        for rule in rules:
            reason = rule.test(ops, op) if op.name not in found else None
            if reason is not None:
                found[op.name] = LeftFloat(op.name, reason, rule.name, "F103")
    return found
