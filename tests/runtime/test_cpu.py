"""The kind of this machine's CPU, read from what Linux says of it."""

import platform
from pathlib import Path

import pytest

from onnxq.numerics.machine import classify_cpu
from onnxq.runtime import CPU_KINDS, detect_cpu


def cpuinfo(*cores: str) -> str:
    return "".join(f"processor\t: {k}\nmodel name\t: some CPU\nflags\t\t: fpu sse {f}\n\n" for k, f in enumerate(cores))


@pytest.mark.parametrize(
    ("machine", "text", "kind"),
    [
        ("x86_64", cpuinfo("avx avx2 fma", "avx avx2 fma"), "avx2"),
        ("x86_64", cpuinfo("avx2 avx512f avx512_vnni"), "vnni"),
        ("x86_64", cpuinfo("avx2 avx_vnni"), "vnni"),
        ("x86_64", cpuinfo("avx2 avx512f avx512bw"), "avx2"),
        ("x86_64", cpuinfo("avx2 avx_vnni", "avx2"), "avx2"),
        ("x86_64", cpuinfo("avx"), "x86"),
        ("AMD64", "", "unknown"),
        ("x86_64", "", "unknown"),
        ("aarch64", "processor\t: 0\nFeatures\t: fp asimd asimddp\n", "arm64"),
        ("arm64", "", "arm64"),
        ("riscv64", "processor\t: 0\nisa\t: rv64imafdc\n", "unknown"),
    ],
)
def test_flags_decide(machine: str, text: str, kind: str) -> None:
    assert classify_cpu(machine, text) == kind
    assert kind in CPU_KINDS


def test_this_machine_has_a_kind() -> None:
    assert detect_cpu() in CPU_KINDS
    if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
        assert detect_cpu() != "unknown"
