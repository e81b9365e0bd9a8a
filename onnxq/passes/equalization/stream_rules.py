"""How each operator takes part in the streams of channels that may be rotated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from onnxq.graph import NodeRef
from onnxq.passes.equalization.stream_norms import (
    HEADS,
    MEANS,
    attend,
    normalize,
    normalize_sum,
    raise_power,
    reduce_squares,
    square_channels,
)
from onnxq.passes.equalization.streams import Label, Streams, pass_on, turn_others
from onnxq.passes.view import View
from onnxq.sites import TensorId


def find_streams(view: View) -> Streams:
    """Every stream of the model, in the order the model runs in."""
    streams = Streams(view)
    for node in view.index.nodes:
        rule = _RULES.get(node.op_type) if node.domain in ("", "com.microsoft") else None
        if rule is None or not rule(streams, node):
            _end(streams, node)
    return streams


def _end(s: Streams, node: NodeRef) -> None:
    """A node that no stream passes: fixed are those that it reads."""
    tensors = [s.view.tensor(node, k) for k in range(len(node.inputs))]
    for tensor in tensors:
        if tensor is not None:
            s.fix(s.labels.get(tensor) or s.squares.get(tensor), f"{node.name} ({node.op_type}) reads {tensor.name}")
    # Numbers of rows stay such under whatever is done to each of them.
    if node.op_type in _ELEMENTWISE and all(one is None or _is_number(s, one) for one in tensors):
        s.narrow.add(node.result)


def _is_number(s: Streams, tensor: TensorId) -> bool:
    return s.is_narrow(tensor) and tensor not in s.labels


_ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Sqrt", "Pow", "Reciprocal", "Max", "Min", "Clip", "Cast"})


def _measure(s: Streams, node: NodeRef) -> bool:
    # Nothing is computed of the values.
    return True


def _matmul(s: Streams, node: NodeRef) -> bool:
    edge, x, y = s.view.edge(node, 1), s.label(node, 0), s.label(node, 1)
    shape = s.shape(edge)
    if shape is not None:
        return len(shape) == 2 and _linear(s, node, shape[0], -2, shape[1], -1)
    if x is None or y is None:
        # P·V: every row is a mean of rows.
        if y is None or y.axis != -1:
            return False
        s.write(node.result, y)
        return True
    if (x.axis, y.axis) != (-1, -2) or x.waiting or y.waiting:
        return False
    # Q·Kᵀ: products of vectors that are turned alike.
    s.join([x, replace(y, axis=-1)], node)
    return True


def _linear(s: Streams, node: NodeRef, inputs: int, axis: int, outputs: int, out_axis: int) -> bool:
    """A linear operator ends a stream and begins another."""
    x, edge = s.label(node, 0), s.view.edge(node, 1)
    if x is not None and x.axis == -1:
        s.read(x, edge, axis, inputs)
    elif x is not None:
        s.fix(x, f"{node.name} ({node.op_type}) reads it along another axis")
    if not s.view.is_constant(node, 0):
        label = s.begin(node.result, edge, out_axis, outputs)
        s.write(node.result, replace(label, rank=s.rank(s.view.tensor(node, 0))))
    return True


def _gemm(s: Streams, node: NodeRef) -> bool:
    shape, turned = s.shape(s.view.edge(node, 1)), bool(node.attrs.get("transB", 0))
    if shape is None or len(shape) != 2 or node.attrs.get("transA", 0):
        return False
    _linear(s, node, shape[int(turned)], -1 if turned else -2, shape[1 - int(turned)], -2 if turned else -1)
    return _add_bias(s, node, 2)


def _add_bias(s: Streams, node: NodeRef, k: int) -> bool:
    """The bias at input k follows the output."""
    label = s.labels.get(node.result)
    if label is None or s.view.tensor(node, k) is None:
        return True
    edge = s.view.edge(node, k)
    shape = s.shape(edge)
    if shape is None or not s.turn_constant(label, edge, shape):
        s.fix(label, f"the bias of {node.name} is computed")
    return True


def _conv(s: Streams, node: NodeRef) -> bool:
    edge = s.view.edge(node, 1)
    shape = s.shape(edge)
    if shape is None or len(shape) < 3 or node.attrs.get("group", 1) != 1:
        return False
    label = s.begin(node.result, edge, -len(shape), shape[0], 1 - len(shape))
    s.write(node.result, label)
    bias = s.view.edge(node, 2)
    if s.view.tensor(node, 2) is not None:
        if s.shape(bias) == (shape[0],):
            s.of(label).turns.append((bias, -1))
        else:
            s.fix(label, f"the bias of {node.name} is computed")
    # Patches may be made of another stream.
    return s.label(node, 0) is None


def _begin_of_constant(s: Streams, node: NodeRef) -> bool:
    """Rows or parts of a constant, such as a table: a stream along its last axis."""
    edge = s.view.edge(node, 0)
    shape = s.shape(edge)
    if shape is None or len(shape) < 2 or shape[-1] < 2:
        return False
    s.write(node.result, s.begin(node.result, edge, -1, shape[-1]))
    return True


def _gather(s: Streams, node: NodeRef) -> bool:
    x, axis = s.label(node, 0), int(node.attrs.get("axis", 0))
    if x is None:
        return axis == 0 and _begin_of_constant(s, node)
    back = s.count_back(s.view.tensor(node, 0), axis)
    # Of a tensor of one axis there is nothing but channels to gather.
    return x.axis == -1 and (axis == 0 if back is None else back < -1) and pass_on(s, node, same_rank=False)


def _reshape(s: Streams, node: NodeRef) -> bool:
    """Channels that lie side by side stay so: of heads in one row, or of each head in its own."""
    label, source, out = s.label(node, 0), s.view.tensor(node, 0), s.view.index.shape(node.result)
    if label is None:
        return False
    if label.axis == -1:
        width = _find_width(s, node)
        if width is None or (label.waiting and width != label.width):
            return False
        s.divide(label, width)
        s.write(node.result, replace(label, width=width, rank=_find_rank(s, node)))
        return True
    before = s.view.index.shape(source) if source is not None else None
    if before is None or out is None or len(out) != 3 or label.axis != 1 - len(before) or out[1] != label.width:
        return False
    # [N, C, H, W] to [N, C, H·W].
    s.write(node.result, replace(label, axis=-2))
    return True


def _find_width(s: Streams, node: NodeRef) -> int | None:
    """The last dim of a node's output; by the linear operator that reads it where no shape says so."""
    shape = s.view.index.shape(node.result)
    if shape and isinstance(shape[-1], int):
        return shape[-1]
    target = s.view.constant(node, 1) if node.op_type == "Reshape" else None
    if target is not None and target.size and target.flat[-1] > 0:
        return int(target.flat[-1])
    label, axes = s.label(node, 0), s.view.constant(node, 1)
    if node.op_type == "Unsqueeze" and label is not None and axes is not None:
        rank = _find_rank(s, node)
        last = any(int(one) == -1 or rank is None or int(one) == rank - 1 for one in axes.flat)
        return None if last else label.width
    for edge in s.view.index.consumers(node.result):
        weight = s.shape(replace(edge, index=1)) if edge.index == 0 else None
        if weight is not None and len(weight) == 2 and s.view.index.node(edge.node).op_type == "MatMul":
            return weight[0]
    return None


def _find_rank(s: Streams, node: NodeRef) -> int | None:
    """The rank of a Reshape's or an Unsqueeze's output; None for other nodes."""
    rank, added = s.rank(s.view.tensor(node, 0)), s.view.constant(node, 1)
    if added is None or node.op_type not in ("Reshape", "Unsqueeze"):
        return None
    return int(added.size) if node.op_type == "Reshape" else None if rank is None else rank + int(added.size)


def _transpose(s: Streams, node: NodeRef) -> bool:
    label, perm = s.label(node, 0), list(node.attrs.get("perm", ()))
    if label is None or not perm:
        return False
    s.write(node.result, replace(label, axis=perm.index(len(perm) + label.axis) - len(perm), rank=len(perm)))
    return True


def _concat(s: Streams, node: NodeRef) -> bool:
    """Tokens beside tokens."""
    tensors = [s.view.tensor(node, k) for k in range(len(node.inputs))]
    labels = [s.labels[one] for one in tensors if one in s.labels]
    axis = int(node.attrs.get("axis", 0))
    back = next((b for one in (*tensors, node.result) if (b := s.count_back(one, axis)) is not None), None)
    if not labels or back is None or back == labels[0].axis:
        return False
    label = s.join(labels, node)
    alone = all(tensor in s.labels for tensor in tensors)
    s.write(node.result, label)
    return alone or (not label.waiting and turn_others(s, node, label, range(len(tensors))))


def _slice(s: Streams, node: NodeRef) -> bool:
    label = s.label(node, 0)
    axes = node.attrs.get("axes", s.view.constant(node, 3))
    axis = -1 if label is None else label.axis
    tensor = s.view.tensor(node, 0)
    if axes is None or any(s.count_back(tensor, int(one)) in (axis, None) for one in np.asarray(axes).flat):
        return False
    return _begin_of_constant(s, node) if label is None else pass_on(s, node)


def _split(s: Streams, node: NodeRef) -> bool:
    label, back = s.label(node, 0), s.count_back(s.view.tensor(node, 0), int(node.attrs.get("axis", 0)))
    return label is not None and back not in (label.axis, None) and pass_on(s, node)


def _expand(s: Streams, node: NodeRef) -> bool:
    return _begin_of_constant(s, node) if s.label(node, 0) is None else pass_on(s, node, same_rank=False)


def _pair(s: Streams, node: NodeRef) -> tuple[Label, int, TensorId | None, tuple[int, ...] | None] | None:
    """(label, its input, the other input, that one's shape if it is a constant) where one of two inputs has a label."""
    labels = [s.label(node, k) for k in range(2)]
    k = 0 if labels[0] is not None else 1
    label = labels[k]
    if label is None or labels[1 - k] is not None:
        return None
    return label, k, s.view.tensor(node, 1 - k), s.shape(s.view.edge(node, 1 - k))


def _is_row(shape: Sequence[int], label: Label) -> bool:
    """True for one number, or one for each channel of the last axis."""
    return all(dim == 1 for dim in shape[:-1]) and (not shape or shape[-1] in (1, label.width)) and label.axis == -1


def _add(s: Streams, node: NodeRef) -> bool:
    a, b = s.label(node, 0), s.label(node, 1)
    if a is not None and b is not None:
        if a.waiting or b.waiting:
            return False
        s.write(node.result, s.join([a, b], node))
        return True
    found = _pair(s, node)
    if found is None:
        return False
    label, k, other, shape = found
    edge = s.view.edge(node, 1 - k)
    if label.waiting:
        if shape is None or node.op_type == "Sub" or not _is_row(shape, label):
            return False
        label = s.scale(label, None, edge)
    elif shape is not None:
        if not s.turn_constant(label, edge, shape):
            return False
    elif s.is_narrow(other) and label.axis == -1:
        s.of(label).level = True
    else:
        return False
    s.write(node.result, label)
    return True


def _sum(s: Streams, node: NodeRef) -> bool:
    """An Add of any number of tensors."""
    labels = [label for k in range(len(node.inputs)) if (label := s.label(node, k)) is not None]
    if not labels or any(one.waiting for one in labels):
        return False
    label = s.join(labels, node)
    s.write(node.result, label)
    return turn_others(s, node, label, range(len(node.inputs)))


def _mul(s: Streams, node: NodeRef) -> bool:
    if node.inputs[0] == node.inputs[1]:
        return node.op_type == "Mul" and square_channels(s, node)
    found = _pair(s, node)
    if found is None or (node.op_type == "Div" and found[1]):
        return False
    label, k, other, shape = found
    if shape is not None:
        alike = len(shape) < -label.axis or shape[label.axis] == 1
        if not alike:
            if not _is_row(shape, label) or node.op_type == "Div":
                return False
            label = s.scale(label, s.view.edge(node, 1 - k))
    elif not s.is_narrow(other) or label.axis != -1:
        return False
    s.write(node.result, label)
    return True


_RULES: dict[str, Callable[[Streams, NodeRef], bool]] = {
    **dict.fromkeys(("Shape", "Size"), _measure),
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "Gather": _gather,
    **dict.fromkeys(("Identity", "Dropout", "Cast", "Neg"), pass_on),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    "Transpose": _transpose,
    "Sum": _sum,
    "Concat": _concat,
    "Slice": _slice,
    "Split": _split,
    "Expand": _expand,
    **dict.fromkeys(("Add", "Sub"), _add),
    **dict.fromkeys(("Mul", "Div"), _mul),
    "Pow": raise_power,
    **dict.fromkeys(("ReduceL2", "ReduceSumSquare", *sorted(MEANS)), reduce_squares),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), normalize),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), normalize_sum),
    **dict.fromkeys(HEADS, attend),
}
