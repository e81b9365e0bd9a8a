"""Execution providers: the parts of ONNX Runtime that sessions can run on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxq.errors import ConfigError
from onnxq.runtime.engine import import_onnxruntime

_SUFFIX = "ExecutionProvider"
CPU = f"CPU{_SUFFIX}"
# Options with which a provider computes float32 in float32: ranges and checks must not depend on where they were made.
_EXACT: Mapping[str, Mapping[str, str]] = {
    f"CUDA{_SUFFIX}": {"use_tf32": "0"},
    f"OpenVINO{_SUFFIX}": {"precision": "FP32"},
}


def check_provider(name: str) -> str:
    """The full name of an installed provider: "cuda" -> "CUDAExecutionProvider"; "" for the CPU, which needs none.

    Raises ConfigError, with the installed ones, for any other name, MissingDependencyError without onnxruntime.
    """
    if _shorten_name(name) == _shorten_name(CPU):
        return ""
    known: dict[str, str] = {_shorten_name(one): one for one in import_onnxruntime().get_available_providers()}
    found = known.get(_shorten_name(name))
    if found is None:
        cause = "this onnxruntime does not have it"
        raise ConfigError(f"provider {name!r}", cause, f"installed: {', '.join(sorted(known))}", code="Q312")
    return found


def _shorten_name(name: str) -> str:
    return name.lower().removesuffix(_SUFFIX.lower()).replace("_", "").replace("-", "")


def set_options(provider: str) -> tuple[str, dict[str, str]]:
    """A provider with its options, as sessions take it. Named, because ORT would otherwise take any GPU it finds."""
    return provider or CPU, dict(_EXACT.get(provider, {}))


def check_loaded(session: Any, provider: str) -> None:
    """ConfigError where ONNX Runtime printed a line and took the CPU: the provider is installed and does not load."""
    if provider and provider not in session.get_providers():
        cause = "is installed, but does not start on this machine: ONNX Runtime took the CPU in its place"
        fix = "see that its driver and its libraries are there"
        raise ConfigError(f"provider {_shorten_name(provider)!r}", cause, fix, code="Q323")
