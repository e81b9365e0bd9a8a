"""Custom operators: shared libraries that are registered with every ONNX Runtime session made inside a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from onnxq.errors import ConfigError
from onnxq.runtime.engine import import_onnxruntime, list_faults
from onnxq.runtime.faults import clean_message

_open: ContextVar[tuple[str, ...]] = ContextVar("onnxq_operator_libraries", default=())


@contextmanager
def use_libraries(paths: Iterable[str | Path]) -> Iterator[None]:
    """Register these shared libraries of custom operators with the sessions made inside the block; blocks nest.

    Raises ConfigError for a file that is missing or that ONNX Runtime cannot register, and MissingDependencyError
    without onnxruntime. No paths: nothing is loaded.
    """
    # dlopen looks for a bare file name in the system's folders, not in the working directory.
    own = [str(Path(path).resolve()) for path in paths]
    if own:
        options = import_onnxruntime().SessionOptions()
        for path in own:
            _register_library(options, path)
    # ORT refuses a domain that is registered twice with the same options.
    token = _open.set(tuple(dict.fromkeys((*_open.get(), *own))))
    try:
        yield
    finally:
        _open.reset(token)


def list_open_libraries() -> tuple[str, ...]:
    """Absolute paths of the libraries of the blocks around the caller, outermost first."""
    return _open.get()


def register_libraries(options: Any) -> None:
    """Add the libraries of the blocks around the caller to an onnxruntime.SessionOptions."""
    for path in list_open_libraries():
        _register_library(options, path)


def _register_library(options: Any, path: str) -> None:
    subject = f"operator library {path}"
    if not Path(path).is_file():
        raise ConfigError(
            subject, "there is no such file", "give the path of a shared library (.so, .dylib, .dll)", code="Q322"
        )
    try:
        options.register_custom_ops_library(path)
    except list_faults() as error:
        raise ConfigError(
            subject,
            f"ONNX Runtime cannot load it: {clean_message(error)}",
            "give a shared library for this machine that exports RegisterCustomOps",
            code="Q322",
        ) from error
