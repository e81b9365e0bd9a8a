"""Conv, ConvTranspose, Gemm and MatMul with constant weights, seen alike, and affine maps through their weights.

A Conv, ConvTranspose, Gemm or MatMul computes y = L(W, x) + b, linear in W and x. With a and c one number per output
channel, and s and t scalars,

    a·y + c        = L(a·W, x) + (a·b + c)                 (a along W's output channels)
    L(W, s·x) + b  = L(s·W, x) + b                         (always: padding is zero, and s·0 = 0)
    L(W, x + t) + b = L(W, x) + (b + t·ΣW)                 (only where no padding enters; ΣW over all but the output)

Everything is computed in float64 and rounded once, to the weight's own type.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxq.arrays import Array, Array64, are_finite, as_float64, is_float, list_other_axes
from onnxq.graph import GraphIndex, NodeRef, NodeRefs
from onnxq.sites import Edge, NameSet, TensorId

# What values are multiplied by and what is added to them; None where that is not all that is done to them.
Affine = tuple[Array64, Array64] | None


def compute_batchnorm_scale(
    scale: Array, bias: Array, mean: Array, var: Array, epsilon: float
) -> Affine:
    """(a, c) of a BatchNormalization in inference, a·y + c; [channels] each. None if a variance is -epsilon or less."""
    spread = as_float64(var) + epsilon
    # The operator itself would give NaN or inf, which a folded weight must not spread.
    if not (spread > 0).all():
        return None
    a = as_float64(scale) / np.sqrt(spread)
    return a, as_float64(bias) - as_float64(mean) * a


def per_channel(value: Array | None, rank: int, axis: int, channels: int) -> Array64 | None:
    """A constant that broadcasts onto a tensor [.., channels at `axis`, ..] of `rank` without changing its shape.

    Returns [channels] or [] as float64; None when it varies along another axis or would raise the rank, and for what
    is no constant of floats.
    """
    if value is None or not is_float(value) or value.ndim > rank:
        return None
    shape = (1,) * (rank - value.ndim) + value.shape
    if any(dim != 1 for k, dim in enumerate(shape) if k != axis % rank):
        return None
    flat = as_float64(value).ravel()
    # inf and NaN stay where they are: folded, they would spread over whole channels.
    if flat.size not in (1, channels) or not are_finite(flat):
        return None
    # Scalars broadcast to any rank later.
    return flat if flat.size == channels and channels > 1 else flat.reshape(())


ARITHMETIC = frozenset({"Mul", "Div", "Add", "Sub"})


@dataclass(frozen=True, eq=False)
class Linear:
    """y = L(weight, x) + bias.

    axis: the weight's output axis; channels: of y, along y's `channel_axis`; rank: y's, or its known minimum.
    last: the node that writes y: `node`, or the Add that gives a MatMul its bias. bias_edge: the input that holds the
    bias or can take one; None for a MatMul without Add.
    """

    node: NodeRef
    weight: Array
    axis: int
    channels: int
    channel_axis: int
    rank: int
    rank_known: bool
    last: NodeRef
    bias_edge: Edge | None
    bias: Array64

    def owns_constants(self, index: GraphIndex) -> bool:
        """True when nothing else reads its weight and its bias."""
        edges = (self.node.make_edge(1), self.bias_edge)
        return all(map(index.is_owned, filter(None, map(index.find_at, edges))))

    @property
    def inputs(self) -> int:
        """Number of input channels: axis 1 of a Conv's weight has those of one group."""
        outer, inner = self.weight.shape[:2]
        return int(outer if self.axis else inner * self.node.groups)

    @property
    def magnitudes(self) -> Array64:
        """Largest |weight| over the kernel, [groups, outputs, inputs]."""
        groups = self.node.groups
        outer, inner = self.weight.shape[:2]
        flat = abs(as_float64(self.weight)).reshape(groups, outer // groups, inner, -1)
        largest = flat.max(axis=3)
        return as_float64(largest.swapaxes(1, 2) if self.axis else largest)

    def scale_weight(self, outputs: Array64, inputs: Array64 | float = 1.0) -> Array64:
        """weight · outputs / inputs, per channel ([channels] or [], [inputs] or a number), in float64."""
        groups = self.node.groups
        multiplied = np.broadcast_to(outputs, self.channels).reshape(groups, -1, 1)
        factor: Array64 = multiplied / np.broadcast_to(inputs, self.inputs).reshape(groups, 1, -1)
        factor = factor.swapaxes(1, 2) if self.axis else factor
        return as_float64(self.weight) * factor.reshape(
            *self.weight.shape[:2], *[1] * (self.weight.ndim - 2)
        )

    def sum_inputs(self) -> Array64:
        """ΣW, [channels]: the increase of every output channel if all inputs grow by one."""
        return as_float64(as_float64(self.weight).sum(axis=list_other_axes(self.weight, self.axis)))

    def multiply_constant(self, c: Array64) -> Array64:
        """W·c, [channels]: added to the bias if the input is lowered everywhere by c, [inputs]."""
        wide = as_float64(self.weight)
        if self.axis:
            return c @ wide
        groups = self.node.groups
        flat = wide.reshape(groups, len(wide) // groups, wide.shape[1], -1).sum(axis=3)
        return as_float64(np.einsum("goi,gi->go", flat, c.reshape(groups, -1)).ravel())

    @property
    def has_plain_bias(self) -> bool:
        """True when it has a bias, or can take one, that may be any row of numbers: a Gemm's C is scaled by beta."""
        return self.bias_edge is not None and self.node.read_float("beta", 1.0) == 1.0

    @property
    def is_padded(self) -> bool:
        """True when the output's border sees fewer inputs than its middle."""
        mode = self.node.padding_mode
        padded = mode not in ("NOTSET", "VALID") or (
            mode == "NOTSET" and any(self.node.attrs.get("pads", ()))
        )
        # Kernels of a ConvTranspose overlap less at the border even without padding.
        return self.node.op_type == "ConvTranspose" or padded

    def takes_shifts(self, maker: Linear) -> bool:
        """True when a constant in front of it is a constant in its bias, and its channels are those of the maker."""
        node = self.node
        # Padding stays 0 when the values around it move, and how many taps of a ConvTranspose meet changes with its
        # stride. The sum of a column would have to be multiplied by alpha, too, and transA swaps its axes.
        if (
            self.is_padded
            or not self.has_plain_bias
            or node.transposes_data
            or node.read_float("alpha", 1.0) != 1.0
        ):
            return False
        alike = self.rank == maker.rank
        # It reads channels along the last axis: those of another MatMul, or of any operator of rank 2.
        if node.op_type == "MatMul":
            alike = maker.channel_axis == -1 or maker.rank == 2
        return self.inputs == maker.channels and alike


def find_linear(index: GraphIndex, node: NodeRef) -> Linear | None:
    """The linear operator a node is, None when its weight or bias is computed at run time or has another form."""
    if not node.is_onnx("Conv", "ConvTranspose", "Gemm", "MatMul"):
        return None
    weight = index.input_value(node, 1)
    # Of constant data it is no layer.
    if weight is None or not is_float(weight) or weight.ndim < 2 or index.has_constant(node, 0):
        return None
    if node.op_type == "MatMul":
        return _describe_matmul(index, node, weight) if weight.ndim == 2 else None
    bias = index.input_value(node, 2)
    if bias is None and index.find_input(node, 2) is not None:
        return None
    return (
        _describe_gemm(node, weight, bias)
        if node.op_type == "Gemm"
        else _describe_conv(node, weight, bias)
    )


def _describe_conv(node: NodeRef, weight: Array, bias: Array | None) -> Linear | None:
    axis = 0 if node.op_type == "Conv" else 1
    # Axis 0 of Conv's weight has the outputs of all groups, axis 1 of ConvTranspose's those of one.
    groups = node.groups if axis else 1
    channels = weight.shape[axis] * groups
    unlike = bias is not None and bias.shape != (channels,)
    if weight.ndim < 3 or len(weight) % groups or unlike:
        return None
    shift = np.zeros(()) if bias is None else as_float64(bias)
    return Linear(
        node, weight, axis, channels, 1, weight.ndim, True, node, node.make_edge(2), shift
    )


def _describe_gemm(node: NodeRef, weight: Array, bias: Array | None) -> Linear | None:
    axis = 0 if node.is_transposed else 1
    shift = np.zeros(())
    if bias is not None:
        column = per_channel(bias, 2, 1, weight.shape[axis])
        # A C that differs by row is no bias.
        if column is None:
            return None
        shift = column * node.read_float("beta", 1.0)
    return Linear(
        node, weight, axis, weight.shape[axis], 1, 2, True, node, node.make_edge(2), shift
    )


def _describe_matmul(index: GraphIndex, node: NodeRef, weight: Array) -> Linear:
    channels = weight.shape[1]
    out = node.result
    known = index.find_rank(out)
    # Without shapes the rank is that of the input at least: enough to tell a bias from a constant that broadcasts.
    rank = known or max(1, index.find_least_rank(index.find_input(node)))
    last = node
    bias_edge = None
    bias = np.zeros(())
    # With another reader the product is seen without the bias.
    reader = index.find_reader(out, "Add")
    if reader is not None:
        add, k = reader
        column = per_channel(index.input_value(add, 1 - k), rank, -1, channels)
        if column is not None:
            last = add
            bias_edge = add.make_edge(1 - k)
            bias = column
    return Linear(node, weight, 1, channels, -1, rank, known is not None, last, bias_edge, bias)


@dataclass(frozen=True, eq=False)
class Followers:
    """a·y + c behind a linear operator: the nodes it is made of, in order. a and c: [channels] or []."""

    a: Array64
    c: Array64
    nodes: NodeRefs = ()


def list_followers(index: GraphIndex, op: Linear, kinds: NameSet) -> Followers:
    """The longest affine map of nodes of these kinds that alone read an operator's output."""
    followers = Followers(np.ones(()), np.zeros(()))
    tensor = op.last.result
    while (reader := index.find_reader(tensor, *kinds)) is not None:
        node, k = reader
        read = _read_batchnorm if node.op_type == "BatchNormalization" else _read_step
        step = read(index, op, node, k)
        if step is None:
            break
        a, c = step
        # a'·(a·y + c) + c'.
        following = Followers(followers.a * a, followers.c * a + c, (*followers.nodes, node))
        # A bare MatMul has nowhere to put it.
        if op.bias_edge is None and following.c.any():
            break
        followers = following
        tensor = node.result
    return followers


def _read_step(index: GraphIndex, op: Linear, node: NodeRef, k: int) -> Affine:
    value = index.input_value(node, 1 - k)
    column = per_channel(value, op.rank, op.channel_axis, op.channels)
    return None if column is None else read_arithmetic(node.op_type, column, k)


def read_arithmetic(op_type: str, value: Array64, k: int) -> Affine:
    """(a, c) of the map a·x + c that Mul, Div, Add or Sub is, where x is its input k and `value` the other one.

    None for a division by x or by zero.
    """
    unit = np.ones(())
    nothing = np.zeros(())
    if op_type == "Mul":
        return value, nothing
    if op_type == "Div":
        # 1/0 would turn whole rows of the weight to inf.
        return (1.0 / value, nothing) if k == 0 and value.all() else None
    if op_type == "Add":
        return unit, value
    # c - x is affine, too.
    return (unit, -value) if k == 0 else (-unit, value)


def _read_batchnorm(index: GraphIndex, op: Linear, node: NodeRef, k: int) -> Affine:
    if (
        k != 0
        # With statistics among its outputs it is an operator of training.
        or any(node.outputs[1:])
        or node.attrs.get("training_mode", 0)
        # Up to opset 8: with spatial = 0 every position has statistics of its own.
        or not node.attrs.get("spatial", 1)
    ):
        return None
    # BatchNormalization's channel axis is 1, a MatMul's the last.
    if op.channel_axis != 1 and not (op.rank_known and op.rank == 2):
        return None
    inputs = [index.input_value(node, i) for i in range(1, 5)]
    if any(value is None or value.shape != (op.channels,) for value in inputs):
        return None
    scale, bias, mean, var = (value for value in inputs if value is not None)
    return compute_batchnorm_scale(scale, bias, mean, var, node.read_float("epsilon", 1e-5))


@dataclass(frozen=True, eq=False)
class ScalarSource:
    """s·x + t in front of a linear operator: the nodes it is made of, in order, and x."""

    s: float
    t: float
    x: TensorId
    nodes: NodeRefs


def find_scalar_source(index: GraphIndex, op: Linear) -> ScalarSource | None:
    """The scalar arithmetic that only this operator's data input reads, as far back as it goes."""
    s = 1.0
    t = 0.0
    tensor = index.find_input(op.node)
    nodes: list[NodeRef] = []
    while tensor is not None:
        reader = index.find_reader(tensor)
        node = index.find_onnx_producer(tensor, *ARITHMETIC)
        # A node of another scope runs elsewhere, or more often, than the operator.
        if reader is None or node is None or node.scope != op.node.scope:
            break
        k, constant = index.read_operands(node)
        x = index.find_input(node, k)
        # A constant of more axes than x gives the result a higher rank.
        if constant is None or x is None or constant[1] > index.find_least_rank(x):
            break
        step = read_arithmetic(node.op_type, np.asarray(constant[0]), k)
        if step is None:
            break
        # Backwards: the map found so far is applied behind this one.
        s, t = s * float(step[0]), t + s * float(step[1])
        nodes.insert(0, node)
        tensor = x
    return ScalarSource(s, t, tensor, tuple(nodes)) if nodes and tensor is not None else None
