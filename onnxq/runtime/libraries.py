"""Custom operators: shared libraries that are registered with the ONNX Runtime sessions of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onnxq.errors import ConfigError
from onnxq.runtime.engine import import_onnxruntime, list_faults
from onnxq.runtime.faults import clean_message


def check_libraries(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Absolute paths of shared libraries of custom operators, each once, for `add_libraries` and `Session`.

    Raises ConfigError for a file that is missing or that ONNX Runtime cannot register, and MissingDependencyError
    without onnxruntime. No paths: nothing is loaded.
    """
    # dlopen looks for a bare file name in the system's folders, not in the working directory.
    found = tuple(dict.fromkeys(str(Path(path).resolve()) for path in paths))
    if found:
        register_libraries(import_onnxruntime().SessionOptions(), found)
    return found


def register_libraries(options: Any, paths: Iterable[str]) -> None:
    """Add libraries to an onnxruntime.SessionOptions, as `check_libraries` does."""
    # ORT refuses a domain that is registered twice with the same options.
    for path in dict.fromkeys(paths):
        subject = f"operator library {path}"
        if not os.path.isfile(path):
            fix = "give the path of a shared library (.so, .dylib, .dll)"
            raise ConfigError(subject, "there is no such file", fix, code="Q322")
        try:
            options.register_custom_ops_library(path)
        except list_faults() as error:
            cause = f"ONNX Runtime cannot load it: {clean_message(error)}"
            fix = "give a shared library for this machine that exports RegisterCustomOps"
            raise ConfigError(subject, cause, fix, code="Q322") from error
