"""The data-free methods of Nagel et al. (2019) in the graph: channels made alike by factors, and centred by biases.

Where one operator makes a tensor its weights say by how much; where an Add or a Concat joins several, the largest
values of each channel on a few samples do. The channels that may be scaled are found by `channels`. The float function
stays as it is, and so does the graph: only weights and biases change.

Cross-layer equalization (Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction",
https://arxiv.org/abs/1906.04721, section 4.1): with f(s·x) = s·f(x) for s > 0, channel c of the first operator may be
multiplied by s_c and the same channel of the second divided by it. r1_c is the largest weight of the first operator's
row c, r2_c that of the second's column c; s_c = sqrt(r1_c · r2_c) / r1_c makes both equal.

Where a tensor has several producers (an Add, a Concat) the weights say little about its values. There s_c is
(channel maximum / tensor maximum) ** -0.5 of the tensors themselves.

Both are divided by their geometric mean, so that a group as a whole keeps its size. Channels without weights or
without values (below 1e-6 of the largest) keep 1, and nothing is scaled by more than 2**12 either way.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from onnxq.arrays import Array64, Mask, as_float32, as_float64
from onnxq.graph import ModelLike, get_index
from onnxq.passes.equalization.channels import (
    Labels,
    ScaledChannels,
    find_scaled_channels,
    list_shift_sources,
)
from onnxq.passes.equalization.smoothquant import ChannelStatistics, Factors
from onnxq.passes.linear import Linear
from onnxq.passes.patterns import Edit, unfit_plan
from onnxq.planner.sums import read_constant
from onnxq.sites import TensorId

# Share of the largest channel below which a channel counts as empty.
_DEAD = 1e-6
# Most that a channel is scaled by, up or down.
_FARTHEST = 2.0**12
# Of a channel's distance from the largest, in decibels, the share that goes.
_STRENGTH = 0.5


def equalize_weights(rows: Array64, columns: Array64, groups: Labels) -> Array64:
    """s = sqrt(rows · columns) / rows, [channels] each, normalized within each group."""
    alive = _find_alive(rows, groups) & _find_alive(columns, groups)
    s = np.ones_like(rows)
    s[alive] = np.sqrt(columns[alive] / rows[alive])
    return _normalize_factors(s, alive, groups)


def equalize_values(largest: Array64, groups: Labels) -> Array64:
    """s = (largest / the group's largest) ** -0.5, [channels], normalized within each group."""
    alive = _find_alive(largest, groups)
    s = np.ones_like(largest)
    s[alive] = (largest[alive] / _find_largest(largest, groups)[alive]) ** -_STRENGTH
    return _normalize_factors(s, alive, groups)


def _find_largest(values: Array64, groups: Labels) -> Array64:
    top = np.zeros(int(groups.max(initial=-1)) + 1)
    np.maximum.at(top, groups, values)
    return top[groups]


def _find_alive(values: Array64, groups: Labels) -> Mask:
    return np.isfinite(values) & (values > _DEAD * _find_largest(values, groups))


def _normalize_factors(s: Array64, alive: Mask, groups: Labels) -> Array64:
    """s divided by its geometric mean over the channels of each group that are not empty, within the limits."""
    members = groups[alive]
    logs = np.log(s[alive])
    # Of a group without members nobody asks for the mean.
    mean = np.bincount(members, logs) / np.maximum(np.bincount(members), 1)
    out = np.ones_like(s)
    out[alive] = np.exp(np.clip(logs - mean[members], -np.log(_FARTHEST), np.log(_FARTHEST)))
    # Plans store these numbers in float32, and applying a plan later must repeat them to the bit.
    return as_float64(as_float32(out))


# Below this a factor moves nothing that eight bits could tell.
_WORTH = 1.05


def list_channel_axes(proto: ModelLike, fixed: Iterable[TensorId] = ()) -> dict[TensorId, int]:
    """The channel axis of the tensors whose largest values `compute_factors` wants: of groups that weights say too
    little about. fixed: tensors that keep their values."""
    flow = find_scaled_channels(get_index(proto), fixed)
    joint = flow.free & ~flow.rectified
    return {
        tensor: axis
        for tensor, axis in flow.axes.items()
        if tensor is not None and joint[flow.labels[tensor]].any()
    }


def compute_factors(
    proto: ModelLike,
    largest: Mapping[TensorId, Array64] | None = None,
    fixed: Iterable[TensorId] = (),
) -> Factors:
    """Factors for the outputs of linear operators, [channels] each; {} where nothing is to be gained.

    largest: max |x_c| over samples of the tensors of `list_channel_axes`, [channels] each; without it only weights
    decide, and joined tensors stay as they are. fixed: tensors that keep their values.
    """
    flow = find_scaled_channels(get_index(proto), fixed)
    by_root = _compute_by_root(flow, largest or {})
    factors = {}
    for op in flow.ops:
        s = by_root[flow.root[op.rows]]
        if max(s.max(initial=1.0), 1.0 / s.min(initial=1.0)) > _WORTH:
            factors[op.linear.last.result] = as_float32(s)
    return factors


def _compute_by_root(flow: ScaledChannels, largest: Mapping[TensorId, Array64]) -> Array64:
    """[labels] factors; only roots have factors other than 1."""
    root = flow.root
    count = root.size
    rows = np.zeros(count)
    columns = np.zeros(count)
    values = np.zeros(count)
    for op in flow.ops:
        size = op.linear.magnitudes
        # `at`: several rows may have one root.
        np.maximum.at(rows, root[op.rows], size.max(axis=2, initial=0.0).ravel())
        if op.columns is not None:
            np.maximum.at(columns, root[op.columns], size.max(axis=1, initial=0.0).ravel())
    for tensor, value in largest.items():
        if tensor in flow.labels:
            np.maximum.at(values, root[flow.labels[tensor]], value)
    roots = np.flatnonzero((root == np.arange(count)) & flow.free)
    # Behind an Add or a Concat, or without a ReLU, the weights of one operator say little about the values.
    single = roots[flow.rectified[roots]]
    joint = roots[~flow.rectified[roots]]
    factors = np.ones(count)
    factors[single] = equalize_weights(rows[single], columns[single], flow.group[single])
    if largest:
        factors[joint] = equalize_values(values[joint], flow.group[joint])
    return factors


def write_scales(proto: ModelLike, factors: Factors) -> ModelLike:
    """The model with these outputs multiplied, and all that reads them divided.

    Raises PlanError for a tensor that cannot take the factors, or that joins another which has other ones.
    """
    index = get_index(proto)
    flow = find_scaled_channels(index)
    root = flow.root
    s = np.ones(root.size)
    scaled = np.zeros(root.size, bool)
    for tensor, values in factors.items():
        labels = flow.labels.get(tensor)
        if labels is None or labels.size != values.size:
            raise unfit_plan(tensor, "has no channels that could be equalized this way")
        roots = root[labels]
        wide = as_float64(values)
        # Channels of one root, as an Add makes them, can only be multiplied alike.
        if (scaled[roots] & (s[roots] != wide)).any() or ((wide != 1.0) & ~flow.free[labels]).any():
            raise unfit_plan(tensor, "cannot take the factors that the plan gives it")
        s[roots] = wide
        scaled[roots] = True
    edit = Edit(proto)
    changed = False
    for op in flow.ops:
        linear = op.linear
        rows = s[root[op.rows]]
        columns = np.ones(()) if op.columns is None else s[root[op.columns]]
        if (rows == 1.0).all() and (columns == 1.0).all():
            continue
        changed = True
        weight = linear.scale_weight(rows, columns)
        edit.set_rounded(linear.node.make_edge(1), weight, linear.weight.dtype)
        edge = linear.bias_edge
        bias = read_constant(index, edge)
        if edge is not None and bias is not None:
            edit.set_rounded(edge, as_float64(bias) * rows, bias.dtype)
    return edit.export() if changed else proto


# Bias absorption: channels are centred by the layer that makes them; the layers behind get it back in their biases.
# After Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction"
# (https://arxiv.org/abs/1906.04721), section 4.1.2. For a per-channel c,
#
#     L(W, x) + b = L(W, x - c) + (b + W·c)
#
# and x - c is the output of the layer in front with its bias lowered by c: c is the middle of the channel's range on
# samples, so that channels with different offsets share one range; a symmetric range gains at most half, more where
# channels differ. The paper takes c = max(0, β - 3γ) of the batch normalization in front of a ReLU. No tensor behind a
# ReLU is lowered here: values below c change the function, and new inputs have them, whatever the samples show (a text
# recognizer lost 2.9 dB on new lines by the least values of 32). Nor where padding enters the layers behind, which
# stays 0 when the values around it move.
#
# By default biases are absorbed only if that narrows the tensor's range by at least 2 %.
#
# The shift of a tensor passes through Adds of two tensors (their shifts add up) and must end in Conv, Gemm and MatMul
# that take it into a bias (`channels`). The graph stays as it is.

# Least share by which the tensor's range must shrink.
WORTH = 0.02


def compute_shifts(low: Array64, high: Array64) -> Array64:
    """c of each channel from its smallest and largest values, [channels] each; zeros if the range hardly shrinks.

    Values are those of float32, as a plan stores them.
    """
    c = (low + high) / 2.0
    c = as_float64(as_float32(np.where(np.isfinite(c), c, 0.0)))
    before = _measure_width(low, high)
    after = _measure_width(low - c, high - c)
    return c if after < (1.0 - WORTH) * before else np.zeros_like(c)


def _measure_width(low: Array64, high: Array64) -> float:
    """Width of the range that one scale has to cover; it always contains zero."""
    return float(high.max(initial=0.0) - low.min(initial=0.0))


def list_shift_axes(proto: ModelLike) -> dict[TensorId, int]:
    """The channel axis of each tensor that `choose_shifts` wants the values of."""
    return {
        source.tensor: source.op.channel_axis for source in list_shift_sources(get_index(proto))
    }


def choose_shifts(proto: ModelLike, observed: Mapping[TensorId, ChannelStatistics]) -> Factors:
    """Shifts to lower tensors by, [channels] each; {} where none gains. observed: tensors on samples."""
    shifts = {}
    for source in list_shift_sources(get_index(proto)):
        if source.tensor in observed:
            values = observed[source.tensor]
            c = compute_shifts(values.low, values.high)
            if c.any():
                shifts[source.tensor] = as_float32(c)
    return shifts


def write_shifts(proto: ModelLike, shifts: Factors) -> ModelLike:
    """The model with these tensors lowered, and all that reads them made up for it.

    Raises PlanError for a tensor that cannot be lowered this way.
    """
    index = get_index(proto)
    sources = {source.tensor: source for source in list_shift_sources(index)}
    # Operators whose bias grows, and by how much: one may make a tensor that is lowered and read another.
    gains: dict[Linear, Array64] = {}
    for tensor, c in shifts.items():
        source = sources.get(tensor)
        if source is None or c.shape != (source.op.channels,):
            raise unfit_plan(tensor, "cannot take the shifts that the plan gives it")
        wide = as_float64(c)
        gains[source.op] = gains.get(source.op, 0.0) - wide
        for reader, times in source.readers.items():
            gains[reader] = gains.get(reader, 0.0) + times * reader.multiply_constant(wide)
    edit = Edit(proto)
    for op, value in gains.items():
        assert op.bias_edge is not None
        edge = op.bias_edge
        stored = read_constant(index, edge)
        bias = np.broadcast_to(op.bias, (op.channels,)) + value
        if stored is None:
            edit.set_rounded(edge, bias, op.weight.dtype)
            continue
        # A bias keeps its rank: [1, N] stays [1, N]; a scalar becomes a row.
        shaped = bias.reshape(stored.shape) if stored.size == bias.size else bias
        edit.set_rounded(edge, shaped, stored.dtype)
    return edit.export() if gains else proto
