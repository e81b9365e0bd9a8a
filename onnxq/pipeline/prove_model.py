"""Prove: the kernels and types that a model gets in an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from onnxq.annotate import read_model
from onnxq.config import Config, check_number
from onnxq.data import Dataset, load_data
from onnxq.engines.builder.library import ORT
from onnxq.engines.prove.proof import Proof
from onnxq.engines.prove.prove import TIMEOUT, ProveRequest, open_output_folder
from onnxq.engines.prove.prove import prove_model as _prove
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, add_libraries, name_nodes
from onnxq.pipeline.quantize_model import Options, make_config
from onnxq.progress import Progress, silent

# Decibels and shares settle within few samples.
_SAMPLES = 8


def prove(
    model: str | Path | onnx.ModelProto,
    *,
    engine: str | None = None,
    compute_capability: str | None = None,
    require_int8: Sequence[str] = (),
    require_exact: bool = False,
    data: object = None,
    config: Config | str | Path | None = None,
    samples: int | None = None,
    seed: int | None = None,
    threads: int = 0,
    ort_library: Sequence[str | Path] | str | Path = (),
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = None,
    compare: str | Path | None = None,
    save: str | Path | None = None,
    force: bool = False,
    reduce: bool = False,
    timeout: float = TIMEOUT,
    progress: Progress = silent,
) -> Proof:
    """Build the engine, and find the kernel that every pair and every heavy node became, and the type it runs in.

    engine: None for the one that the plan in the model is for ("ort" for ort, "tensorrt-rtx" for trt), "tensorrt-rtx"
    where there is no plan; the proof's `chosen` says why. "tensorrt-rtx" builds ahead of time for
    `compute_capability` ("8.6" if None) and needs no GPU; "tensorrt" builds for the GPU of this machine; "ort"
    reads ONNX Runtime's optimized graph. require_int8: patterns (glob or /regular expression/) over names of heavy
    nodes, or operators: those that do not run in int8 are in `.unmet`. shapes: (min, opt, max) of inputs of no fixed
    size, by name. compare: the JSON of an earlier proof. save: folder for engine, log and list of kernels; `force`
    overwrites them. reduce: when the build fails or crashes, find the smallest part that does. timeout: seconds a build
    may take.

    With "ort", `.weights` has every int8 weight that meets 8-bit data, with the 16-bit sums that can overflow on CPUs
    without VNNI. require_exact: none may. data: as for `quantize`, to count on `samples` (8) how often that happens
    and the error it leaves each output, in `.cost`; threads: of that, 0 takes all. config: for its
    `data` and `runtime` sections. ort_library: shared libraries with the custom operators of the model, for "ort".

    The build runs in a process of its own: a model that crashes the library, or is refused, gives a Proof that says so.
    Raises MissingDependencyError without the library, ConfigError for a pattern, engine or shape that fits nothing.
    """
    check_number("timeout", timeout, low=0, above=True)
    check_number("samples", samples, low=1, whole=True)
    check_number("threads", threads, low=0, whole=True)
    chosen = make_config(config, None, Options(seed=seed, ort_library=ort_library))
    if ort_library and engine not in (ORT, None):
        raise ConfigError(
            "ort_library", "is for ONNX Runtime, and another engine was asked for", "leave it out", code="Q317"
        )
    folder = None if save is None else Path(save)
    with open_output_folder(folder, engine, force=force):
        dataset = None if data is None else _load_samples(model, data, chosen, samples, progress)
        request = ProveRequest(
            engine=engine, capability=compute_capability, require_int8=tuple(require_int8), require_exact=require_exact,
            dataset=dataset, threads=threads, shapes=dict(shapes or {}), compare=compare, save=folder, force=force,
            reduce=reduce, timeout=timeout, libraries=chosen.runtime.libraries, progress=progress,
        )  # fmt: skip
        return _prove(model, request)


def _load_samples(
    model: str | Path | onnx.ModelProto,
    data: object,
    config: Config,
    samples: int | None,
    progress: Progress,
) -> Dataset:
    """The samples that saturation is measured on."""
    with progress("reading the model"):
        named = name_nodes(add_libraries(read_model(model).proto, config.runtime.libraries))
    dataset = load_data(data, GraphIndex(named).inputs, config.data, named, progress=progress)
    return dataset.take(_SAMPLES if samples is None else samples, config.data.seed)
