"""Integer range, granularity and gradient rule of one call, checked against its tensors; groups that share a scale."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onnxq.arrays import Shape
from onnxq.errors import CauseAndFix, ConfigError

EDGES = ("round", "clip")
# Whether dx, dscale and dzero_point are needed.
Needed = tuple[bool, bool, bool]
# dx, dscale and dzero_point; None for one that is not needed.
Gradients = tuple[Tensor | None, ...]
TensorPair = tuple[Tensor, Tensor]
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
    wrong = _find_fault(x, scale, zero_point, grid)
    if wrong is not None:
        raise ConfigError("fake_quantize", *wrong, code="Q318")


def check_scale(scale: Tensor) -> None:
    """Raise ConfigError for a scale on the CPU that is 0 or negative. On other devices kernels make NaN of its values.

    NaN passes: it shows in the result.
    """
    # Reading a value of another device would wait for all that is queued there.
    if scale.device.type == "cpu" and (least := float(scale.min())) <= 0:
        raise ConfigError(
            "fake_quantize",
            f"scale {least:g} is not above 0",
            "keep learned scales legal: attach a PostStep or a Pacer to the optimizer",
            code="Q318",
        )


def _find_fault(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> CauseAndFix | None:
    """(cause, fix) of a wrong call."""
    # Reads shapes, types and devices but no value: reading one would wait for the GPU at every call.
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}", "give a float32, float16, bfloat16 or float64 tensor"
    if not scale.is_floating_point():
        return f"scale is {scale.dtype}", "give a float32 tensor"
    if not (scale.device == zero_point.device == x.device):
        devices = f"x is on {x.device}, scale on {scale.device}, zero_point on {zero_point.device}"
        return devices, "move all three to one device"
    # 16 bits, signed or unsigned: float32, in which the kernels compute, holds such integers exactly.
    if not -(1 << 16) < grid.qmin < grid.qmax < 1 << 16:
        return f"qmin {grid.qmin}, qmax {grid.qmax}", "qmin must lie below qmax, both in 16 bits"
    if grid.edge not in EDGES:
        return f"edge {grid.edge!r}", f"use one of {', '.join(EDGES)}"
    if grid.block_size < 0 or (grid.block_size and grid.axis is None):
        return f"block_size {grid.block_size}", "give a positive size and an axis"
    if scale.shape != zero_point.shape:
        shapes = f"scale has shape {tuple(scale.shape)}, zero_point {tuple(zero_point.shape)}"
        return shapes, "give both the same shape"
    misfit = explain_misfit(x.shape, scale.shape, grid.axis, grid.block_size)
    return (
        None
        if misfit is None
        else (misfit, "calibrate again, or use the axis it was calibrated on")
    )


def explain_misfit(
    shape: Sequence[int], scale_shape: Sequence[int], axis: int | None, block_size: int
) -> str | None:
    """Reason why scales of `scale_shape` do not fit a tensor of `shape`, or None."""
    if axis is None:
        count = prod(scale_shape)
        return None if count == 1 else f"{count} scales for a tensor quantized as a whole"
    if not -len(shape) <= axis < len(shape):
        return f"axis {axis} is outside a tensor of shape {tuple(shape)}"
    wanted = qparam_shape(shape, axis, block_size)
    if tuple(scale_shape) != wanted:
        return f"scales of shape {tuple(scale_shape)} where a tensor of shape {tuple(shape)} needs {wanted}"
    return None


def qparam_shape(shape: Sequence[int], axis: int | None, block_size: int) -> Shape:
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
    rows = functional.pad(terms.movedim(axis, -1), (0, -terms.shape[axis] % block_size)).movedim(
        -1, axis
    )
    return rows.unflatten(axis, (-1, block_size)).sum(axis + 1)
