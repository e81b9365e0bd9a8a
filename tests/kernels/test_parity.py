"""Forward is bit for bit what onnxq.numerics computes, and so ONNX Runtime (tests/numerics); the arithmetic's edges."""

import ctypes
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.kernels import DType, Flag, Layout, backward_plan, find_layout
from onnxq.numerics import fake_quant, quantize
from onnxq.spec import PerBlock, PerChannel, PerTensor, QParams, QuantSpec
from tests.kernels.machines import NUMPY, Case, Machine, case, collect, expected


def bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])


@settings(max_examples=80)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    long=st.integers(1, 700),
    grain=st.sampled_from([PerTensor(), PerChannel(0), PerBlock(0, 3), PerBlock(0, 16)]),
    width=st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16]),
    signed=st.booleans(),
    narrow=st.booleans(),
    dtype=st.sampled_from([DType.F32, DType.F16, DType.BF16]),
    far=st.sampled_from([1.0, 1.0, 1e6, 1e38]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_kernels_give_what_numerics_gives(
    machine: Machine, shape, long, grain, width: int, signed: bool, narrow: bool, dtype: DType, far: float, seed: int
) -> None:
    """In C order; others: the gradients below."""
    shape, block = (*shape, long), getattr(grain, "size", 0)
    spec = QuantSpec(bits=width, signed=signed, symmetric=False, narrow_range=signed and narrow, granularity=grain)
    flags = Flag.SCALE_AS_X if dtype is DType.F16 else Flag(0)
    one = case(shape, getattr(grain, "axis", None), block, dtype, spec.qmin, spec.qmax, seed)
    with np.errstate(all="ignore"):
        x = (one.x.astype(np.float64) * far).astype(one.x.dtype)
    one = replace(one, x=np.where(np.isnan(x), x.dtype.type(0), x), flags=flags)
    scales = (-(-shape[0] // block), *shape[1:]) if block else shape[:1] if isinstance(grain, PerChannel) else ()
    qparams = QParams(one.scale.reshape(scales), one.zero_point.astype(np.int32).reshape(scales))
    y = machine(one, True, True)[0]
    expected = fake_quant(one.x.reshape(shape), qparams, spec).reshape(-1)
    assert np.array_equal(bits(y), bits(expected.astype(y.dtype)))


def whole(x: np.ndarray, scale: float, zero: float = 0.0, **more) -> Case:
    width = np.float64 if x.dtype == np.float64 else np.float32
    layout = find_layout(x.shape, [1])
    return Case(x, np.array([scale], width), np.array([zero], width), layout, -128, 127, dy=np.ones_like(x), **more)


@pytest.mark.parametrize("dtype", NUMPY.values())
def test_nan_stays_infinity_saturates_and_zero_has_no_sign(machine: Machine, dtype: type) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, -0.1, 0.25, 0.75, -0.25, 1e4, -1e4] * 7, dtype)
    y, dx, dscale, _ = machine(whole(x, 0.5), True, True)
    assert np.isnan(y[::10]).all()
    assert y[1:10].tolist() == [63.5, -64.0, 0.0, 0.0, 0.0, 1.0, 0.0, 63.5, -64.0]
    assert not np.signbit(y[3:8]).any()
    # A gradient through NaN passes, and the scale's says that something is wrong; what was cut off gets none.
    assert dx[:10].tolist() == [1, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert np.isnan(dscale).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_half_is_read_and_written_exactly(machine: Machine, dtype: type) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    # Asking bfloat16's signalling NaNs what they are warns.
    numbers = bits(every) & 0x7FFF <= bits(np.array([np.inf], dtype))
    dx = machine(replace(whole(np.zeros_like(every), 1.0), dy=every), True, True)[1]
    assert np.array_equal(bits(dx)[numbers], bits(every)[numbers])
    assert np.isnan(dx[~numbers]).all()


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_levels_round_to_half_types_as_numpy_rounds(machine: Machine, dtype: DType) -> None:
    """Every level times scales from the smallest subnormal to overflow."""
    levels = np.arange(-32768, 32768, 5, dtype=np.float32)
    scales = np.float32(1.2345678) * 2.0 ** np.arange(-40, 14, dtype=np.float32)
    x = np.broadcast_to(np.inf, (len(scales), 2)).astype(NUMPY[dtype])
    for zero in levels[::600]:
        # x saturates at both ends: y = (end - zero) * scale.
        x[:, 1] = -np.inf
        layout = find_layout(x.shape, (2, 1), 0)
        zeros = np.full(len(scales), zero, np.float32)
        one = Case(x.reshape(-1), scales, zeros, layout, -32768, 32767, dy=np.zeros(x.size, x.dtype))
        ends = np.array([32767 - zero, -32768 - zero], np.float32)
        with np.errstate(over="ignore"):
            expected = (ends * scales[:, None]).astype(np.float32).astype(NUMPY[dtype])
        assert np.array_equal(bits(machine(one, True, True)[0]), bits(expected.reshape(-1)))


def test_a_scale_may_be_rounded_to_the_tensors_type_or_not(machine: Machine) -> None:
    x = np.linspace(-40, 40, 999).astype(np.float16)
    scale = 0.1
    exact, rounded = (machine(whole(x, scale, flags=flag), True, True)[0] for flag in (Flag(0), Flag.SCALE_AS_X))
    assert not np.array_equal(exact, rounded)
    spec = QuantSpec(bits=8)
    qparams = QParams(np.float32(scale), np.int32(0))
    assert np.array_equal(rounded, fake_quant(x, qparams, spec))
    levels = quantize(x.astype(np.float32), qparams, spec).astype(np.float32)
    assert np.array_equal(exact, (levels * np.float32(scale)).astype(np.float16))


def test_without_zero_points_they_are_zero_and_fractions_are_rounded(machine: Machine) -> None:
    one = case((40, 30), 1, 0, DType.F32, -8, 7, 3)
    zeros, none = replace(one, zero_point=np.zeros_like(one.scale)), replace(one, zero_point=None)
    assert np.array_equal(machine(zeros, True, True)[0], machine(none, True, True)[0])
    near = replace(one, zero_point=one.zero_point + np.float32(0.3))
    assert np.array_equal(machine(near, True, True)[0], machine(one, True, True)[0])


# ---- Large outputs that begin on a line are written past the caches: the same bits as those that are not.

LARGE = 16 << 20
GUARD = 64
# Elements of float32. Spans; columns in one tile, in several, and with a last row that is not full; blocks both ways.
LAYOUTS = {
    "tensor": Layout(1, 1, 1 << 22),
    "channels": Layout(2, 2048, 1040),
    "columns": Layout(1 << 14, 257, 1),
    "narrow columns": Layout((1 << 17) + 1, 33, 1),
    "wide columns": Layout(1 << 11, 2080, 1),
    "blocks": Layout(1 << 11, 2080, 1, 32),
    "blocks of rows": Layout(1, 2080, 1 << 11, 48),
}


def results(library: ctypes.CDLL, one: Case, offset: int, threads: int) -> list[bytes]:
    """y, dx alone, dx beside sums, and the sums, in memory this many bytes behind a line's start."""
    one.threads = threads
    out = []
    for forward, sums in ((True, False), (False, False), (False, True)):
        whole = np.full(one.x.nbytes + 3 * GUARD, 0x55, np.uint8)
        begin = GUARD - whole.ctypes.data % GUARD + offset
        written = whole[begin : begin + one.x.nbytes].view(one.x.dtype)
        names = {name: np.zeros_like(one.scale) for name in ("dscale", "dzero_point")} if sums else {}
        run = library.fq_cpu_forward if forward else library.fq_cpu_backward
        assert run(ctypes.byref(one.call(y=written, **names))) == 0
        assert (whole[:begin] == 0x55).all()
        assert (whole[begin + written.nbytes :] == 0x55).all()
        out += [written.tobytes(), *(values.tobytes() for values in names.values())]
    return out


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits(library: ctypes.CDLL, name: str, dtype: DType) -> None:
    layout = LAYOUTS[name]
    if dtype is DType.BF16:  # twice as many of its elements make as many bytes
        layout = Layout(layout.outer * 2, layout.channels, layout.inner, layout.block)
    rng = np.random.default_rng(0)
    assert layout.count * dtype.size >= LARGE
    x, dy = (np.resize(rng.normal(0, 4, 100_003), layout.count).astype(NUMPY[dtype]) for _ in range(2))
    scale = rng.uniform(0.3, 0.5, layout.scales).astype(np.float32)
    one = Case(x, scale, rng.integers(-3, 3, layout.scales).astype(np.float32), layout, -8, 7, dy=dy)
    usual = results(library, one, dtype.size, 1)
    assert results(library, one, 0, 1) == usual
    assert results(library, one, 0, 3) == usual


# ---- Gradients against the formulas in float64, on every way through the kernels; the same bits every time.

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
    check(cpu, case(shape, axis, block, dtype, low, low + (1 << width) - 1, seed, flags=flags, order=order))


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
        assert backward_plan(layout, DType.F32, parameters=True).partial_bytes <= layout.count * 12 / 20
