"""The CPU twin as a shared library: taken from the cache or a wheel, else compiled for this very processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from onnxq.errors import MissingDependencyError, OnnxqError
from onnxq.kernels import cache as store
from onnxq.kernels import sources
from onnxq.kernels.abi import Call

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
_NAME = "libfq_cpu-{}.dylib" if sys.platform == "darwin" else "libfq_cpu-{}.so"
# What x86-64-v3 adds, as Linux names it: a wheel's library is built for that.
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
PORTABLE = "x86-64-v3"


def host_library() -> Path | None:
    """The library with cuda/fq_cpu.cpp's C ABI; compiled on first use. None where that is impossible: `host_reason`."""
    return _found()[0]


def host_reason() -> str:
    """Why there is no host library; "" when there is one."""
    return _found()[1]


def load_host() -> ctypes.CDLL | None:
    """The host library with its functions' types set; None without one."""
    path = host_library()
    return None if path is None else _checked(path)


def build_host(place: Path | None = None, *, march: str = "native", force: bool = False) -> store.Entry:
    """Compile the CPU twin into the cache, or for `march` into another folder. Raises OnnxqError if that fails.

    The folder of a wheel gets `march=PORTABLE`.
    """
    compiler, version = _compiler()
    key = {
        "kind": "host", "source": sources.digest(sources.HOST), "machine": platform.machine(), "march": march,
        "cpu": _cpu() if march == "native" else "", "compiler": version, "flags": " ".join(_flags(march)),
    }  # fmt: skip

    def build(path: Path) -> None:
        _compile(compiler, path, march)
        _checked(path)

    return store.fetch(place or store.kernels_folder(), _NAME, key, build, force=force)


@cache
def _found() -> tuple[Path | None, str]:
    """Compiled here and now; without a compiler what one left here for this processor, or what a wheel brought."""
    try:
        return build_host().path, ""
    except OnnxqError as error:
        reason = f"{error.subject}: {error.cause}"
    try:
        left = store.find(store.kernels_folder(), lambda key: _fits(key) and key.get("cpu") == _cpu())
        ready = left or store.find(sources.folder() / sources.PREBUILT, _runs_here)
        if ready is not None:
            _checked(ready.path)
            return ready.path, ""
    except OnnxqError as error:
        reason = f"{error.subject}: {error.cause}"
    return None, reason


def _fits(key: store.Key) -> bool:
    return key.get("kind") == "host" and key.get("source") == sources.digest(sources.HOST)


def _runs_here(key: store.Key) -> bool:
    return _fits(key) and key.get("march") == PORTABLE and _features() >= _V3


def _compiler() -> tuple[str, str]:
    """The C++ compiler and what it says about itself: $CXX, else the first of g++, clang++ and c++."""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            return path, _run([path, "--version"]).splitlines()[0]
    raise MissingDependencyError(
        "CPU kernels",
        f"there is no C++ compiler ({named or 'g++, clang++, c++'})",
        "install g++, or set CXX",
        code="Q806",
    )


def _flags(march: str) -> tuple[str, ...]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return (*_FLAGS, f"-mcpu={march}")
    # Without it compilers stay at 256 bits: a fifth slower backward.
    return (*_FLAGS, f"-march={march}", "-mprefer-vector-width=512")


def _compile(compiler: str, path: Path, march: str) -> None:
    source = str(sources.folder() / sources.HOST[0])
    command = [compiler, *_flags(march), "-o", str(path), source]
    try:
        _run([*command, "-fopenmp"])
    except MissingDependencyError:
        # Apple's compiler comes without OpenMP. One thread is better than none; any other fault shows again.
        _run(command)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(
            "CPU kernels", f"{command[0]} does not run: {error}", "set CXX", code="Q807"
        ) from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[:10])
        raise MissingDependencyError(
            "CPU kernels", f"{command[0]} failed: {said}", "set CXX to another compiler", code="Q807"
        )
    return done.stdout


def _checked(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise MissingDependencyError("CPU kernels", str(error), "set CXX to another compiler", code="Q807") from error
    for name in ("fq_cpu_forward", "fq_cpu_backward"):
        getattr(library, name).argtypes = (ctypes.POINTER(Call),)
        getattr(library, name).restype = ctypes.c_int
    if library.fq_cpu_abi() != ctypes.sizeof(Call):
        raise MissingDependencyError(
            path, "has another layout of its argument", "report this, with the compiler", code="Q807"
        )
    return library


@cache
def _cpu() -> str:
    """What -march=native depends on; folders are shared between machines that differ."""
    about = f"{platform.machine()} {platform.processor()} {' '.join(sorted(_features()))}"
    return hashlib.sha256(about.encode()).hexdigest()[:16]


@cache
def _features() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    first = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")][:1]
    return frozenset((*first.partition(":")[2].split(), *models))
