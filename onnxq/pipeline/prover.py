"""prove(): what an engine makes of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from onnxq.engines.proof import RTX, Proof
from onnxq.engines.prove import TIMEOUT, Wish
from onnxq.engines.prove import prove as _prove


def prove(
    model: str | Path | onnx.ModelProto,
    *,
    engine: str = RTX,
    compute_capability: str | None = None,
    require_int8: Sequence[str] = (),
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
    compare: str | Path | None = None,
    save: str | Path | None = None,
    force: bool = False,
    reduce: bool = False,
    timeout: float = TIMEOUT,
) -> Proof:
    """Build the engine and tell which kernel every pair and every heavy node became, and in which type it runs.

    engine: "tensorrt-rtx" builds ahead of time for `compute_capability` ("8.6" unless told) and needs no GPU;
    "tensorrt" builds for the GPU of this machine; "ort" reads ONNX Runtime's optimized graph. require_int8: patterns
    (glob or /regular expression/) over names of heavy nodes, or operators: those that do not run in int8 are in
    `.unmet`. shapes: (min, opt, max) of inputs of no fixed size, by name. compare: the JSON of an earlier proof.
    save: folder for engine, log and list of kernels; `force` overwrites them. reduce: when the build fails or
    crashes, find the smallest part that does. timeout: seconds a build may take.

    The build runs in a process of its own: what crashes the library, or what it refuses, is a Proof that says so.
    Raises MissingDependencyError without the library, ConfigError for a pattern, engine or shape that fits nothing.
    """
    wish = Wish(
        engine=engine,
        capability=compute_capability,
        require_int8=tuple(require_int8),
        shapes=dict(shapes or {}),
        compare=compare,
        save=None if save is None else Path(save),
        force=force,
        reduce=reduce,
        timeout=timeout,
    )
    return _prove(model, wish)
