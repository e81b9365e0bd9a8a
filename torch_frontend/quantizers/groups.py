"""Groups of elements that share a scale, as a QuantSpec defines them; the arithmetic is `fake_quant.grid`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from onnxq.spec import PerBlock, PerTensor, QuantSpec
from torch_frontend.fake_quant import grid


def axis_of(spec: QuantSpec) -> int | None:
    """Axis of the channels or blocks; None per tensor."""
    return None if isinstance(spec.granularity, PerTensor) else spec.granularity.axis


def block_size_of(spec: QuantSpec) -> int:
    """Elements in a block; 0 unless per block."""
    # 0, not None: the op's schema takes an int.
    return spec.granularity.size if isinstance(spec.granularity, PerBlock) else 0


def explain_misfit(shape: tuple[int, ...], spec: QuantSpec, scale_shape: tuple[int, ...]) -> str | None:
    """Reason why scales of `scale_shape` do not fit a tensor of `shape`, or None."""
    axis = axis_of(spec)
    if axis is None:
        return None if scale_shape == () else f"{scale_shape} scales for a tensor quantized as a whole"
    if not -len(shape) <= axis < len(shape):
        return f"axis {axis} is outside a tensor of shape {tuple(shape)}"
    wanted = grid.qparam_shape(shape, axis, block_size_of(spec))
    if scale_shape != wanted:
        return f"scales of shape {tuple(scale_shape)} where a tensor of shape {tuple(shape)} needs {wanted}"
    return None


def spread_values(values: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    """One value per group, [] or [channels] or blocked, as a tensor that broadcasts over `shape`."""
    return grid.spread_over(values, shape, axis_of(spec), block_size_of(spec))


def sum_groups(x: Tensor, spec: QuantSpec) -> Tensor:
    """Sum of each group in float64, of the scales' shape."""
    return grid.sum_groups(x, axis_of(spec), block_size_of(spec))


def count_elements(x: Tensor, spec: QuantSpec) -> Tensor:
    """Number of elements of each group, float64, of the scales' shape."""
    if axis_of(spec) is None:
        return torch.tensor(float(x.numel()), dtype=torch.float64)
    # Counted, not divided: the last block may be shorter than the others.
    return sum_groups(torch.ones(x.shape, dtype=torch.float64), spec)
