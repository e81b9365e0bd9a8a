"""vmap: a batch of tensors, each with its own scale or all with one, is one larger tensor with more scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_frontend.fake_quant.grid import Grid

Dims = Sequence[int | None]


def forward(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    """vmap rule of fake_quantize."""
    grid = Grid(*args[3:])
    x, scale, zero_point = _batched(info.batch_size, in_dims[:3], args[:3])
    folded = _Folded(x, grid)
    y = torch.ops.onnxq.fake_quantize(folded.values(x), folded.qparams(scale), folded.qparams(zero_point), *folded.grid)
    return folded.unfold(y), 0


def backward(info: Any, in_dims: Dims, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """vmap rule of fake_quantize_backward: every sample of the batch gets its own dscale and dzero_point."""
    needed, grid = args[4:7], Grid(*args[7:])
    dy, x, scale, zero_point = _batched(info.batch_size, in_dims[:4], args[:4])
    folded = _Folded(x, grid)
    grads = torch.ops.onnxq.fake_quantize_backward(
        folded.values(dy), folded.values(x), folded.qparams(scale), folded.qparams(zero_point), *needed,
        *folded.grid,
    )  # fmt: skip
    restore: tuple[Callable[[Tensor], Tensor], ...] = (
        folded.unfold,
        lambda t: t.reshape(scale.shape),
        lambda t: t.reshape(zero_point.shape),
    )
    out = tuple(put(g) if need else g for put, g, need in zip(restore, grads, needed, strict=True))
    return out, tuple(0 if need else None for need in needed)


def _batched(size: int, dims: Dims, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)
    ]


class _Folded:
    """[batch, ...] as one tensor: the batch becomes channels (per tensor), multiplies them (per channel), or is one
    more dimension (per block, whose scales have x's rank)."""

    def __init__(self, x: Tensor, grid: Grid) -> None:
        rank = x.dim() - 1
        self.axis = None if grid.axis is None else grid.axis % max(rank, 1) + 1
        self.channels = x.shape[:1] if self.axis is None else (x.shape[0], x.shape[self.axis])
        self.blocked = grid.block_size > 0
        self.grid = grid._replace(axis=self.axis if self.blocked else 0)

    def values(self, x: Tensor) -> Tensor:
        if self.blocked or self.axis is None:
            return x
        return x.movedim(self.axis, 1).flatten(0, 1)

    def unfold(self, y: Tensor) -> Tensor:
        if self.blocked or self.axis is None:
            return y
        return y.unflatten(0, self.channels).movedim(1, self.axis)

    def qparams(self, values: Tensor) -> Tensor:
        return values if self.blocked else values.reshape(-1)
