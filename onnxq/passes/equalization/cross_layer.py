"""Equalization: channels that share one activation scale are made alike, by factors that cancel in the weights.

Where one operator makes a tensor its weights say by how much (Nagel et al. 2019, arXiv 1906.04721); where an Add or a
Concat joins several, the largest values of each channel on a few samples do. The channels that may be scaled are found
in `channels`, the factors in `cross_layer_core`. The float function stays as it is, and so does the graph: only
weights and biases change.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from onnxq.errors import PlanError
from onnxq.graph import ModelLike
from onnxq.passes.affine_core import Array64
from onnxq.passes.edit import Edit
from onnxq.passes.equalization.channels import Channels, find_channels
from onnxq.passes.equalization.cross_layer_core import by_values, by_weights, scale_weight
from onnxq.passes.view import View
from onnxq.sites import TensorId

Factors = Mapping[TensorId, NDArray[np.float32]]
# Below this a factor moves nothing that eight bits could tell.
_WORTH = 1.05


def channel_axes(proto: ModelLike) -> dict[TensorId, int]:
    """The channel axis of the tensors whose largest values `compute_factors` wants: of groups that weights say too
    little about."""
    found = find_channels(View(proto))
    joint = found.free & ~found.rectified
    return {t: found.axes[t] for t, labels in found.labels.items() if bool(joint[labels].any())}


def compute_factors(proto: ModelLike, largest: Mapping[TensorId, Array64] | None = None) -> Factors:
    """Factors for the outputs of linear operators, [channels] each; {} where nothing is to be gained.

    largest: max |x_c| over samples of the tensors of `channel_axes`, [channels] each; without it only weights decide,
    and joined tensors stay as they are.
    """
    found = find_channels(View(proto))
    factors = _by_root(found, largest or {})
    scales = {op.linear.last.result: factors[found.root[op.rows]] for op in found.ops}
    return {
        tensor: s.astype(np.float32)
        for tensor, s in scales.items()
        if max(s.max(initial=1.0), 1.0 / s.min(initial=1.0)) > _WORTH
    }


def _by_root(found: Channels, largest: Mapping[TensorId, Array64]) -> Array64:
    """[labels] factors; only roots have factors other than 1."""
    count = found.root.size
    rows, columns, values = np.zeros(count), np.zeros(count), np.zeros(count)
    for op in found.ops:
        size = op.largest()
        np.maximum.at(rows, found.root[op.rows], size.max(axis=2, initial=0.0).reshape(-1))
        if op.columns is not None:
            np.maximum.at(columns, found.root[op.columns], size.max(axis=1, initial=0.0).reshape(-1))
    for tensor, value in largest.items():
        if tensor in found.labels:
            np.maximum.at(values, found.root[found.labels[tensor]], value)
    roots = np.flatnonzero((found.root == np.arange(count)) & found.free)
    # Behind an Add or a Concat, or without a ReLU, the weights of one operator say little about the values.
    single, joint = roots[found.rectified[roots]], roots[~found.rectified[roots]]
    out = np.ones(count)
    out[single] = by_weights(rows[single], columns[single], found.group[single])
    if largest:
        out[joint] = by_values(values[joint], found.group[joint])
    return out


def write_scales(proto: ModelLike, factors: Factors) -> ModelLike:
    """The model with these outputs multiplied, and all that reads them divided.

    Raises PlanError for a tensor that cannot take the factors, or that joins another which is given other ones.
    """
    view = View(proto)
    found = find_channels(view)
    s = np.ones(found.root.size)
    given = np.zeros(found.root.size, bool)
    for tensor, values in factors.items():
        labels = found.labels.get(tensor)
        if labels is None or labels.size != values.size:
            raise PlanError(str(tensor), "has no channels that could be equalized this way", _FIX, code="Q404")
        roots, wide = found.root[labels], values.astype(np.float64)
        # Channels of one root, as an Add makes them, can only be multiplied alike.
        if bool((given[roots] & (s[roots] != wide)).any()) or bool(((wide != 1.0) & ~found.free[labels]).any()):
            raise PlanError(str(tensor), "cannot take the factors that the plan gives it", _FIX, code="Q404")
        s[roots], given[roots] = wide, True
    edit, changed = Edit(proto), False
    for op in found.ops:
        rows = s[found.root[op.rows]]
        columns = np.ones(op.inputs) if op.columns is None else s[found.root[op.columns]]
        if bool((rows == 1.0).all() and (columns == 1.0).all()):
            continue
        linear, changed = op.linear, True
        weight = scale_weight(linear.weight, op.groups, op.output_first, rows, columns)
        edit.set_rounded(view, view.edge(linear.node, 1), weight, linear.weight.dtype)
        bias = None if linear.bias_at is None else view.constant(*linear.bias_at)
        if linear.bias_at is not None and bias is not None:
            edit.set_rounded(view, view.edge(*linear.bias_at), bias.astype(np.float64) * rows, bias.dtype)
    return edit.export() if changed else proto


_FIX = "plan the model again"
