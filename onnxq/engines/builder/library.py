"""The libraries that build engines: how each is imported, called and installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

RTX, TRT, ORT = "tensorrt-rtx", "tensorrt", "ort"
ENGINES = (RTX, TRT, ORT)


@dataclass(frozen=True)
class Library:
    """A library under the names that Python, people and package indexes have for it."""

    module: str
    title: str
    # A command.
    install: str
    # Distributions that may hold it.
    packages: tuple[str, ...]


LIBRARIES: Mapping[str, Library] = {
    RTX: Library("tensorrt_rtx", "TensorRT for RTX", "pip install 'onnxq[trt-rtx]'", ("tensorrt-rtx",)),
    TRT: Library(
        "tensorrt", "TensorRT", "pip install 'onnxq[trt]'", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
    ),
    ORT: Library("onnxruntime", "ONNX Runtime", "pip install 'onnxq[cpu]'", ("onnxruntime", "onnxruntime-gpu")),
}  # fmt: skip


def name_version(engine: str) -> str:
    """The library of an engine with its version, e.g. "ONNX Runtime 1.32.0"; without it where no package has one.

    Read from the packages, not from the library: a process that crashed cannot say it.
    """
    library = LIBRARIES[engine]
    for package in library.packages:
        try:
            return f"{library.title} {version(package)}"
        except PackageNotFoundError:
            continue
    return library.title
