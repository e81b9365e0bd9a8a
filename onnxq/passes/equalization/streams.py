"""Streams: the tensors whose channels may be multiplied by one orthogonal matrix, and the weights that follow.

A linear operator or a table begins one: its output channels may be turned in the weight. Streams go through nodes that
treat all channels alike (moves of tokens and heads, scalars, normalization by the root of mean squares), meet in Add,
and end in the input channels of linear operators. The residual stream of a pre-norm network is one, the values of an
attention are another, whose heads are turned alike. The scale and bias per channel of a normalization wait for the
linear operators that read it. A stream that meets anything else (a graph output, a Gelu, a rotary embedding) is held.

LayerNormalization also takes the mean away: of its streams the matrix must leave a row of equal numbers as it is, so
that the mean of a row stays what it was; then the operator need not change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd

from onnxq.arrays import Shape
from onnxq.graph import FLOAT_TENSORS, GraphIndex, NodeRef
from onnxq.passes.equalization.channels import ChannelFlow
from onnxq.planner.sums import read_constant
from onnxq.sites import Edge, MaybeTensor, TensorId


@dataclass(frozen=True)
class ChannelConstant:
    """Constants per channel that wait for the readers of a tensor: inputs that scale it, and those that are added."""

    edge: Edge
    shift: bool = False


@dataclass(frozen=True)
class StreamLabel:
    """Where a stream lies in a tensor: along `axis`, counted from the end, of `width` channels.

    waiting: in order. rank: the tensor's, None where nothing says so.
    """

    stream: int
    axis: int
    width: int
    waiting: tuple[ChannelConstant, ...] = ()
    rank: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class StreamReader:
    """A linear operator that reads a stream: the input that holds its weight, the weight's input axis."""

    edge: Edge
    axis: int
    label: StreamLabel


@dataclass(eq=False)
class Stream:
    """One stream. size: channels that one matrix may mix, a divisor of the width of each of its tensors.

    tensor: the first of it, by which plans know it. level: a mean or a number for all channels meets it.
    normalized: a normalization reads it. reason: why it is held, "" where it is not. turns: constants, those that
    begin it among them, and the axes that it has in them, counted from the end.
    """

    tensor: TensorId
    size: int
    level: bool = False
    normalized: bool = False
    reason: str = ""
    turns: list[tuple[Edge, int]] = field(default_factory=list)
    readers: list[StreamReader] = field(default_factory=list)

    @property
    def free(self) -> bool:
        """True where turning it changes nothing but weights, some of which read it."""
        return not self.reason and self.size > 1 and bool(self.readers)


class Streams(ChannelFlow[StreamLabel]):
    """The streams of a graph while its nodes are visited, in the order they run in."""

    # Operators of ONNX Runtime have norms and attention in one node.
    domains = ("", "com.microsoft")

    def __init__(self, index: GraphIndex) -> None:
        super().__init__(index)
        # Tensors of one number for all channels of their row, where no shape says so.
        self.narrow = set[TensorId]()
        # Squares of a stream's tensors, for whoever takes their mean.
        self.squares: dict[MaybeTensor, StreamLabel] = {}
        # By number of a label; joined streams are one object.
        self._streams: list[Stream] = []

    def find_stream(self, label: StreamLabel) -> Stream:
        """The stream of a label."""
        return self._streams[label.stream]

    def list_streams(self) -> list[Stream]:
        """Every stream, once."""
        return list({id(stream): stream for stream in self._streams}.values())

    def list_labels(self, tensors: Iterable[MaybeTensor]) -> list[StreamLabel]:
        """The labels of those of these tensors that have one."""
        return [self.labels[tensor] for tensor in tensors if tensor in self.labels]

    def begin_stream(
        self, tensor: TensorId, edge: Edge, axis: int, width: int, place: int = -1
    ) -> StreamLabel:
        """A new stream: `tensor` along `place`, of `width` channels, which the constant at `edge` has along `axis`."""
        self._streams.append(Stream(tensor, width, turns=[(edge, axis)]))
        return StreamLabel(len(self._streams) - 1, place, width)

    def write_label(self, tensor: TensorId, label: StreamLabel) -> None:
        """Set the label of a tensor, with the rank that its shape says."""
        super().write_label(tensor, replace(label, rank=self.find_rank(tensor) or label.rank))

    def hold_label(self, label: StreamLabel, reason: str) -> None:
        """Turn the stream of a label by nothing. The first reason stays."""
        stream = self.find_stream(label)
        stream.reason = stream.reason or reason

    def end_labels(self, node: NodeRef) -> None:
        """Hold the streams that a node reads, and those whose squares it reads."""
        super().end_labels(node)
        tensors = self.index.list_reads(node)
        for tensor in tensors:
            if tensor in self.squares and tensor not in self.labels:
                self.hold_label(self.squares[tensor], f"{node.title} reads {tensor.name}")
        # Numbers of rows stay such under whatever is done to each of them.
        if node.op_type in _ELEMENTWISE and all(
            self.is_narrow(tensor) and tensor not in self.labels for tensor in tensors
        ):
            self.narrow.add(node.result)

    def divide_stream(self, label: StreamLabel, width: int) -> None:
        """Parts of `width` channels lie in rows of their own from here on."""
        stream = self.find_stream(label)
        stream.size = gcd(stream.size, width)

    def join_streams(self, labels: Sequence[StreamLabel], node: NodeRef) -> StreamLabel:
        """One stream of those that meet in a node."""
        first = labels[0]
        for other in labels[1:]:
            if (other.axis, other.width, other.waiting) != (first.axis, first.width, first.waiting):
                for label in labels:
                    self.hold_label(label, f"{node.title} joins channels that differ")
            streams = self.find_stream(first), self.find_stream(other)
            if streams[0] is not streams[1]:
                # The one that begins first gives its name.
                first_begun, merged = sorted(streams, key=self._streams.index)
                # Heads of 64 channels beside rows of 768 leave matrices of 64.
                first_begun.size = gcd(first_begun.size, merged.size)
                first_begun.level |= merged.level
                first_begun.normalized |= merged.normalized
                first_begun.reason = first_begun.reason or merged.reason
                first_begun.turns += merged.turns
                first_begun.readers += merged.readers
                self._streams = [
                    first_begun if stream is merged else stream for stream in self._streams
                ]
        return first

    def join_plain(self, node: NodeRef, tensors: Iterable[MaybeTensor]) -> StreamLabel | None:
        """One stream of those that these inputs of a node have; None where a scale waits, which is each one's own."""
        labels = self.list_labels(tensors)
        if not labels or any(label.waiting for label in labels):
            return None
        return self.join_streams(labels, node)

    def turn_constant(self, label: StreamLabel, edge: Edge, shape: Sequence[int]) -> bool:
        """Let a constant that joins a stream follow it; False where its shape says nothing of channels."""
        axis = label.axis
        if len(shape) >= -axis and shape[axis] == label.width:
            self.find_stream(label).turns.append((edge, axis))
            return True
        # One number for all channels.
        self.find_stream(label).level = True
        return len(shape) < -axis or shape[axis] == 1

    def turn_others(self, node: NodeRef, label: StreamLabel, inputs: Iterable[int]) -> bool:
        """Let constants that are added follow a stream; False for anything else beside it."""
        for k in inputs:
            if self.index.find_input(node, k) is None or self.find_label(node, k) is not None:
                continue
            edge = node.make_edge(k)
            shape = self.find_shape(edge)
            if shape is None or not self.turn_constant(label, edge, shape):
                return False
        return True

    def read_stream(self, label: StreamLabel, edge: Edge, axis: int, width: int) -> None:
        """Note a linear operator that reads a stream along the last axis."""
        self.divide_stream(label, width)
        self.find_stream(label).readers.append(StreamReader(edge, axis, label))
        if label.waiting and label.width != width:
            self.hold_label(
                label, f"{edge.node} reads {width} channels where {label.width} are scaled"
            )

    def scale_stream(
        self, label: StreamLabel, scale: Edge | None, shift: Edge | None = None
    ) -> StreamLabel:
        """The label behind a scale and a shift per channel, [width] or one number each."""
        waiting = label.waiting
        if scale is not None:
            value = read_constant(self.index, scale)
            # One number for all channels needs no turning.
            if value is None or not (value == value.flat[0]).all():
                waiting = (*waiting, ChannelConstant(scale))
        # Behind a scale that waits a shift waits as well; one by itself is added, and turned like
        # any constant.
        if shift is not None and waiting:
            waiting = (*waiting, ChannelConstant(shift, shift=True))
        elif shift is not None:
            self.turn_constant(label, shift, self.find_shape(shift) or ())
        return replace(label, waiting=waiting)

    def find_shape(self, edge: Edge) -> Shape | None:
        """The shape of a constant of floats; None for anything else."""
        tensor = self.index.find_at(edge)
        floats = self.index.find_dtype(tensor) in FLOAT_TENSORS
        return self.index.find_sizes(tensor) if floats and self.index.is_constant(tensor) else None

    def is_narrow(self, tensor: MaybeTensor) -> bool:
        """True for a tensor that has one number for all channels of a row."""
        shape = self.index.find_shape(tensor)
        return tensor in self.narrow or (shape is not None and (not shape or shape[-1] == 1))

    def find_rank(self, tensor: MaybeTensor) -> int | None:
        """The rank of a tensor, by its shape or its label; operators of ONNX Runtime have no shape inference."""
        label = self.labels.get(tensor)
        return self.index.find_rank(tensor) or (None if label is None else label.rank)

    def count_back(self, axis: int, *tensors: MaybeTensor) -> int | None:
        """An axis of tensors of one rank, counted from the end; None where that is not known of any."""
        rank = next(filter(None, map(self.find_rank, tensors)), None)
        return axis if axis < 0 else None if rank is None else axis - rank


_ELEMENTWISE = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Sqrt",
    "Pow",
    "Reciprocal",
    "Max",
    "Min",
    "Clip",
    "Cast",
)
