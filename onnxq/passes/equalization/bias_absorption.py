"""Bias absorption: channels are centred by the layer that makes them; the layers behind get it back in their biases.

After Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"
(https://arxiv.org/abs/1906.04721), section 4.1.2. For a per-channel c,

    L(W, x) + b = L(W, x - c) + (b + W·c)

and x - c is the output of the layer in front with its bias lowered by c. The paper takes c = max(0, β - 3γ) of the
batch normalization in front of a ReLU, which changes the rare values below c, and ignores padding, which stays 0 when
the values around it move. Both change the function, so here

* without an activation between, c is the middle of the channel's range on samples: exact for any input, and channels
  with different offsets then share one range; a symmetric range gains at most half, more where channels differ;
* behind a ReLU, c is the smallest value of the channel on samples (times 0.9), so that no observed value is cut off;
* only where no padding enters the layers behind.

By default biases are absorbed only if that narrows the tensor's range by at least 2 %.

The shift of a tensor passes through Adds of two tensors (their shifts add up) and must end in Conv, Gemm and MatMul
that take it into a bias (`channels`). The graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxq.arrays import Array, Floats
from onnxq.errors import PlanError
from onnxq.graph import ModelLike
from onnxq.passes.affine_core import Array64
from onnxq.passes.edit import Edit
from onnxq.passes.equalization.channels import ShiftSource
from onnxq.passes.equalization.operators import find_shifted_channels
from onnxq.passes.equalization.smoothquant_core import ChannelStatistics
from onnxq.passes.linear import Linear
from onnxq.passes.view import View
from onnxq.sites import TensorId

Shifts = Mapping[TensorId, Floats]
# Least share by which the tensor's range must shrink.
WORTH = 0.02
# Share of a ReLU output's smallest value that is absorbed; the rest is a margin for other inputs than the samples.
_KEPT = 0.9


def compute_shifts(low: Array64, high: Array64, *, rectified: bool) -> Array64:
    """c of each channel from its smallest and largest values, [channels] each; zeros if the range hardly shrinks.

    rectified: behind a ReLU. Values are those of float32, as a plan stores them.
    """
    c = np.maximum(low, 0.0) * _KEPT if rectified else (low + high) / 2.0
    c = np.where(np.isfinite(c), c, 0.0).astype(np.float32).astype(np.float64)
    before, after = _measure_width(low, high), _measure_width(low - c, high - c)
    return c if after < (1.0 - WORTH) * before else np.zeros_like(c)


def _measure_width(low: Array64, high: Array64) -> float:
    """Width of the range that one scale has to cover; it always contains zero."""
    return float(max(high.max(initial=0.0), 0.0) - min(low.min(initial=0.0), 0.0))


def absorb_shifts(weight: Array, c: Array64, axis: int, groups: int) -> Array64:
    """W·c, [output channels]: added to the bias if the input is lowered everywhere by c, [input channels].

    axis: W's output axis, 0 for Conv ([out, in / groups, kernel…]) and a transposed Gemm, 1 for [in, out] matrices.
    """
    wide = weight.astype(np.float64)
    if axis:
        return np.asarray(c @ wide)
    flat = wide.reshape(groups, wide.shape[0] // groups, wide.shape[1], -1).sum(axis=3)
    return np.asarray(np.einsum("goi,gi->go", flat, c.reshape(groups, -1)).reshape(-1))


def list_sources(proto: ModelLike) -> list[ShiftSource]:
    """Every tensor that may be lowered, in the order the model runs."""
    return find_shifted_channels(View(proto)).list_free()


def list_shift_axes(proto: ModelLike) -> dict[TensorId, int]:
    """The channel axis of each tensor that `choose_shifts` wants the values of."""
    return {source.tensor: source.op.channel_axis for source in list_sources(proto)}


def choose_shifts(proto: ModelLike, observed: Mapping[TensorId, ChannelStatistics]) -> Shifts:
    """Shifts to lower tensors by, [channels] each; {} where none gains. observed: tensors on samples."""
    shifts = {}
    for source in list_sources(proto):
        if source.tensor in observed:
            values = observed[source.tensor]
            c = compute_shifts(values.low, values.high, rectified=source.rectified)
            if c.any():
                shifts[source.tensor] = c.astype(np.float32)
    return shifts


def write_shifts(proto: ModelLike, shifts: Shifts) -> ModelLike:
    """The model with these tensors lowered, and all that reads them made up for it.

    Raises PlanError for a tensor that cannot be lowered this way.
    """
    view = View(proto)
    sources = {source.tensor: source for source in find_shifted_channels(view).list_free()}
    # Operators whose bias grows, and by how much: one may make a tensor that is lowered and read another.
    gains: dict[str, tuple[Linear, Array64]] = {}

    def add_gain(op: Linear, value: Array64) -> None:
        _, before = gains.get(op.node.name, (op, np.zeros(op.channels)))
        gains[op.node.name] = op, before + value

    for tensor, c in shifts.items():
        source = sources.get(tensor)
        if source is None or c.shape != (source.op.channels,):
            cause = "cannot take the shifts that the plan gives it"
            raise PlanError(str(tensor), cause, "plan the model again", code="Q404")
        wide = c.astype(np.float64)
        add_gain(source.op, -wide)
        for reader, times in source.readers.values():
            groups = int(reader.node.attrs.get("group", 1))
            add_gain(reader, times * absorb_shifts(reader.weight, wide, reader.axis, groups))
    edit = Edit(proto)
    for op, value in gains.values():
        assert op.bias_at is not None
        edge, stored = view.edge(*op.bias_at), view.constant(*op.bias_at)
        bias = np.broadcast_to(op.bias, (op.channels,)) + value
        if stored is None:
            edit.set_rounded(view, edge, bias, op.weight.dtype)
            continue
        # A bias keeps its rank: [1, N] stays [1, N]; a scalar becomes a row.
        shaped = bias.reshape(stored.shape) if stored.size == bias.size else bias
        edit.set_rounded(view, edge, shaped, stored.dtype)
    return edit.export() if gains else proto
