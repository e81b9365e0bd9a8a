"""Layer normalization written out becomes LayerNormalization (opset 17).

    d = x - mean(x);  y = d / sqrt(mean(d²) + eps) · gamma (+ beta)

ORT fuses this by itself when nothing stands between; as one node it also stays whole when pairs are planned around it,
and calibration need not look inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxq.arrays import Array, Shape
from onnxq.graph import NodeRef
from onnxq.passes.base import RunContext
from onnxq.passes.patterns import Replacement, View, apply_replacements, is_float, is_op
from onnxq.passes.state import FloatState, FloatStep
from onnxq.sites import TensorId


def fuse_layernorm(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Every written-out layer normalization over trailing axes with a constant gamma, replaced by its node."""
    return apply_replacements(state, "layernorm", _find_norms)


def _find_norms(view: View) -> list[Replacement]:
    found = [_match(view, node) for node in view.index.nodes if is_op(node, "Sqrt")]
    return [match for match in found if match is not None]


@dataclass(frozen=True)
class _Centred:
    """d = x - mean(x, axes)."""

    x: TensorId
    axes: tuple[int, ...]
    nodes: tuple[NodeRef, ...]


def _match(view: View, root: NodeRef) -> Replacement | None:
    inside = _inside(view, root)
    norm = None if inside is None else _match_normalized(view, root)
    if inside is None or norm is None:
        return None
    squares, epsilon, nodes = inside
    divided, d = norm
    # Exporters compute d once, or once for each of its two uses.
    if (d.x, d.axes) != (squares.x, squares.axes):
        return None
    affine = _affine(view, divided[-1], d.x, len(d.axes))
    if affine is None:
        return None
    last, gamma, beta, read = affine
    used = {node.name for node in (root, *nodes, *divided, *squares.nodes, *d.nodes, *read)}
    written = {view.output(view.index.node(name)) for name in used} - {view.output(last)}
    if not view.private(written, used):
        return None
    arrays = {"gamma": gamma} if beta is None else {"gamma": gamma, "beta": beta}
    # From the end: the rank need not be known.
    attrs = {"axis": -len(d.axes), "epsilon": float(np.float32(epsilon))}
    return Replacement(last, frozenset(used), "LayerNormalization", (d.x,), attrs, "", 17, arrays)


def _inside(view: View, root: NodeRef) -> tuple[_Centred, float, list[NodeRef]] | None:
    """(d, epsilon, nodes) under the root: mean(d²) + epsilon."""
    add = view.producer(view.tensor(root, 0), "Add")
    if add is None:
        return None
    k = 1 if view.scalar(add, 0) is not None else 0
    # A constant of more axes than the mean would not be one epsilon.
    epsilon = view.scalar(add, 1 - k)
    mean = view.producer(view.tensor(add, k), "ReduceMean")
    square = None if mean is None else view.producer(view.tensor(mean, 0), "Pow", "Mul")
    if epsilon is None or epsilon[1] > 1 or epsilon[0] < 0 or mean is None or square is None:
        return None
    if square.op_type == "Pow":
        exponent = view.scalar(square, 1)
        if exponent is None or exponent[0] != 2.0 or exponent[1] > 1:
            return None
    elif square.inputs[0] != square.inputs[1]:
        return None
    d = _match_centred(view, view.tensor(square, 0))
    if d is None or _axes(view, mean, d.x) != d.axes:
        return None
    return d, epsilon[0], [add, mean, square]


def _match_normalized(view: View, root: NodeRef) -> tuple[list[NodeRef], _Centred] | None:
    """(nodes, d) of d / root, also written d · (1 / root)."""
    reader = view.sole_reader(view.output(root), "Reciprocal", "Div")
    if reader is None:
        return None
    node, k = reader
    nodes = [node]
    d = None
    numerator = view.scalar(node, 0)
    if node.op_type == "Reciprocal" or (k == 1 and numerator is not None and numerator[0] == 1.0):
        reader = view.sole_reader(view.output(node), "Mul")
        if reader is None:
            return None
        node, k = reader
        nodes.append(node)
        d = _match_centred(view, view.tensor(node, 1 - k))
    elif k == 1:
        d = _match_centred(view, view.tensor(node, 0))
    return None if d is None else (nodes, d)


def _match_centred(view: View, tensor: TensorId | None) -> _Centred | None:
    sub = view.producer(tensor, "Sub")
    x = None if sub is None else view.tensor(sub, 0)
    mean = None if sub is None else view.producer(view.tensor(sub, 1), "ReduceMean")
    if sub is None or x is None or mean is None or view.tensor(mean, 0) != x:
        return None
    axes = _axes(view, mean, x)
    return None if axes is None else _Centred(x, axes, (sub, mean))


def _axes(view: View, mean: NodeRef, x: TensorId) -> tuple[int, ...] | None:
    """The trailing axes a ReduceMean with kept dims runs over, counted from the end."""
    axes: Any = mean.attrs.get("axes")
    if axes is None:
        axes = view.constant(mean, 1)
    if axes is None or not mean.attrs.get("keepdims", 1):
        return None
    rank = view.rank(x)
    values = [int(axis) for axis in np.asarray(axes).reshape(-1)]
    if rank is not None:
        values = [axis - rank if axis >= 0 else axis for axis in values]
    wanted = list(range(-len(values), 0))
    return tuple(wanted) if values and sorted(values) == wanted else None


def _affine(
    view: View, node: NodeRef, x: TensorId, count: int
) -> tuple[NodeRef, Array, Array | None, list[NodeRef]] | None:
    """(last node, gamma, beta, the nodes) behind the division."""
    scaled = _constant_reader(view, node, "Mul")
    if scaled is None:
        return None
    # The sizes of the normalized axes, where all are known.
    sizes = tuple(dim for dim in (view.index.shape(x) or ())[-count:] if isinstance(dim, int))
    gamma = _trailing(scaled[1], count, sizes if len(sizes) == count else None, view.least_rank(x))
    if gamma is None:
        return None
    shifted = _constant_reader(view, scaled[0], "Add")
    beta = None if shifted is None else _trailing(shifted[1], count, gamma.shape, view.least_rank(x))
    if shifted is None or beta is None or beta.dtype != gamma.dtype:
        return scaled[0], gamma, None, [scaled[0]]
    return shifted[0], gamma, beta, [scaled[0], shifted[0]]


def _constant_reader(view: View, node: NodeRef, op_type: str) -> tuple[NodeRef, Array] | None:
    reader = view.sole_reader(view.output(node), op_type)
    if reader is None:
        return None
    value = view.constant(reader[0], 1 - reader[1])
    return (reader[0], value) if value is not None and is_float(value) else None


def _trailing(value: Array, count: int, dims: Shape | None, least_rank: int) -> Array | None:
    """A constant in the shape of the normalized axes; None when it varies along others or raises the rank."""
    if value.ndim > max(least_rank, 1) or any(dim != 1 for dim in value.shape[: max(value.ndim - count, 0)]):
        return None
    tail = value.reshape(value.shape[max(value.ndim - count, 0) :])
    if dims is not None:
        try:
            return np.ascontiguousarray(np.broadcast_to(tail, dims))
        except ValueError:
            return None
    # With unknown sizes only a full vector says what they must be.
    return tail if tail.ndim == count and min(tail.shape) > 1 else None
