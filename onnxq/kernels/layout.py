"""A dense tensor as [outer, channels, inner] in the order of its memory, whatever the order of its dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Layout:
    """[outer, channels, inner] in memory order; `block` elements along channels share a scale (0: all of a channel).

    order: the tensor's dimensions from the slowest to the fastest in memory. A blocked scale must be laid out so:
        `scale.permute(order).contiguous()`.
    """

    outer: int
    channels: int
    inner: int
    block: int = 0
    order: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Elements."""
        return self.outer * self.channels * self.inner

    @property
    def blocks(self) -> int:
        """Blocks along the channels."""
        return -(-self.channels // self.block) if self.block else 1

    @property
    def scales(self) -> int:
        """Scales the tensor has."""
        return self.outer * self.blocks * self.inner if self.block else self.channels


def layout_of(
    shape: Sequence[int], strides: Sequence[int], axis: int | None = None, block_size: int = 0
) -> Layout | None:
    """Layout of a tensor; None when it is not dense (gaps, overlaps, expanded dimensions) and must be copied first.

    shape, strides: in elements. axis: None per tensor; block_size > 0: blocks along `axis`.
    """
    rank = len(shape)
    # Dimensions of size 1 may have any stride; they go where they do not disturb.
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
