"""vmap rules: a batch of tensors is computed as one larger tensor with more scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_frontend.fake_quant.grid import Grid

Dims = Sequence[int | None]


def batch_forward(info: Any, in_dims: Dims, *args: Any) -> tuple[Tensor, int]:
    """vmap rule of fake_quantize: (y with the batch in front, 0)."""
    grid = Grid(*args[3:])
    x, scale, zero_point = _move_batch_first(info.batch_size, in_dims[:3], args[:3])
    folded = _FoldedBatch(x, grid)
    qparams = folded.fold_qparams(scale), folded.fold_qparams(zero_point)
    y = torch.ops.onnxq.fake_quantize(folded.fold(x), *qparams, *folded.grid)
    return folded.unfold(y), 0


def batch_backward(info: Any, in_dims: Dims, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """vmap rule of fake_quantize_backward: (dx, dscale, dzero_point) and their batch dimensions.

    Each sample of the batch gets its own dscale and dzero_point; a gradient that is not needed has no batch dimension.
    """
    needed, grid = args[4:7], Grid(*args[7:])
    dy, x, scale, zero_point = _move_batch_first(info.batch_size, in_dims[:4], args[:4])
    folded = _FoldedBatch(x, grid)
    qparams = folded.fold_qparams(scale), folded.fold_qparams(zero_point)
    grads = torch.ops.onnxq.fake_quantize_backward(folded.fold(dy), folded.fold(x), *qparams, *needed, *folded.grid)
    restore: tuple[Callable[[Tensor], Tensor], ...] = (
        folded.unfold,
        lambda t: t.reshape(scale.shape),
        lambda t: t.reshape(zero_point.shape),
    )
    out = tuple(put(g) if need else g for put, g, need in zip(restore, grads, needed, strict=True))
    return out, tuple(0 if need else None for need in needed)


def _move_batch_first(size: int, dims: Dims, tensors: Sequence[Tensor]) -> list[Tensor]:
    # A tensor that the batch shares is expanded: the folded call needs its values once per sample.
    return [
        t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, dims, strict=True)
    ]


class _FoldedBatch:
    """A batch [batch, ...] as one tensor with its own grid.

    The batch becomes channels (per tensor), multiplies them (per channel), or is one more dimension (per block, whose
    scales have x's rank).
    """

    def __init__(self, x: Tensor, grid: Grid) -> None:
        rank = x.dim() - 1
        # The axis counts from the sample; the batch stands in front of it.
        self.axis = None if grid.axis is None else grid.axis % max(rank, 1) + 1
        self.channels = x.shape[:1] if self.axis is None else (x.shape[0], x.shape[self.axis])
        self.blocked = grid.block_size > 0
        # Per tensor and per channel the folded channels stand first.
        self.grid = grid._replace(axis=self.axis if self.blocked else 0)

    def fold(self, x: Tensor) -> Tensor:
        if self.blocked or self.axis is None:
            return x
        return x.movedim(self.axis, 1).flatten(0, 1)

    def unfold(self, y: Tensor) -> Tensor:
        if self.blocked or self.axis is None:
            return y
        return y.unflatten(0, self.channels).movedim(1, self.axis)

    def fold_qparams(self, values: Tensor) -> Tensor:
        return values if self.blocked else values.reshape(-1)
