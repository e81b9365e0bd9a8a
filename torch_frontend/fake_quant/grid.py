"""Integer range, granularity and gradient rule of one call, checked against its tensors; groups that share a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onnxq.errors import ConfigError

EDGES = ("round", "clip")
# Whether dx, dscale and dzero_point are needed.
Needed = tuple[bool, bool, bool]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Grid(NamedTuple):
    """Integer range, granularity and gradient rule of one call.

    axis None: per tensor. axis and block_size 0: per channel. axis and block_size: per block along axis.
    grad_scale, zero_point_grad_scale: factors on the gradients of scale and zero point.
    edge: "round" passes gradients where x rounds to an integer of the range, "clip" where x lies strictly between the
        ends (LSQ's paper: clip, then round).
    """

    qmin: int
    qmax: int
    axis: int | None = None
    block_size: int = 0
    grad_scale: float = 1.0
    zero_point_grad_scale: float = 1.0
    edge: str = "round"


def check_call(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> None:
    """Raise ConfigError unless scale and zero point fit x and the grid.

    Shapes as in `onnxq.spec.QParams`: one value per tensor, [channels], or x's shape with ceil(dim / size) at axis.
    """
    # Reads shapes, types and devices but no value: reading one would wait for the GPU at every call.
    if x.dtype not in DTYPES:
        raise ConfigError(
            "fake_quantize", f"x is {x.dtype}", "give a float32, float16, bfloat16 or float64 tensor", code="Q318"
        )
    if not scale.is_floating_point():
        raise ConfigError("fake_quantize", f"scale is {scale.dtype}", "give a float32 tensor", code="Q318")
    if not (scale.device == zero_point.device == x.device):
        devices = f"x is on {x.device}, scale on {scale.device}, zero_point on {zero_point.device}"
        raise ConfigError("fake_quantize", devices, "move all three to one device", code="Q318")
    # 16 bits, signed or unsigned: float32, in which the kernels compute, holds such integers exactly.
    if not -(1 << 16) < grid.qmin < grid.qmax < 1 << 16:
        levels = f"qmin {grid.qmin}, qmax {grid.qmax}"
        raise ConfigError("fake_quantize", levels, "qmin must lie below qmax, both in 16 bits", code="Q318")
    if grid.edge not in EDGES:
        raise ConfigError("fake_quantize", f"edge {grid.edge!r}", f"use one of {', '.join(EDGES)}", code="Q318")
    if grid.block_size < 0 or (grid.block_size and grid.axis is None):
        raise ConfigError(
            "fake_quantize", f"block_size {grid.block_size}", "give a positive size and an axis", code="Q318"
        )
    if scale.shape != zero_point.shape:
        shapes = f"scale has shape {tuple(scale.shape)}, zero_point {tuple(zero_point.shape)}"
        raise ConfigError("fake_quantize", shapes, "give both the same shape", code="Q318")
    _check_shape(x, scale, grid)


def _check_shape(x: Tensor, scale: Tensor, grid: Grid) -> None:
    if grid.axis is None:
        if scale.numel() != 1:
            values = f"{scale.numel()} scales for a tensor quantized as a whole"
            raise ConfigError("fake_quantize", values, "give one value, or an axis", code="Q318")
        return
    if not -x.dim() <= grid.axis < x.dim():
        raise ConfigError(
            f"axis {grid.axis}",
            f"is outside a tensor of shape {tuple(x.shape)}",
            "use an axis the tensor has",
            code="Q318",
        )
    wanted = qparam_shape(x.shape, grid.axis, grid.block_size)
    if tuple(scale.shape) != wanted:
        shapes = f"scale has shape {tuple(scale.shape)}, x of shape {tuple(x.shape)} needs {wanted}"
        raise ConfigError("fake_quantize", shapes, "calibrate again, or use the axis it was calibrated on", code="Q318")


def qparam_shape(shape: Sequence[int], axis: int | None, block_size: int) -> tuple[int, ...]:
    """Shape of scale and zero point for a tensor of `shape`."""
    if axis is None:
        return ()
    axis = axis % len(shape)
    if not block_size:
        return (shape[axis],)
    return (*shape[:axis], -(-shape[axis] // block_size), *shape[axis + 1 :])


def spread_over(values: Tensor, shape: Sequence[int], axis: int | None, block_size: int) -> Tensor:
    """One value per group, of `qparam_shape`, as a tensor that broadcasts over `shape`."""
    if axis is None:
        return values.reshape(())
    axis = axis % len(shape)
    if not block_size:
        return values.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    # The last block may be shorter than the others.
    return values.repeat_interleave(block_size, axis).narrow(axis, 0, shape[axis])


def sum_groups(terms: Tensor, axis: int | None, block_size: int) -> Tensor:
    """Sum over each group that shares a scale, of `qparam_shape`, in float64."""
    terms = terms.to(torch.float64)
    if axis is None:
        return terms.sum()
    axis = axis % terms.dim()
    if not block_size:
        others = [k for k in range(terms.dim()) if k != axis]
        return terms.sum(others) if others else terms  # sum([]) would sum over all dimensions
    # Zeros fill up the last block; pad works on the last dimension.
    rows = functional.pad(terms.movedim(axis, -1), (0, -terms.shape[axis] % block_size)).movedim(-1, axis)
    return rows.unflatten(axis, (-1, block_size)).sum(axis + 1)
