"""Streams turned by Hadamard matrices: the matrices, and the weights that follow.

A Hadamard matrix holds +1 and -1 in orthogonal rows. Sylvester doubles one; Paley gives one of q + 1 or 2(q + 1) for a
prime q, so that most multiples of 4 have one; other sizes are cut into blocks that do. Rows are signed by a seed, as in
QuaRot (Ashkboos et al. 2024, arXiv 2404.00456), and products are made of additions in a fixed order, so that a seed
stands for the same bytes on every machine; no matrix is stored.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from onnxq.arrays import Array, Array64, Integers, as_float64
from onnxq.graph import GraphIndex, ModelLike, get_index
from onnxq.passes.equalization.stream_rules import find_streams
from onnxq.passes.equalization.streams import ChannelConstant, StreamReader
from onnxq.passes.linear import find_linear
from onnxq.passes.patterns import Edit, unfit_plan
from onnxq.plan.model import Rotation
from onnxq.planner.sums import read_constant
from onnxq.sites import Edge, Lines, Names, Refusal, Refusals

# Largest matrix that is multiplied row by row; larger ones are made of it by doubling.
_DENSE = 100
# Elements of a weight that are in work at a time, in float64: a megabyte, which caches hold.
_CHUNK = 1 << 17


_ORDER_2 = np.array([[1, 1], [1, -1]], np.int8)


@lru_cache(maxsize=64)
def make_paley(order: int) -> Array | None:
    """Paley's Hadamard matrix of this order, int8 [order, order]; None where there is none of a prime.

    Paley 1933, On orthogonal matrices.
    """
    if order in (1, 2):
        return _ORDER_2[:order, :order]
    single = order - 1
    half = order // 2 - 1
    # Paley's first construction: q = 3 modulo 4 makes Jacobsthal's matrix skew-symmetric, and I + S
    # orthogonal.
    if single % 4 == 3 and _is_prime(single):
        return np.asarray(np.eye(order) + _make_conference(single, -1), np.int8)
    # The second: q = 1 modulo 4 makes it symmetric. Every entry becomes a block of 2 x 2, the zeros
    # on the diagonal a block of their own.
    if order % 4 == 0 and half % 4 == 1 and _is_prime(half):
        crossed = np.kron(_make_conference(half, 1), _ORDER_2)
        matrix = crossed + np.kron(np.eye(half + 1), [[1, -1], [-1, -1]])
        return np.asarray(matrix, np.int8)
    return None


def _make_conference(q: int, column: int) -> Integers:
    """Jacobsthal's matrix of order q behind a row of ones and a column of this number: [q + 1, q + 1].

    Its entries: 1 where row - column is a square modulo q, -1 where it is none, 0 on the diagonal.
    """
    kind = np.full(q, -1)
    kind[np.arange(1, q) ** 2 % q] = 1
    kind[0] = 0
    jacobsthal = kind[(np.arange(q)[:, None] - np.arange(q)) % q]
    return np.concatenate([[[0], *[[column]] * q], [[1] * q, *jacobsthal]], axis=1)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))


def find_base(size: int) -> int:
    """The order of the smallest matrix that gives one of `size` by doubling; 0 where there is none to be had."""
    # The odd part of the size: all powers of two in it can come from doubling.
    base = size // (size & -size)
    while base <= size:
        if base <= _DENSE and make_paley(base) is not None:
            return base
        base *= 2
    return 0


def split_size(size: int) -> tuple[int, ...]:
    """Sizes of Hadamard matrices that add up to `size`, the largest first; (size,) where there is one of it."""
    block = next(filter(find_base, range(size, 0, -1)))
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
            # A scale that waits stands in front of the rotation: of (s·x)·W remains Qᵀ·(s·W).
            if scale is not None:
                chunk *= scale[:, None]
            parts = [
                self._turn_part(chunk[k : k + self.size]) for k in range(0, shape[0], self.size)
            ]
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
        return turned - normal * (_sum_rows(normal * turned) * (2.0 / length))

    def _turn_plain(self, columns: Array64) -> Array64:
        order, signs = _draw_signs(self.seed, self.size)
        signed = columns[order] * signs[:, None]
        ends = np.cumsum(split_size(self.size))[:-1]
        return np.concatenate([_multiply_hadamard(part) for part in np.split(signed, ends)])


@lru_cache(maxsize=64)
def _draw_signs(seed: int, size: int) -> tuple[Array, Array64]:
    """The order of the channels and their signs."""
    # Raw numbers of the generator: numpy may draw others of one seed in later releases, but never these.
    raw = np.random.PCG64(seed).random_raw(2 * size)
    whole = len(split_size(size)) == 1
    # One matrix mixes all channels whatever their order.
    order = np.arange(size) if whole else raw[:size].argsort(kind="stable")
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
    width = 1
    spare = np.empty_like(parts)
    # The fast Walsh-Hadamard transform: n log n additions, where the matrix would take n².
    while width < size // base:
        pairs, sums = (array.reshape(-1, 2, width, base * count) for array in (parts, spare))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        parts, spare = spare, parts
        width *= 2
    return parts.reshape(size, count) * (1.0 / float(np.sqrt(size)))


def _sum_rows(values: Array64) -> Array64:
    """The sum over axis 0, by halves: in one order on every machine."""
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = np.concatenate([values[:half] + values[half : 2 * half], rest])
    return as_float64(values[0])


def multiply_row(row: Array64, matrix: Array) -> Array64:
    """row·matrix, [n] times [n, m], in the order of the rows."""
    out = np.zeros(matrix.shape[1])
    for factor, values in zip(row, matrix, strict=True):
        out += factor * as_float64(values)
    return out


# Rotations in the graph: streams of channels multiplied by an orthogonal matrix, which the weights around take in.
# QuaRot, Ashkboos et al. 2024, arXiv 2404.00456: R1, of the residual stream, and R2, of the values of each head.
# Outliers of single channels become small parts of all. The scale of a normalization goes into the weights that read
# it, its bias through them into theirs.


def has_residual_stream(proto: ModelLike) -> bool:
    """True where a normalization reads a stream that linear operators write, and others read."""
    return any(
        stream.normalized and stream.readers
        for stream in find_streams(get_index(proto)).list_streams()
    )


def list_rotations(proto: ModelLike, seed: int) -> tuple[Rotation, ...]:
    """A rotation for each stream that can take one; () where no normalization reads any of them."""
    free = [stream for stream in find_streams(get_index(proto)).list_streams() if stream.free]
    # Values of heads alone are not worth a trial.
    if not any(stream.normalized for stream in free):
        return ()
    return tuple(Rotation(tensor=stream.tensor, seed=seed, size=stream.size) for stream in free)


def list_fixed(proto: ModelLike) -> Refusals:
    """The streams that begin and end in weights, but meet something that asks for their channels as they are.

    Those that a normalization reads come first.
    """
    fix = "nothing; the channels stay as they are"
    streams = find_streams(get_index(proto)).list_streams()
    fixed = [stream for stream in streams if stream.reason and stream.readers and stream.size > 1]
    return tuple(
        Refusal(str(stream.tensor), f"cannot be rotated: {stream.reason}", fix, "rotation", "R112")
        for stream in sorted(fixed, key=lambda stream: not stream.normalized)
    )


@dataclass(frozen=True)
class _ConstantRecipe:
    """How one reader's constant is rewritten: its `axis` scaled by what waits, then axes turned, in order."""

    axis: int = -1
    waiting: tuple[ChannelConstant, ...] = ()
    turns: tuple[tuple[int, Hadamard], ...] = ()


def write_rotations(proto: ModelLike, rotations: Sequence[Rotation]) -> tuple[ModelLike, Lines]:
    """The model with these streams turned, and the names of the constants that are there twice from now on.

    Raises PlanError for a tensor that begins no stream of its size that could be turned.
    """
    index = get_index(proto)
    turns = defaultdict(list)
    readers = {}
    streams = find_streams(index)
    for rotation in rotations:
        label = streams.labels.get(rotation.tensor)
        stream = None if label is None else streams.find_stream(label)
        if stream is None or not stream.free or stream.size != rotation.size:
            cause = f"begins no stream of {rotation.size} channels that could be rotated"
            raise unfit_plan(rotation.tensor, cause)
        matrix = Hadamard(rotation.seed, rotation.size, stream.level)
        for edge, axis in stream.turns:
            turns[edge].append((axis, matrix))
        for reader in stream.readers:
            turns[reader.edge].append((reader.axis, matrix))
            readers[reader.edge] = reader
    recipes = {edge: _ConstantRecipe(turns=tuple(turned)) for edge, turned in turns.items()}
    for edge, reader in readers.items():
        recipes[edge] = replace(recipes[edge], axis=reader.axis, waiting=reader.label.waiting)
    edit = Edit(proto)
    copied = _write_constants(edit, recipes, _move_shifts(edit, readers, recipes))
    waiting = {constant for reader in readers.values() for constant in reader.label.waiting}
    # Their readers' weights and biases hold them now, and the norm keeps ones and zeros.
    for constant in sorted(waiting, key=lambda constant: constant.edge):
        value = _read_constant(index, constant.edge)
        edit.set_constant(constant.edge, np.full_like(value, 0.0 if constant.shift else 1.0))
    return edit.export(), copied


def _read_constant(index: GraphIndex, edge: Edge) -> Array:
    value = read_constant(index, edge)
    assert value is not None
    return value


def _add_up(
    index: GraphIndex, waiting: Sequence[ChannelConstant], width: int
) -> tuple[Array64, Array64]:
    """Scale and shift of every channel that constants in a row come to, [width] each."""
    scale = np.ones(width)
    shift = np.zeros(width)
    for constant in waiting:
        value = as_float64(_read_constant(index, constant.edge)).ravel()
        if constant.shift:
            shift += value
        else:
            scale *= value
            # A scale multiplies the shifts in front of it, too.
            shift *= value
    return scale, shift


def _move_shifts(
    edit: Edit,
    readers: Mapping[Edge, StreamReader],
    recipes: Mapping[Edge, _ConstantRecipe],
) -> dict[Edge, Array64]:
    """The gains of biases by shifts of channels in front, in the old basis, by the input that holds the bias.

    Where there is no bias, it is written, in an Add behind.
    """
    index = edit.index
    gains = {}
    for edge, reader in readers.items():
        _, shift = _add_up(index, reader.label.waiting, reader.label.width)
        if not shift.any():
            continue
        node = index.find_node(edge.node)
        weight = _read_constant(index, edge)
        # The weight as [inputs, outputs], which transB stores transposed.
        gain = multiply_row(shift, weight if reader.axis == -2 else weight.T)
        linear = find_linear(index, node)
        place = None if linear is None else linear.bias_edge
        bias = read_constant(index, place)
        if place is not None and bias is not None and bias.size == gain.size:
            # Gemm computes alpha·x·W + beta·C.
            factor = node.read_float("alpha", 1.0) / (node.read_float("beta", 1.0) or 1.0)
            gains[place] = gain * factor
            continue
        # A bias that is there is turned with its stream; one that is written now is turned here.
        for axis, matrix in recipes[edge].turns:
            gain = gain if axis == reader.axis else matrix.turn_channels(gain, -1)
        written = edit.add_part(node, "bias", gain.astype(weight.dtype))
        edit.append(node, [("Add", [written], {})])
    return gains


def _write_constants(
    edit: Edit,
    recipes: Mapping[Edge, _ConstantRecipe],
    gains: Mapping[Edge, Array64],
) -> Names:
    """Rewrite the constants one after the other; the names of matrices that their readers no longer share."""
    index = edit.index
    shared = defaultdict(list)
    for edge in dict.fromkeys((*recipes, *gains)):
        tensor = index.find_at(edge)
        assert tensor is not None
        shared[tensor].append(edge)
    copied = []
    for tensor, edges in shared.items():
        groups = defaultdict(list)
        for edge in edges:
            groups[edge.scope, recipes.get(edge, _PLAIN), edge if edge in gains else None].append(
                edge
            )
        alike = len({key[1:] for key in groups}) == 1 and len(edges) == len(
            index.list_consumers(tensor)
        )
        for (scope, recipe, _), users in groups.items():
            value = _rewrite(index, users[0], recipe, gains.get(users[0]))
            if alike and index.find_producer(tensor) is None:
                # In all scopes at once.
                edit.replace_constant(tensor, value)
                break
            name = edit.add_constant(scope, f"{tensor.name}/{users[0].node}", value)
            for edge in users:
                edit.read(edge, name)
        if not alike and len(index.find_shape(tensor) or ()) > 1:
            copied.append(tensor.name)
    return tuple(copied)


_PLAIN = _ConstantRecipe()


def _rewrite(index: GraphIndex, edge: Edge, recipe: _ConstantRecipe, gain: Array64 | None) -> Array:
    value = _read_constant(index, edge)
    # The gain is in the old basis.
    if gain is not None:
        value = (as_float64(value) + gain).astype(value.dtype)
    for axis, matrix in recipe.turns:
        scaled = recipe.waiting and axis == recipe.axis
        scale = _add_up(index, recipe.waiting, value.shape[axis])[0] if scaled else None
        value = matrix.turn_channels(value, axis, scale)
    return value
