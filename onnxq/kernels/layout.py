"""A dense tensor as [outer, channels, inner] in memory order, whatever the order of its dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Layout:
    """[outer, channels, inner] in memory order."""

    outer: int
    channels: int
    inner: int
    # Elements along channels that share a scale; 0: one scale per channel.
    block: int = 0
    # The tensor's dimensions from the slowest to the fastest in memory. A blocked scale must have the same layout:
    # `scale.permute(order).contiguous()`.
    order: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.outer * self.channels * self.inner

    @property
    def blocks(self) -> int:
        """Number of blocks along the channels."""
        return -(-self.channels // self.block) if self.block else 1

    @property
    def scales(self) -> int:
        """Number of scales."""
        return self.outer * self.blocks * self.inner if self.block else self.channels


def find_layout(
    shape: Sequence[int], strides: Sequence[int], axis: int | None = None, block_size: int = 0
) -> Layout | None:
    """Find the layout of a tensor; None if it is not dense (gaps, overlaps, expanded dimensions) and must be copied.

    shape, strides: in elements. axis: None for per tensor. block_size: above 0 for blocks along `axis`.
    """
    rank = len(shape)
    # Dimensions of size 1 may have any stride, so theirs is ignored.
    order = tuple(sorted(range(rank), key=lambda dim: (-strides[dim] if shape[dim] > 1 else 0, dim)))
    if prod(shape):
        expected = 1
        for dim in reversed(order):
            if shape[dim] > 1 and strides[dim] != expected:
                return None
            expected *= shape[dim]
    if axis is None:
        return Layout(1, 1, prod(shape), 0, order)
    place = order.index(axis % rank)
    outer = prod(shape[dim] for dim in order[:place])
    inner = prod(shape[dim] for dim in order[place + 1 :])
    return Layout(outer, shape[axis], inner, block_size, order)
