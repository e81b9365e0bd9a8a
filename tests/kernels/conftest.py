"""The compiled kernels, built once for all workers of a test run, never in the user's cache."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from onnxq.kernels import cache, sources
from onnxq.kernels.host import _find_library, build_host
from tests.kernels.machines import Machine, on_cpu, on_grid

GXX = shutil.which("g++")
KINDS = ("f32", "f16", "bf16", "f64")
SOURCES = ("fq_emu.cpp", "cuda_emu.h", *sources.DEVICE)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compiled things that the workers share."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "onnxq-cache" / "kernels"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return place


@pytest.fixture
def own_cache(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The shared folder as this user's cache."""
    monkeypatch.setenv("ONNXQ_CACHE", str(built.parent))
    _find_library.cache_clear()
    yield built
    _find_library.cache_clear()


Emulation = Callable[..., Path]


@pytest.fixture(scope="session")
def emulation(built: Path) -> Emulation:
    """build(options, edit, kinds) -> the emulated kernels as a library.

    edit: a change to make to fq_kernels.cuh. kinds: compile kernels for these types only.
    """
    if GXX is None:
        pytest.skip("no g++")

    def build(*options: str, edit: Callable[[str], str] = str, kinds: Sequence[str] = KINDS) -> Path:
        texts = {name: (sources.find_folder() / name).read_text("utf-8") for name in SOURCES}
        for kind in set(KINDS) - set(kinds):
            texts["fq_kernels.cuh"] = re.sub(
                rf"^FQ_KERNELS\({kind}, .*\n", "", texts["fq_kernels.cuh"], flags=re.MULTILINE
            )
            texts["fq_emu.cpp"] = texts["fq_emu.cpp"].replace(f"EMU_KERNELS({kind}),", "")
        changed = edit(texts["fq_kernels.cuh"])
        assert edit is str or changed != texts["fq_kernels.cuh"]
        texts["fq_kernels.cuh"] = changed

        def compile_to(path: Path) -> None:
            work = path.with_suffix(".sources")
            work.mkdir()
            for name, text in texts.items():
                (work / name).write_text(text, "utf-8")
            command = [GXX, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", *options]
            subprocess.run([*command, "-shared", "-fPIC", "fq_emu.cpp", "-o", str(path)], cwd=work, check=True)

        return cache.fetch_entry(built, "emu-{}.so", {"texts": str(texts), "options": str(options)}, compile_to).path

    return build


@pytest.fixture(scope="session")
def emulated(emulation: Emulation) -> ctypes.CDLL:
    return ctypes.CDLL(str(emulation()))


@pytest.fixture(scope="session")
def grid(emulated: ctypes.CDLL) -> Machine:
    return on_grid(emulated)


@pytest.fixture(scope="session")
def library(built: Path) -> ctypes.CDLL:
    """The CPU twin."""
    if GXX is None:
        pytest.skip("no g++")
    return ctypes.CDLL(str(build_host(built).path))


@pytest.fixture(scope="session")
def cpu(library: ctypes.CDLL) -> Machine:
    return on_cpu(library)


@pytest.fixture(params=["cpu", "grid"], scope="session")
def machine(request: pytest.FixtureRequest) -> Machine:
    """Both: the CPU twin, and the CUDA kernels under emulation."""
    return request.getfixturevalue(request.param)
