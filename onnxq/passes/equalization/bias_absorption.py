"""Bias absorption: channels are centred by the layer that makes them; the layers behind get it back in their biases.

The float function stays as it is; weights and the graph too. The maths and the paper: `bias_absorption_core`. The shift
of a tensor passes through Adds of two tensors (their shifts add up) and must end in Conv, Gemm and MatMul that take it
into a bias: no padding, no graph output, nothing else that reads it. One ReLU may stand behind the maker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import PlanError
from onnxq.graph import ModelLike, NodeRef
from onnxq.passes.affine_core import Array64
from onnxq.passes.edit import Edit
from onnxq.passes.equalization.bias_absorption_core import absorb_shifts, compute_shifts
from onnxq.passes.linear import Linear, find_linear
from onnxq.passes.view import View
from onnxq.sites import TensorId

Shifts = Mapping[TensorId, NDArray[np.float32]]
# Ways through Adds that part and meet again multiply.
_MOST_STEPS = 4096


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor that may be lowered. tensor: as its readers see it, behind a ReLU where `rectified`.

    readers: the layers that get it back, with how often (an Add of a tensor with itself counts twice).
    """

    op: Linear
    tensor: TensorId
    rectified: bool
    readers: tuple[tuple[Linear, int], ...]


def list_sources(proto: ModelLike) -> tuple[Source, ...]:
    """Every tensor that may be lowered, in the order the model runs."""
    return tuple(_find_sources(View(proto)))


def _find_sources(view: View) -> Iterator[Source]:
    for node in view.index.nodes:
        op = find_linear(view, node)
        if op is None or op.bias_at is None or not _takes(op):
            continue
        tensor, rectified = view.output(op.last), False
        sole = view.sole_reader(tensor)
        if sole is not None and sole[0].op_type == "Relu" and not sole[0].domain:
            tensor, rectified = view.output(sole[0]), True
        readers: dict[str, tuple[Linear, int]] = {}
        if _follow(view, op, tensor, readers, adds=not rectified) and readers:
            yield Source(op, tensor, rectified, tuple(readers.values()))


def _takes(op: Linear) -> bool:
    """True when its bias may be any row of numbers: a Gemm's C is scaled by beta."""
    return op.node.op_type != "Gemm" or float(op.node.attrs.get("beta", 1.0)) == 1.0


def _follow(view: View, op: Linear, tensor: TensorId, found: dict[str, tuple[Linear, int]], *, adds: bool) -> bool:
    """Collect the layers at the end of every way from a tensor; False when one of them leads elsewhere."""
    pending, steps = [tensor], 0
    while pending:
        at = pending.pop()
        edges = view.index.consumers(at)
        if view.kept(at) or not edges:
            return False
        for edge in edges:
            node = view.index.node(edge.node)
            if adds and node.op_type == "Add" and not node.domain and _joins(view, node, op):
                pending.append(view.output(node))
                continue
            reader = find_linear(view, node)
            if reader is None or edge.index != 0 or not _has_no_padding(reader, op):
                return False
            _, times = found.get(node.name, (reader, 0))
            found[node.name] = (reader, times + 1)
        steps += 1
        if steps > _MOST_STEPS:
            return False
    return True


def _joins(view: View, node: NodeRef, op: Linear) -> bool:
    """True for an Add of two computed tensors of one rank whose channels lie alike: broadcasting moves no channel."""
    if any(view.is_constant(node, k) for k in range(2)):
        return False
    shapes = [view.index.shape(t) for k in range(2) if (t := view.tensor(node, k)) is not None]
    if len(shapes) != 2 or any(shape is None or len(shape) != op.rank or not op.rank_known for shape in shapes):
        return False
    return all(shape is not None and shape[op.channel_axis] == op.channels for shape in shapes)


def _has_no_padding(reader: Linear, maker: Linear) -> bool:
    """True when a constant in front of it is a constant in its bias, and its channels are those of the maker."""
    node = reader.node
    if node.op_type == "ConvTranspose" or reader.bias_at is None or not _takes(reader):
        return False
    if node.op_type == "Conv":
        automatic = node.attrs.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        if automatic or any(node.attrs.get("pads", ())):
            return False
        inputs = reader.weight.shape[1] * int(node.attrs.get("group", 1))
    else:
        if node.attrs.get("transA", 0) or float(node.attrs.get("alpha", 1.0)) != 1.0:
            return False
        inputs = reader.weight.shape[1 - reader.axis]
    # A MatMul reads channels along the last axis: those of another MatMul, or of any operator of rank 2.
    same = reader.rank == maker.rank if node.op_type != "MatMul" else maker.channel_axis == -1 or maker.rank == 2
    return bool(inputs == maker.channels and same)


def shift_axes(proto: ModelLike) -> dict[TensorId, int]:
    """The channel axis of each tensor that `choose_shifts` wants the values of."""
    return {one.tensor: one.op.channel_axis for one in list_sources(proto)}


def choose_shifts(proto: ModelLike, low: Mapping[TensorId, Array64], high: Mapping[TensorId, Array64]) -> Shifts:
    """Shifts to lower tensors by, [channels] each; {} where none gains. low, high: of each channel on samples."""
    out = {}
    for one in list_sources(proto):
        if one.tensor not in low:
            continue
        c = compute_shifts(low[one.tensor], high[one.tensor], rectified=one.rectified)
        if c.any():
            out[one.tensor] = c.astype(np.float32)
    return out


def write_shifts(proto: ModelLike, given: Shifts) -> ModelLike:
    """The model with these tensors lowered, and all that reads them made up for it.

    Raises PlanError for a tensor that cannot be lowered this way.
    """
    view = View(proto)
    known = {one.tensor: one for one in _find_sources(view)}
    # Operators whose bias grows, and by how much: one may make a tensor that is lowered and read another.
    gains: dict[str, tuple[Linear, Array64]] = {}

    def gain(op: Linear, value: Array64) -> None:
        _, before = gains.get(op.node.name, (op, np.zeros(op.channels)))
        gains[op.node.name] = op, before + value

    for tensor, c in given.items():
        source = known.get(tensor)
        if source is None or c.shape != (source.op.channels,):
            raise PlanError(
                str(tensor), "cannot take the shifts that the plan gives it", "plan the model again", code="Q404"
            )
        wide = c.astype(np.float64)
        gain(source.op, -wide)
        for reader, times in source.readers:
            groups = int(reader.node.attrs.get("group", 1))
            gain(reader, times * absorb_shifts(reader.weight, wide, reader.axis, groups))
    edit = Edit(proto)
    for op, value in gains.values():
        assert op.bias_at is not None
        edge, held = view.edge(*op.bias_at), view.constant(*op.bias_at)
        bias = np.broadcast_to(op.bias, (op.channels,)) + value
        # A bias keeps its rank: [1, N] stays [1, N]; a scalar becomes a row.
        shaped = bias.reshape(held.shape) if held is not None and held.size == bias.size else bias
        edit.set_rounded(view, edge, shaped, op.weight.dtype if held is None else held.dtype)
    return edit.export() if gains else proto
