"""Streams: the tensors whose channels may be multiplied by one orthogonal matrix, and the weights that follow.

A linear operator or a table begins one: its output channels may be turned in the weight. Streams go through nodes that
treat all channels alike (moves of tokens and heads, scalars, normalization by the root of mean squares), meet in Add,
and end in the input channels of linear operators. The residual stream of a pre-norm network is one, the values of an
attention are another, whose heads are turned alike. The scale and bias per channel of a normalization wait for the
linear operators that read it. A stream that meets anything else (a graph output, a Gelu, a rotary embedding) is fixed.

LayerNormalization also takes the mean away: of its streams the matrix must leave a row of equal numbers as it is, so
that the mean of a row stays what it was; then the operator need not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np

from onnxq.graph import NodeRef
from onnxq.passes.view import View
from onnxq.sites import Edge, TensorId

# float32, float16, float64, bfloat16 of onnx.TensorProto.
FLOATS = (1, 10, 11, 16)


@dataclass(frozen=True)
class Affine:
    """Constants per channel that wait for the readers of a tensor: inputs that scale it, and those that are added."""

    edge: Edge
    shift: bool = False


@dataclass(frozen=True)
class Label:
    """Where a stream lies in a tensor: along `axis`, counted from the end, of `width` channels.

    waiting: in order. rank: the tensor's, None where nothing says so.
    """

    stream: int
    axis: int
    width: int
    waiting: tuple[Affine, ...] = ()
    rank: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Reader:
    """A linear operator that reads a stream: the input that holds its weight, the weight's input axis."""

    edge: Edge
    axis: int
    label: Label


@dataclass
class Stream:
    """One stream. size: channels that one matrix may mix, a divisor of the width of each of its tensors.

    tensor: the first of it, by which plans know it. level: a mean or a number for all channels meets it.
    normalized: a normalization reads it. reason: why it is fixed, "" where it is not. writers: linear operators and
    tables that begin it. turns: constants along whose axis, counted from the end, it is written.
    """

    tensor: TensorId
    size: int
    level: bool = False
    normalized: bool = False
    reason: str = ""
    turns: list[tuple[Edge, int]] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)

    @property
    def free(self) -> bool:
        """True where turning it changes nothing but weights, some of which read it."""
        return not self.reason and self.size > 1 and bool(self.readers)


class Streams:
    """The streams of a graph while its nodes are visited, in the order they run in."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.labels: dict[TensorId, Label] = {}
        # Tensors of one number for all channels of their row, where no shape says so.
        self.narrow: set[TensorId] = set()
        # Squares of a stream's tensors, for whoever takes their mean.
        self.squares: dict[TensorId, Label] = {}
        self._streams: list[Stream] = []
        self._parent: list[int] = []

    def find(self, stream: int) -> int:
        """The stream that this one became a part of."""
        while self._parent[stream] != stream:
            stream = self._parent[stream]
        return stream

    def of(self, label: Label) -> Stream:
        """The stream of a label."""
        return self._streams[self.find(label.stream)]

    def all(self) -> list[Stream]:
        """Every stream, once."""
        return [one for k, one in enumerate(self._streams) if self._parent[k] == k]

    def label(self, node: NodeRef, k: int) -> Label | None:
        """The label of input k of a node; None where it has none."""
        tensor = self.view.tensor(node, k)
        return None if tensor is None else self.labels.get(tensor)

    def begin(self, tensor: TensorId, edge: Edge, axis: int, width: int, place: int = -1) -> Label:
        """A new stream: `tensor` along `place`, of `width` channels, which the constant at `edge` has along `axis`."""
        self._parent.append(len(self._streams))
        self._streams.append(Stream(tensor, width, turns=[(edge, axis)]))
        return Label(len(self._streams) - 1, place, width)

    def write(self, tensor: TensorId, label: Label) -> None:
        """The label of a tensor; fixed where somebody outside of the nodes sees it."""
        self.labels[tensor] = replace(label, rank=self.rank(tensor) or label.rank)
        if self.view.kept(tensor):
            self.fix(label, f"{tensor.name} is an output, or a body reads it")

    def fix(self, label: Label | None, reason: str) -> None:
        """The stream cannot be turned. The first reason stays."""
        if label is not None:
            stream = self.of(label)
            stream.reason = stream.reason or reason

    def divide(self, label: Label, width: int) -> None:
        """Parts of `width` channels lie in rows of their own from here on."""
        stream = self.of(label)
        stream.size = gcd(stream.size, width)

    def join(self, labels: Sequence[Label], node: NodeRef) -> Label:
        """One stream of those that meet in a node."""
        first = labels[0]
        for other in labels[1:]:
            if (other.axis, other.width, other.waiting) != (first.axis, first.width, first.waiting):
                for one in labels:
                    self.fix(one, f"{node.name} ({node.op_type}) joins channels that differ")
            keep, gone = sorted((self.find(first.stream), self.find(other.stream)))
            if keep != gone:
                a, b = self._streams[keep], self._streams[gone]
                self._parent[gone] = keep
                self._streams[keep] = Stream(
                    a.tensor, gcd(a.size, b.size), a.level or b.level, a.normalized or b.normalized,
                    a.reason or b.reason, a.turns + b.turns, a.readers + b.readers,
                )  # fmt: skip
        return first

    def turn_constant(self, label: Label, edge: Edge, shape: Sequence[int]) -> bool:
        """Let a constant that joins a stream follow it; False where its shape says nothing of channels."""
        if len(shape) >= -label.axis and shape[label.axis] == label.width:
            self.of(label).turns.append((edge, label.axis))
            return True
        # One number for all channels.
        self.of(label).level = True
        return len(shape) < -label.axis or shape[label.axis] == 1

    def read(self, label: Label, edge: Edge, axis: int, width: int) -> None:
        """A linear operator that reads a stream along the last axis."""
        self.divide(label, width)
        self.of(label).readers.append(Reader(edge, axis, label))
        if label.waiting and label.width != width:
            self.fix(label, f"{edge.node} reads {width} channels where {label.width} are scaled")

    def scale(self, label: Label, scale: Edge | None, shift: Edge | None = None) -> Label:
        """The stream behind a scale and a shift per channel, [width] or one number each."""
        waiting = label.waiting
        if scale is not None and not self._is_even(scale):
            waiting = (*waiting, Affine(scale))
        if shift is None:
            return replace(label, waiting=waiting)
        if waiting:
            waiting = (*waiting, Affine(shift, shift=True))
        else:
            self.turn_constant(label, shift, self.shape(shift) or ())
        return replace(label, waiting=waiting)

    def shape(self, edge: Edge) -> tuple[int, ...] | None:
        """The shape of a constant of floats; None for anything else."""
        index = self.view.index
        tensor = self.view.tensor(index.node(edge.node), edge.index)
        shape = None if tensor is None or not index.is_constant(tensor) else index.shape(tensor)
        if tensor is None or shape is None or index.dtype(tensor) not in FLOATS:
            return None
        return tuple(dim for dim in shape if isinstance(dim, int)) if None not in shape else None

    def _is_even(self, edge: Edge) -> bool:
        value = self.view.constant(self.view.index.node(edge.node), edge.index)
        return value is not None and bool(np.all(value == value.flat[0]))

    def is_narrow(self, tensor: TensorId | None) -> bool:
        """True for a tensor that has one number for all channels of a row."""
        shape = None if tensor is None else self.view.index.shape(tensor)
        return tensor in self.narrow or (shape is not None and (not shape or shape[-1] == 1))

    def rank(self, tensor: TensorId | None) -> int | None:
        """The rank of a tensor, by its shape or its label; operators of ONNX Runtime have no shape inference."""
        if tensor is None:
            return None
        label = self.labels.get(tensor)
        return self.view.rank(tensor) or (None if label is None else label.rank)

    def count_back(self, tensor: TensorId | None, axis: int) -> int | None:
        """An axis of a tensor, counted from the end; None where its rank is not known."""
        rank = self.rank(tensor)
        return axis if axis < 0 else None if rank is None else axis - rank


def pass_on(s: Streams, node: NodeRef, same_rank: bool = True) -> bool:
    """Every channel goes where its neighbours go."""
    label = s.label(node, 0)
    if label is None or (node.op_type == "Cast" and node.attrs.get("to") not in FLOATS):
        return False
    for name in filter(None, node.outputs):
        s.write(TensorId(name, node.scope), label if same_rank else replace(label, rank=None))
    return True


def turn_others(s: Streams, node: NodeRef, label: Label, inputs: Iterable[int]) -> bool:
    """Let constants that are added follow a stream; False for anything else beside it."""
    edges = [s.view.edge(node, k) for k in inputs if s.view.tensor(node, k) is not None and s.label(node, k) is None]
    return all((shape := s.shape(edge)) is not None and s.turn_constant(label, edge, shape) for edge in edges)
