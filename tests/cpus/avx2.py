#!/usr/bin/env python3
"""Run a command on this machine as if its CPU had AVX2 and no VNNI: `python -m tests.cpus.avx2 COMMAND…`.

ONNX Runtime, OpenBLAS and numpy choose their kernels by the CPUID instruction. Where CPU and kernel can let it fault
(arch_prctl(2), ARCH_SET_CPUID), `avx2.c` answers for it, and everything runs at native speed: QEMU takes ten to forty
times as long. Child processes see the same CPU. Exit status: the command's; 97 where this is not possible here.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("avx2.c")
IMPOSSIBLE = 97
_HIDDEN = re.compile(r" (avx512\w*|avx10\w*|avx_vnni\w*|avx_ifma|amx_\w*|gfni|vaes|vpclmulqdq)\b")


class Impossible(Exception):
    """The reason why this machine cannot pose as another CPU."""


def prepare(folder: Path) -> Mapping[str, str]:
    """Build the library in `folder`; environment variables that make a process see a CPU without VNNI.

    Raises Impossible on other systems, without a C compiler, or where CPUID cannot fault.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Impossible(f"CPUID faulting is Linux's on x86-64; this is {platform.system()} on {platform.machine()}")
    library, cpuinfo = folder / "avx2.so", folder / "cpuinfo"
    build = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    try:
        built = subprocess.run(build, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        raise Impossible("no C compiler (cc) here") from None
    if built.returncode:
        raise Impossible(f"cc cannot build {SOURCE.name}: {built.stderr.strip()}")
    cpuinfo.write_text(_HIDDEN.sub("", Path("/proc/cpuinfo").read_text(encoding="utf-8")), encoding="utf-8")
    # Compiled for this CPU as it is, torch's cached kernels would not fit.
    env = {"LD_PRELOAD": str(library), "ONNXQ_CPUINFO": str(cpuinfo), "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch")}
    if subprocess.run(["/bin/true"], check=False, env={**os.environ, **env}).returncode == IMPOSSIBLE:
        raise Impossible("this CPU or kernel cannot let CPUID fault")
    return env


def main() -> int:
    """Run the command of the command line; its exit status."""
    with tempfile.TemporaryDirectory(prefix="onnxq-avx2-") as folder:
        try:
            env = prepare(Path(folder))
        except Impossible as reason:
            print(f"cannot run as a CPU without VNNI: {reason}", file=sys.stderr)
            return IMPOSSIBLE
        return subprocess.run(sys.argv[1:], check=False, env={**os.environ, **env}).returncode


if __name__ == "__main__":
    sys.exit(main())
