"""Execution providers: the part of ONNX Runtime that sessions run on, chosen for all sessions of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from onnxq.config import RuntimeConfig
from onnxq.errors import ConfigError
from onnxq.runtime.engine import import_onnxruntime
from onnxq.runtime.libraries import use_libraries

_SUFFIX = "ExecutionProvider"
CPU = f"CPU{_SUFFIX}"
# Options with which a provider computes float32 in float32: ranges and checks must not depend on where they were made.
_EXACT: Mapping[str, Mapping[str, str]] = {
    f"CUDA{_SUFFIX}": {"use_tf32": "0"},
    f"OpenVINO{_SUFFIX}": {"precision": "FP32"},
}
_chosen: ContextVar[str] = ContextVar("onnxq_provider", default=CPU)


@contextmanager
def use_provider(name: str) -> Iterator[None]:
    """Run the sessions made inside the block on a provider, by its short name ("cuda") or its own.

    Raises ConfigError with the installed ones where it is not among them, MissingDependencyError without onnxruntime.
    """
    token = _chosen.set(find_provider(name))
    try:
        yield
    finally:
        _chosen.reset(token)


@contextmanager
def use_runtime(settings: RuntimeConfig) -> Iterator[None]:
    """Open the operator libraries and the provider of a configuration for the sessions made inside the block."""
    with ExitStack() as stack:
        stack.enter_context(use_libraries(settings.libraries))
        if settings.provider != "cpu":
            stack.enter_context(use_provider(settings.provider))
        yield


def find_provider(name: str) -> str:
    """The full name of an installed provider: "cuda" -> "CUDAExecutionProvider". ConfigError for any other name."""
    known: dict[str, str] = {_shorten_name(one): one for one in import_onnxruntime().get_available_providers()}
    found = known.get(_shorten_name(name))
    if found is None:
        cause = "this onnxruntime does not have it"
        raise ConfigError(f"provider {name!r}", cause, f"installed: {', '.join(sorted(known))}", code="Q312")
    return found


def _shorten_name(name: str) -> str:
    return name.lower().removesuffix(_SUFFIX.lower()).replace("_", "").replace("-", "")


def choose_provider(given: str | None) -> tuple[str, dict[str, str]]:
    """A provider with its options, as sessions take it. given: None for that of the block around the caller."""
    name = _chosen.get() if given is None else find_provider(given)
    return name, dict(_EXACT.get(name, {}))


def check_loaded(session: Any, wanted: str) -> None:
    """ConfigError where ONNX Runtime printed a line and took the CPU: the provider is installed and does not load."""
    if wanted not in session.get_providers():
        cause = "is installed, but does not start on this machine: ONNX Runtime took the CPU in its place"
        fix = "see that its driver and its libraries are there"
        raise ConfigError(f"provider {_shorten_name(wanted)!r}", cause, fix, code="Q323")
