"""Prove: the kernels and types that a model gets in an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxq.annotate import read_model
from onnxq.backends import find_engine, list_engines
from onnxq.config import Command, Config
from onnxq.data import Dataset, load_data
from onnxq.engines.prove.proof import INT8, Proof
from onnxq.engines.prove.prove import ProveRequest, open_output_folder
from onnxq.engines.prove.prove import prove_model as _prove
from onnxq.engines.shapes import parse_shapes
from onnxq.errors import ConfigError
from onnxq.files import name_folder
from onnxq.graph import GraphIndex, add_libraries, name_nodes
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.progress import Progress, silent


def prove(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Proof:
    """Build the engine, and find the kernel that every pair and every heavy node became, and the type it runs in.

    config, overrides: as for `quantize`, of which the sections `prove`, `data` and `runtime` are used. `engine`: a name
    of `onnxq.backends.list_engines()`; None for the first of the backend that the plan in the model is for, TensorRT
    for RTX where there is no plan; the proof's `chosen` says why. TensorRT for RTX builds ahead of time and needs no
    GPU, TensorRT builds for the GPU of this machine, of ONNX Runtime the optimized graph is read. Nodes that do not run
    in the type that `require`, (type, pattern) pairs, or `require_int8` asks for, and those that compute in a type of
    `forbid`, are in `.unmet`. out: folder for engine, log and list of kernels; force: overwrite them.

    With ONNX Runtime `.weights` has every int8 weight that meets 8-bit data, with the 16-bit sums that can overflow on
    CPUs without VNNI. data: as for `quantize`, to count how often that happens and the error it leaves each output,
    `.cost`.

    The build runs in a process of its own: a model that crashes the library, or is refused, gives a Proof that says so.
    Raises MissingDependencyError without the library, ConfigError for a pattern, engine or shape that fits nothing.
    """
    folder = name_folder(out)
    with open_run(model, config, overrides, Command.PROVE) as chosen:
        wanted = chosen.prove
        _check_libraries(wanted.engine, overrides or {})
        with open_output_folder(folder, wanted.engine, force=force):
            dataset = None if data is None else _load_samples(model, data, chosen, progress)
            request = ProveRequest(
                engine=wanted.engine, capability=wanted.compute_capability,
                require=(*((INT8, one) for one in wanted.require_int8), *wanted.require), forbid=wanted.forbid,
                require_exact=wanted.require_exact, dataset=dataset, threads=wanted.threads,
                shapes=parse_shapes(wanted.shapes), compare=wanted.compare or None, save=folder, force=force,
                reduce=wanted.reduce, timeout=wanted.timeout, libraries=chosen.runtime.libraries,
                plugins=chosen.runtime.plugins, progress=progress,
            )  # fmt: skip
            return _prove(model, request)


def _check_libraries(engine: str | None, given: Mapping[str, Any]) -> None:
    """ConfigError for a library of another engine than the one asked for."""
    for name in ("ort_library", "plugin"):
        if engine is None or not given.get(name) or name in find_engine(engine).takes:
            continue
        families = dict.fromkeys(other.family for other in list_engines().values() if name in other.takes)
        cause = f"is for {' or '.join(families)}, and another engine was asked for"
        raise ConfigError(name, cause, "leave it out", code="Q317")


def _load_samples(model: ModelSource, data: object, config: Config, progress: Progress) -> Dataset:
    """The samples that saturation is measured on."""
    with progress("reading the model"):
        named = name_nodes(add_libraries(read_model(model).proto, config.runtime.libraries))
    dataset = load_data(data, GraphIndex(named).inputs, config.data, named, progress=progress)
    return dataset.take(config.prove.samples, config.data.seed)
