"""This machine: its kind of CPU, as the costs of placement tell them apart, and freed memory back to the system."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_X86 = ("x86_64", "amd64", "i386", "i686")
_ARM = ("aarch64", "arm64")

# Kind -> how people call it.
CPU_KINDS: Mapping[str, str] = {
    "vnni": "x86 with VNNI",
    "avx2": "x86 with AVX2, without VNNI",
    "x86": "x86 without AVX2",
    "arm64": "ARM, 64 bits",
    "unknown": "a CPU of unknown kind",
}


def detect_cpu() -> str:
    """The kind of this machine's CPU, one of CPU_KINDS.

    x86 can be told apart on Linux only, by the flags in /proc/cpuinfo. An emulator may show the flags of its host.
    """
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return classify_cpu(platform.machine(), text)


def classify_cpu(machine: str, cpuinfo: str) -> str:
    """The kind of CPU of a machine type (`uname -m`) whose /proc/cpuinfo reads so; "" where there is none."""
    if machine.lower() in _ARM:
        return "arm64"
    lists = [line.partition(":")[2] for line in cpuinfo.splitlines() if line.startswith("flags")]
    if machine.lower() not in _X86 or not lists:
        return "unknown"
    # Of several kinds of cores the least counts: a thread may run on any of them.
    flags = set.intersection(*(set(line.split()) for line in lists))
    if flags & {"avx512_vnni", "avx_vnni"}:
        return "vnni"
    return "avx2" if "avx2" in flags else "x86"


def trim_memory() -> None:
    """Return the freed memory that the C library keeps to the system; does nothing where it has no such call.

    glibc learns from large freed buffers to keep their like, and fragmentation then makes the peak of the next run
    add to that of the last (measured: 208 MiB in place of 143 for 52 MB of taps).
    """
    _find_trim()(0)


@lru_cache(maxsize=1)
def _find_trim() -> Callable[[int], object]:
    if not sys.platform.startswith("linux"):
        return lambda _: None
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library than glibc
        return lambda _: None
    return trim
