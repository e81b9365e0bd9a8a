"""More than 2**31 elements, in memory that was never written and so costs none."""

import ctypes

import numpy as np
import pytest

from onnxq.kernels import THREADS, DType, Layout, backward_plan, forward_plan
from onnxq.kernels.abi import Divisor
from tests.kernels.machines import Case, start

COUNT = (1 << 31) + 4096
LAYOUTS = [
    Layout(1, 1, COUNT),
    Layout(1 << 16, (1 << 15) // 8, 8),
    Layout(2, 2, COUNT // 4),
    Layout(COUNT // 4096, 4096, 1, 1024),
]


def large(layout: Layout) -> Case:
    """Zeros; the last element alone is not."""
    try:
        x, dy = np.zeros(layout.count, np.float16), np.zeros(layout.count, np.float16)
    except MemoryError:
        pytest.skip("no address space for it")
    x[-1], dy[-1] = 100, 2
    return Case(x, np.ones(layout.scales, np.float32), None, layout, -8, 7, dy=dy)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_cpu_twin_reaches_the_end(library: ctypes.CDLL, layout: Layout) -> None:
    one, scale = large(layout), np.full(layout.scales, 9, np.float32)
    assert library.fq_cpu_backward(ctypes.byref(one.call(dscale=scale))) == 0
    assert np.flatnonzero(scale).tolist() == [layout.scales - 1]
    assert scale[-1] == 14


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_cuda_kernels_find_the_end(emulated: ctypes.CDLL, layout: Layout) -> None:
    """Their last blocks alone: y, and dx."""
    one = large(layout)
    out = np.zeros(layout.count, np.float16)
    for plan in (forward_plan(layout, DType.F16), backward_plan(layout, DType.F16, parameters=False)):
        out[-1] = 9
        start(emulated, plan, one.call(y=out), first=plan.launches[0].grid - 2)
        assert out[-1] == (7 if plan == forward_plan(layout, DType.F16) else 0)
    scale = np.full(layout.scales, 9, np.float32)
    plan = backward_plan(layout, DType.F16, parameters=True)
    first = plan.launches[0]
    filled = first.fill_call(one.call(dscale=scale))
    scratch = np.zeros(plan.partial_bytes // 8)
    filled.partial = scratch.ctypes.data if scratch.size else None
    emulated.fq_emu_launch_from.restype = ctypes.c_char_p
    name = first.kernel.encode()
    assert emulated.fq_emu_launch_from(name, first.grid - 2, first.grid, THREADS, ctypes.byref(filled)) == b""
    if scratch.size:
        # Partial sums come in pairs, for the scale and the zero point.
        assert scratch.sum() == 16
        assert set(scratch[np.flatnonzero(scratch)]) == {14.0, 2.0}
    else:
        assert scale[-1] == 14


def test_grids_fit_cuda() -> None:
    for layout in (*LAYOUTS, Layout(1, 1, 1 << 40), Layout(1 << 30, 1 << 10, 1), Layout(1 << 20, 1 << 10, 1 << 10)):
        for dtype in DType:
            plans = (forward_plan(layout, dtype), *(backward_plan(layout, dtype, parameters=p) for p in (False, True)))
            assert all(0 < launch.grid < 1 << 31 for plan in plans for launch in plan.launches)


def test_division_by_multiplication_is_exact() -> None:
    """fq_divide in Python's integers: the high half of a product, and one less where that was too much."""
    rng = np.random.default_rng(0)
    values = [1, 2, 3, 5, 7, 9, 49, 196, 255, 256, 3136, 4608, (1 << 31) - 1, (1 << 31) + 11, (1 << 40) + 3]
    for value in values:
        by = Divisor.of(value)
        near = [k * value + d for k in rng.integers(0, (1 << 62) // value, 50).tolist() for d in (-1, 0, 1)]
        for n in [0, 1, value - 1, value, (1 << 32) - 1, 1 << 32, *map(int, rng.integers(0, 1 << 32, 200)), *near]:
            if n < 0:
                continue
            quotient = n if by.magic == 0 else n * by.magic >> 64
            if n >> 32 and quotient * value > n:
                quotient -= 1
            assert quotient == n // value
