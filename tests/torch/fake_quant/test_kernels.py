"""Where fake_quantize's kernels come from: nothing at import, the compiled ones, else one warning and the reference."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch_frontend.fake_quant import SlowFakeQuantWarning, available, fake_quantize, kernels

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
def test_the_cpu_runs_compiled_kernels() -> None:
    assert available()["cpu"] == "compiled"


CHILD = """
import ctypes, os, subprocess, sys, warnings, torch

class no:
    def __init__(self, *a, **k): raise SystemExit("touched at import: " + str(a))

kept = subprocess.Popen, subprocess.run, ctypes.CDLL
subprocess.Popen = subprocess.run = ctypes.CDLL = no
from torch_frontend.fake_quant import available, fake_quantize, SlowFakeQuantWarning
subprocess.Popen, subprocess.run, ctypes.CDLL = kept
assert not torch.cuda.is_initialized()
assert not os.path.exists(os.environ["ONNXQ_CACHE"])

x, scale, zero, dy, y, dx, dscale, dzero = torch.load(sys.argv[1])
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        found = fake_quantize(x, scale, zero, qmin=-8, qmax=7, axis=1, edge="clip")
        grads = torch.autograd.grad(found, (x, scale, zero), dy)
assert [w.category for w in seen] == [SlowFakeQuantWarning], seen
print(seen[0].message)
print(available()["cpu"])
assert torch.equal(found, y) and torch.equal(grads[0], dx)
torch.testing.assert_close(grads[1:], (dscale, dzero), rtol=1e-5, atol=1e-4)
"""


def test_import_compiles_nothing_and_without_a_compiler_one_warning_and_the_same_numbers(tmp_path: Path) -> None:
    """The module's data is computed here by the compiled kernels, there without."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 40, generator=rng, requires_grad=True)
    scale, zero = torch.rand(5, generator=rng) + 0.1, torch.rand(5, generator=rng)
    leaves = [x, scale.requires_grad_(), zero.requires_grad_()]
    y = fake_quantize(*leaves, qmin=-8, qmax=7, axis=1, edge="clip")
    dy = torch.randn(y.shape, generator=rng)
    torch.save([*leaves, dy, y, *torch.autograd.grad(y, leaves, dy)], tmp_path / "data.pt")
    environment = {
        "PYTHONPATH": str(ROOT),
        "ONNXQ_CACHE": str(tmp_path / "cache"),
        "CXX": "no-such-compiler",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", CHILD, str(tmp_path / "data.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fake_quantize on the CPU runs as composed torch operators: the same numbers" in done.stdout
    assert "no-such-compiler" in done.stdout
    assert "\nreference: " in done.stdout


def test_without_a_driver_the_warning_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a CUDA driver")
    kernels._warn_once.cache_clear()
    with pytest.warns(SlowFakeQuantWarning, match=r"on CUDA runs as composed torch operators.*libcuda.*\[W119\]"):
        found = kernels._find_cuda_kernels.__wrapped__(0)
    assert isinstance(found, kernels.ReferenceKernels)
