"""Sources of the kernels, in `cuda/` of a checkout or in the package `onnxq_cuda` of a wheel, and compilers that run on
them as child processes.
"""

import subprocess
from functools import cache
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path

from onnxq.arrays import hash_parts
from onnxq.errors import MissingDependencyError
from onnxq.sites import Names

HEADERS = ("fq_call.h", "fq_math.h")
HOST = ("fq_cpu.cpp", "fq_spans.h", "fq_vectors.h", *HEADERS)
DEVICE = ("fq_kernels.cuh", *HEADERS)
# Folder of builds that a wheel may ship beside the sources.
PREBUILT = "prebuilt"


@cache
def find_folder() -> Path:
    """Find the folder with the sources. Raises MissingDependencyError if the installation lacks them."""
    package = Path(__file__).parents[1]
    spec = PathFinder.find_spec("onnxq_cuda", [str(package.parent)])
    installed = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    for place in (package.parent / "cuda", *map(Path, installed)):
        if all((place / name).is_file() for name in {*HOST, *DEVICE}):
            return place
    raise MissingDependencyError(
        "kernels", f"their sources are not beside {package}", "install onnxq again", code="Q806"
    )


def read_sources(names: Names) -> dict[str, str]:
    """Read sources; returns their texts by name."""
    return {name: (find_folder() / name).read_text("utf-8") for name in names}


def hash_sources(names: Names) -> str:
    """Hash the names and texts of sources."""
    return hash_parts(*chain.from_iterable(read_sources(names).items()))[:32]


def identify_sources(kind: str, names: Names) -> dict[str, str]:
    """The part of a build's key that says what was built, "host" or "device", and from which sources."""
    return {"kind": kind, "source": hash_sources(names)}


# Seconds; nvcc takes minutes for all architectures.
_TIMEOUT = 600
# Lines of a compiler's output that a message repeats: the first errors, which cause the others.
_LINES = 10


def run_compiler(command: list[str], subject: str, if_absent: str, if_failed: str) -> str:
    """Run a compiler and return its output. Raises MissingDependencyError about `subject` with one of the two fixes."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(
            subject, f"{command[0]} does not run: {error}", if_absent, code="Q807"
        ) from error
    if done.returncode:
        output = " | ".join((done.stderr or done.stdout).strip().splitlines()[:_LINES])
        raise MissingDependencyError(
            subject, f"{command[0]} failed: {output}", if_failed, code="Q807"
        )
    return done.stdout
