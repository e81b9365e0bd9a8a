"""Channels followed through a graph: one walk for every change of their basis that the weights around can take in.

A flow gives each tensor that a linear operator writes a label, and visits the nodes in the order they run. The rule of
an operator passes labels on, joins them, or ends them in a weight that reads them. A label that
meets a node without a rule, or leaves the nodes, is held: its channels stay as they are. There is a flow for each
change: factors per channel between weights and constants that are added per channel (here), and orthogonal matrices
(`streams`, `stream_rules`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxq.arrays import Mask
from onnxq.graph import GraphIndex, NodeRef
from onnxq.passes.linear import Linear, find_linear
from onnxq.passes.patterns import find_pad_value
from onnxq.sites import MaybeTensor, Names, TensorId

Labels = NDArray[np.intp]
LabelT = TypeVar("LabelT")


class ChannelFlow(Generic[LabelT]):
    """Labels of tensors, as far as nodes were visited."""

    # Of the operators that have rules here.
    domains: ClassVar[Names] = ("",)

    def __init__(self, index: GraphIndex) -> None:
        self.index = index
        # Of None, an input that is left out, there is none.
        self.labels: dict[MaybeTensor, LabelT] = {}

    def visit_nodes(self, rules: Mapping[str, Callable[[Any, NodeRef], bool]]) -> None:
        """Visit every node of every scope. rules: by operator; each returns False where it cannot pass a label on."""
        for node in self.index.nodes:
            rule = rules.get(node.op_type) if node.domain in self.domains else None
            if rule is None or not rule(self, node):
                self.end_labels(node)

    def end_labels(self, node: NodeRef) -> None:
        """Hold all that a node reads, which no rule passes on."""
        self.hold_inputs(node, range(len(node.inputs)))

    def hold_inputs(self, node: NodeRef, inputs: Iterable[int]) -> None:
        """Hold what a node reads at these inputs."""
        for k in inputs:
            label = self.find_label(node, k)
            if label is not None:
                self.hold_label(label, f"{node.title} reads {node.inputs[k]}")

    def find_label(self, node: NodeRef, k: int) -> LabelT | None:
        """The label of input k of a node; None where it has none."""
        return self.labels.get(self.index.find_input(node, k))

    def write_label(self, tensor: TensorId, label: LabelT) -> None:
        """Set the label of a tensor; it is held where somebody outside of the nodes sees the tensor."""
        self.labels[tensor] = label
        if self.index.is_kept(tensor):
            self.hold_label(label, f"{tensor.name} is an output, or a body reads it")

    def pass_label(self, node: NodeRef, label: LabelT) -> bool:
        """Set the label of a node's first output. True."""
        self.write_label(node.result, label)
        return True

    def hold_label(self, label: LabelT, reason: str) -> None:
        """Keep the channels of a label as they are."""
        raise NotImplementedError


def merge_labels(count: int, pairs: Iterable[tuple[Labels, Labels]]) -> Labels:
    """[count] labels after uniting the two sides of every pair; the label of a class is its lowest member."""
    labels = np.arange(count, dtype=np.intp)
    united = list(pairs)
    while True:
        before = labels.copy()
        for left, right in united:
            lowest = np.minimum(labels[left], labels[right])
            np.minimum.at(labels, left, lowest)
            np.minimum.at(labels, right, lowest)
        # Pointers to pointers, so that long chains take few rounds.
        labels = labels[labels]
        if np.array_equal(before, labels):
            return labels


@dataclass(frozen=True, eq=False)
class ScaledLinear:
    """A linear operator: labels of its output channels, and of its input channels (None: not scalable)."""

    linear: Linear
    rows: Labels
    columns: Labels | None


class ScaledChannels(ChannelFlow[Labels]):
    """Channels that may be multiplied by positive factors. A label is an array of numbers, one for each channel.

    axes: of the channels of each tensor that has labels. Of a finished flow: root: of a label, the one it shares its
    factor with. free: [labels], True where the factor may differ from 1. group: [labels], alike where channels are of
    one tensor, or of tensors that share factors. rectified: [labels], True in groups that hold a Relu or its like, and
    no Add or Concat.
    """

    def __init__(self, index: GraphIndex) -> None:
        super().__init__(index)
        self.ops: list[ScaledLinear] = []
        self.axes: dict[MaybeTensor, int] = {}
        # Adds that hold the bias of a MatMul, which labels their outputs.
        self.bias_adds = set[str]()
        self.count = 0
        self.fixed_labels: list[Labels] = []
        self.pairs: list[tuple[Labels, Labels]] = []
        self.joined: list[Labels] = []
        self.bent: list[Labels] = []

    def hold_label(self, label: Labels, reason: str) -> None:
        """Keep these channels as they are."""
        self.fixed_labels.append(label)

    def make_labels(self, count: int) -> Labels:
        """So many new labels."""
        self.count += count
        return np.arange(self.count - count, self.count, dtype=np.intp)

    def write_labels(self, tensor: TensorId, labels: Labels, axis: int) -> bool:
        """Set the labels of a tensor along an axis. True."""
        self.axes[tensor] = axis
        self.write_label(tensor, labels)
        return True

    def finish(self) -> ScaledChannels:
        """The flow with its labels resolved into factors and groups."""
        self.root = merge_labels(self.count, self.pairs)
        # Channels of one tensor are of one group: neighbours united in a row.
        chains = [(labels[:-1], labels[1:]) for labels in self.labels.values()]
        self.group = merge_labels(self.count, [*self.pairs, *chains])
        # A factor must be taken out again by some weight's columns.
        columns = (op.columns for op in self.ops if op.columns is not None)
        read = self._mark_classes(columns, self.root)
        self.free = (read & ~self._mark_classes(self.fixed_labels, self.root))[self.root]
        bent = self._mark_classes(self.bent, self.group)
        self.rectified = (bent & ~self._mark_classes(self.joined, self.group))[self.group]
        return self

    def _mark_classes(self, parts: Iterable[Labels], classes: Labels) -> Mask:
        """[labels], True for the classes that these labels belong to."""
        marked = np.zeros(self.count, bool)
        for part in parts:
            marked[classes[part]] = True
        return marked


def scale_linear(flow: ScaledChannels, node: NodeRef) -> bool:
    """A linear operator whose weight and bias nobody else reads ends labels and begins others."""
    index = flow.index
    op = find_linear(index, node)
    if op is None or node.transposes_data or not op.owns_constants(index):
        return False
    # Axis 1 of its weight has the outputs of one group, so that rows of labels do not lie along it.
    if node.op_type == "ConvTranspose" and node.groups > 1:
        return False
    x = index.find_input(node)
    y = op.last.result
    scaled = ScaledLinear(op, flow.make_labels(op.channels), flow.find_label(node, 0))
    if scaled.columns is not None:
        rank = index.find_rank(x)
        along = rank is not None and flow.axes[x] == op.channel_axis % rank
        # Columns of another number, or along another axis, as behind a Reshape: no factor fits them.
        if scaled.columns.size != op.inputs or not along:
            flow.end_labels(node)
            scaled = ScaledLinear(op, scaled.rows, None)
    flow.ops.append(scaled)
    flow.bias_adds.add(op.last.name)
    rank = op.rank if op.rank_known else index.find_rank(y)
    if rank is None:
        flow.hold_label(scaled.rows, "")
    else:
        flow.write_labels(y, scaled.rows, op.channel_axis % rank)
    return True


# Between two layers with one of these, and no Add or Concat, the weights alone give the factors.
_BENT = ("Relu", "LeakyRelu", "PRelu", "Clip")


def pass_scales(flow: ScaledChannels, node: NodeRef) -> bool:
    """Nodes that commute with a positive factor per channel, as long as the channels stay where they are."""
    x = flow.index.find_input(node)
    alone = all(map(flow.index.is_constant, flow.index.list_reads(node)[1:]))
    if (
        x not in flow.labels
        or any(node.outputs[1:])
        or not alone
        or not _write_alike(flow, node, x)
    ):
        return False
    if node.op_type in _BENT:
        flow.bent.append(flow.labels[x])
    return True


def _write_alike(flow: ScaledChannels, node: NodeRef, x: MaybeTensor) -> bool:
    """Give the output the labels of an input, along the same axis; False where its shape is another or not known."""
    shape = flow.index.find_shape(node.result)
    if shape is None or len(shape) != flow.index.find_rank(x):
        return False
    axis = flow.axes[x]
    labels = flow.labels[x]
    return (not axis or shape[axis] == labels.size) and flow.write_labels(node.result, labels, axis)


def scale_clip(flow: ScaledChannels, node: NodeRef) -> bool:
    """A Clip that is a Relu, or nothing at all."""
    ends = flow.index.read_clip(node)
    # Exporters write the largest float32 for no bound.
    if ends is None or (ends[0] and abs(ends[0]) < 3.4e38) or abs(ends[1]) < 3.4e38:
        return False
    return pass_scales(flow, node)


def scale_pad(flow: ScaledChannels, node: NodeRef) -> bool:
    """Reflected values are those of the channel; a constant must be one that every factor leaves, 0."""
    constant = node.attrs.get("mode", "constant") == "constant"
    # Any other constant stands for one value behind the pad, whatever its channel is multiplied by.
    if constant and find_pad_value(flow.index, node) != 0.0:
        return False
    return pass_scales(flow, node)


def scale_resize(flow: ScaledChannels, node: NodeRef) -> bool:
    """Outside of a crop it writes a number of its own."""
    mode = node.attrs.get("coordinate_transformation_mode", "")
    return mode != "tf_crop_and_resize" and pass_scales(flow, node)


def scale_product(flow: ScaledChannels, node: NodeRef) -> bool:
    """Mul by a tensor without labels, Div by it: a gate, or a constant."""
    labelled = [x for x in flow.index.list_inputs(node) if x in flow.labels]
    # The product of two such tensors would have the factors of both, and behind a Div a divisor the inverse of its own.
    if len(labelled) != 1 or (node.op_type == "Div" and flow.find_label(node, 0) is None):
        return False
    # Along axis 0 a gate of fewer axes may lie along the channels.
    (x,) = labelled
    return flow.axes[x] != 0 and _write_alike(flow, node, x)


def scale_add(flow: ScaledChannels, node: NodeRef) -> bool:
    """Both operands take the same factors, if they are of one shape along the channels."""
    if node.name in flow.bias_adds:
        return True
    labels = flow.find_label(node, 0)
    others = flow.find_label(node, 1)
    # An operand of one channel broadcasts over those of the other, and has no factor for each.
    if labels is None or others is None or labels.size != others.size:
        return False
    left, right = flow.index.list_reads(node)
    alike = flow.index.find_rank(left) == flow.index.find_rank(right)
    if not alike or flow.axes[left] != flow.axes[right]:
        return False
    flow.pairs.append((labels, others))
    flow.joined.append(labels)
    return flow.write_labels(node.result, labels, flow.axes[left])


def scale_concat(flow: ScaledChannels, node: NodeRef) -> bool:
    """Along the channels: labels side by side, those of other operands held."""
    rank = flow.index.find_rank(node.result)
    if rank is None:
        return False
    axis = node.read_int("axis", 0) % rank
    parts = []
    for x in flow.index.list_inputs(node):
        labels = flow.labels.get(x)
        shape = flow.index.find_shape(x)
        if shape is None or flow.axes.get(x, axis) != axis:
            return False
        if labels is None:
            size = shape[axis]
            if not isinstance(size, int):
                return False
            # Held labels in its place keep the numbers of the channels behind it right.
            labels = flow.make_labels(size)
            flow.hold_label(labels, "")
        parts.append(labels)
    labels = np.concatenate(parts)
    flow.joined.append(labels)
    return flow.write_labels(node.result, labels, axis)


def scale_flat(flow: ScaledChannels, node: NodeRef) -> bool:
    """[N, C, spatial…] -> [N, C · spatial]: each channel's label as often as it has positions."""
    x = flow.index.find_input(node)
    labels = flow.find_label(node, 0)
    before, after = map(flow.index.find_shape, (x, node.result))
    # A Reshape comes here, too: exporters write it for a Flatten.
    if before is None or after is None or len(after) != 2 or labels is None or flow.axes[x] != 1:
        return False
    sizes = [dim for dim in before[1:] if isinstance(dim, int)]
    if len(sizes) < len(before) - 1 or after[1] != math.prod(sizes):
        return False
    return flow.write_labels(node.result, np.repeat(labels, math.prod(sizes[1:])), 1)


_SCALE_RULES = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul"), scale_linear),
    "Add": scale_add,
    "Mul": scale_product,
    "Div": scale_product,
    # A ReLU right behind the maker of a tensor belongs to that: see `shift_linear`.
    **dict.fromkeys((*_BENT, "Identity", "Dropout"), pass_scales),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"), pass_scales),
    "Clip": scale_clip,
    "Pad": scale_pad,
    "Resize": scale_resize,
    "Concat": scale_concat,
    "Flatten": scale_flat,
    "Reshape": scale_flat,
}


def find_scaled_channels(index: GraphIndex, fixed: Iterable[TensorId] = ()) -> ScaledChannels:
    """The channels of every scope that may be multiplied, and the weights that make and read them.

    fixed: tensors that keep their values.
    """
    flow = ScaledChannels(index)
    flow.visit_nodes(_SCALE_RULES)
    for tensor in set(fixed) & flow.labels.keys():
        flow.hold_label(flow.labels[tensor], f"a rule gives the range of {tensor.name}")
    return flow.finish()


@dataclass(eq=False)
class ShiftSource:
    """A tensor that may be lowered.

    readers: the layers that get it back, with how often (an Add of a tensor with itself counts twice).
    """

    op: Linear
    tensor: TensorId
    readers: Counter[Linear] = field(default_factory=Counter)
    fixed: bool = False


class ShiftedChannels(ChannelFlow[Mapping[TensorId, int]]):
    """Tensors that may be lowered by a constant per channel. A label says how often it holds each source's constant."""

    def __init__(self, index: GraphIndex) -> None:
        super().__init__(index)
        self.sources: dict[TensorId, ShiftSource] = {}

    def hold_label(self, label: Mapping[TensorId, int], reason: str) -> None:
        """Lower none of these sources."""
        for tensor in label:
            self.sources[tensor].fixed = True

    def write_label(self, tensor: TensorId, label: Mapping[TensorId, int]) -> None:
        """Set the label of a tensor; it is held where somebody outside sees the tensor, or nobody takes it back."""
        super().write_label(tensor, label)
        if not self.index.list_consumers(tensor):
            self.hold_label(label, "")


def shift_linear(flow: ShiftedChannels, node: NodeRef) -> bool:
    """A linear operator takes constants back into its bias, and makes a tensor that may be lowered."""
    op = find_linear(flow.index, node)
    for k in range(len(node.inputs)):
        for tensor, times in (flow.find_label(node, k) or {}).items():
            source = flow.sources[tensor]
            if op is None or k or not op.takes_shifts(source.op):
                source.fixed = True
                continue
            source.readers[op] += times
    if op is None or not op.has_plain_bias:
        return True
    tensor = op.last.result
    flow.sources[tensor] = ShiftSource(op, tensor)
    flow.write_label(tensor, {tensor: 1})
    return True


def shift_add(flow: ShiftedChannels, node: NodeRef) -> bool:
    """The constants of both operands add up."""
    total = Counter[TensorId]()
    for k in range(2):
        total.update(flow.find_label(node, k) or {})
    for tensor in total:
        source = flow.sources[tensor]
        if not _joins_alike(flow.index, node, source.op):
            source.fixed = True
    if total:
        flow.write_label(node.result, total)
    return True


def _joins_alike(index: GraphIndex, node: NodeRef, op: Linear) -> bool:
    """True for an Add of two computed tensors of one rank whose channels lie alike: broadcasting moves no channel."""
    for k, tensor in enumerate(index.list_reads(node)):
        shape = () if index.has_constant(node, k) else index.find_shape(tensor) or ()
        if len(shape) != op.rank or shape[op.channel_axis] != op.channels:
            return False
    return op.rank_known


_SHIFT_RULES = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "MatMul"), shift_linear),
    "Add": shift_add,
}


def list_shift_sources(index: GraphIndex) -> list[ShiftSource]:
    """Every tensor that may be lowered, with the layers that take the constants back, in the order the model runs."""
    flow = ShiftedChannels(index)
    flow.visit_nodes(_SHIFT_RULES)
    return [source for source in flow.sources.values() if source.readers and not source.fixed]
