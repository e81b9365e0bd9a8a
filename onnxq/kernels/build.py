"""All kernels ahead of time: for this machine, or into a folder that travels in a wheel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onnxq.errors import MissingDependencyError, OutputError
from onnxq.kernels import cache as store
from onnxq.kernels.device import ARCHS, arch_number, build_cubin, build_fatbin
from onnxq.kernels.host import PORTABLE, build_host
from onnxq.kernels.nvrtc import find_nvrtc
from onnxq.progress import Progress, counted, silent


@dataclass(frozen=True)
class Built:
    """One library or image. state: "built", "there" (already, and valid) or "missing", then with the reason."""

    kernels: str
    state: str
    made_by: str = ""
    archs: tuple[str, ...] = ()
    path: str = ""
    size: int = 0
    seconds: float = 0.0
    reason: str = ""


def build_kernels(
    archs: Sequence[str] = (), *, output: Path | None = None, force: bool = False, progress: Progress = silent
) -> tuple[Built, ...]:
    """Build the CPU twin and the CUDA kernels; what cannot be built is told, not raised.

    archs: GPUs, as "sm_90" or "9.0"; none: all that nvcc knows of ARCHS. Without nvcc NVRTC compiles them one by one.
    output: a folder to build into, for machines of the same kind, instead of this user's cache for this processor.
    Raises OutputError if the folder cannot be written, ConfigError for an architecture that is none.
    """
    numbers = tuple(sorted({arch_number(arch) for arch in archs}))
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(output, error.strerror or str(error), "choose another folder", code="Q604") from error
    march = "native" if output is None else PORTABLE
    with progress("compiling for the CPU, about a minute"):
        host = _timed("CPU", lambda: build_host(output, march=march, force=force))
    with progress("compiling for GPUs with nvcc, some minutes"):
        device = _timed("CUDA", lambda: build_fatbin(numbers, output, force=force))
    compiler = find_nvrtc() if device.state == "missing" else None
    if compiler is None:
        return host, device
    wanted = numbers or tuple(one for one in ARCHS if one in compiler.archs)
    with progress("compiling for GPUs with NVRTC", len(wanted)) as task:
        builds = [partial(build_cubin, compiler, one, output, force=force) for one in wanted]
        return host, *(_timed("CUDA", build) for build in counted(builds, task))


def _timed(kernels: str, build: Callable[[], store.Entry]) -> Built:
    start = time.perf_counter()
    try:
        entry = build()
    except MissingDependencyError as error:
        return Built(kernels, "missing", reason=f"{error.cause}; {error.fix}" if error.fix else error.cause)
    archs = tuple(f"sm_{one}" for one in entry.key.get("archs", "").split(",") if one)
    return Built(
        kernels, "built" if entry.fresh else "there", entry.key["compiler"], archs, str(entry.path),
        entry.path.stat().st_size, time.perf_counter() - start,
    )  # fmt: skip
