"""From strides to [outer, channels, inner], and from there to the argument that C++ reads."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.kernels import THREADS, DType, KernelCall, Layout, backward_plan, find_layout, forward_plan, sources
from onnxq.kernels.abi import make_divisor
from tests.kernels.conftest import GXX
from tests.kernels.machines import Case, expand, start


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 4))
def test_every_element_finds_its_scale(data: st.DataObject, shape: list[int], block: int) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    memory = np.empty([shape[dim] for dim in order], np.int8)
    logical = memory.transpose(np.argsort(order))
    layout = find_layout(logical.shape, logical.strides, axis, block)
    assert layout.count == memory.size
    dims = [-(-dim // block) if block and k == axis % len(shape) else dim for k, dim in enumerate(shape)]
    scales = np.arange(np.prod(dims) if block else shape[axis])
    assert layout.scales == scales.size
    spread = (
        scales.reshape(dims)
        if block
        else scales.reshape([-1 if k == axis % len(shape) else 1 for k in range(len(shape))])
    )
    for k in range(len(shape)):
        if block and k == axis % len(shape):
            spread = np.repeat(spread, block, axis=k).take(range(shape[k]), axis=k)
    wanted = np.broadcast_to(spread, shape).transpose(order).reshape(-1)
    in_memory = scales.reshape(dims).transpose(layout.order).reshape(-1) if block else scales
    assert np.array_equal(expand(in_memory, layout), wanted)


def test_what_is_not_dense_has_no_layout() -> None:
    whole = np.empty((4, 6), np.int8)
    for view in (whole[:, :5], whole[::2], whole[:, ::2], np.broadcast_to(whole[:1], (4, 6)), whole[::-1]):
        assert find_layout(view.shape, view.strides, 0) is None
    assert find_layout((4, 1, 6), (6, 99, 1), 1) == Layout(24, 1, 1, 0, (0, 2, 1))
    assert find_layout((), ()) == Layout(1, 1, 1)
    assert find_layout((3, 0), (1, 7), 1) is not None


def test_a_plan_has_no_launch_without_elements_and_no_second_one_where_a_scale_is_one_pieces_own() -> None:
    assert forward_plan(Layout(0, 4, 1), DType.F32).launches == ()
    assert backward_plan(Layout(0, 4, 1), DType.F32, parameters=False).launches == ()
    for layout in (Layout(1, 512, 4096), Layout(1, 64, 32), Layout(4096, 4096, 1, 32), Layout(1, 4096, 512, 32)):
        plan = backward_plan(layout, DType.F32, parameters=True)
        assert (len(plan.launches), plan.partial_bytes) == (1, 0)


@pytest.mark.skipif(GXX is None, reason="no g++")
def test_python_and_cpp_lay_out_the_argument_alike(tmp_path: Path) -> None:
    names = [name for name, *_ in KernelCall._fields_]
    lines = [f'std::printf("%zu %zu\\n", offsetof(FqCall, {name}), sizeof(FqCall::{name}));' for name in names]
    text = '#include <cstddef>\n#include <cstdio>\n#include "fq_call.h"\nint main() {\n'
    (tmp_path / "main.cpp").write_text(text + "\n".join(lines) + '\nstd::printf("%zu\\n", sizeof(FqCall));\n}\n')
    program = tmp_path / "main"
    subprocess.run(
        [str(GXX), "-I", str(sources.find_folder()), str(tmp_path / "main.cpp"), "-o", str(program)], check=True
    )
    said = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = [f"{getattr(KernelCall, name).offset} {getattr(KernelCall, name).size}" for name in names]
    assert said == [*wanted, str(ctypes.sizeof(KernelCall))]


# ---- More than 2**31 elements, in memory that was never written and so costs none.

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
        by = make_divisor(value)
        near = [k * value + d for k in rng.integers(0, (1 << 62) // value, 50).tolist() for d in (-1, 0, 1)]
        for n in [0, 1, value - 1, value, (1 << 32) - 1, 1 << 32, *map(int, rng.integers(0, 1 << 32, 200)), *near]:
            if n < 0:
                continue
            quotient = n if by.magic == 0 else n * by.magic >> 64
            if n >> 32 and quotient * value > n:
                quotient -= 1
            assert quotient == n // value
