"""prove(): what an engine makes of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from onnxq.annotate import read_model
from onnxq.config import Config
from onnxq.data import Dataset, load_data
from onnxq.engines.proof import RTX, Proof
from onnxq.engines.prove import TIMEOUT, Wish, saving
from onnxq.engines.prove import prove as _prove
from onnxq.graph import GraphIndex, name_nodes
from onnxq.pipeline.run import Options, configured
from onnxq.report import Progress, silent

# Decibels and shares settle within few samples.
_SAMPLES = 8


def prove(
    model: str | Path | onnx.ModelProto,
    *,
    engine: str = RTX,
    compute_capability: str | None = None,
    require_int8: Sequence[str] = (),
    require_exact: bool = False,
    data: object = None,
    config: Config | str | Path | None = None,
    samples: int | None = None,
    seed: int | None = None,
    threads: int = 0,
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
    compare: str | Path | None = None,
    save: str | Path | None = None,
    force: bool = False,
    reduce: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress = silent,
) -> Proof:
    """Build the engine and tell which kernel every pair and every heavy node became, and in which type it runs.

    engine: "tensorrt-rtx" builds ahead of time for `compute_capability` ("8.6" unless told) and needs no GPU;
    "tensorrt" builds for the GPU of this machine; "ort" reads ONNX Runtime's optimized graph. require_int8: patterns
    (glob or /regular expression/) over names of heavy nodes, or operators: those that do not run in int8 are in
    `.unmet`. shapes: (min, opt, max) of inputs of no fixed size, by name. compare: the JSON of an earlier proof.
    save: folder for engine, log and list of kernels; `force` overwrites them. reduce: when the build fails or
    crashes, find the smallest part that does. timeout: seconds a build may take.

    With "ort", `.weights` has every int8 weight that meets 8-bit data, with what can overflow 16-bit sums on CPUs
    without VNNI. require_exact: nothing may. data: as for `quantize`, to count on `samples` (8) how often that happens
    and what it costs each output, in `.cost`; config: for its `data` section; threads: of that, 0 takes all.

    The build runs in a process of its own: what crashes the library, or what it refuses, is a Proof that says so.
    Raises MissingDependencyError without the library, ConfigError for a pattern, engine or shape that fits nothing.
    """
    folder = None if save is None else Path(save)
    with saving(folder, engine, force=force):
        dataset = None if data is None else _dataset(model, data, config, samples, seed)
        wish = Wish(
            engine=engine,
            capability=compute_capability,
            require_int8=tuple(require_int8),
            require_exact=require_exact,
            dataset=dataset,
            threads=threads,
            shapes=dict(shapes or {}),
            compare=compare,
            save=folder,
            force=force,
            reduce=reduce,
            timeout=timeout,
            stage=progress,
        )
        return _prove(model, wish)


def _dataset(
    model: str | Path | onnx.ModelProto,
    data: object,
    config: Config | str | Path | None,
    samples: int | None,
    seed: int | None,
) -> Dataset:
    """The samples that saturation is measured on."""
    named = name_nodes(read_model(model).proto)
    chosen = configured(config, None, Options(seed=seed)).data
    dataset = load_data(data, GraphIndex(named).inputs, chosen, named)
    return dataset.take(_SAMPLES if samples is None else samples, chosen.seed)
