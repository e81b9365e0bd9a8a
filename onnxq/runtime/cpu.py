"""Which kind of CPU this process runs on, as the costs of placement tell them apart."""

from __future__ import annotations

import platform
from collections.abc import Mapping
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
