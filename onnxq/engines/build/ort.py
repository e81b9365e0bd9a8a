"""ONNX Runtime, in the child process: what it makes of a model, as a model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx

from onnxq.engines.build.process import ENGINE, MODEL, OPTIMIZED
from onnxq.engines.prove.proof import BUILT, REFUSED
from onnxq.errors import MissingDependencyError, ModelError
from onnxq.runtime import UnknownOperatorError, operator_libraries, optimized_graph


def build(job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Optimize the model in `folder`. Beside the graph as it runs (`engine`), the one before tensors are laid out anew:

    same fusions, but every tensor that survives still has its own name, by which kernels find their nodes.
    """
    start = time.perf_counter()
    try:
        with operator_libraries(job["operators"]):
            onnx.save(optimized_graph(folder / MODEL), folder / ENGINE)
            onnx.save(optimized_graph(folder / MODEL, layout=False), folder / OPTIMIZED)
    except MissingDependencyError as error:
        return {"state": "missing", "reason": error.cause}
    except UnknownOperatorError as error:
        reason = f"{error.subject}: {error.cause}; {error.fix}"
        return {"state": REFUSED, "reason": reason, "version": _version()}
    except ModelError as error:
        return {"state": REFUSED, "reason": error.cause, "node": _blamed(error.subject), "version": _version()}
    return {"state": BUILT, "version": _version(), "seconds": time.perf_counter() - start}


def _blamed(subject: str) -> str:
    """The node of "node 'conv' (Conv)"; "" when the error blames the model."""
    return subject.split("'")[1] if subject.startswith("node '") else ""


def _version() -> str:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return f"ONNX Runtime {version(name)}"
        except PackageNotFoundError:
            continue
    return "ONNX Runtime"
