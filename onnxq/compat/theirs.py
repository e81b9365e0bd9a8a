"""Names of onnxruntime.quantization that quantize nothing of a model of ours: onnxruntime's own, handed on.

A module that is not here is looked up there, `onnxq.compat.onnx_model` as `onnxruntime.quantization.onnx_model`; so
is a name that a module here lacks. Its classes that quantize do so as onnxruntime does, which a warning says.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from onnxq.compat.options import CompatWarning
from onnxq.errors import MissingDependencyError
from onnxq.sites import Caution

_OURS = "onnxq.compat."
_THEIRS = "onnxruntime.quantization."
# Modules whose classes quantize a model, with the way to do that by onnxq.
_QUANTIZERS = {
    **dict.fromkeys(
        ("base_quantizer", "onnx_quantizer", "qdq_quantizer"),
        "quantize_static and quantize_dynamic",
    ),
    "cuda_quantizer": "onnxq.quantize(model, data, config='trt-int8')",
    "neural_compressor": "matmul_nbits_quantizer",
    "matmul_bnb4_quantizer": "matmul_nbits_quantizer",
}


def import_theirs(module: str = "") -> Any:
    """A module of onnxruntime.quantization, by the name that it has there; the package itself."""
    try:
        return importlib.import_module((_THEIRS + module).rstrip("."))
    except ModuleNotFoundError as error:
        # This import says how to install it.
        if error.name == "onnxruntime":
            from onnxq.runtime.session import import_onnxruntime

            import_onnxruntime()
        raise


def hand_on(module: str) -> Callable[[str], Any]:
    """A module's `__getattr__`, which finds in theirs what is not here."""

    def find(name: str) -> Any:
        # Python asks modules for names of its own, such as __path__.
        if name.startswith("__"):
            raise AttributeError(f"module {_OURS + module!r} has no attribute {name!r}")
        return getattr(import_theirs(module), name)

    return find


def take_choices(module: str, name: str, members: str) -> Any:
    """An enumeration of theirs, the very one; without onnxruntime, where nothing runs, one with these members."""
    try:
        return getattr(import_theirs(module), name)
    except (ModuleNotFoundError, MissingDependencyError):
        return Enum(name, members)


class _TheirModules(MetaPathFinder, Loader):
    """Finds modules of onnxq.compat that are not here in onnxruntime.quantization."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if not name.startswith(_OURS):
            return None
        # Only what their package has; this imports what is above it.
        found = importlib.util.find_spec(_THEIRS + name.removeprefix(_OURS))
        return found and ModuleSpec(
            name, self, is_package=found.submodule_search_locations is not None
        )

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(_OURS)
        theirs = import_theirs(name)
        vars(module).update(
            # The module keeps its own name, path and loader.
            {key: value for key, value in vars(theirs).items() if not key.startswith("__")}
        )
        if way := _QUANTIZERS.get(name.partition(".")[0]):
            text = f"{name} is onnxruntime's own and quantizes as onnxruntime does; by onnxq: {way}"
            warnings.warn(CompatWarning(Caution("W147", text)), stacklevel=2)


if not any(isinstance(finder, _TheirModules) for finder in sys.meta_path):
    sys.meta_path.append(_TheirModules())
