"""From strides to [outer, channels, inner], and from there to the argument that C++ reads."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.kernels import DType, KernelCall, Layout, backward_plan, find_layout, forward_plan, sources
from tests.kernels.conftest import GXX
from tests.kernels.machines import expand


@given(st.data(), st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 4))
def test_every_element_finds_its_scale(data: st.DataObject, shape: list[int], block: int) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    memory = np.empty([shape[dim] for dim in order], np.int8)
    logical = memory.transpose(np.argsort(order))
    layout = find_layout(logical.shape, logical.strides, axis, block)
    assert layout is not None
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
