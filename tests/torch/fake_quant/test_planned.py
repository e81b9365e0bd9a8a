"""The CUDA kernels of fake_quantize without a GPU: their own source under an emulation of blocks and threads, started
through the same plans, arguments and driver calls."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from onnxq.kernels import KernelCall
from torch_frontend.fake_quant import reference
from torch_frontend.fake_quant.calls import PlannedKernels
from torch_frontend.fake_quant.device import Driver
from torch_frontend.fake_quant.grid import Grid, Needed, qparam_shape

ROOT = Path(__file__).parents[3]
# The driver's functions that the launcher uses, with the signatures of cuda.h, in front of the emulation.
DRIVER = """
#include "fq_emu.cpp"
#include <map>
static std::map<std::string, int> names;
static void *current;
extern "C" {
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)(device + 77); return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuModuleLoadData(void **module, const void *image) {
    if (current != (void *)77) return 201;
    *module = (void *)image;
    return std::strcmp((const char *)image, "image") ? 200 : 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    bool found = false;
    for (const auto &one : KERNELS) found = found || !std::strcmp(one.name, name);
    if (!found) return 500;
    *function = (void *)names.emplace(name, 0).first->first.c_str();
    return 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || stream != (void *)0x123456789a || extra) return 1;
    return *fq_emu_launch((const char *)function, gx, bx, (const FqCall *)arguments[0]) ? 719 : 0;
}
int cuGetErrorString(int code, const char **text) {
    *text = code == 500 ? "named symbol not found" : "failed";
    return 0;
}
}
"""
# Rows and columns, long and short runs, several strips, odd ends, ragged blocks, one value, none.
CASES = [
    ((9000,), None, 0),
    ((9, 5, 40, 10), 1, 0),
    ((200, 33), 1, 0),
    ((70, 12, 3), 1, 0),
    ((2, 4500), 0, 0),
    ((3, 5, 4), -1, 0),
    ((16, 50), 1, 16),
    ((3, 37, 6), 1, 8),
    ((1,), None, 0),
    ((3, 0), 0, 0),
]


class _Emulated(PlannedKernels):
    def __init__(self, library: ctypes.CDLL) -> None:
        self.driver = Driver(library)
        self.driver.enter_context(0)
        self.module = self.driver.load_module(b"image")

    def launch_kernel(self, kernel: str, grid: int, call: KernelCall, device: Any) -> None:
        self.driver.launch_kernel(self.driver.find_function(self.module, kernel), grid, call, 0x123456789A)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> _Emulated:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("emulation")
    (folder / "driver.cpp").write_text(DRIVER)
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-I", str(ROOT / "cuda"), "-o", str(folder / "driver.so"),
         str(folder / "driver.cpp")],
        check=True,
    )  # fmt: skip
    return _Emulated(ctypes.CDLL(str(folder / "driver.so")))


def _data(shape: tuple[int, ...], grid: Grid, dtype: Any) -> Any:
    rng = torch.Generator().manual_seed(11)
    x = torch.randn(shape, generator=rng)
    scales = qparam_shape(x.shape, grid.axis, grid.block_size)
    width = torch.float64 if dtype == torch.float64 else torch.float32
    scale = (torch.rand(scales, generator=rng) * 0.2 + 0.1).to(width)
    x[torch.rand(shape, generator=rng) < 0.2] = float("inf")
    zero = (torch.rand(scales, generator=rng) * 4 - 2).to(width)
    return x.to(dtype), scale, zero, torch.randn(shape, generator=rng).to(dtype)


@pytest.mark.parametrize("edge", ["round", "clip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("shape", "axis", "block"), CASES)
def test_equals_the_reference(
    kernels: _Emulated, shape: tuple[int, ...], axis: int | None, block: int, dtype: Any, edge: str
) -> None:
    grid = Grid(-8, 7, axis, block, 0.5, 2.0, edge)
    x, scale, zero, dy = _data(shape, grid, dtype)
    assert torch.equal(kernels.forward(x, scale, zero, grid), reference.compute_forward(x, scale, zero, grid))
    needs: tuple[Needed, ...] = ((True, True, True), (True, False, False), (False, True, False))
    for needed in needs:
        found = kernels.backward(dy, x, scale, zero, grid, needed)
        wanted = reference.compute_backward(dy, x, scale, zero, grid, needed)
        assert [t is None for t in found] == [t is None for t in wanted] == [not need for need in needed]
        if needed[0]:
            assert torch.equal(found[0], wanted[0])
        for one, other in zip(found[1:], wanted[1:], strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_channels_last_runs_without_a_copy(kernels: _Emulated) -> None:
    grid = Grid(-8, 7, 1)
    x, scale, zero, dy = _data((3, 20, 6, 7), grid, torch.float16)
    last, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    y = kernels.forward(last, scale, zero, grid)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, reference.compute_forward(x, scale, zero, grid))
    found = kernels.backward(dy, last, scale, zero, grid, (True, True, True))
    wanted = reference.compute_backward(dy, x, scale, zero, grid, (True, True, True))
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "axis", "block"), [((9000,), None, 0), ((200, 33), 1, 0), ((3, 37, 6), 1, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_scale_that_is_not_above_zero_makes_nan_of_its_values(
    kernels: _Emulated, shape: tuple[int, ...], axis: int | None, block: int, dtype: Any
) -> None:
    grid = Grid(-8, 7, axis, block)
    x, scale, zero, dy = _data(shape, grid, dtype)
    scale.view(-1)[0], scale.view(-1)[-1] = 0.0, -0.1
    y, wanted = kernels.forward(x, scale, zero, grid), reference.compute_forward(x, scale, zero, grid)
    assert wanted.isnan().any()
    torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)
    gradients = kernels.backward(dy, x, scale, zero, grid, (True, True, False))[:2]
    wanted = reference.compute_backward(dy, x, scale, zero, grid, (True, True, False))[:2]
    torch.testing.assert_close(gradients, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_driver_that_refuses_is_quoted(kernels: _Emulated) -> None:
    with pytest.raises(RuntimeError, match=r"cuModuleGetFunction failed: named symbol not found \(500\)"):
        kernels.driver.find_function(kernels.module, "fq_nothing")
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed"):
        kernels.driver.load_module(b"other")
