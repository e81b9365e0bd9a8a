"""The CPU twin as a shared library: from the cache or a wheel, else compiled for this processor."""

import ctypes
import os
import platform
import shutil
import sys
from functools import cache
from pathlib import Path

from onnxq.arrays import hash_parts
from onnxq.errors import MissingDependencyError, OnnxqError
from onnxq.kernels import cache as store
from onnxq.kernels import sources
from onnxq.kernels.abi import KernelCall
from onnxq.kernels.sources import run_compiler
from onnxq.sites import Names, NameSet

# -ffp-contract=off: a fused multiply-add rounds once instead of twice, and results must be the same bits everywhere.
# The other floating-point flags change no result; without them loops do not vectorise.
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
_NAME = "libfq_cpu-{}.dylib" if sys.platform == "darwin" else "libfq_cpu-{}.so"
# The features that x86-64-v3 adds, as /proc/cpuinfo names them. The library of a wheel is built for that level.
_V3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
PORTABLE = "x86-64-v3"


def portable_march() -> str:
    """The level that a wheel's library is compiled for, which all but old processors of this kind have."""
    return PORTABLE if platform.machine() in ("x86_64", "AMD64") else "generic"


def host_library() -> Path | None:
    """Find the library with the C ABI of cuda/fq_cpu.cpp, compiled on first use; None if impossible (`host_reason`)."""
    return _find_library()[0]


def host_reason() -> str:
    """Say why there is no host library; "" if there is one."""
    return _find_library()[1]


def load_host() -> ctypes.CDLL | None:
    """Load the host library with its functions' types set; None without one."""
    path = host_library()
    return None if path is None else _load_library(path)


def build_host(
    place: Path | None = None, *, march: str = "native", force: bool = False
) -> store.CacheEntry:
    """Compile the CPU twin into the cache, or for `march` (`portable_march` for a wheel) into another folder.

    Raises OnnxqError on failure.
    """
    compiler, version = _find_compiler()
    key = {
        **_identify_source(),
        "machine": platform.machine(),
        "march": march,
        "cpu": _hash_cpu() if march == "native" else "",
        "compiler": version,
        "flags": " ".join(_choose_flags(march)),
    }

    def build(path: Path) -> None:
        _compile_library(compiler, path, march)
        _load_library(path)  # a library that does not load is a failed build

    return store.fetch_entry(place, _NAME, key, build, force=force)


@cache
def _find_library() -> tuple[Path | None, str]:
    """Find a build for this processor, else that of the wheel; compile without either."""
    try:
        place = store.choose_folder(libraries=True)
        mine = _identify_source() | {"cpu": _hash_cpu()}
        ready = store.find_entry(place, lambda key: key.items() >= mine.items())
        ready = ready or store.find_entry(sources.find_folder() / sources.PREBUILT, _runs_here)
        if ready is not None:
            _load_library(ready.path)
            return ready.path, ""
    except MissingDependencyError as error:
        # A library that does not load is built anew.
        store.LOG.info("%s", error)
    try:
        _find_compiler()
        store.LOG.warning(
            "onnxq: compiling the CPU kernels of fake quantization, once for this user: up to a minute"
        )
        return build_host(place).path, ""
    except OnnxqError as error:
        return None, f"{error.fault}; {error.fix}"


def _identify_source() -> dict[str, str]:
    return sources.identify_sources("host", sources.HOST)


def _runs_here(key: store.Key) -> bool:
    march = portable_march()
    wanted = _identify_source() | {"machine": platform.machine(), "march": march}
    return key.items() >= wanted.items() and (march != PORTABLE or _read_features() >= _V3)


def _find_compiler() -> tuple[str, str]:
    """Find the C++ compiler and its version line: $CXX, else the first of g++, clang++ and c++."""
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            return path, _run([path, "--version"]).splitlines()[0]
    raise MissingDependencyError(
        "CPU kernels",
        f"there is no C++ compiler ({named or 'g++, clang++, c++'})",
        "install one (`apt install g++`, `dnf install gcc-c++`, `xcode-select --install`), or set CXX to yours",
        code="Q806",
    )


def _choose_flags(march: str) -> Names:
    if platform.machine() not in ("x86_64", "AMD64"):
        return (*_FLAGS, f"-mcpu={march}")
    # By default compilers stay at 256 bits, where the backward pass takes a fifth more time.
    return (*_FLAGS, f"-march={march}", "-mprefer-vector-width=512")


def _compile_library(compiler: str, path: Path, march: str) -> None:
    source = str(sources.find_folder() / sources.HOST[0])
    command = [compiler, *_choose_flags(march), "-o", str(path), source]
    try:
        _run([*command, "-fopenmp"])
    except MissingDependencyError:
        # Apple's compiler has no OpenMP: one thread then. Any other fault shows again.
        _run(command)


def _run(command: list[str]) -> str:
    return run_compiler(command, "CPU kernels", "set CXX", "set CXX to another compiler")


def _load_library(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise MissingDependencyError(
            "CPU kernels",
            str(error),
            "set CXX to another compiler, or ONNXQ_CACHE to a folder that is not mounted noexec",
            code="Q807",
        ) from error
    for name in ("fq_cpu_forward", "fq_cpu_backward"):
        getattr(library, name).argtypes = (ctypes.POINTER(KernelCall),)
        getattr(library, name).restype = ctypes.c_int
    # The size of the struct: another one means sources of another version or another alignment.
    if library.fq_cpu_abi() != ctypes.sizeof(KernelCall):
        raise MissingDependencyError(
            path,
            "has another layout of its argument",
            "report this, with the compiler",
            code="Q807",
        )
    return library


@cache
def _hash_cpu() -> str:
    """Hash the processor features that -march=native depends on: machines that share a home folder may differ."""
    about = f"{platform.machine()} {platform.processor()} {' '.join(sorted(_read_features()))}"
    return hash_parts(about)[:16]


@cache
def _read_features() -> NameSet:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    # "flags" on x86, "Features" on ARM.
    first = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")][:1]
    return frozenset((*first.partition(":")[2].split(), *models))
