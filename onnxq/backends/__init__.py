"""Backends: all that is known of each engine, one folder for each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxq.arrays import Shape as Shape
    from onnxq.backends.base import Candidate as Candidate
    from onnxq.backends.base import Capability as Capability
    from onnxq.backends.base import Output as Output
    from onnxq.backends.base import PlacementRule as PlacementRule
    from onnxq.backends.base import Shapes as Shapes
    from onnxq.backends.base import Target as Target
    from onnxq.backends.engine import Engine as Engine
    from onnxq.backends.registry import BACKENDS as BACKENDS
    from onnxq.backends.registry import GROUP as GROUP
    from onnxq.backends.registry import Backend as Backend
    from onnxq.backends.registry import check_limits as check_limits
    from onnxq.backends.registry import check_target as check_target
    from onnxq.backends.registry import find_backend as find_backend
    from onnxq.backends.registry import find_compiler as find_compiler
    from onnxq.backends.registry import find_engine as find_engine
    from onnxq.backends.registry import find_holder as find_holder
    from onnxq.backends.registry import find_ideal as find_ideal
    from onnxq.backends.registry import find_modes as find_modes
    from onnxq.backends.registry import find_reference as find_reference
    from onnxq.backends.registry import find_sums as find_sums
    from onnxq.backends.registry import find_target as find_target
    from onnxq.backends.registry import find_usual_engine as find_usual_engine
    from onnxq.backends.registry import list_backends as list_backends
    from onnxq.backends.registry import list_costs as list_costs
    from onnxq.backends.registry import list_engines as list_engines
    from onnxq.backends.registry import list_names as list_names
    from onnxq.backends.registry import list_parts as list_parts
    from onnxq.backends.registry import list_registered as list_registered
    from onnxq.backends.registry import list_runnable as list_runnable
    from onnxq.backends.registry import load_config as load_config
    from onnxq.backends.registry import split_target as split_target

# The names of each module, which is loaded with the first of them: the help of commands needs no engine.
_NAMES = {
    "base": "Candidate Capability Output PlacementRule Shape Shapes Target",
    "engine": "Engine",
    "registry": "BACKENDS GROUP Backend check_limits check_target find_backend find_compiler find_engine find_holder "
    "find_ideal find_modes find_reference find_sums find_target find_usual_engine list_backends list_costs "
    "list_engines list_names list_parts list_registered list_runnable load_config split_target",
}
_HOMES = {
    name: f"onnxq.backends.{module}" for module, names in _NAMES.items() for name in names.split()
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onnxq.backends' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
