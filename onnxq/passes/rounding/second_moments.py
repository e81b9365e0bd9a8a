"""First and second moments of a linear operator's inputs, streamed: no sample is kept.

For x (float model) and y (quantized model), both as columns of the operator's matrix form (`im2col`), centred:

    H = cov(y, y)     C = cov(x, y)     mean(x), mean(y)

Each group has its own, so a depthwise convolution has one k x k matrix per channel. Means are over every position, as
bias correction needs them; H and C converge with few, so some positions are enough, about the means of all.
Products are float32 BLAS on blocks of columns shifted by the first sample's mean, sums float64: no cancellation.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from onnxq.arrays import Array, Floats, as_float32, as_float64
from onnxq.numerics.machine import map_parts

# (positions, mean of x, mean of y), the means float64 [groups, K].
Part = tuple[int, Array, Array]

# Positions, of all groups together, that are multiplied at a time.
_ROWS = 4096
# Positions per column, and their bounds: with half as many a ResNet for TensorRT loses .3 dB (37.3 to 36.9, 24 draws).
_PER_COLUMN = 128
_FEWEST = 8192
_MOST = 1 << 17
# Values of all columns together; fewer for operators of many groups, whose small matrices converge with few positions,
# but at least the positions that a re-fit needs.
_VALUES = 1 << 24
_GROUPED = 1 << 22
_LEAST_PER_COLUMN = 32
# Multiply-adds of one operator's H, which limit its time to a second or two.
_WORK = 4e10
# Rows of a matrix that a thread works on at a time.
ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of one operator's inputs.

    h, c: float64 [groups, K, K], c empty if no re-fit is possible. mean_x, mean_y: float64 [groups, K].
    count: positions in h. parts: (number of positions, means) of each sample.
    """

    h: Array
    c: Array
    mean_x: Array
    mean_y: Array
    count: int
    parts: tuple[Part, ...] = ()

    @property
    def weight(self) -> int:
        """Number of positions in the means."""
        return sum(count for count, _, _ in self.parts) or self.count


def position_limit(groups: int, size: int) -> int:
    """Number of positions to use for an operator with `groups` matrices of `size` columns."""
    wanted = min(max(_PER_COLUMN * size, _FEWEST), _MOST)
    affordable = max(
        (_GROUPED if groups > 1 else _VALUES) / (groups * size), _LEAST_PER_COLUMN * size
    )
    # Of fewer positions than columns H has no full rank.
    return int(max(min(wanted, affordable, _WORK / (groups * size * size)), 4 * size, 64))


class Workspace(threading.local):
    """Memory for two blocks, which is reused: fresh memory costs more than the arithmetic in it.

    Each thread has its own.
    """

    def __init__(self) -> None:
        self._held = [np.empty(0, np.float32)] * 2

    def shift_columns(self, which: int, parts: Sequence[Array], shift: Array) -> Floats:
        """Blocks of columns side by side, less their shift, in the blocks' memory order; valid until the next call."""
        groups, size, _ = parts[0].shape
        count = sum(part.shape[2] for part in parts)
        # Rows of a MatMul come as [positions, K], windows of a Conv as [K, positions]: a block
        # keeps that order, so that both are read along their memory.
        by_columns = parts[0].strides[1] < parts[0].strides[2]
        shape = (groups, count, size) if by_columns else (groups, size, count)
        volume = groups * size * count
        if self._held[which].size < volume:
            self._held[which] = np.empty(volume, np.float32)
        block = self._held[which][:volume].reshape(shape)
        whole = block.transpose(0, 2, 1) if by_columns else block
        first = 0
        for part in parts:
            np.subtract(part, shift, out=whole[:, :, first : first + part.shape[2]])
            first += part.shape[2]
        return whole


class Columns(Protocol):
    """Columns of one operator's input, at the same positions in both models."""

    def take_columns(self, first: int, last: int, *, both: bool) -> Sequence[Floats]:
        """y and, with `both`, x, float32 [groups, K, n], of some of the positions."""
        ...


@dataclass(frozen=True, eq=False)
class Block:
    """Columns that are multiplied at a time. slices: (columns, first, last). shift: of x and y. cross: with C."""

    slices: tuple[tuple[Columns, int, int], ...]
    shift: tuple[Array, Array]
    cross: bool

    def multiply_columns(self, workspace: Workspace | None = None) -> list[Array]:
        """Sums of y, y y^T and, with C, of x and x y^T, float32, in the order of `Accumulator.add_products`."""
        workspace = workspace or Workspace()
        taken = [
            columns.take_columns(first, last, both=self.cross)
            for columns, first, last in self.slices
        ]
        b = workspace.shift_columns(0, [columns[0] for columns in taken], self.shift[1])
        ones = np.ones(b.shape[2], np.float32)
        turned = b.transpose(0, 2, 1)
        products = [b @ ones, b @ turned]
        if self.cross:
            a = workspace.shift_columns(1, [columns[1] for columns in taken], self.shift[0])
            products += [a @ ones, a @ turned]
        return products


class Accumulator:
    """Moments of any number of blocks.

    second: False: only the means (operators too large for a matrix, or whose weights are not rounded). cross: False:
    without C, half the work, if nothing is re-fitted.
    """

    def __init__(self, groups: int, size: int, *, second: bool = True, cross: bool = True) -> None:
        self._second = second
        self._cross = second and cross
        self._groups = groups
        shape = (groups, size, size)
        empty = np.zeros((groups, 0, 0))
        self._h = np.zeros(shape) if second else empty
        self._c = np.zeros(shape) if self._cross else empty
        self._sums = np.zeros((2, groups, size))
        self._shift: tuple[Array, Array] | None = None
        self._blocks: list[Block] = []
        self._waiting: list[tuple[Columns, int, int]] = []
        self._parts: list[Part] = []
        self._count = self._pending = 0

    def add_columns(self, columns: Columns, count: int, parts: Sequence[Part]) -> None:
        """Add so many columns. parts: the means over all positions of each sample, of which the columns may be some."""
        if not count:
            return
        self._parts.extend(parts)
        # About the first sample's mean: float32 products of values far from 0 would lose the digits that differ.
        if self._shift is None:
            _, x, y = parts[0]
            self._shift = as_float32(x)[:, :, None], as_float32(y)[:, :, None]
        self._count += count
        if not self._second:
            return
        # With few columns at a time, adding up K x K sums would take most of the time.
        most = max(_ROWS // self._groups, 256)
        for first in range(0, count, most):
            last = min(first + most, count)
            self._waiting.append((columns, first, last))
            self._pending += last - first
            if self._pending >= most:
                self._close_block()

    def _close_block(self) -> None:
        if self._waiting and self._shift is not None:
            self._blocks.append(Block(tuple(self._waiting), self._shift, self._cross))
        self._waiting = []
        self._pending = 0

    def take_blocks(self) -> list[Block]:
        """The columns that wait to be multiplied, whose products go to `add_products` in their order."""
        self._close_block()
        blocks, self._blocks = self._blocks, []
        return blocks

    def add_products(self, products: Iterable[Array]) -> None:
        """Add what `Block.multiply_columns` gives."""
        # `strict=False`: without C there are two products.
        for total, product in zip(
            (self._sums[1], self._h, self._sums[0], self._c), products, strict=False
        ):
            total += product

    def make_moments(self) -> Moments:
        """The first and second moments of all samples whose products were added."""
        if self._shift is None:
            x, y = np.zeros_like(self._sums)
            return Moments(self._h, self._c, x, y, 0)
        # By positions, since samples may differ in size.
        counts, *means = zip(*self._parts, strict=True)
        weights = as_float64(counts)
        x, y = (np.tensordot(weights / weights.sum(), np.stack(part), 1) for part in means)
        n = max(self._count, 1)
        # Less the shift, means of the columns that were taken; p and q are those of all positions.
        u, v = self._sums / n
        p = x - self._shift[0][:, :, 0]
        q = y - self._shift[1][:, :, 0]
        if self._second:
            _centre_sums(self._h, n, v, q, v, q)
        if self._cross:
            _centre_sums(self._c, n, u, p, v, q)
        return Moments(self._h, self._c, x, y, self._count, tuple(self._parts))


def _centre_sums(sums: Array, count: int, u: Array, p: Array, v: Array, q: Array) -> None:
    """Turn sums of a b^T into the mean of (a - p)(b - q)^T, in place. u, v: the means of a and b."""
    # E[a b^T] - u q^T - p v^T + p q^T, as one product of rank 2.
    left = np.stack([p - u, -p], axis=2)
    right = np.stack([q, v], axis=1)

    def centre_rows(part: slice) -> None:
        sums[:, part] /= count
        sums[:, part] += left[:, part] @ right

    map_parts(centre_rows, sums.shape[1], ROWS_AT_ONCE, elements=sums.size)


def merge_moments(even: Moments, odd: Moments) -> Moments:
    """Moments of the samples of both."""
    count = even.count + odd.count
    a = even.count / max(count, 1)
    b = odd.count / max(count, 1)
    weight = max(even.weight + odd.weight, 1)
    x, y = (
        even.weight / weight * mean + odd.weight / weight * other
        for mean, other in ((even.mean_x, odd.mean_x), (even.mean_y, odd.mean_y))
    )
    gap_y = even.mean_y - odd.mean_y

    def merge_products(own: Array, other: Array, gap: Array) -> Array:
        """Around the common mean: those around the own means, and what the distance of these adds."""
        if not own.size or not other.size:
            return own[:, :0]
        between = a * (1.0 - a) * gap[:, :, None] * gap_y[:, None, :]
        return np.asarray(a * own + b * other + between)

    h = merge_products(even.h, odd.h, gap_y)
    c = merge_products(even.c, odd.c, even.mean_x - odd.mean_x)
    return Moments(h, c, x, y, count, (*even.parts, *odd.parts))
