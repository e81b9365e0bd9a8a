#!/usr/bin/env python3
"""Do quantized files answer right on CPUs that this machine does not have? Run by `make test-cpus`.

x86 without VNNI   `tests/cpus` with this interpreter on this CPU without its AVX-512 (`avx2.py`), or where that cannot
                   be under `qemu-x86_64 -cpu Haswell`: ONNX Runtime takes its AVX2 kernels; and what `record.py` wrote
                   here, compared there. A machine without VNNI learns nothing of those that have it.
arm64              the same files, compared by a Python of Debian 12 with ONNX Runtime and numpy under `qemu-aarch64`,
                   once for each generation of kernels: plain NEON, dot products, and matrix products in 8 bits. It is
                   unpacked into a folder, 150 MB, the first time; nothing is installed.

What cannot run here is skipped, with its reason. Exit status: 1 if anything that ran went wrong, else 0.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np

from tests.cpus.avx2 import Impossible, prepare
from tests.cpus.kernels import EXPECTED
from tests.cpus.record import record

ROOT = Path(__file__).resolve().parents[2]
# Without what QEMU does not emulate, of which it would complain in every process.
HASWELL = ("qemu-x86_64", "-cpu", "Haswell,-pcid,-x2apic,-tsc-deadline,-hle,-invpcid,-rtm")
ARM64 = ("cortex-a72", "neoverse-n1", "max")

# Of Debian, whatever the system here is; and wheels of the same Python, onnxruntime the oldest that onnxq supports
# (1.31 crashes under QEMU 7.2).
PYTHON = "3.11"
PACKAGES = (
    "libbz2-1.0", "libc6", "libcrypt1", "libexpat1", "libffi8", "libgcc-s1", "liblzma5", f"libpython{PYTHON}-minimal",
    f"libpython{PYTHON}-stdlib", "libstdc++6", f"python{PYTHON}-minimal", "zlib1g",
)  # fmt: skip
WHEELS = ("onnxruntime==1.23.2", "numpy==2.3.5")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64")


class Skipped(Exception):
    """What is missing here."""


def need(*programs: str) -> None:
    """Raise Skipped unless all are installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise Skipped(f"{' and '.join(missing)} not installed (Debian and Ubuntu: apt install qemu-user)")


def run(*command: str | Path, **env: str) -> int:
    """Exit status of a command in the repository's root; its output goes where ours goes."""
    return subprocess.run([str(word) for word in command], cwd=ROOT, env={**os.environ, **env}, check=False).returncode


def check_x86(recorded: Callable[[], Path]) -> bool:
    """The tests and the recorded networks on a CPU with AVX2 and without VNNI."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Skipped(f"runs this Python, which is one for {platform.system()} on {platform.machine()}")
    with tempfile.TemporaryDirectory() as name:
        try:
            env = {**prepare(Path(name)), EXPECTED: "saturating"}
        except Impossible as reason:
            print(f"under QEMU, because {reason}", flush=True)
            return check_haswell(recorded)
        tests = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cpus", **env)
        return tests == run(sys.executable, ROOT / "tests/cpus/compare.py", recorded(), "network", **env) == 0


def check_haswell(recorded: Callable[[], Path]) -> bool:
    """The same under QEMU."""
    need(HASWELL[0])
    folder = recorded()
    # QEMU 7.2 emulates gathers wrongly, with which numpy sorts on AVX2: argsort would give wrong orders.
    recent = tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4)
    env = {"NPY_DISABLE_CPU_FEATURES": "X86_V3" if recent else "AVX2 FMA3", EXPECTED: "saturating"}
    # One process: those that pytest-xdist starts would not be emulated.
    tests = run(*HASWELL, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                "tests/cpus", **env)  # fmt: skip
    files = run(*HASWELL, sys.executable, ROOT / "tests/cpus/compare.py", folder, "network", **env)
    return tests == files == 0


def debian_sources() -> Path:
    """The system's own list of where Debian's packages are."""
    for path in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if path.exists() and "debian" in path.read_text(encoding="utf-8", errors="replace"):
            return path
    raise Skipped("the arm64 packages are Debian's, and apt knows no Debian here")


def prepare_arm64(root: Path) -> None:
    """Unpack an arm64 Python, ONNX Runtime and numpy into `root`, unless that was done before."""
    done = root / f"ready-{'-'.join(WHEELS)}"
    if done.exists():
        return
    need("apt-get", "dpkg")
    shutil.rmtree(root, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        # apt's own state, apart from the system's: no root, no foreign architecture.
        for part in ("state/lists/partial", "cache/archives/partial", "wheels"):
            (work / part).mkdir(parents=True)
        (work / "status").touch()
        options = {
            "Dir::State": work / "state", "Dir::State::status": work / "status", "Dir::Cache": work / "cache",
            "Dir::Etc::sourcelist": debian_sources(), "Dir::Etc::sourceparts": "/dev/null",
            "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "",
            "Acquire::Languages": "none", "APT::Update::Error-Mode": "any",
        }  # fmt: skip
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--dest", "wheels"]
        wheels = [*pip, "--python-version", PYTHON, *(f"--platform={name}" for name in PLATFORMS), *WHEELS]
        for command in ([*apt, "update"], [*apt, "download", *PACKAGES], wheels):
            ended = subprocess.run(command, cwd=work, check=False, capture_output=True, text=True)
            if ended.returncode:
                said = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[0]
                raise Skipped(f"{Path(command[0]).name} cannot fetch the arm64 packages: {said}")
        for package in sorted(work.glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, root], check=True)
        for wheel in (work / "wheels").glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(root / "site")
    done.touch()


def check_arm64(cpu: str, recorded: Callable[[], Path], root: Path) -> bool:
    """The recorded kernels and networks on one arm64 CPU."""
    if platform.system() != "Linux":
        raise Skipped(f"user emulation is Linux's, and this is {platform.system()}")
    need("qemu-aarch64")
    prepare_arm64(root)
    folder = recorded()
    env = {"PYTHONHOME": str(root / "usr"), "PYTHONPATH": str(root / "site")}
    python = ("qemu-aarch64", "-cpu", cpu, "-L", root, root / f"usr/bin/python{PYTHON}", "-W", "ignore")
    return run(*python, ROOT / "tests/cpus/compare.py", folder, "kernel", "network", **env) == 0


def main() -> int:
    """Every emulated CPU in turn, then a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm64-root", type=Path, default=ROOT / ".venv-arm64", help="where arm64 packages go")
    root = parser.parse_args().arm64_root.resolve()
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:

        @cache
        def recorded() -> Path:
            record(Path(name))
            return Path(name)

        checks = {"x86 without VNNI": partial(check_x86, recorded)}
        checks |= {f"arm64 {cpu}": partial(check_arm64, cpu, recorded, root) for cpu in ARM64}
        for label, check in checks.items():
            print(f"--- {label}", flush=True)
            begin = time.monotonic()
            try:
                outcomes[label] = "passed" if check() else "FAILED"
            except Skipped as reason:
                outcomes[label] = f"skipped: {reason}"
            outcomes[label] += f" ({time.monotonic() - begin:.0f} s)"
    print("\n" + "\n".join(f"{label}: {outcome}" for label, outcome in outcomes.items()))
    return int(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
