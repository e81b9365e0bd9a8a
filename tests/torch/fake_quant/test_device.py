"""fake_quantize on a GPU: the numbers of the CPU, graphs, streams, huge tensors, compute-sanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_frontend.fake_quant import available, fake_quantize
from torch_frontend.fake_quant.grid import Grid, qparam_shape

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Rows and columns, long and short, odd ends, one and many channels.
CASES = [
    ((1000003,), None, 0),
    ((33, 64, 28, 28), 1, 0),
    ((64, 196, 768), 2, 0),
    ((512, 512, 3, 3), 0, 0),
    ((5, 7, 9), 1, 0),
    ((7, 3), -1, 0),
    ((3, 200001), 0, 0),
    ((96, 100), 1, 32),
    ((10, 37, 24), 1, 8),
    ((4, 0), 0, 0),
]


def _call(leaves: Any, grid: Grid) -> Any:
    return fake_quantize(
        *leaves, qmin=grid.qmin, qmax=grid.qmax, axis=grid.axis, block_size=grid.block_size, grad_scale=0.5,
        edge=grid.edge,
    )  # fmt: skip


def _data(shape: tuple[int, ...], grid: Grid, dtype: Any) -> Any:
    rng = torch.Generator().manual_seed(11)
    x = torch.randn(shape, generator=rng)
    scales = qparam_shape(x.shape, grid.axis, grid.block_size)
    scale = torch.rand(scales, generator=rng) * 0.2 + 0.1
    x[torch.rand(shape, generator=rng) < 0.3] = 0.15
    return x.to(dtype), scale, torch.rand(scales, generator=rng) * 4 - 2, torch.randn(shape, generator=rng).to(dtype)


def _results(data: Any, grid: Grid, device: str) -> Any:
    *leaves, dy = (t.detach().to(device) for t in data)
    leaves = [t.requires_grad_() for t in leaves]
    y = _call(leaves, grid)
    return [t.cpu() for t in (y, *torch.autograd.grad(y, leaves, dy))]


def test_the_kernels_are_compiled() -> None:
    assert available()["cuda"] == "compiled"


@pytest.mark.parametrize("edge", ["round", "clip"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis", "block"), CASES)
def test_equals_the_cpu(shape: tuple[int, ...], axis: int | None, block: int, dtype: Any, edge: str) -> None:
    grid = Grid(-8, 7, axis, block, edge=edge)
    data = _data(shape, grid, dtype)
    here, there, again = _results(data, grid, "cpu"), _results(data, grid, "cuda"), _results(data, grid, "cuda")
    assert torch.equal(here[0], there[0])
    assert torch.equal(here[1], there[1])
    terms = max(data[0].numel() // max(data[1].numel(), 1), 1)
    for k in (2, 3):
        torch.testing.assert_close(here[k], there[k], rtol=1e-5, atol=1e-6 * terms**0.5 * 8)
    assert all(torch.equal(a, b) for a, b in zip(there, again, strict=True))


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced", "unaligned"])
def test_any_strides(layout: str) -> None:
    grid = Grid(-8, 7, 1)
    x, scale, zero, dy = (t.cuda() for t in _data((8, 12, 10, 14), grid, torch.float16))
    x = {
        "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "transposed": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
        "sliced": lambda t: torch.cat([t, t], 3)[..., ::2],
        "unaligned": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    }[layout](x)
    results = []
    for given in (x, x.contiguous().clone()):
        leaves = [t.detach().requires_grad_() for t in (given, scale, zero)]
        y = _call(leaves, grid)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    torch.testing.assert_close(results[0][2:], results[1][2:], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("axis", [None, 1])
def test_a_cuda_graph_replays_forward_and_backward(axis: int | None) -> None:
    grid = Grid(-8, 7, axis)
    x, scale, zero, dy = (t.cuda() for t in _data((16, 32, 20, 20), grid, torch.float32))
    leaves = [t.requires_grad_() for t in (x, scale, zero)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(_call(leaves, grid), leaves, dy)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = _call(leaves, grid)
        grads = torch.autograd.grad(y, leaves, dy)
    # Autograd's nodes of these leaves belong to the stream of the capture as long as y holds them.
    y = y.detach()
    for seed in range(3):
        with torch.no_grad():
            x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
            scale.mul_(1.1)
        graph.replay()
        wanted = _call(leaves, grid)
        assert torch.equal(y, wanted)
        for one, other in zip(grads, torch.autograd.grad(wanted, leaves, dy), strict=True):
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device() -> None:
    grid = Grid(-8, 7, 1)
    *leaves, dy = (t.cuda() for t in _data((8, 12, 10, 14), grid, torch.float32))
    leaves = [t.requires_grad_() for t in leaves]
    torch.autograd.grad(_call(leaves, grid), leaves, dy)
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.autograd.grad(_call(leaves, grid), leaves, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor(mode: str) -> None:
    grid = Grid(-8, 7, 1)
    *leaves, dy = (t.cuda() for t in _data((8, 12, 10, 14), grid, torch.float32))
    leaves = [t.requires_grad_() for t in leaves]

    def step(*leaves: Any) -> Any:
        return torch.relu(_call(leaves, grid))

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for _ in range(3):
        found = [t.clone() for t in torch.autograd.grad(compiled(*leaves), leaves, dy)]
    for one, other in zip(found, torch.autograd.grad(step(*leaves), leaves, dy), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [None, 0])
def test_more_than_two_to_the_31_elements(axis: int | None) -> None:
    rows, columns = 3, (1 << 30) + 8
    if torch.cuda.mem_get_info()[0] < 6 * 2 * rows * columns:
        pytest.skip("not enough GPU memory")
    x = torch.full((rows, columns), 0.3, dtype=torch.float16, device="cuda")
    x[-1, -5:] = torch.tensor([0.1, 0.2, 5.0, -5.0, 0.0], dtype=torch.float16, device="cuda")
    scale = torch.full(() if axis is None else (rows,), 0.25, device="cuda")
    leaves = [x.requires_grad_(), scale.requires_grad_(), torch.zeros_like(scale).requires_grad_()]
    y = _call(leaves, Grid(-8, 7, axis))
    assert y[0, :3].tolist() == [0.25] * 3
    assert y[-1, -5:].tolist() == [0, 0.25, 1.75, -2.0, 0]
    dx, dscale, dzero = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert dx[-1, -5:].tolist() == [1, 1, 0, 0, 1]
    assert bool((dx[:, :-5] == 1).all())
    plain = 1 - float(torch.tensor(0.3, dtype=torch.float16)) / 0.25
    wanted = 0.5 * plain * (rows * columns if axis is None else columns)
    assert float(dscale.flatten()[0]) == pytest.approx(wanted, rel=1e-5)
    assert float(dzero.flatten()[-1]) == pytest.approx(0.5 * (-0.25 - 0.25))


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    grid = Grid(-8, 7, 1)
    data = _data((8, 12, 10, 14), grid, torch.float32)
    for one, other in zip(_results(data, grid, "cuda:1"), _results(data, grid, "cuda:0"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    script = Path(__file__).with_name("sanitize.py")
    command = [sanitizer, "--tool", tool, "--kernel-regex", "kns=fq_", "--error-exitcode", "9", sys.executable, script]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3], timeout=300
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{tool} did not end within five minutes, as initcheck on an H200")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "SUMMARY: 0 " in done.stdout
