"""Where the kernels' sources are: `cuda/` of a checkout, the package `onnxq_cuda` of an installed wheel."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from onnxq.errors import MissingDependencyError

HEADERS = ("fq_call.h", "fq_math.h")
HOST = ("fq_cpu.cpp", "fq_spans.h", "fq_vectors.h", *HEADERS)
DEVICE = ("fq_kernels.cuh", *HEADERS)
# Built ahead of time and shipped with the sources, if at all.
PREBUILT = "prebuilt"


@cache
def folder() -> Path:
    """The folder with the sources. Raises MissingDependencyError if the installation lacks them."""
    package = Path(__file__).parents[1]
    spec = PathFinder.find_spec("onnxq_cuda", [str(package.parent)])
    installed = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    for place in (package.parent / "cuda", *map(Path, installed)):
        if all((place / name).is_file() for name in {*HOST, *DEVICE}):
            return place
    raise MissingDependencyError(
        "kernels", f"their sources are not beside {package}", "install onnxq again", code="Q806"
    )


def read(names: tuple[str, ...]) -> dict[str, str]:
    """The text of some sources by name."""
    return {name: (folder() / name).read_text("utf-8") for name in names}


def digest(names: tuple[str, ...]) -> str:
    """What identifies some sources: a hash over their names and text."""
    whole = hashlib.sha256()
    for name, text in read(names).items():
        whole.update(f"{name}\0{text}\0".encode())
    return whole.hexdigest()[:32]
