"""A real library of custom operators, compiled where there is a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.custom_ops.models import network

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "g++"))), None)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """swell.c as a shared library."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("custom-ops") / "libswell.so"
    source = Path(__file__).with_name("swell.c")
    subprocess.run([COMPILER, "-xc", "-shared", "-fPIC", "-O1", "-o", path, source], check=True)
    return path


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with model.onnx, which uses the operator, and samples.npz."""
    onnx.save(network(), tmp_path / "model.onnx")
    images = np.random.default_rng(1).standard_normal((16, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=images)
    return tmp_path
