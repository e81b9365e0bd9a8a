"""Gradients against the formulas in float64, on every way through the kernels; the same bits every time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.kernels import DType, Flag, Layout, backward_plan
from tests.kernels.machines import Case, Machine, case, collect, expected

# Shape, axis, block: whole, rows and columns, long rows, pieces of rows, groups of rows, odd widths, blocks with a
# short last one along rows and columns, one element, none at all.
SHAPES = [
    ((9000,), None, 0), ((3, 700), 0, 0), ((700, 3), 1, 0), ((64, 24), 1, 0), ((40, 33, 7), 1, 0), ((9, 5, 400), 1, 0),
    ((2, 3, 10000), 1, 0), ((2, 3, 9001), 1, 0), ((50, 4, 130), 1, 0), ((33, 4, 128), 1, 0), ((5, 3, 131), 0, 0),
    ((300, 9), 0, 0), ((40, 120, 25), 1, 0), ((3000, 2), 1, 0), ((6, 64), 1, 16), ((6, 70), 1, 32),
    ((2, 9000), 1, 6000), ((70, 6), 0, 32), ((64, 8), 0, 16), ((3, 70, 5), 1, 32), ((2, 300, 24), 1, 150),
    ((1,), None, 0), ((1, 1), 1, 0), ((0, 4), 1, 0), ((4, 0), 0, 0), ((0,), None, 0), ((3, 0), 1, 4), ((0, 3, 2), 1, 2),
]  # fmt: skip
NAMES = ["x".join(map(str, shape)) + f"@{axis}" + (f"/{block}" if block else "") for shape, axis, block in SHAPES]


def close(found: np.ndarray, wanted: np.ndarray, one: Case, unit: np.ndarray) -> bool:
    """Within rounding of a sum whose terms are at most |dy| * unit."""
    size = collect(np.abs(one.dy.astype(np.float64)), one.layout) * unit
    return bool((np.abs(found - wanted) <= (1e-12 if one.dtype is DType.F64 else 1e-6) * size).all())


def check(machine: Machine, one: Case) -> None:
    y, dx, dscale, dzero = machine(one, True, True)
    wanted = expected(one)
    assert np.array_equal(y, wanted[0])
    assert np.array_equal(dx, wanted[1])
    reach = max(abs(one.qmin), abs(one.qmax)) + (0 if one.zero_point is None else np.abs(one.zero_point))
    assert close(dscale, wanted[2], one, reach)
    assert close(dzero, wanted[3], one, one.scale)


# Of each shape and type one way of clipping, in turn.
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("shape", "axis", "block"), SHAPES, ids=NAMES)
def test_gradients_follow_the_formulas(machine: Machine, shape, axis, block, dtype: DType) -> None:
    clip = (SHAPES.index((shape, axis, block)) + list(DType).index(dtype)) % 2 == 1
    flags = (Flag.EDGE_CLIP if clip else Flag(0)) | (Flag.SCALE_AS_X if dtype is DType.F16 else Flag(0))
    zero = not clip
    low, high = (-8, 7) if zero else (-128, 127)
    check(machine, case(shape, axis, block, dtype, low, high, len(shape), flags=flags, zero_point=zero))


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(0, 60), min_size=1, max_size=3).map(tuple),
    data=st.data(),
    dtype=st.sampled_from(list(DType)),
    clip=st.booleans(),
    width=st.integers(2, 16),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_small_tensor(cpu: Machine, shape, data, dtype: DType, clip: bool, width: int, seed: int) -> None:
    axis = data.draw(st.none() | st.integers(0, len(shape) - 1))
    block = 0 if axis is None else data.draw(st.integers(0, 40))
    low = data.draw(st.sampled_from([0, -(1 << (width - 1)), 1 - (1 << (width - 1))]))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    flags = Flag.EDGE_CLIP if clip else Flag(0)
    one = case(shape, axis, block, dtype, low, low + (1 << width) - 1, seed, flags=flags, order=order)
    check(cpu, one)


def test_the_two_edges_differ_by_half_a_level(machine: Machine) -> None:
    """LSQ's mask is open at the outermost levels; round, then clip keeps half a step beyond them."""
    levels = np.array([-8.6, -8.5, -8.2, -8.0, -7.9, 6.9, 7.0, 7.3, 7.5, 7.6], np.float32)
    one = case((10,), None, 0, DType.F32, -8, 7, 0, zero_point=False)
    one = replace(one, x=levels, scale=np.ones(1, np.float32), dy=np.ones(10, np.float32))
    assert machine(one, True, True)[1].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 0, 0]
    assert machine(replace(one, flags=Flag.EDGE_CLIP), True, True)[1].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_only_what_is_wanted_is_written(machine: Machine) -> None:
    for shape, axis, block in SHAPES:
        one = case(shape, axis, block, DType.F32, -8, 7, 7)
        full = machine(one, True, True)
        for dx, parameters in ((True, False), (False, True)):
            some = machine(one, dx, parameters)
            for got, wanted, kept in zip(some[1:], full[1:], (dx, parameters, parameters), strict=True):
                assert (got is None) is not kept
                assert not kept or np.array_equal(got, wanted)


def test_more_threads_give_the_same_bits(cpu: Machine) -> None:
    for shape, axis, block in [((300_000,), None, 0), ((40, 50, 100), 1, 0), ((9000, 24), 1, 0), ((4000, 64), 1, 32)]:
        one = case(shape, axis, block, DType.F32, -8, 7, 1)
        first = cpu(one, True, True)
        for threads in (1, 2, 3, 7):
            again = cpu(replace(one, threads=threads), True, True)
            assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(first, again, strict=True))


def test_addresses_need_no_alignment(machine: Machine) -> None:
    """Slices of storages begin anywhere; the sums may then differ by the order in which they are added up."""
    for dtype in (DType.F32, DType.BF16):
        for shape, axis, block in [((5001,), None, 0), ((40, 33, 8), 1, 0), ((6, 3, 600), 1, 0), ((40, 64), 1, 16)]:
            one = case(shape, axis, block, dtype, -8, 7, 2)
            moved = replace(one, x=shifted(one.x), dy=shifted(one.dy))
            assert moved.x.ctypes.data % 16 == one.x.itemsize
            check(machine, moved)


def shifted(array: np.ndarray) -> np.ndarray:
    """A copy whose address is one element past a multiple of 16 bytes."""
    room = np.empty(array.size + 64 // array.itemsize, array.dtype)
    begin = (-room.ctypes.data % 16) // array.itemsize + 1
    out = room[begin : begin + array.size]
    out[:] = array
    return out


def test_long_sums_keep_their_digits(cpu: Machine) -> None:
    """A plain float32 sum of these would be off by per mille."""
    one = case((1 << 22,), None, 0, DType.F32, -8, 7, 1)
    one = replace(one, dy=np.abs(one.dy) + np.float32(1))
    found, wanted = cpu(one, False, True), expected(one)
    assert np.allclose(found[2], wanted[2], rtol=3e-7, atol=0)
    assert np.allclose(found[3], wanted[3], rtol=3e-7, atol=0)


def test_partial_sums_are_few() -> None:
    for layout in (Layout(64, 64, 3136), Layout(12544, 768, 1), Layout(64, 2048, 49), Layout(1, 4096, 4096)):
        plan = backward_plan(layout, DType.F32, parameters=True)
        assert plan.partial_bytes <= layout.count * 12 / 20
