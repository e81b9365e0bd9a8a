"""Rotations in the graph: streams of channels multiplied by an orthogonal matrix, which the weights around take in.

QuaRot, Ashkboos et al. 2024, arXiv 2404.00456: R1, of the residual stream, and R2, of the values of each head. Outliers
of single channels become small parts of all. The scale of a normalization goes into the weights that read it, its bias
through them into theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxq.arrays import Array
from onnxq.errors import PlanError
from onnxq.graph import ModelLike
from onnxq.passes.affine_core import Array64
from onnxq.passes.edit import Edit
from onnxq.passes.equalization.hadamard_core import Hadamard, multiply_row
from onnxq.passes.equalization.operators import find_streams
from onnxq.passes.equalization.streams import ChannelConstant, Stream, StreamReader, Streams
from onnxq.passes.linear import find_linear
from onnxq.passes.view import View
from onnxq.plan.model import Rotation
from onnxq.sites import Edge, Refusal, Refusals, TensorId


def has_residual_stream(proto: ModelLike) -> bool:
    """True where a normalization reads a stream that linear operators write, and others read."""
    return any(stream.normalized and stream.readers for stream in find_streams(View(proto)).list_streams())


def list_rotations(proto: ModelLike, seed: int) -> tuple[Rotation, ...]:
    """A rotation for each stream that can take one; () where no normalization reads any of them."""
    free = [stream for stream in find_streams(View(proto)).list_streams() if stream.free]
    # Values of heads alone are not worth a trial.
    if not any(stream.normalized for stream in free):
        return ()
    return tuple(Rotation(tensor=stream.tensor, seed=seed, size=stream.size) for stream in free)


def list_fixed(proto: ModelLike) -> Refusals:
    """The streams that begin and end in weights, but meet something that asks for their channels as they are.

    Those that a normalization reads come first.
    """
    fix = "nothing; the channels stay as they are"
    streams = find_streams(View(proto)).list_streams()
    fixed = [stream for stream in streams if stream.reason and stream.readers and stream.size > 1]
    return tuple(
        Refusal(str(stream.tensor), f"cannot be rotated: {stream.reason}", fix, "rotation", "R112")
        for stream in sorted(fixed, key=lambda stream: not stream.normalized)
    )


@dataclass(frozen=True)
class _ConstantRecipe:
    """How one reader's constant is rewritten: its `axis` scaled by what waits, then axes turned, in order."""

    axis: int = -1
    waiting: tuple[ChannelConstant, ...] = ()
    turns: tuple[tuple[int, Hadamard], ...] = ()


def write_rotations(proto: ModelLike, rotations: Sequence[Rotation]) -> tuple[ModelLike, tuple[str, ...]]:
    """The model with these streams turned, and the names of the constants that are there twice from now on.

    Raises PlanError for a tensor that begins no stream of its size that could be turned.
    """
    view = View(proto)
    turns: defaultdict[Edge, list[tuple[int, Hadamard]]] = defaultdict(list)
    readers: dict[Edge, StreamReader] = {}
    for stream, matrix in _choose_matrices(find_streams(view), rotations):
        for edge, axis in stream.turns:
            turns[edge].append((axis, matrix))
        for reader in stream.readers:
            turns[reader.edge].append((reader.axis, matrix))
            readers[reader.edge] = reader
    recipes = {edge: _ConstantRecipe(turns=tuple(turned)) for edge, turned in turns.items()}
    for edge, reader in readers.items():
        recipes[edge] = _ConstantRecipe(reader.axis, reader.label.waiting, tuple(turns[edge]))
    edit = Edit(proto)
    copied = _write_constants(view, edit, recipes, _move_shifts(view, edit, readers, recipes))
    waiting = {constant for reader in readers.values() for constant in reader.label.waiting}
    for constant in sorted(waiting, key=lambda constant: constant.edge):
        value = _read_constant(view, constant.edge)
        edit.set_constant(view, constant.edge, np.full_like(value, 0.0 if constant.shift else 1.0))
    return edit.export(), copied


def _choose_matrices(streams: Streams, rotations: Sequence[Rotation]) -> list[tuple[Stream, Hadamard]]:
    """The streams that the rotations name, each with its matrix."""
    chosen = []
    for rotation in rotations:
        label = streams.labels.get(rotation.tensor)
        stream = None if label is None else streams.find_stream(label)
        if stream is None or not stream.free or stream.size != rotation.size:
            cause = f"begins no stream of {rotation.size} channels that could be rotated"
            raise PlanError(str(rotation.tensor), cause, "plan the model again", code="Q404")
        chosen.append((stream, Hadamard(rotation.seed, rotation.size, stream.level)))
    return chosen


def _read_constant(view: View, edge: Edge) -> Array:
    value = view.constant(view.index.node(edge.node), edge.index)
    assert value is not None
    return value


def _add_up(view: View, waiting: Sequence[ChannelConstant], width: int) -> tuple[Array64, Array64]:
    """Scale and shift of every channel that constants in a row come to, [width] each."""
    scale, shift = np.ones(width), np.zeros(width)
    for constant in waiting:
        value = _read_constant(view, constant.edge).astype(np.float64).reshape(-1)
        if constant.shift:
            shift = shift + value
        else:
            scale, shift = scale * value, shift * value
    return scale, shift


def _move_shifts(
    view: View, edit: Edit, readers: Mapping[Edge, StreamReader], recipes: Mapping[Edge, _ConstantRecipe]
) -> dict[Edge, Array64]:
    """The gains of biases by shifts of channels in front, in the old basis, by the input that holds the bias.

    Where there is no bias, it is written, in an Add behind.
    """
    gains: dict[Edge, Array64] = {}
    for edge, reader in readers.items():
        _, shift = _add_up(view, reader.label.waiting, reader.label.width)
        if not shift.any():
            continue
        node, weight = view.index.node(edge.node), _read_constant(view, edge)
        gain = multiply_row(shift, weight if reader.axis == -2 else weight.T)
        linear = find_linear(view, node)
        place = None if linear is None else linear.bias_at
        bias = None if place is None else view.constant(*place)
        if place is not None and bias is not None and bias.size == gain.size:
            factor = float(node.attrs.get("alpha", 1.0)) / float(node.attrs.get("beta", 1.0) or 1.0)
            gains[view.edge(*place)] = gain * factor
            continue
        for axis, matrix in recipes[edge].turns:
            gain = gain if axis == reader.axis else matrix.turn_channels(gain, -1)
        edit.append(node, "Add", gain.astype(weight.dtype))
    return gains


def _write_constants(
    view: View, edit: Edit, recipes: Mapping[Edge, _ConstantRecipe], gains: Mapping[Edge, Array64]
) -> tuple[str, ...]:
    """Rewrite the constants one after the other; the names of matrices that their readers no longer share."""
    shared: defaultdict[TensorId, list[Edge]] = defaultdict(list)
    for edge in dict.fromkeys((*recipes, *gains)):
        tensor = view.tensor(view.index.node(edge.node), edge.index)
        assert tensor is not None
        shared[tensor].append(edge)
    copied = []
    for tensor, edges in shared.items():
        groups: defaultdict[tuple[str, _ConstantRecipe, Edge | None], list[Edge]] = defaultdict(list)
        for edge in edges:
            groups[edge.scope, recipes.get(edge, _PLAIN), edge if edge in gains else None].append(edge)
        alike = len({key[1:] for key in groups}) == 1 and len(edges) == len(view.index.consumers(tensor))
        for (scope, recipe, _), users in groups.items():
            value = _rewrite(view, users[0], recipe, gains.get(users[0]))
            if alike and view.index.producer(tensor) is None:
                # In all scopes at once.
                edit.replace_constant(tensor, value)
                break
            name = edit.constant(scope, f"{tensor.name}/{users[0].node}", value)
            for edge in users:
                edit.read(edge, name)
        if not alike and len(view.index.shape(tensor) or ()) > 1:
            copied.append(tensor.name)
    return tuple(copied)


_PLAIN = _ConstantRecipe()


def _rewrite(view: View, edge: Edge, recipe: _ConstantRecipe, gain: Array64 | None) -> Array:
    value = _read_constant(view, edge)
    if gain is not None:
        value = (value.astype(np.float64) + gain).astype(value.dtype)
    for axis, matrix in recipe.turns:
        scaled = recipe.waiting and axis == recipe.axis
        scale = _add_up(view, recipe.waiting, value.shape[axis])[0] if scaled else None
        value = matrix.turn_channels(value, axis, scale)
    return value
