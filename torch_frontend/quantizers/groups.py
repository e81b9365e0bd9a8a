"""Elements that share a scale: statistics over them, and their values spread over the tensor again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from onnxq.spec import PerBlock, PerChannel, PerTensor, QuantSpec


def axis_of(spec: QuantSpec) -> int | None:
    """Axis of the channels or blocks; None per tensor."""
    return None if isinstance(spec.granularity, PerTensor) else spec.granularity.axis


def block_size_of(spec: QuantSpec) -> int:
    """Elements in a block; 0 unless per block."""
    return spec.granularity.size if isinstance(spec.granularity, PerBlock) else 0


def misfit(shape: tuple[int, ...], spec: QuantSpec, scale_shape: tuple[int, ...]) -> str | None:
    """Why numbers of `scale_shape` do not fit a tensor of `shape`, or None."""
    grain = spec.granularity
    if isinstance(grain, PerTensor):
        return None if scale_shape == () else f"{scale_shape} scales for a tensor quantized as a whole"
    if not -len(shape) <= grain.axis < len(shape):
        return f"axis {grain.axis} is outside a tensor of shape {tuple(shape)}"
    axis = grain.axis % len(shape)
    size = grain.size if isinstance(grain, PerBlock) else 0
    wanted = tuple(-(-dim // size) if k == axis else dim for k, dim in enumerate(shape)) if size else (shape[axis],)
    if scale_shape != wanted:
        return f"scales of shape {tuple(scale_shape)} where a tensor of shape {tuple(shape)} needs {wanted}"
    return None


def spread(values: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    """One value per group, [] or [channels] or blocked, as a tensor that broadcasts over `shape`."""
    grain = spec.granularity
    if isinstance(grain, PerTensor):
        return values.reshape(())
    axis = grain.axis % len(shape)
    if isinstance(grain, PerChannel):
        return values.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return values.repeat_interleave(grain.size, axis).narrow(axis, 0, shape[axis])


def group_sum(x: Tensor, spec: QuantSpec) -> Tensor:
    """Sum of each group in float64, of the shape the scales have."""
    grain = spec.granularity
    values = x.to(torch.float64)
    if isinstance(grain, PerTensor):
        return values.sum()
    axis = grain.axis % x.dim()
    if isinstance(grain, PerChannel):
        others = [k for k in range(x.dim()) if k != axis]
        return values.sum(others) if others else values
    gap = -x.shape[axis] % grain.size
    rows = functional.pad(values.movedim(axis, -1), (0, gap)).movedim(-1, axis)
    return rows.unflatten(axis, (-1, grain.size)).sum(axis + 1)


def group_count(x: Tensor, spec: QuantSpec) -> Tensor:
    """Number of elements of each group, of the shape the scales have."""
    if isinstance(spec.granularity, PerTensor):
        return torch.tensor(float(x.numel()), dtype=torch.float64)
    return group_sum(torch.ones(x.shape, dtype=torch.float64), spec)
