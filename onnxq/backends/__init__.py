"""Backends: all that is known of each engine, one folder for each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxq.backends.base import (
        Candidate,
        Capability,
        Output,
        PlacementRule,
        Shape,
        Shapes,
        Target,
        describe_spec,
    )
    from onnxq.backends.checks import check_limits, check_target, list_registered, load_config
    from onnxq.backends.engine import Engine
    from onnxq.backends.registry import (
        BACKENDS,
        GROUP,
        Backend,
        find_backend,
        find_engine,
        find_holder,
        find_ideal,
        find_modes,
        find_reference,
        find_sums,
        find_target,
        find_usual_engine,
        list_backends,
        list_costs,
        list_engines,
        list_names,
        list_runnable,
    )

# The names of each module, which is loaded with the first of them: the help of commands needs no engine.
_NAMES = {
    "base": "Candidate Capability Output PlacementRule Shape Shapes Target describe_spec",
    "checks": "check_limits check_target list_registered load_config",
    "engine": "Engine",
    "registry": "BACKENDS GROUP Backend find_backend find_engine find_holder find_ideal find_modes find_reference "
    "find_sums find_target find_usual_engine list_backends list_costs list_engines list_names list_runnable",
}
_HOMES = {name: f"onnxq.backends.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "BACKENDS",
    "GROUP",
    "Backend",
    "Candidate",
    "Capability",
    "Engine",
    "Output",
    "PlacementRule",
    "Shape",
    "Shapes",
    "Target",
    "check_limits",
    "check_target",
    "describe_spec",
    "find_backend",
    "find_engine",
    "find_holder",
    "find_ideal",
    "find_modes",
    "find_reference",
    "find_sums",
    "find_target",
    "find_usual_engine",
    "list_backends",
    "list_costs",
    "list_engines",
    "list_names",
    "list_registered",
    "list_runnable",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxq.backends' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
