"""Normalizations: BatchNormalization folded into weights as all affine maps are, LayerNormalization made of its parts.

Behind Conv, ConvTranspose and Gemm (MatMul with its bias Add): Mul, Div, Add, Sub by a scalar or a constant per output
channel, and BatchNormalization, as long a row as there is. In front: scalars only (a factor per input channel would
carry the channels' imbalance from the weight, which has a scale per channel, into the activation, which has one).

PaddlePaddle's PP-LCNet family writes a learnable affine block, Mul and Add by one number each, behind every convolution
and every activation; left alone they cost a float kernel and hide the convolution's own output from its pair.
A BatchNormalization in front of a Conv stays: it evens out channels that share one activation scale.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from onnxq.arrays import Array, Array64, Axes, Shape, as_float64, is_float
from onnxq.graph import GraphIndex, MaybeNode, NodeRef, NodeRefs
from onnxq.numerics.rounding import round_to_type
from onnxq.passes.base import RunContext
from onnxq.passes.journal import PassReport
from onnxq.passes.linear import (
    ARITHMETIC,
    Linear,
    ScalarSource,
    find_linear,
    find_scalar_source,
    list_followers,
)
from onnxq.passes.patterns import Edit, Replacement, apply_replacements
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import MaybeTensor, NameSet, Refusal, TensorId

_BATCHNORM = frozenset({"BatchNormalization"})
# TensorFlow's exporter writes the mean of rows of three axes as the latter.
_MEANS = ("ReduceMean", "GlobalAveragePool")


# The nodes that an operator takes in, and whether its constants hold the result; None where there are none.
_TakenIn = tuple[NodeRefs, bool] | None


def fold_batchnorm(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Every BatchNormalization that alone reads a linear operator with constant weights."""
    return _fold_affine(state, "batchnorm", partial(_take_in_behind, kinds=_BATCHNORM))


def fold_scalars(ctx: RunContext, state: FloatState) -> FloatStep:
    """Every scalar or per-channel Mul, Div, Add, Sub behind a linear operator, and scalar ones in front of one."""
    # A BatchNormalization behind such arithmetic comes into reach only now.
    kinds = ARITHMETIC if "batchnorm" in ctx.skip else ARITHMETIC | _BATCHNORM
    state, behind = _fold_affine(state, "scalars", partial(_take_in_behind, kinds=kinds))
    state, front = _fold_affine(state, "scalars", _take_in_front)
    return state, PassReport(
        "scalars", behind.changed + front.changed, behind.skipped + front.skipped
    )


def _fold_affine(
    state: FloatState, name: str, take_in: Callable[[Edit, Linear], _TakenIn]
) -> FloatStep:
    edit = Edit(state.model)
    changed = []
    skipped = []
    for node in edit.index.nodes:
        op = find_linear(edit.index, node)
        taken = None if op is None else take_in(edit, op)
        if op is None or taken is None:
            continue
        row = ", ".join(follower.name for follower in taken[0])
        if taken[1]:
            changed.append(f"{node.name}: took in {row}")
            continue
        reason = f"folding {row} into it overflows {op.weight.dtype}"
        fix = "nothing to do; the nodes stay as they are"
        skipped.append(Refusal(node.name, reason, fix, name, "R112"))
    return edit.finish_pass(state, name, changed, skipped)


def _take_in_behind(edit: Edit, op: Linear, kinds: NameSet) -> _TakenIn:
    affine = list_followers(edit.index, op, kinds)
    if not affine.nodes:
        return None
    weight = round_to_type(op.scale_weight(affine.a), op.weight.dtype)
    fits = _write_constants(edit, op, weight, affine.a * op.bias + affine.c)
    if fits:
        edit.absorb_chain(op.last, affine.nodes)
    return affine.nodes, fits


def _write_constants(edit: Edit, op: Linear, weight: Array | None, bias: Array64) -> bool:
    """Give an operator another weight and bias; False, and no change, where one of them overflows its type."""
    if weight is None:
        return False
    edge = op.bias_edge
    if edge is None or (not bias.any() and edit.index.find_at(edge) is None):
        # No bias of zeros where there was none.
        edit.set_constant(op.node.make_edge(1), weight)
        return True
    narrow = round_to_type(np.array(np.broadcast_to(bias, (op.channels,))), op.weight.dtype)
    if narrow is None:
        return False
    edit.set_constant(op.node.make_edge(1), weight)
    edit.set_constant(edge, narrow)
    if op.node.read_float("beta", 1.0) != 1.0:
        # The bias holds it now.
        edit.set_attrs(op.node, {"beta": 1.0})
    return True


def _take_in_front(edit: Edit, op: Linear) -> _TakenIn:
    node = op.node
    source = find_scalar_source(edit.index, op)
    move = None if source is None else _move_source(op, source)
    if source is None or move is None:
        return None
    bias, rest = move
    shift = round_to_type(np.array(rest), op.weight.dtype)
    weight = round_to_type(as_float64(op.weight) * source.s, op.weight.dtype)
    if shift is None or not _write_constants(edit, op, weight, bias):
        return source.nodes, False
    x = source.x.name
    if rest != 0.0:
        constant = edit.add_part(node, "shift", shift)
        x = edit.insert_before(node, "Add", (x, constant), f"{x}/shifted")
    edit.read(node.make_edge(0), x)
    return source.nodes, True


def _move_source(op: Linear, source: ScalarSource) -> tuple[Array64, float] | None:
    """How s·x + t enters an operator: its new bias, and the term still added to x (t/s) where padding is zero."""
    if source.t == 0.0:
        return op.bias, 0.0
    if op.bias_edge is not None and not op.is_padded:
        sums = op.sum_inputs() * op.node.read_float("alpha", 1.0)
        return op.bias + source.t * sums, 0.0
    # One node for one node would gain nothing, and t/s loses digits where s is small.
    if len(source.nodes) < 2 or abs(source.s) < 1e-6:
        return None
    return op.bias, source.t / source.s


# Layer normalization written out becomes LayerNormalization (opset 17).
# d = x - mean(x); y = d / sqrt(mean(d²) + eps) · gamma (+ beta)
# JAX has max(mean(x²) - mean(x)², 0) in place of mean(d²), TensorFlow with r = gamma / sqrt(mean(d²) + eps)
# y = x · r + (beta - mean(x) · r)
#
# ORT fuses this by itself when nothing stands between; as one node it also stays whole when pairs are planned around
# it, and calibration need not look inside.


def fuse_layernorm(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Every written-out layer normalization over trailing axes with a constant gamma, replaced by its node."""
    return apply_replacements(state, "layernorm", _find_norms)


def _find_norms(index: GraphIndex) -> list[Replacement]:
    roots = (node for node in index.nodes if node.is_onnx("Sqrt"))
    return list(filter(None, (_match(index, root) for root in roots)))


@dataclass(frozen=True)
class _Centred:
    """d = x - mean(x, axes)."""

    x: TensorId
    axes: Axes
    nodes: NodeRefs


def _match(index: GraphIndex, root: NodeRef) -> Replacement | None:
    inside = _inside(index, root)
    if inside is None:
        return None
    d, epsilon, nodes = inside
    behind = _match_divided(index, root, d) or _match_spread(index, root, d)
    if behind is None:
        return None
    parts, last, gamma, beta = behind
    used = {node.name for node in (root, *nodes, *parts, last, *d.nodes)}
    written = {index.find_node(name).result for name in used} - {last.result}
    if not index.are_private(written, used):
        return None
    arrays = {"gamma": gamma} if beta is None else {"gamma": gamma, "beta": beta}
    # From the end: the rank need not be known.
    attrs = {"axis": -len(d.axes), "epsilon": float(np.float32(epsilon))}
    return Replacement(last, frozenset(used), "LayerNormalization", (d.x,), attrs, "", 17, arrays)


def _inside(index: GraphIndex, root: NodeRef) -> tuple[_Centred, float, list[NodeRef]] | None:
    """(d, epsilon, nodes) under the root: mean(d²) + epsilon."""
    add = index.find_onnx_producer(index.find_input(root), "Add")
    if add is None:
        return None
    # A constant of more axes than the mean would not be one epsilon.
    k, epsilon = index.read_operands(add)
    variance = index.find_input(add, k)
    if epsilon is None or epsilon[1] > 1 or epsilon[0] < 0:
        return None
    nodes = [add]
    bound = index.find_onnx_producer(variance, "Max")
    if bound is not None and index.read_scalar(bound, 1) == (0.0, 0):
        nodes.append(bound)
        variance = index.find_input(bound)
    difference = index.find_onnx_producer(variance, "Sub")
    if difference is not None:
        variance = index.find_input(difference)
    mean = index.find_onnx_producer(variance, *_MEANS)
    square = _match_square(index, index.find_input(mean))
    if mean is None or square is None:
        return None
    nodes += [mean, square]
    base = index.find_input(square)
    if difference is None:
        d = _match_centred(index, base)
        return (d, epsilon[0], nodes) if d and _axes(index, mean, d.x) == d.axes else None
    squared = _match_square(index, index.find_input(difference, 1))
    centre = index.find_onnx_producer(index.find_input(squared), *_MEANS)
    if squared is None or centre is None or base is None or index.find_input(centre) != base:
        return None
    axes = _axes(index, centre, base)
    if axes is None or axes != _axes(index, mean, base):
        return None
    return _Centred(base, axes, (centre,)), epsilon[0], [*nodes, difference, squared]


def _match_square(index: GraphIndex, tensor: MaybeTensor) -> MaybeNode:
    """The node that squares its first input, if one makes the tensor."""
    square = index.find_onnx_producer(tensor, "Pow", "Mul")
    if square is None:
        return None
    if square.op_type == "Mul":
        return square if square.inputs[0] == square.inputs[1] else None
    exponent = index.read_scalar(square, 1)
    return square if exponent and exponent[0] == 2.0 and exponent[1] <= 1 else None


# The nodes behind the root but the last one, the last one, gamma and beta.
_Behind = tuple[NodeRefs, NodeRef, Array, Array | None]


def _match_divided(index: GraphIndex, root: NodeRef, d: _Centred) -> _Behind | None:
    """d / root · gamma (+ beta)."""
    norm = _match_normalized(index, root)
    # Exporters compute d once, or once for each of its two uses.
    if norm is None or (norm[1].x, norm[1].axes) != (d.x, d.axes):
        return None
    divided, again = norm
    affine = _affine(index, divided[-1], d.x, len(d.axes))
    if affine is None:
        return None
    scaled, last, gamma, beta = affine
    return (*divided, *again.nodes, scaled), last, gamma, beta


def _match_spread(index: GraphIndex, root: NodeRef, d: _Centred) -> _Behind | None:
    """x · r + (beta - mean(x) · r), where r = gamma / root; also written x · r + (-mean(x) · r + beta)."""
    inverse = index.find_follower(root, "Reciprocal")
    scaled = None if inverse is None else _constant_reader(index, inverse, "Mul")
    if inverse is None or scaled is None:
        return None
    factor, values = scaled
    products = index.readers(factor.result)
    centre = next(node for node in d.nodes if node.op_type in _MEANS)
    for product, other in itertools.permutations(products, 2):
        last = index.find_follower(product, "Add")
        negated = index.find_onnx_producer(_other_input(index, other, factor), "Neg")
        shifted = _constant_reader(index, other, "Add" if negated else "Sub")
        if last is None or shifted is None or _other_input(index, product, factor) != d.x:
            continue
        moved = index.find_input(negated) if negated else _other_input(index, other, factor)
        shift, offsets = shifted
        if moved != centre.result or _other_input(index, last, product) != shift.result:
            continue
        if shift.op_type == "Sub" and index.find_input(shift, 1) != other.result:
            continue
        gamma, beta = (
            _trailing(value, len(d.axes), None, index.find_least_rank(d.x))
            for value in (values, offsets)
        )
        if gamma is None or beta is None or (gamma.shape, gamma.dtype) != (beta.shape, beta.dtype):
            continue
        nodes = (inverse, factor, product, other, shift, *([negated] if negated else []))
        return nodes, last, gamma, beta
    return None


def _other_input(index: GraphIndex, node: NodeRef, maker: NodeRef) -> MaybeTensor:
    """The operand of a node of two that another node does not make."""
    k = 1 if index.find_input(node) == maker.result else 0
    return index.find_input(node, k)


def _match_normalized(index: GraphIndex, root: NodeRef) -> tuple[list[NodeRef], _Centred] | None:
    """(nodes, d) of d / root, also written d · (1 / root)."""
    reader = index.find_reader(root.result, "Reciprocal", "Div")
    if reader is None:
        return None
    node, k = reader
    nodes = [node]
    numerator = index.read_scalar(node, 0)
    if node.op_type == "Reciprocal" or (k == 1 and numerator is not None and numerator[0] == 1.0):
        reader = index.find_reader(node.result, "Mul")
        if reader is None:
            return None
        node, k = reader
        nodes.append(node)
    # root / d is no normalization.
    elif k == 0:
        return None
    d = _match_centred(index, index.find_input(node, 1 - k))
    return None if d is None else (nodes, d)


def _match_centred(index: GraphIndex, tensor: MaybeTensor) -> _Centred | None:
    sub = index.find_onnx_producer(tensor, "Sub")
    x = index.find_input(sub)
    mean = index.find_onnx_producer(index.find_input(sub, 1), *_MEANS)
    if sub is None or x is None or mean is None or index.find_input(mean) != x:
        return None
    axes = _axes(index, mean, x)
    return None if axes is None else _Centred(x, axes, (sub, mean))


def _axes(index: GraphIndex, mean: NodeRef, x: TensorId) -> Axes | None:
    """The trailing axes a mean with kept dims runs over, counted from the end."""
    axes = index.read_integers(mean, "axes", 1)
    rank = index.find_rank(x)
    if mean.op_type == "GlobalAveragePool":
        return None if rank is None else tuple(range(2 - rank, 0))
    if axes is None or not mean.attrs.get("keepdims", 1):
        return None
    counted = axes if rank is None else axes % rank - rank
    wanted = tuple(range(-len(axes), 0))
    return wanted if wanted and tuple(sorted(counted)) == wanted else None


def _affine(
    index: GraphIndex, node: NodeRef, x: TensorId, count: int
) -> tuple[NodeRef, NodeRef, Array, Array | None] | None:
    """(node with gamma, last node, gamma, beta) behind the division."""
    scaled = _constant_reader(index, node, "Mul")
    if scaled is None:
        return None
    multiplied, factor = scaled
    least_rank = index.find_least_rank(x)
    # The sizes of the normalized axes, where all are known.
    sizes = tuple(dim for dim in (index.find_shape(x) or ())[-count:] if isinstance(dim, int))
    gamma = _trailing(factor, count, sizes if len(sizes) == count else None, least_rank)
    if gamma is None:
        return None
    shifted = _constant_reader(index, multiplied, "Add")
    if shifted is not None:
        last, shift = shifted
        beta = _trailing(shift, count, gamma.shape, least_rank)
        if beta is not None and beta.dtype == gamma.dtype:
            return multiplied, last, gamma, beta
    return multiplied, multiplied, gamma, None


def _constant_reader(
    index: GraphIndex, node: NodeRef, op_type: str
) -> tuple[NodeRef, Array] | None:
    reader = index.find_reader(node.result, op_type)
    if reader is None:
        return None
    value = index.input_value(reader[0], 1 - reader[1])
    return (reader[0], value) if value is not None and is_float(value) else None


def _trailing(value: Array, count: int, dims: Shape | None, least_rank: int) -> Array | None:
    """A constant in the shape of the normalized axes; None when it varies along others or raises the rank."""
    if value.ndim > max(least_rank, 1) or any(dim != 1 for dim in value.shape[:-count]):
        return None
    tail = value.reshape(value.shape[-count:])
    if dims is not None:
        try:
            return np.ascontiguousarray(np.broadcast_to(tail, dims))
        except ValueError:
            return None
    # With unknown sizes only a full vector says what they must be.
    return tail if tail.ndim == count and min(tail.shape) > 1 else None
