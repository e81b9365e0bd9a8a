"""The door to quantization-aware training: `from onnxq import qat` gives what `torch_frontend.qat` holds.

It opens when something of it is used, and needs the extra `torch`.
"""

from importlib import import_module
from typing import Any

from onnxq.errors import MissingDependencyError


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_front_end(), name)


def __dir__() -> list[str]:
    return sorted(_front_end().__all__)


def _front_end() -> Any:
    try:
        return import_module("torch_frontend.qat")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError(
            "onnxq.qat", "torch is not installed", 'pip install "onnxq[torch]"', code="Q802"
        ) from error
