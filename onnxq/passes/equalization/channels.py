"""Which channels of which tensors may be scaled without changing the function, and which weights would have to follow.

Every channel of a linear operator's output gets a label. Labels travel through nodes that commute with a positive
factor per channel (Relu, pooling, Resize, …), meet in Add, lie side by side behind Concat, and end in the columns of
the next linear operator. A label that meets anything else (a graph output, a Sigmoid, a Clip with an upper bound) is
fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from onnxq.graph import NodeRef
from onnxq.passes.affine_core import Array64
from onnxq.passes.equalization.cross_layer_core import Labels, group_by_label, merge_labels
from onnxq.passes.linear import Linear, find_linear
from onnxq.passes.view import View
from onnxq.sites import TensorId

Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Op:
    """A linear operator: labels of its output channels, and of its input channels (None: not scalable)."""

    linear: Linear
    rows: Labels
    columns: Labels | None

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        weight = self.linear.weight
        return int(weight.shape[0] if self.linear.axis else weight.shape[1] * self.groups)

    @property
    def groups(self) -> int:
        """Of the weight as `group_by_label` sees it."""
        return int(self.linear.node.attrs.get("group", 1))

    @property
    def output_first(self) -> bool:
        """True when axis 0 of the weight is the output."""
        return self.linear.axis == 0

    def largest(self) -> Array64:
        """|W| as [groups, outputs, inputs]."""
        return group_by_label(self.linear.weight, self.groups, self.output_first)


@dataclass(eq=False)
class Channels:
    """labels: of the channels of each tensor, along `axes`; root: of a label, the one it shares its factor with.

    free: [labels], True where the factor may differ from 1. group: [labels], alike where channels are of one tensor,
    or of tensors that share factors. rectified: [labels], True in groups that hold a Relu or its like, and no Add or
    Concat.
    """

    ops: list[Op] = field(default_factory=list)
    labels: dict[TensorId, Labels] = field(default_factory=dict)
    axes: dict[TensorId, int] = field(default_factory=dict)
    root: Labels = field(default_factory=lambda: np.zeros(0, np.intp))
    group: Labels = field(default_factory=lambda: np.zeros(0, np.intp))
    free: Flags = field(default_factory=lambda: np.zeros(0, bool))
    rectified: Flags = field(default_factory=lambda: np.zeros(0, bool))


def find_channels(view: View) -> Channels:
    """Look at every node of every scope."""
    found = _Search(view)
    for node in view.index.nodes:
        found.visit(node)
    return found.result()


class _Search:
    def __init__(self, view: View) -> None:
        self.view, self.out = view, Channels()
        self.count = 0
        self.fixed: list[Labels] = []
        self.pairs: list[tuple[Labels, Labels]] = []
        self.joins: list[Labels] = []
        self.bends: list[Labels] = []
        self.biases: set[str] = set()

    def visit(self, node: NodeRef) -> None:
        """Labels for the outputs of the node."""
        op = _own(self.view, node)
        if op is not None:
            self._linear(op)
            return
        if not node.domain and node.op_type in _RULES and _RULES[node.op_type](self, node):
            return
        # The Add of a MatMul's bias was labelled with its MatMul.
        for k in range(len(node.inputs)) if node.name not in self.biases else ():
            self.fix(self.view.tensor(node, k))

    def fix(self, tensor: TensorId | None) -> None:
        """No channel of this tensor may be scaled."""
        labels = self.find(tensor)
        if labels is not None:
            self.fixed.append(labels)

    def find(self, tensor: TensorId | None) -> Labels | None:
        """The labels of a tensor; None where it has none."""
        return None if tensor is None else self.out.labels.get(tensor)

    def make(self, count: int) -> Labels:
        """So many new labels."""
        self.count += count
        return np.arange(self.count - count, self.count, dtype=np.intp)

    def _linear(self, op: Linear) -> None:
        x, y = self.view.tensor(op.node, 0), op.last.result
        made = Op(op, self.make(op.channels), self.find(x))
        if x is not None and made.columns is not None:
            rank = self.view.rank(x)
            along = rank is not None and self.out.axes[x] == op.channel_axis % rank
            # Columns of another number, or along another axis, as behind a Reshape: no factor fits them.
            if made.columns.size != made.inputs or not along:
                self.fix(x)
                made = replace(made, columns=None)
        self.out.ops.append(made)
        self.biases.add(op.last.name)
        rank = op.rank if op.rank_known else self.view.rank(y)
        if rank is None:
            self.fixed.append(made.rows)
        else:
            self.write(y, made.rows, op.channel_axis % rank)

    def write(self, tensor: TensorId, labels: Labels, axis: int) -> None:
        """The labels of a tensor; fixed when somebody outside sees it."""
        self.out.labels[tensor], self.out.axes[tensor] = labels, axis
        if self.view.kept(tensor):
            self.fixed.append(labels)

    def result(self) -> Channels:
        """Everything resolved."""
        out = self.out
        out.root = merge_labels(self.count, self.pairs)
        # Channels of one tensor are of one group: neighbours united in a row.
        chains = [(one[:-1], one[1:]) for one in out.labels.values()]
        out.group = merge_labels(self.count, [*self.pairs, *chains])
        # A factor must be taken out again by some weight's columns.
        read = self._mark((op.columns for op in out.ops if op.columns is not None), out.root)
        out.free = (read & ~self._mark(self.fixed, out.root))[out.root]
        out.rectified = (self._mark(self.bends, out.group) & ~self._mark(self.joins, out.group))[out.group]
        return out

    def _mark(self, parts: Iterable[Labels], classes: Labels) -> Flags:
        """[labels], True for the classes that these labels belong to."""
        found = np.zeros(self.count, bool)
        for part in parts:
            found[classes[part]] = True
        return found


def _own(view: View, node: NodeRef) -> Linear | None:
    """A linear operator whose weight and bias nobody else reads."""
    op = find_linear(view, node)
    if op is None or (node.op_type == "ConvTranspose" and op.groups > 1) or node.attrs.get("transA", 0):
        return None
    return op if op.owns_constants(view) else None


_BENT = frozenset({"Relu", "LeakyRelu", "PRelu", "Clip"})


def _same(search: _Search, node: NodeRef) -> bool:
    """Nodes that commute with a positive factor per channel, as long as the channels stay where they are."""
    view = search.view
    x, y = view.tensor(node, 0), node.result
    labels = search.find(x)
    if x is None or labels is None or any(node.outputs[1:]):
        return False
    if any(name and not view.is_constant(node, k) for k, name in enumerate(node.inputs) if k):
        return False
    axis, shape = search.out.axes[x], view.index.shape(y)
    if shape is None or len(shape) != view.rank(x) or (axis and shape[axis] != labels.size):
        return False
    search.write(y, labels, axis)
    if node.op_type in _BENT:
        search.bends.append(labels)
    return True


def _clip(search: _Search, node: NodeRef) -> bool:
    """A Clip that is a Relu, or nothing at all."""
    for k, (name, neutral) in enumerate((("min", (0.0, -np.inf)), ("max", (np.inf,))), start=1):
        given = search.view.tensor(node, k) is not None
        value = search.view.scalar(node, k) if given else None
        bound = node.attrs.get(name, neutral[-1]) if not given else None if value is None else value[0]
        # Exporters write the largest float32 for no bound.
        if bound is None or (bound not in neutral and abs(float(bound)) < 3.4e38):
            return False
    return _same(search, node)


def _pad(search: _Search, node: NodeRef) -> bool:
    # Reflected values are those of the channel; a constant must be one that every factor leaves, 0.
    if node.attrs.get("mode", "constant") != "constant":
        return _same(search, node)
    value = search.view.scalar(node, 2)
    absent = search.view.tensor(node, 2) is None and not node.attrs.get("value", 0.0)
    return (absent or (value is not None and value[0] == 0.0)) and _same(search, node)


def _resize(search: _Search, node: NodeRef) -> bool:
    # Outside of the crop it writes a number of its own.
    return node.attrs.get("coordinate_transformation_mode", "") != "tf_crop_and_resize" and _same(search, node)


def _factor(search: _Search, node: NodeRef) -> bool:
    """Mul by a tensor without labels, Div by it: a gate, or a constant."""
    view = search.view
    tensors = [view.tensor(node, k) for k in range(2)]
    labelled = [k for k, t in enumerate(tensors) if search.find(t) is not None]
    if len(labelled) != 1 or (node.op_type == "Div" and labelled != [0]):
        return False
    x, y = tensors[labelled[0]], node.result
    labels = search.find(x)
    if x is None or labels is None:
        return False
    axis, shape = search.out.axes[x], view.index.shape(y)
    if not axis or shape is None or len(shape) != view.rank(x) or shape[axis] != labels.size:
        return False
    search.write(y, labels, axis)
    return True


def _add(search: _Search, node: NodeRef) -> bool:
    """Both operands take the same factors, if they are of one shape along the channels."""
    view = search.view
    tensors = [view.tensor(node, k) for k in range(2)]
    left, right = tensors
    a, b = search.find(left), search.find(right)
    if left is None or right is None or a is None or b is None:
        return False
    if a.size != b.size or view.rank(left) != view.rank(right) or search.out.axes[left] != search.out.axes[right]:
        return False
    search.pairs.append((a, b))
    search.joins.append(a)
    search.write(node.result, a, search.out.axes[left])
    return True


def _concat(search: _Search, node: NodeRef) -> bool:
    """Along the channels: labels side by side, those of other operands fixed."""
    view, y = search.view, node.result
    rank, axis = view.rank(y), int(node.attrs.get("axis", 0))
    parts: list[Labels] = []
    for k in range(len(node.inputs)):
        x = view.tensor(node, k)
        shape = None if x is None else view.index.shape(x)
        if x is None or rank is None or shape is None:
            return False
        labels, size = search.out.labels.get(x), shape[axis % rank]
        if labels is not None and search.out.axes[x] != axis % rank:
            return False
        if labels is None:
            if not isinstance(size, int):
                return False
            labels = search.make(size)
            search.fixed.append(labels)
        parts.append(labels)
    together = np.concatenate(parts)
    search.joins.append(together)
    search.write(y, together, axis % (rank or 1))
    return True


def _flat(search: _Search, node: NodeRef) -> bool:
    """[N, C, spatial…] -> [N, C · spatial]: each channel's label as often as it has positions."""
    view, x, y = search.view, search.view.tensor(node, 0), node.result
    labels = search.find(x)
    before, after = (None, None) if x is None else (view.index.shape(x), view.index.shape(y))
    if x is None or labels is None or before is None or after is None or len(after) != 2 or search.out.axes[x] != 1:
        return False
    sizes = [dim for dim in before[1:] if isinstance(dim, int)]
    if len(sizes) < len(before) - 1 or after[1] != int(np.prod(sizes)):
        return False
    search.write(y, np.repeat(labels, int(np.prod(sizes[1:]))), 1)
    return True


_RULES: dict[str, Callable[[_Search, NodeRef], bool]] = {
    **dict.fromkeys(
        ("Relu", "LeakyRelu", "PRelu", "Identity", "Dropout", "MaxPool", "AveragePool", "GlobalAveragePool",
         "GlobalMaxPool"),
        _same,
    ),
    "Clip": _clip,
    "Pad": _pad,
    "Resize": _resize,
    "Mul": _factor,
    "Div": _factor,
    "Add": _add,
    "Concat": _concat,
    "Flatten": _flat,
    "Reshape": _flat,
}  # fmt: skip
