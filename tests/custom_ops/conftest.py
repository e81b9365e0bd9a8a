"""Real libraries of custom operators and plugins, compiled where there is a compiler."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.custom_ops.models import network


def compile_library(source: str, folder: Path, *compilers: str) -> Path:
    """A source beside this file as a shared library."""
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        pytest.skip("no compiler")
    path = folder / f"lib{Path(source).stem}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, Path(__file__).with_name(source)], check=True)
    return path


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """swell.c: the operator for ONNX Runtime."""
    return compile_library("swell.c", tmp_path_factory.mktemp("custom-ops"), "cc", "gcc", "clang")


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """swell_plugin.cpp: the operator for TensorRT."""
    return compile_library("swell_plugin.cpp", tmp_path_factory.mktemp("plugins"), "c++", "g++", "clang++")


def fill_folder(folder: Path) -> Path:
    """model.onnx, which uses the operator, and samples.npz."""
    onnx.save(network(), folder / "model.onnx")
    images = np.random.default_rng(1).standard_normal((16, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "samples.npz", x=images)
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder of model and samples."""
    return fill_folder(tmp_path)
