"""How each operator takes part in the streams of channels that may be rotated."""

from dataclasses import replace

import numpy as np

from onnxq.arrays import Shape
from onnxq.graph import FLOAT_TENSORS, GraphIndex, NodeRef
from onnxq.passes.equalization.streams import StreamLabel, Streams
from onnxq.sites import Edge


def pass_stream(flow: Streams, node: NodeRef, same_rank: bool = True) -> bool:
    """Every channel goes where its neighbours go."""
    label = flow.find_label(node, 0)
    # A rotation mixes channels, which a Cast to integers does not commute with.
    if label is None or (node.op_type == "Cast" and node.attrs.get("to") not in FLOAT_TENSORS):
        return False
    for tensor in node.results:
        flow.write_label(tensor, label if same_rank else replace(label, rank=None))
    return True


def ignore_values(flow: Streams, node: NodeRef) -> bool:
    """Nothing is computed of the values."""
    return True


def turn_matmul(flow: Streams, node: NodeRef) -> bool:
    """By a weight it ends a stream and begins another; P·V and Q·Kᵀ pass or end streams by themselves."""
    edge = node.make_edge(1)
    x = flow.find_label(node, 0)
    y = flow.find_label(node, 1)
    shape = flow.find_shape(edge)
    if shape is not None:
        return len(shape) == 2 and _turn_linear(flow, node, shape)
    if x is None or y is None:
        # P·V: every row is a mean of rows.
        return y is not None and y.axis == -1 and flow.pass_label(node, y)
    # A scale that waits would lie between two rotations, which then do not cancel.
    if (x.axis, y.axis) != (-1, -2) or x.waiting or y.waiting:
        return False
    # Q·Kᵀ: products of vectors that are turned alike.
    flow.join_streams([x, replace(y, axis=-1)], node)
    return True


def _turn_linear(flow: Streams, node: NodeRef, shape: Shape) -> bool:
    """A linear operator with a weight of this shape ends a stream and begins another."""
    x = flow.find_label(node, 0)
    edge = node.make_edge(1)
    axis, out_axis = (-1, -2) if node.is_transposed else (-2, -1)
    if x is not None and x.axis == -1:
        flow.read_stream(x, edge, axis, shape[axis])
    # Tokens are mixed, not channels: as in an MLP-Mixer or behind a Transpose.
    elif x is not None:
        flow.hold_label(x, f"{node.title} reads it along another axis")
    if not flow.index.has_constant(node, 0):
        label = flow.begin_stream(node.result, edge, out_axis, shape[out_axis])
        flow.write_label(
            node.result, replace(label, rank=flow.find_rank(flow.index.find_input(node)))
        )
    return True


def turn_gemm(flow: Streams, node: NodeRef) -> bool:
    """A linear operator with its bias."""
    shape = flow.find_shape(node.make_edge(1))
    if shape is None or len(shape) != 2 or node.transposes_data:
        return False
    _turn_linear(flow, node, shape)
    flow.hold_inputs(node, [2])
    label = flow.labels.get(node.result)
    # The bias follows the output; a computed one cannot be turned offline.
    if label is not None and (flow.find_label(node, 2) or not flow.turn_others(node, label, [2])):
        flow.hold_label(label, f"the bias of {node.name} is computed")
    return True


def turn_conv(flow: Streams, node: NodeRef) -> bool:
    """Patches of an image begin a stream."""
    edge = node.make_edge(1)
    shape = flow.find_shape(edge)
    if shape is None or len(shape) < 3 or node.groups != 1:
        return False
    # From the end, as all axes of labels: W is [M, C, kH, kW] and its result [N, M, H, W].
    label = flow.begin_stream(node.result, edge, -len(shape), shape[0], 1 - len(shape))
    flow.write_label(node.result, label)
    bias = node.make_edge(2)
    if flow.find_shape(bias) == (shape[0],):
        flow.find_stream(label).turns.append((bias, -1))
    elif flow.index.find_input(node, 2) is not None:
        flow.hold_label(label, f"the bias of {node.name} is computed")
    # Patches may be made of another stream.
    return flow.find_label(node, 0) is None


def _begin_of_constant(flow: Streams, node: NodeRef) -> bool:
    """Rows or parts of a constant, such as a table: a stream along its last axis."""
    edge = node.make_edge(0)
    shape = flow.find_shape(edge)
    if shape is None or len(shape) < 2 or shape[-1] < 2:
        return False
    return flow.pass_label(node, flow.begin_stream(node.result, edge, -1, shape[-1]))


def turn_gather(flow: Streams, node: NodeRef) -> bool:
    """Rows of a table begin a stream; of tokens it goes on."""
    x = flow.find_label(node, 0)
    axis = node.read_int("axis", 0)
    if x is None:
        return axis == 0 and _begin_of_constant(flow, node)
    # Axes count from the end, so that they hold where the rank is unknown or grows in front.
    back = flow.count_back(axis, flow.index.find_input(node))
    # Of a tensor of one axis there is nothing but channels to gather.
    return (
        x.axis == -1
        and (axis == 0 if back is None else back < -1)
        and pass_stream(flow, node, same_rank=False)
    )


def turn_reshape(flow: Streams, node: NodeRef) -> bool:
    """Channels that lie side by side stay so: of heads in one row, or of each head in its own."""
    label = flow.find_label(node, 0)
    if label is None:
        return False
    if label.axis == -1:
        width = _find_width(flow, node, label)
        if width is None or (label.waiting and width != label.width):
            return False
        # Heads in rows of their own: only a rotation within each head, the same for all, survives.
        flow.divide_stream(label, width)
        return flow.pass_label(node, replace(label, width=width, rank=_find_rank(flow, node)))
    before = flow.index.input_shape(node)
    after = flow.index.find_shape(node.result)
    # [N, C, H, W] to [N, C, H·W].
    return (
        before is not None
        and after is not None
        and len(after) == 3
        and label.axis == 1 - len(before)
        and after[1] == label.width
        and flow.pass_label(node, replace(label, axis=-2))
    )


def _find_width(flow: Streams, node: NodeRef, label: StreamLabel) -> int | None:
    """The last dim of a node's output; by the linear operator that reads it where no shape says so."""
    shape = flow.index.find_shape(node.result)
    if shape and isinstance(shape[-1], int):
        return shape[-1]
    value = flow.index.input_value(node, 1)
    if node.op_type == "Reshape" and value is not None and value.size and value.flat[-1] > 0:
        return int(value.flat[-1])
    if node.op_type == "Unsqueeze" and value is not None:
        rank = _find_rank(flow, node)
        last = any(rank is None or axis in (-1, rank - 1) for axis in value.flat)
        return None if last else label.width
    for reader in flow.index.readers(node.result):
        weight = flow.find_shape(reader.make_edge(1))
        if reader.op_type == "MatMul" and weight is not None and len(weight) == 2:
            return weight[0]
    return None


def _find_rank(flow: Streams, node: NodeRef) -> int | None:
    """The rank of a Reshape's or an Unsqueeze's output; None for other nodes."""
    rank = 0 if node.op_type == "Reshape" else flow.find_rank(flow.index.find_input(node))
    added = flow.index.input_value(node, 1)
    if added is None or rank is None or node.op_type not in ("Reshape", "Unsqueeze"):
        return None
    return rank + added.size


def turn_transpose(flow: Streams, node: NodeRef) -> bool:
    """The channels lie along another axis."""
    label = flow.find_label(node, 0)
    perm = node.attrs.get("perm")
    # Without `perm` ONNX reverses all axes, and how many there are may be unknown.
    if label is None or not perm:
        return False
    return flow.pass_label(
        node, replace(label, axis=perm.index(len(perm) + label.axis) - len(perm), rank=len(perm))
    )


def turn_concat(flow: Streams, node: NodeRef) -> bool:
    """Tokens beside tokens."""
    tensors = flow.index.list_inputs(node)
    labels = flow.list_labels(tensors)
    back = flow.count_back(node.read_int("axis", 0), *tensors, node.result)
    # Channels beside channels would be two streams in one, and cannot be turned as either.
    if not labels or back is None or back == labels[0].axis:
        return False
    label = flow.join_streams(labels, node)
    alone = all(tensor in flow.labels for tensor in tensors)
    flow.write_label(node.result, label)
    return alone or (not label.waiting and flow.turn_others(node, label, range(len(tensors))))


def turn_slice(flow: Streams, node: NodeRef) -> bool:
    """Some of the tokens; of a constant they begin a stream."""
    label = flow.find_label(node, 0)
    axes = flow.index.read_integers(node, "axes", 3)
    axis = -1 if label is None else label.axis
    tensor = flow.index.find_input(node)
    if axes is None or any(flow.count_back(int(sliced), tensor) in (axis, None) for sliced in axes):
        return False
    return _begin_of_constant(flow, node) if label is None else pass_stream(flow, node)


def turn_split(flow: Streams, node: NodeRef) -> bool:
    """Tokens in parts."""
    label = flow.find_label(node, 0)
    back = flow.count_back(node.read_int("axis", 0), flow.index.find_input(node))
    return label is not None and back not in (label.axis, None) and pass_stream(flow, node)


def turn_expand(flow: Streams, node: NodeRef) -> bool:
    """Rows repeated; those of a constant begin a stream."""
    return (
        _begin_of_constant(flow, node)
        if flow.find_label(node, 0) is None
        else pass_stream(flow, node, same_rank=False)
    )


def _find_pair(flow: Streams, node: NodeRef) -> tuple[StreamLabel, Edge, Shape | None] | None:
    """(label, the other input, that one's shape if it is a constant) where one of two inputs has a label."""
    for k in range(2):
        label = flow.find_label(node, k)
        if label is not None and flow.find_label(node, 1 - k) is None:
            other = node.make_edge(1 - k)
            return label, other, flow.find_shape(other)
    return None


def _is_row(shape: Shape, label: StreamLabel) -> bool:
    """True for one number, or one for each channel of the last axis."""
    return (
        all(dim == 1 for dim in shape[:-1])
        and (not shape or shape[-1] in (1, label.width))
        and label.axis == -1
    )


def turn_add(flow: Streams, node: NodeRef) -> bool:
    """Residual sums; a constant that is added follows the stream, or waits with a scale."""
    pair = _find_pair(flow, node)
    if pair is None:
        return turn_sum(flow, node)
    label, other, shape = pair
    if label.waiting:
        if shape is None or node.op_type == "Sub" or not _is_row(shape, label):
            return False
        label = flow.scale_stream(label, None, other)
    elif shape is not None:
        if not flow.turn_constant(label, other, shape):
            return False
    # Added to all channels alike: kept by a rotation that keeps the vector of ones.
    elif flow.is_narrow(flow.index.find_at(other)) and label.axis == -1:
        flow.find_stream(label).level = True
    else:
        return False
    return flow.pass_label(node, label)


def turn_sum(flow: Streams, node: NodeRef) -> bool:
    """An Add of any number of tensors."""
    label = flow.join_plain(node, flow.index.list_inputs(node))
    if label is None:
        return False
    flow.write_label(node.result, label)
    return flow.turn_others(node, label, range(len(node.inputs)))


def turn_product(flow: Streams, node: NodeRef) -> bool:
    """A number for each row, or a scale per channel that waits; by itself, squares."""
    if node.inputs[0] == node.inputs[1]:
        return node.op_type == "Mul" and _square_channels(flow, node)
    pair = _find_pair(flow, node)
    if pair is None:
        return False
    label, other, shape = pair
    if node.op_type == "Div" and other.index == 0:
        return False
    if shape is None:
        narrow = flow.is_narrow(flow.index.find_at(other))
        return narrow and label.axis == -1 and flow.pass_label(node, label)
    if len(shape) >= -label.axis and shape[label.axis] != 1:
        if not _is_row(shape, label) or node.op_type == "Div":
            return False
        label = flow.scale_stream(label, other)
    return flow.pass_label(node, label)


def turn_power(flow: Streams, node: NodeRef) -> bool:
    """Squares, where the exponent is 2."""
    exponent = flow.index.read_scalar(node, 1)
    # The sum of squares is the only power whose sum a rotation keeps.
    return exponent is not None and exponent[0] == 2.0 and _square_channels(flow, node)


def _square_channels(flow: Streams, node: NodeRef) -> bool:
    """Squares, whose sum over the channels does not hang on their basis."""
    label = flow.find_label(node, 0)
    # Σ(s·x)² depends on the basis, unlike Σx².
    if label is None or label.waiting:
        return False
    flow.squares[node.result] = label
    if flow.index.is_kept(node.result):
        flow.hold_label(label, f"{node.name} gives out its squares")
    return True


# Of [N, tokens, channels] a mean over the last axis is a GlobalAveragePool, too.
_MEANS = ("ReduceMean", "ReduceSum", "GlobalAveragePool")


def turn_mean(flow: Streams, node: NodeRef) -> bool:
    """A sum or mean over the channels, of squares or of themselves, or over what stands in front of them."""
    tensor = flow.index.find_input(node)
    squares = flow.squares.get(tensor)
    label = squares or flow.find_label(node, 0)
    pooled = node.op_type == "GlobalAveragePool"
    axes = np.array([2]) if pooled else flow.index.read_integers(node, "axes", 1)
    if label is None or axes is None or label.waiting or (pooled and flow.find_rank(tensor) != 3):
        return False
    backs = {flow.count_back(int(axis), tensor) for axis in axes}
    keeps_rank = bool(node.attrs.get("keepdims", 1))
    if backs == {label.axis}:
        stream = flow.find_stream(label)
        if squares is not None or node.op_type in ("ReduceL2", "ReduceSumSquare"):
            stream.normalized = True
        elif node.op_type in _MEANS:
            # The mean is the product with a vector of ones, which the rotation has to keep.
            stream.level = True
        else:
            return False
        if keeps_rank and label.axis == -1:
            flow.narrow.add(node.result)
        return True
    before = all(axis is not None and axis < label.axis for axis in backs)
    return (
        squares is None
        and before
        and node.op_type in _MEANS
        and pass_stream(flow, node, same_rank=keeps_rank)
    )


_CENTRED = ("LayerNormalization", "SkipLayerNormalization")


def turn_normalized(flow: Streams, node: NodeRef) -> bool:
    """LayerNormalization and RMSNormalization."""
    label = flow.find_label(node, 0)
    back = flow.count_back(node.read_int("axis", -1), flow.index.find_input(node))
    # Over several axes tokens share a length, which turning channels does not keep.
    return label is not None and back == -1 and _normalize(flow, node, label, 1)


def _normalize(flow: Streams, node: NodeRef, label: StreamLabel, k: int) -> bool:
    """A normalization's first output, with scale at input k and shift, where it takes the mean away, behind it."""
    scale = node.make_edge(k)
    centred = node.op_type in _CENTRED
    if label.axis != -1 or label.waiting or flow.find_shape(scale) != (label.width,):
        return False
    shift = node.make_edge(k + 1) if centred and node.name_input(k + 1) else None
    if shift is not None and flow.find_shape(shift) != (label.width,):
        return False
    stream = flow.find_stream(label)
    stream.normalized = True
    stream.level |= centred
    return flow.pass_label(node, flow.scale_stream(label, scale, shift))


def turn_normalized_sum(flow: Streams, node: NodeRef) -> bool:
    """The sum of two inputs and a bias, normalized, and the sum itself as fourth output."""
    # The one without mean has no shift at input 3: inputs are x, skip, gamma, (beta,) bias.
    bias = 3 if node.op_type == "SkipSimplifiedLayerNormalization" else 4
    label = flow.join_plain(node, flow.index.list_inputs(node)[:2])
    # Constants such as a position table are turned with the stream they are added to.
    if label is None or not flow.turn_others(node, label, (0, 1, bias)):
        return False
    if any(node.outputs[3:]):
        flow.write_label(node.make_result(3), label)
    return _normalize(flow, node, label, 2)


# Attributes with the number of value heads and of query heads; inputs with past values.
_HEADS = {
    "Attention": ("kv_num_heads", "q_num_heads", 5),
    "GroupQueryAttention": ("kv_num_heads", "num_heads", 4),
    "MultiHeadAttention": ("num_heads", "num_heads", 7),
}


def turn_attention(flow: Streams, node: NodeRef) -> bool:
    """Values through attention as one node: all heads are turned alike."""
    kv_heads, heads, past = _HEADS[node.op_type]
    label = flow.find_label(node, 2)
    # Its biases of queries, keys and values lie in one constant; that of com.microsoft holds the weights too.
    biased = node.op_type == "MultiHeadAttention" and flow.index.find_input(node, 3) is not None
    # com.microsoft's Attention multiplies by one packed weight of queries, keys and values.
    if label is None or label.axis != -1 or biased or (node.op_type == "Attention" and node.domain):
        return False
    # Queries and keys are compared as they are: in this node no rotation of theirs cancels.
    flow.hold_inputs(node, {*range(len(node.inputs))} - {2})
    if flow.index.find_input(node, past) is not None:
        # A cache holds values of earlier runs, in the basis that they were computed in.
        flow.hold_label(label, f"{node.title} reads past values")
    width = out = label.width
    # Of rank 4, [N, heads, tokens, width], heads lie apart and labels are a head wide.
    if flow.find_rank(flow.index.find_input(node, 2)) != 4:
        # Of all heads in one row.
        parts = node.read_int(kv_heads, 0)
        if not parts or out % parts:
            return False
        width = out // parts
        # With grouped queries several heads read one head of values: the result is wider.
        out = width * int(node.attrs[heads])
    flow.divide_stream(label, width)
    flow.write_label(node.result, replace(label, width=out))
    if any(node.outputs[2:3]):
        flow.write_label(node.make_result(2), replace(label, width=width))
    return True


_RULES = {
    "Conv": turn_conv,
    "Gemm": turn_gemm,
    "MatMul": turn_matmul,
    "Add": turn_add,
    "Sub": turn_add,
    "Sum": turn_sum,
    "Mul": turn_product,
    "Div": turn_product,
    "Pow": turn_power,
    **dict.fromkeys(("Neg", "Identity", "Dropout", "Cast"), pass_stream),
    # Of [N, tokens, channels] a GlobalAveragePool is a mean over the channels.
    **dict.fromkeys((*_MEANS, "ReduceL2", "ReduceSumSquare"), turn_mean),
    "Concat": turn_concat,
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), turn_reshape),
    "Transpose": turn_transpose,
    "Gather": turn_gather,
    "Slice": turn_slice,
    "Split": turn_split,
    "Expand": turn_expand,
    "Shape": ignore_values,
    "Size": ignore_values,
    "LayerNormalization": turn_normalized,
    "RMSNormalization": turn_normalized,
    "SimplifiedLayerNormalization": turn_normalized,
    "SkipLayerNormalization": turn_normalized_sum,
    "SkipSimplifiedLayerNormalization": turn_normalized_sum,
    **dict.fromkeys(_HEADS, turn_attention),
}


def find_streams(index: GraphIndex) -> Streams:
    """Every stream of the model, in the order the model runs in."""
    flow = Streams(index)
    flow.visit_nodes(_RULES)
    return flow
