"""What one call asks for, checked against its tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onnxq.errors import ConfigError

EDGES = ("round", "clip")
# Which of dx, dscale and dzero_point are wanted.
Needed = tuple[bool, bool, bool]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Grid(NamedTuple):
    """Levels, granularity and gradient rule of one call.

    axis None: per tensor. axis and block_size 0: per channel. axis and block_size: per block along axis.
    grad_scale, zero_point_grad_scale: factors on the gradients of scale and zero point.
    edge: "round" lets gradients through where x rounds to a level, "clip" where x lies strictly between the ends
        (LSQ's paper: clip, then round).
    """

    qmin: int
    qmax: int
    axis: int | None = None
    block_size: int = 0
    grad_scale: float = 1.0
    zero_point_grad_scale: float = 1.0
    edge: str = "round"


def check(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> None:
    """Raise ConfigError unless scale and zero point fit x and the grid; looks at no value, so it never waits.

    Shapes as in `onnxq.spec.QParams`: one value per tensor, [channels], or x's shape with ceil(dim / size) at axis.
    """
    if x.dtype not in DTYPES:
        raise ConfigError(
            "fake_quantize", f"x is {x.dtype}", "give a float32, float16, bfloat16 or float64 tensor", code="Q318"
        )
    if not scale.is_floating_point():
        raise ConfigError("fake_quantize", f"scale is {scale.dtype}", "give a float32 tensor", code="Q318")
    if not (scale.device == zero_point.device == x.device):
        devices = f"x is on {x.device}, scale on {scale.device}, zero_point on {zero_point.device}"
        raise ConfigError("fake_quantize", devices, "move all three to one device", code="Q318")
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
    wanted = qparam_shape(x, grid)
    if tuple(scale.shape) != wanted:
        shapes = f"scale has shape {tuple(scale.shape)}, x of shape {tuple(x.shape)} needs {wanted}"
        raise ConfigError("fake_quantize", shapes, "calibrate again, or use the axis it was calibrated on", code="Q318")


def qparam_shape(x: Tensor, grid: Grid) -> tuple[int, ...]:
    """Shape of scale and zero point for x."""
    if grid.axis is None:
        return ()
    axis = grid.axis % x.dim()
    if not grid.block_size:
        return (x.shape[axis],)
    return (*x.shape[:axis], -(-x.shape[axis] // grid.block_size), *x.shape[axis + 1 :])
