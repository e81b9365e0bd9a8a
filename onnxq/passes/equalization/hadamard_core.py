"""Orthogonal matrices whose entries are all of one size, and their products with arrays.

A Hadamard matrix holds +1 and -1 in orthogonal rows. Sylvester doubles one; Paley gives one of q + 1 or 2(q + 1) for a
prime q, so that most multiples of 4 have one; other sizes are cut into blocks that do. Rows are signed by a seed, as in
QuaRot (Ashkboos et al. 2024, arXiv 2404.00456), and products are made of additions in a fixed order, so that a seed
stands for the same bytes on every machine; no matrix is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from onnxq.arrays import Array
from onnxq.passes.affine_core import Array64

# Largest matrix that is multiplied row by row; larger ones are made of it by doubling.
_DENSE = 100
# Elements of a weight that are in work at a time, in float64: a megabyte, which caches hold.
_CHUNK = 1 << 17


@lru_cache(maxsize=64)
def make_paley(order: int) -> NDArray[np.int8] | None:
    """Paley's Hadamard matrix of this order, [order, order]; None where there is none of a prime.

    Paley 1933, On orthogonal matrices.
    """
    if order in (1, 2):
        return np.array([[1, 1], [1, -1]], np.int8)[:order, :order]
    single, half = order - 1, order // 2 - 1
    if single % 4 == 3 and _is_prime(single):
        border = np.concatenate([[[0], *[[-1]] * single], [[1] * single, *_make_jacobsthal(single)]], axis=1)
        return np.asarray(np.eye(order) + border, np.int8)
    if order % 4 == 0 and half % 4 == 1 and _is_prime(half):
        border = np.concatenate([[[0], *[[1]] * half], [[1] * half, *_make_jacobsthal(half)]], axis=1)
        matrix = np.kron(border, [[1, 1], [1, -1]]) + np.kron(np.eye(half + 1), [[1, -1], [-1, -1]])
        return np.asarray(matrix, np.int8)
    return None


def _make_jacobsthal(q: int) -> NDArray[np.int64]:
    """[q, q]: 1 where row - column is a square modulo q, -1 where it is none, 0 on the diagonal."""
    kind = np.full(q, -1)
    kind[np.arange(1, q) ** 2 % q] = 1
    kind[0] = 0
    return np.asarray(kind[(np.arange(q)[:, None] - np.arange(q)) % q])


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))


def find_base(size: int) -> int:
    """The order of the smallest matrix that gives one of `size` by doubling; 0 where there is none to be had."""
    base = size // (size & -size)
    while base <= size:
        if base <= _DENSE and make_paley(base) is not None:
            return base
        base *= 2
    return 0


def split_size(size: int) -> tuple[int, ...]:
    """Sizes of Hadamard matrices that add up to `size`, the largest first; (size,) where there is one of it."""
    block = next(k for k in range(size, 0, -1) if find_base(k))
    return (block, *split_size(size - block)) if size > block else (block,)


@dataclass(frozen=True)
class Hadamard:
    """Q, orthogonal: rows in the order and with the signs of a seed, times Hadamard matrices.

    size: channels that it mixes. level: it leaves a row of equal numbers as it is, and so the mean of every row.
    """

    seed: int
    size: int
    level: bool = False

    def turn_channels(self, values: Array, axis: int, scale: Array64 | None = None) -> Array:
        """Values whose `axis` is of channels, in the channels' new basis: x·Q of rows x, Qᵀ·W of what reads x.

        An axis of some times `size` channels is turned part by part. scale: [channels], a factor of each in front of
        that. Of the type that was given, rounded once.
        """
        moved = np.moveaxis(values, axis, 0)
        shape = moved.shape
        columns = moved.reshape(shape[0], -1)
        out = np.empty((columns.shape[1], shape[0]), values.dtype)
        step = max(1, _CHUNK // shape[0])
        for start in range(0, columns.shape[1], step):
            chunk = columns[:, start : start + step].astype(np.float64)
            if scale is not None:
                chunk *= scale[:, None]
            parts = [self._turn_part(chunk[k : k + self.size]) for k in range(0, shape[0], self.size)]
            out[start : start + step] = np.concatenate(parts).T
        return np.ascontiguousarray(np.moveaxis(out.T.reshape(shape), 0, axis))

    def _turn_part(self, columns: Array64) -> Array64:
        """[size, n], each column in the new basis."""
        turned = self._turn_plain(columns)
        if not self.level:
            return turned
        # The reflection that brings the image of equal numbers back to where they were.
        normal = self._turn_plain(np.ones((self.size, 1))) - 1.0
        length = float(_sum_rows(normal * normal)[0])
        # A few units of rounding: there is nothing to bring back.
        if length < 1e-20:
            return turned
        return np.asarray(turned - normal * (_sum_rows(normal * turned) * (2.0 / length)))

    def _turn_plain(self, columns: Array64) -> Array64:
        order, signs = _draw_signs(self.seed, self.size)
        signed = columns[order] * signs[:, None]
        ends = np.cumsum(split_size(self.size))[:-1]
        return np.concatenate([_multiply_hadamard(part) for part in np.split(signed, ends)])


@lru_cache(maxsize=64)
def _draw_signs(seed: int, size: int) -> tuple[NDArray[np.intp], Array64]:
    """The order of the channels and their signs."""
    # Raw numbers of the generator: numpy may draw others of one seed in later releases, but never these.
    raw = np.random.PCG64(seed).random_raw(2 * size)
    whole = len(split_size(size)) == 1
    # One matrix mixes all channels whatever their order.
    order = np.arange(size) if whole else np.argsort(raw[:size], kind="stable")
    return order, np.where(raw[size:] >> 63, 1.0, -1.0)


def _multiply_hadamard(columns: Array64) -> Array64:
    """H·columns / √size."""
    size, count = columns.shape
    base = find_base(size)
    dense = make_paley(base)
    assert dense is not None
    parts = columns.reshape(size // base, base, count)
    if base > 1:
        # Sums in the order of the channels, which no BLAS promises.
        mixed = np.zeros_like(parts)
        for row, signs in enumerate(dense):
            for k, sign in enumerate(signs):
                (np.add if sign > 0 else np.subtract)(mixed[:, row], parts[:, k], out=mixed[:, row])
        parts = mixed
    width, spare = 1, np.empty_like(parts)
    while width < size // base:
        pairs, sums = (array.reshape(-1, 2, width, base * count) for array in (parts, spare))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        parts, spare, width = spare, parts, 2 * width
    return parts.reshape(size, count) * (1.0 / float(np.sqrt(size)))


def _sum_rows(values: Array64) -> Array64:
    """The sum over axis 0, by halves: in one order on every machine."""
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = np.concatenate([values[:half] + values[half : 2 * half], rest])
    return np.asarray(values[0])


def multiply_row(row: Array64, matrix: Array) -> Array64:
    """row·matrix, [n] times [n, m], in the order of the rows."""
    out = np.zeros(matrix.shape[1])
    for factor, values in zip(row, matrix, strict=True):
        out += factor * values.astype(np.float64)
    return out
