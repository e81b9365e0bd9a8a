"""Fewer axes: what has no kernel of the HTP for so many axes moves values, or computes their rows, between Reshapes.

A Transpose moves runs of axes that stay together, and none of size 1; of more runs than there may be axes it becomes
several. A node that works along one axis does so on [axes in front, axis, axes behind], a sum of two tensors on runs of
axes that both have, or one repeats itself along. Reshapes behind each other are one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from onnxq.arrays import Shape, as_int64
from onnxq.graph import GraphIndex, NodeRef, infer_shapes
from onnxq.passes.base import RunContext
from onnxq.passes.linear import ARITHMETIC
from onnxq.passes.patterns import Edit
from onnxq.passes.state import FloatState, FloatStep

# The HTP refuses what has more, but for a Transpose between Reshapes, which ONNX Runtime lowers itself.
_MOST_AXES = 5
# What computes rows, or channels, has kernels for still fewer. A Gather to five answers wrongly, without a message,
# where it takes a matrix of places of more than one sample, as an unfolding does.
_FEWER_AXES = dict.fromkeys(
    ("LayerNormalization", "InstanceNormalization", "MatMul", "Gelu", "Gather"), 4
)
# What leaves values in their order, as a Reshape does.
_RESHAPING = (
    "Squeeze",
    "Unsqueeze",
    "Flatten",
)
# What works along axes, and is lowered where that is one.
_REDUCING = (
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceSum",
)


@dataclass(frozen=True)
class _Lowered:
    """A node on fewer axes. shape: of its data. inputs: names behind the data, constants by their values.

    others: inputs with shapes of their own, behind the data.
    """

    shape: Shape
    attrs: dict[str, Any]
    inputs: tuple[str | np.ndarray, ...] = ()
    others: tuple[tuple[str, Shape], ...] = ()


def lower_ranks(_ctx: RunContext, state: FloatState) -> FloatStep:
    """Compute on five axes at most what moves values of more."""
    edit = Edit(infer_shapes(state.model))
    index = edit.index
    changed = []
    for node in index.nodes:
        before = index.find_sizes(index.find_input(node))
        after = index.find_sizes(node.result)
        most = _FEWER_AXES.get(node.op_type, _MOST_AXES)
        if before is None or after is None or max(len(before), len(after)) <= most:
            continue
        steps = _lower_node(index, node, before, after)
        # Values stay in their order.
        turned = node.is_onnx("Transpose") and len(_find_runs(node, before)) < 2
        if not steps and not turned and not node.is_onnx(*_RESHAPING):
            continue
        # A chain of such nodes has pairs of Reshapes between its nodes, which are joined in the end.
        source = node.inputs[0]
        made = f"{node.outputs[0]}/lowered"
        for lowered in steps:
            inputs = [
                part
                if isinstance(part, str)
                else edit.add_constant(node.scope, f"{made}/input", part)
                for part in lowered.inputs
            ]
            inputs += [
                edit.insert_reshape(node, *other, f"{made}/data") for other in lowered.others
            ]
            data_name = edit.insert_reshape(node, source, lowered.shape, f"{made}/data")
            source = edit.insert_before(
                node, node.op_type, [data_name, *inputs], made, attrs=lowered.attrs
            )
        # The node's own name and output go to the last Reshape.
        _replace_by_reshape(edit, node, source, after)
        changed.append(f"{node.name}: {node.op_type} on fewer axes")
    state, report = edit.finish_pass(state, "ranks", changed)
    return _join_reshapes(state) if changed else state, report


def _join_reshapes(state: FloatState) -> FloatState:
    """Let every Reshape behind a Reshape of many axes read what the first one reads."""
    # The Reshapes in between have no shapes yet.
    edit = Edit(infer_shapes(state.model))
    index = edit.index
    changed = []
    for node in index.nodes:
        data = index.find_input(node) if node.is_onnx("Reshape") else None
        after = index.find_sizes(node.result)
        origin = index.find_origin(data, ("Reshape",))
        if after is None or origin is None or origin == data:
            continue
        # Others are the network's own, and do no harm.
        *reshaped, _ = index.walk_back(data, ("Reshape",))
        if max(len(index.find_shape(source) or ()) for source in reshaped) > _MOST_AXES:
            _replace_by_reshape(edit, node, origin.name, after)
            changed.append(node.name)
    return edit.finish_pass(state, "ranks", changed)[0]


def _replace_by_reshape(edit: Edit, node: NodeRef, data: str, sizes: Shape) -> None:
    shape = edit.add_integers(node.scope, f"{node.outputs[0]}/shape", sizes)
    edit.replace_node(node, "Reshape", [data, shape])


def _lower_node(index: GraphIndex, node: NodeRef, sizes: Shape, after: Shape) -> list[_Lowered]:
    """A node on fewer axes, or several that do its work; none for one that cannot be, or needs a Reshape alone."""
    if node.is_onnx("Transpose"):
        return _lower_transpose(node, sizes)
    if node.is_onnx(*ARITHMETIC):
        return _lower_pointwise(index, node, after)
    if node.is_onnx("Gather"):
        places = index.input_value(node, 1)
        axis = node.attrs.get("axis", 0)
        return (
            []
            if places is None
            else [_Lowered(_join_axes(sizes, axis), {"axis": 1}, (places.ravel(),))]
        )
    if node.is_onnx(*_REDUCING):
        axes = index.read_integers(node, "axes", 1)
        if axes is None or len(axes) != 1:
            return []
        shape = _join_axes(sizes, int(axes[0]))
        # Axes are an input of ReduceSum from opset 13 on, of the others from 18 on.
        if "axes" in node.attrs:
            return [_Lowered(shape, {"keepdims": 1, "axes": [1]})]
        return [_Lowered(shape, {"keepdims": 1}, (as_int64([1]),))]
    if node.is_onnx("InstanceNormalization"):
        # Its means are over all spatial axes together.
        return [_Lowered((*sizes[:2], math.prod(sizes[2:])), {**node.attrs}, node.inputs[1:])]
    if node.is_onnx("LayerNormalization", "MatMul", "Gelu") and _computes_rows(index, node):
        return [_Lowered((math.prod(sizes[:-1]), sizes[-1]), {**node.attrs}, node.inputs[1:])]
    # Without axes there is one for each start, from the first on.
    if node.is_onnx("Slice") and len(node.inputs) > 3:
        axes = index.input_value(node, 3)
        if axes is None or axes.size != 1:
            return []
        shape = _join_axes(sizes, int(axes.flat[0]))
        return [_Lowered(shape, {}, (*node.inputs[1:3], as_int64([1]), *node.inputs[4:]))]
    return []


def _computes_rows(index: GraphIndex, node: NodeRef) -> bool:
    """True where the last axis is all that is computed along. Products with a bias become a Gemm between Reshapes."""
    if node.op_type == "MatMul":
        matrix = len(index.input_shape(node, 1) or ()) == 2
        return matrix and index.find_reader(node.result, "Add") is None
    return bool(node.attrs.get("axis", -1) == -1)


def _join_axes(sizes: Shape, axis: int) -> Shape:
    """The sizes of [axes in front, the axis, axes behind]."""
    axis %= len(sizes)
    return math.prod(sizes[:axis]), sizes[axis], math.prod(sizes[axis + 1 :])


def _find_runs(node: NodeRef, sizes: Shape) -> list[list[int]]:
    """The axes of a Transpose in its order, those together that stay so; axes of size 1 are left out."""
    places = [axis for axis, size in enumerate(sizes) if size != 1]
    runs: list[list[int]] = []
    # Without `perm` a Transpose turns the order of all axes around.
    for axis in node.attrs.get("perm", range(len(sizes))[::-1]):
        if sizes[axis] == 1:
            continue
        if runs and places.index(axis) == places.index(runs[-1][-1]) + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return runs


def _lower_transpose(node: NodeRef, sizes: Shape) -> list[_Lowered]:
    """Transposes of runs of axes that stay together; none where values stay in their order.

    Of more runs than there may be axes each brings one to its place; those that it passes are one axis.
    """
    runs = _find_runs(node, sizes)
    order = sorted(runs)
    steps = []
    if 1 < len(runs) <= _MOST_AXES:
        shape = tuple(_count_values(sizes, [run]) for run in order)
        return [_Lowered(shape, {"perm": [order.index(run) for run in runs]})]
    while order != runs:
        first = next(k for k, run in enumerate(order) if run != runs[k])
        place = order.index(runs[first])
        parts = order[:first], order[first:place], [order[place]], order[place + 1 :]
        shape = tuple(_count_values(sizes, part) for part in parts)
        # In their place already; passed; brought to their place; behind it.
        steps.append(_Lowered(shape, {"perm": [0, 2, 1, 3]}))
        order = [*parts[0], *parts[2], *parts[1], *parts[3]]
    return steps


def _count_values(sizes: Shape, runs: Iterable[Iterable[int]]) -> int:
    """The size of these axes as one."""
    return math.prod(sizes[axis] for run in runs for axis in run)


def _lower_pointwise(index: GraphIndex, node: NodeRef, after: Shape) -> list[_Lowered]:
    """Values of two tensors, where axes of both, and those that one repeats itself along, are few runs."""
    shapes = [index.find_sizes(index.find_input(node, k)) for k in range(2)]
    # Broadcasting lines shapes up at their last axes.
    sizes = [(1,) * (len(after) - len(shape)) + shape for shape in shapes if shape is not None]
    if len(sizes) < 2:
        return []

    def list_repeated(axis: int) -> list[bool]:
        return [shape[axis] < after[axis] for shape in sizes]

    axes = [axis for axis, size in enumerate(after) if size != 1]
    runs = [list(run) for _, run in groupby(axes, list_repeated)]
    if len(runs) > _MOST_AXES or index.has_constant(node, 0):
        return []
    left, right = (tuple(_count_values(shape, [run]) for run in runs) for shape in sizes)
    constant = index.input_value(node, 1)
    if constant is not None:
        return [_Lowered(left, dict(node.attrs), (constant.reshape(right),))]
    return [_Lowered(left, dict(node.attrs), (), ((node.inputs[1], right),))]
