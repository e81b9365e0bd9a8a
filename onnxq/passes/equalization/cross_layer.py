"""Equalization: channels that share one activation scale are made alike, by factors that cancel in the weights.

Where one operator makes a tensor its weights say by how much (Nagel et al. 2019, arXiv 1906.04721); where an Add or a
Concat joins several, the largest values of each channel on a few samples do. The channels that may be scaled are found
by `channels`, the factors in `cross_layer_core`. The float function stays as it is, and so does the graph: only
weights and biases change.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxq.arrays import Floats
from onnxq.errors import PlanError
from onnxq.graph import ModelLike
from onnxq.passes.affine_core import Array64
from onnxq.passes.edit import Edit
from onnxq.passes.equalization.channels import ScaledChannels
from onnxq.passes.equalization.cross_layer_core import equalize_values, equalize_weights, scale_weight
from onnxq.passes.equalization.operators import find_scaled_channels
from onnxq.passes.view import View
from onnxq.sites import TensorId

Factors = Mapping[TensorId, Floats]
# Below this a factor moves nothing that eight bits could tell.
_WORTH = 1.05


def list_channel_axes(proto: ModelLike) -> dict[TensorId, int]:
    """The channel axis of the tensors whose largest values `compute_factors` wants: of groups that weights say too
    little about."""
    flow = find_scaled_channels(View(proto))
    joint = flow.free & ~flow.rectified
    return {tensor: flow.axes[tensor] for tensor, labels in flow.labels.items() if bool(joint[labels].any())}


def compute_factors(proto: ModelLike, largest: Mapping[TensorId, Array64] | None = None) -> Factors:
    """Factors for the outputs of linear operators, [channels] each; {} where nothing is to be gained.

    largest: max |x_c| over samples of the tensors of `list_channel_axes`, [channels] each; without it only weights
    decide, and joined tensors stay as they are.
    """
    flow = find_scaled_channels(View(proto))
    by_root = _compute_by_root(flow, largest or {})
    factors = {}
    for op in flow.ops:
        s = by_root[flow.root[op.rows]]
        if max(s.max(initial=1.0), 1.0 / s.min(initial=1.0)) > _WORTH:
            factors[op.linear.last.result] = s.astype(np.float32)
    return factors


def _compute_by_root(flow: ScaledChannels, largest: Mapping[TensorId, Array64]) -> Array64:
    """[labels] factors; only roots have factors other than 1."""
    count = flow.root.size
    rows, columns, values = np.zeros(count), np.zeros(count), np.zeros(count)
    for op in flow.ops:
        size = op.largest
        np.maximum.at(rows, flow.root[op.rows], size.max(axis=2, initial=0.0).reshape(-1))
        if op.columns is not None:
            np.maximum.at(columns, flow.root[op.columns], size.max(axis=1, initial=0.0).reshape(-1))
    for tensor, value in largest.items():
        if tensor in flow.labels:
            np.maximum.at(values, flow.root[flow.labels[tensor]], value)
    roots = np.flatnonzero((flow.root == np.arange(count)) & flow.free)
    # Behind an Add or a Concat, or without a ReLU, the weights of one operator say little about the values.
    single, joint = roots[flow.rectified[roots]], roots[~flow.rectified[roots]]
    factors = np.ones(count)
    factors[single] = equalize_weights(rows[single], columns[single], flow.group[single])
    if largest:
        factors[joint] = equalize_values(values[joint], flow.group[joint])
    return factors


def write_scales(proto: ModelLike, factors: Factors) -> ModelLike:
    """The model with these outputs multiplied, and all that reads them divided.

    Raises PlanError for a tensor that cannot take the factors, or that joins another which has other ones.
    """
    view = View(proto)
    flow = find_scaled_channels(view)
    s = np.ones(flow.root.size)
    scaled = np.zeros(flow.root.size, bool)
    for tensor, values in factors.items():
        labels = flow.labels.get(tensor)
        if labels is None or labels.size != values.size:
            raise PlanError(str(tensor), "has no channels that could be equalized this way", _FIX, code="Q404")
        roots, wide = flow.root[labels], values.astype(np.float64)
        # Channels of one root, as an Add makes them, can only be multiplied alike.
        if bool((scaled[roots] & (s[roots] != wide)).any()) or bool(((wide != 1.0) & ~flow.free[labels]).any()):
            raise PlanError(str(tensor), "cannot take the factors that the plan gives it", _FIX, code="Q404")
        s[roots], scaled[roots] = wide, True
    edit, changed = Edit(proto), False
    for op in flow.ops:
        rows = s[flow.root[op.rows]]
        columns = np.ones(op.inputs) if op.columns is None else s[flow.root[op.columns]]
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
