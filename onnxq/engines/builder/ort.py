"""ONNX Runtime in the child process: the graph that it optimizes a model into."""

from __future__ import annotations

import time
from pathlib import Path

import onnx

from onnxq.engines.builder.process import ENGINE, MODEL, OPTIMIZED, BuildResult, BuildState, Job
from onnxq.errors import MissingDependencyError, ModelError
from onnxq.runtime import NodeError, UnknownOperatorError, declare_types, optimize_graph


def build(job: Job, folder: Path) -> BuildResult:
    """Optimize the model in `folder`. Beside the graph as it runs (`engine`), the one before tensors are laid out anew:

    same fusions, but every tensor that survives still has its own name, by which kernels find their nodes.
    """
    start = time.perf_counter()
    try:
        for layout, name in ((True, ENGINE), (False, OPTIMIZED)):
            optimized = optimize_graph(folder / MODEL, layout=layout, libraries=job.operators)
            declare_types(optimized)
            onnx.save(optimized, folder / name)
    except MissingDependencyError as error:
        return BuildResult(state=BuildState.MISSING, reason=error.cause)
    except UnknownOperatorError as error:
        reason = f"{error.subject}: {error.cause}; {error.fix}"
        return BuildResult(state=BuildState.REFUSED, reason=reason, node=error.node)
    except ModelError as error:
        node = error.node if isinstance(error, NodeError) else ""
        return BuildResult(state=BuildState.REFUSED, reason=error.cause, node=node)
    return BuildResult(state=BuildState.BUILT, seconds=time.perf_counter() - start)
