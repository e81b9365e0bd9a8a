"""How norms and attention take part in the streams of channels that may be rotated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxq.graph import NodeRef
from onnxq.passes.equalization.streams import Label, Streams, pass_on, turn_others
from onnxq.sites import TensorId


def raise_power(s: Streams, node: NodeRef) -> bool:
    """Squares, where the exponent is 2."""
    exponent = s.view.scalar(node, 1)
    return exponent is not None and exponent[0] == 2.0 and square_channels(s, node)


def square_channels(s: Streams, node: NodeRef) -> bool:
    """Squares, whose sum over the channels does not hang on their basis."""
    label = s.label(node, 0)
    if label is None or label.waiting:
        return False
    s.squares[node.result] = label
    if s.view.kept(node.result):
        s.fix(label, f"{node.name} gives out its squares")
    return True


# Of [N, tokens, channels] a mean over the last axis is a GlobalAveragePool, too.
MEANS = frozenset({"ReduceMean", "ReduceSum", "GlobalAveragePool"})


def reduce_squares(s: Streams, node: NodeRef) -> bool:
    """A sum or mean over the channels, of squares or of themselves, or over what stands in front of them."""
    tensor = s.view.tensor(node, 0)
    squares = None if tensor is None else s.squares.get(tensor)
    label, pooled = squares or s.label(node, 0), node.op_type == "GlobalAveragePool"
    axes = [2] if pooled else node.attrs.get("axes", s.view.constant(node, 1))
    if label is None or axes is None or label.waiting or (pooled and (tensor is None or s.rank(tensor) != 3)):
        return False
    backs = {s.count_back(tensor, int(one)) for one in np.asarray(axes).flat}
    kept = bool(node.attrs.get("keepdims", 1))
    if backs == {label.axis}:
        stream = s.of(label)
        if squares is not None or node.op_type in ("ReduceL2", "ReduceSumSquare"):
            stream.normalized = True
        elif node.op_type in MEANS:
            stream.level = True
        else:
            return False
        if kept and label.axis == -1:
            s.narrow.add(node.result)
        return True
    before = all(one is not None and one < label.axis for one in backs)
    return squares is None and before and node.op_type in MEANS and pass_on(s, node, same_rank=kept)


_CENTRED = frozenset({"LayerNormalization", "SkipLayerNormalization"})


def normalize(s: Streams, node: NodeRef) -> bool:
    """LayerNormalization and RMSNormalization."""
    label = s.label(node, 0)
    back = s.count_back(s.view.tensor(node, 0), int(node.attrs.get("axis", -1)))
    return label is not None and back == -1 and _normalize(s, node, label, 1)


def _normalize(s: Streams, node: NodeRef, label: Label, k: int) -> bool:
    """A normalization's first output, with scale at input k and shift, where it takes the mean away, behind it."""
    scale, centred = s.view.edge(node, k), node.op_type in _CENTRED
    if label.axis != -1 or label.waiting or s.shape(scale) != (label.width,):
        return False
    shift = s.view.edge(node, k + 1) if centred and s.view.tensor(node, k + 1) is not None else None
    if shift is not None and s.shape(shift) != (label.width,):
        return False
    stream = s.of(label)
    stream.normalized, stream.level = True, stream.level or centred
    s.write(node.result, s.scale(label, scale, shift))
    return True


def normalize_sum(s: Streams, node: NodeRef) -> bool:
    """The sum of two inputs and a bias, normalized, and the sum itself as fourth output."""
    labels = [one for one in (s.label(node, 0), s.label(node, 1)) if one is not None]
    bias = 3 if node.op_type == "SkipSimplifiedLayerNormalization" else 4
    if not labels or any(one.waiting for one in labels):
        return False
    label = s.join(labels, node)
    if not turn_others(s, node, label, (0, 1, bias)):
        return False
    if len(node.outputs) > 3 and node.outputs[3]:
        s.write(TensorId(node.outputs[3], node.scope), label)
    return _normalize(s, node, label, 2)


# Attributes with the number of value heads and of query heads; inputs with past values.
HEADS = {
    "Attention": ("kv_num_heads", "q_num_heads", 5),
    "GroupQueryAttention": ("kv_num_heads", "num_heads", 4),
    "MultiHeadAttention": ("num_heads", "num_heads", 7),
}


def attend(s: Streams, node: NodeRef) -> bool:
    """Values through attention as one node: all heads are turned alike."""
    kv_heads, heads, past = HEADS[node.op_type]
    label = s.label(node, 2)
    # Its biases of queries, keys and values lie in one constant; that of com.microsoft holds the weights too.
    biased = node.op_type == "MultiHeadAttention" and s.view.tensor(node, 3) is not None
    if label is None or label.axis != -1 or biased or (node.op_type == "Attention" and node.domain):
        return False
    for k in {*range(len(node.inputs))} - {2}:
        tensor = s.view.tensor(node, k)
        if tensor is not None:
            s.fix(s.labels.get(tensor), f"{node.name} ({node.op_type}) reads {tensor.name}")
            if k == past:
                s.fix(label, f"{node.name} ({node.op_type}) reads past values")
    tensor, width, out = s.view.tensor(node, 2), label.width, label.width
    if s.rank(tensor) != 4:
        # Of all heads in one row.
        parts = int(node.attrs.get(kv_heads, 0))
        if not parts or label.width % parts:
            return False
        width = label.width // parts
        out = width * int(node.attrs[heads])
    s.divide(label, width)
    s.write(node.result, replace(label, width=out))
    if len(node.outputs) > 2 and node.outputs[2]:
        s.write(TensorId(node.outputs[2], node.scope), replace(label, width=width))
    return True
