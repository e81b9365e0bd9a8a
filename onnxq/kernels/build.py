"""Builds of all kernels ahead of time: for this machine, or into a folder that is shipped in a wheel."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onnxq.errors import MissingDependencyError
from onnxq.files import make_folder
from onnxq.kernels import cache as store
from onnxq.kernels.device import ARCHS, arch_number, build_cubin, build_fatbin, find_nvrtc
from onnxq.kernels.host import build_host, portable_march
from onnxq.progress import Progress, count_items
from onnxq.sites import Names


@dataclass(frozen=True)
class Built:
    """One library or device image."""

    # "CPU" or "CUDA".
    kernels: str
    # "built", "there" (already, and valid) or "missing".
    state: str
    # Compiler and version.
    made_by: str = ""
    # GPUs it runs on, as "sm_90".
    archs: Names = ()
    path: str = ""
    # Bytes.
    size: int = 0
    # Wall time of the build.
    seconds: float = 0.0
    # Why it is missing.
    reason: str = ""


def build_kernels(
    archs: Sequence[str] = (),
    *,
    output: Path | None,
    force: bool = False,
    progress: Progress,
) -> tuple[Built, ...]:
    """Build the CPU twin and the CUDA kernels. A kernel that cannot be built is reported as missing, not raised.

    archs: GPUs, as "sm_90" or "9.0"; none: all of ARCHS that nvcc supports. Without nvcc, NVRTC compiles them one by
    one. output: a folder to build into, for machines of the same kind, instead of this user's cache for this processor.
    Raises OutputError if the folder cannot be written, ConfigError for an unknown architecture.
    """
    chosen = tuple(sorted({arch_number(arch) for arch in archs}))
    if output is not None:
        make_folder(output)
    # A folder may go to other machines; the cache stays on this one.
    march = "native" if output is None else portable_march()
    with progress("compiling for the CPU, about a minute"):
        host = _time_build("CPU", lambda: build_host(output, march=march, force=force))
    with progress("compiling for GPUs with nvcc, some minutes"):
        device = _time_build("CUDA", lambda: build_fatbin(chosen, output, force=force))
    compiler = find_nvrtc() if device.state == "missing" else None
    if compiler is None:
        return host, device
    wanted = chosen or tuple(arch for arch in ARCHS if arch in compiler.archs)
    with progress("compiling for GPUs with NVRTC", len(wanted)) as task:
        builds = [partial(build_cubin, compiler, arch, output, force=force) for arch in wanted]
        return host, *(_time_build("CUDA", build) for build in count_items(builds, task))


def _time_build(kernels: str, build: Callable[[], store.CacheEntry]) -> Built:
    start = time.perf_counter()
    try:
        entry = build()
    except MissingDependencyError as error:
        return Built(kernels, "missing", reason=f"{error.cause}; {error.fix}")
    archs = tuple(f"sm_{arch}" for arch in entry.key.get("archs", "").split(",") if arch)
    return Built(
        kernels,
        "built" if entry.fresh else "there",
        entry.key["compiler"],
        archs,
        str(entry.path),
        entry.path.stat().st_size,
        time.perf_counter() - start,
    )
