"""onnxruntime itself: imported at first use, asked for quiet sessions, its absence explained."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from onnxq.errors import MissingDependencyError
from onnxq.workers import count_threads

# Only FATAL reaches stderr: lesser errors ORT also raises, and we translate those.
_QUIET = 4


def import_onnxruntime() -> Any:
    """The module onnxruntime. Raises MissingDependencyError with the install line when it is missing or damaged."""
    try:
        import onnxruntime
    except ImportError as error:
        raise _explain_missing(f"cannot be imported ({error})") from error
    # Uninstalling one of onnxruntime and onnxruntime-gpu beside the other leaves a folder without a module in it.
    if not hasattr(onnxruntime, "InferenceSession"):
        raise _explain_missing("is damaged: several of its packages were installed over each other")
    return onnxruntime


def _explain_missing(cause: str) -> MissingDependencyError:
    return MissingDependencyError(
        "onnxruntime", cause, "pip install 'onnxq[cpu]'  (with an NVIDIA GPU: 'onnxq[gpu]'; never both)", code="Q801"
    )


@lru_cache(maxsize=1)
def list_faults() -> tuple[type[Exception], ...]:
    """Everything ORT raises when it cannot load or run a model."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, ValueError, RuntimeError, TypeError, MemoryError)


def make_session_options(
    *,
    optimize: bool,
    threads: int,
    layout: bool = True,
    arena: bool = True,
    shapes_first: bool = False,
    prepack: bool = True,
    save: Path | None = None,
) -> Any:
    """Quiet options. Spinning is off: idle threads of one session must not slow down the next one measured."""
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    level = ort.GraphOptimizationLevel
    highest = level.ORT_ENABLE_ALL if layout else level.ORT_ENABLE_EXTENDED
    options.graph_optimization_level = highest if optimize else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = count_threads(threads)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not arena:
        # Buffers go back to the system as soon as they are free: the peak is of live tensors only.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
    if shapes_first:
        # Shape nodes run as soon as they can; in the default order they may run last and keep every tensor alive.
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if save is not None:
        options.optimized_model_filepath = str(save)
    return options
