"""Device code for a GPU: from a wheel, from the cache, or compiled on request; ahead of time by nvcc or NVRTC."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onnxq.errors import ConfigError, MissingDependencyError
from onnxq.kernels import cache as store
from onnxq.kernels import sources
from onnxq.kernels.compiler import run_compiler
from onnxq.kernels.nvrtc import Nvrtc, find_nvrtc

# Default architectures of a fatbin, as far as the compiler supports them: Turing to Blackwell.
ARCHS = (75, 80, 86, 89, 90, 100, 120)
_FIX = 'install nvidia-cuda-nvrtc (pip install "onnxq[nvrtc]"), or run onnxq build-kernels where nvcc is'


@dataclass(frozen=True)
class DeviceImage:
    """A cubin, PTX or fatbin."""

    # The argument of cuModuleLoadData.
    data: bytes
    # Text for messages.
    origin: str


def device_image(arch: str, nvrtc: Sequence[Path] = ()) -> DeviceImage:
    """Return code for `arch` ("sm_90"): built ahead of time, or else compiled by NVRTC and cached.

    nvrtc: where to look for NVRTC first. Raises MissingDependencyError if there is neither.
    """
    number = arch_number(arch)
    ready = _find_prebuilt(number)
    if ready is not None:
        return DeviceImage(ready.path.read_bytes(), f"ahead of time, {ready.path}")
    compiler = find_nvrtc(nvrtc)
    if compiler is not None:
        entry = build_cubin(compiler, number)
        return DeviceImage(entry.path.read_bytes(), f"NVRTC {compiler.version}, {entry.path}")
    # Compiled by an NVRTC that is gone since.
    left = store.find_entry(store.kernels_folder(), lambda key: _has_source(key) and key.get("archs") == str(number))
    if left is None:
        raise MissingDependencyError(
            f"CUDA kernels for sm_{number}", "nothing is built and NVRTC is not found", _FIX, code="Q808"
        )
    return DeviceImage(left.path.read_bytes(), f"cache, {left.path}")


def arch_number(arch: str) -> int:
    """Parse "sm_90", "90", "9.0" or "compute_90" as 90. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)[af]?", arch.strip())
    if found is None:
        raise ConfigError(f"architecture {arch!r}", "is not one", "write it as sm_90 or 9.0", code="Q304")
    return int(found[1] + found[2])


def build_cubin(compiler: Nvrtc, arch: int, place: Path | None = None, *, force: bool = False) -> store.Entry:
    """Compile for one GPU by NVRTC, into the cache or another folder. Raises OnnxqError on failure."""
    key = {**_make_key(f"NVRTC {compiler.version}"), "archs": str(arch)}

    def build(path: Path) -> None:
        texts = sources.read_sources(sources.DEVICE)
        headers = {name: texts[name] for name in sources.HEADERS}
        data, _ = compiler.compile(sources.DEVICE[0], texts[sources.DEVICE[0]], headers, arch)
        path.write_bytes(data)

    return store.fetch_entry(place or store.kernels_folder(), f"fq-sm_{arch}-{{}}.cubin", key, build, force=force)


def build_fatbin(archs: Sequence[int] = (), place: Path | None = None, *, force: bool = False) -> store.Entry:
    """Compile for many GPUs by nvcc, into the cache or another folder.

    archs: as 75, 90; none: those of ARCHS that this nvcc supports. Raises OnnxqError without nvcc or if it fails.
    """
    compiler, version, known = find_nvcc()
    chosen = tuple(archs) or tuple(one for one in ARCHS if one in known)
    unknown = [str(one) for one in chosen if one not in known]
    if unknown:
        raise ConfigError(
            f"architecture {', '.join(unknown)}",
            f"{version} knows {', '.join(map(str, known))}",
            "use another nvcc",
            code="Q304",
        )
    key = {**_make_key(version), "archs": ",".join(map(str, sorted(chosen)))}

    def build(path: Path) -> None:
        codes = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in sorted(chosen)]
        source = str(sources.find_folder() / sources.DEVICE[0])
        _run([compiler, "-fatbin", "-std=c++17", "--threads=0", *codes, "-x", "cu", source, "-o", str(path)])

    return store.fetch_entry(place or store.kernels_folder(), "fq-{}.fatbin", key, build, force=force)


@cache
def find_nvcc() -> tuple[str, str, tuple[int, ...]]:
    """Find nvcc: its path, its version, its architectures. Raises MissingDependencyError without one."""
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    named = os.environ.get("ONNXQ_NVCC")
    beside = [shutil.which("nvcc", path=os.path.join(one, "bin")) for one in toolkits if one]
    path = shutil.which(named) if named else next(filter(None, (shutil.which("nvcc"), *beside)), None)
    if path is None:
        raise MissingDependencyError(
            "CUDA kernels", f"there is no {named or 'nvcc'}", "install the CUDA toolkit", code="Q806"
        )
    release = re.search(r"release (\S+),", _run([path, "--version"]))
    known = sorted(int(one) for one in re.findall(r"^sm_(\d+)$", _run([path, "--list-gpu-code"]), re.MULTILINE))
    return path, f"nvcc {release[1] if release else 'unknown'}", tuple(known)


def _has_source(key: store.Key) -> bool:
    return key.get("kind") == "device" and key.get("source") == sources.hash_sources(sources.DEVICE)


def _find_prebuilt(arch: int) -> store.Entry | None:
    """Find code of a wheel, or built by nvcc here. NVRTC's code is found by its version, which may suit the driver."""

    def wanted(key: store.Key) -> bool:
        # Code for a lower minor number of the same major number runs, too.
        archs = [int(one) for one in key.get("archs", "").split(",") if one.isdigit()]
        return _has_source(key) and any(one // 10 == arch // 10 and one <= arch for one in archs)

    shipped = store.find_entry(sources.find_folder() / sources.PREBUILT, wanted)
    if shipped is not None:
        return shipped
    return store.find_entry(
        store.kernels_folder(), lambda key: wanted(key) and key.get("compiler", "").startswith("nvcc")
    )


def _make_key(compiler: str) -> dict[str, str]:
    return {"kind": "device", "source": sources.hash_sources(sources.DEVICE), "compiler": compiler}


def _run(command: list[str]) -> str:
    return run_compiler(command, "CUDA kernels", "set ONNXQ_NVCC", "set ONNXQ_NVCC to another nvcc")
