"""Sources of the kernels: in `cuda/` of a checkout or in the package `onnxq_cuda` of a wheel."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from onnxq.errors import MissingDependencyError

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


def read_sources(names: tuple[str, ...]) -> dict[str, str]:
    """Read sources; returns their texts by name."""
    return {name: (find_folder() / name).read_text("utf-8") for name in names}


def hash_sources(names: tuple[str, ...]) -> str:
    """Hash the names and texts of sources."""
    whole = hashlib.sha256()
    for name, text in read_sources(names).items():
        whole.update(f"{name}\0{text}\0".encode())
    return whole.hexdigest()[:32]
