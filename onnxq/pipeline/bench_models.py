"""Bench: models built for one engine, their kernels, and their times side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from onnxq.config import Config, check_number
from onnxq.engines.bench.bench import BenchRequest, bench_models
from onnxq.engines.bench.model import Bench
from onnxq.engines.builder.library import ENGINES, ORT
from onnxq.engines.builder.shapes import Sizes
from onnxq.engines.prove.prove import TIMEOUT
from onnxq.errors import ConfigError
from onnxq.nearest import suggest_names
from onnxq.pipeline.quantize_model import Options, make_config
from onnxq.progress import Progress, silent
from onnxq.runtime import CPU, find_provider, use_libraries

ModelSource = str | Path | onnx.ModelProto
# Of timing, in all.
_SECONDS = 10.0


def bench(
    models: Sequence[ModelSource] | ModelSource,
    data: object = None,
    config: Config | str | Path | None = None,
    *,
    engine: str | None = None,
    compute_capability: str | None = None,
    shapes: Mapping[str, Sizes] | None = None,
    batch: int = 1,
    threads: int = 1,
    ort_library: Sequence[str | Path] | str | Path = (),
    plugin: Sequence[str | Path] | str | Path = (),
    provider: str | None = None,
    seconds: float = _SECONDS,
    timeout: float = TIMEOUT,
    progress: Progress = silent,
) -> Bench:
    """Build models for an engine, list their kernels, and time them side by side: median, 99th percentile, rate.

    models: of one network, e.g. float32, float16 and quantized; the others are compared with the first. engine:
    "tensorrt" or "tensorrt-rtx" on the GPU of this machine, launched kernel by kernel and as a CUDA graph, timed by
    events of the GPU; "ort" on the CPU, or on `provider`; None for the one that the first plan in the models is for.
    Without a GPU "tensorrt-rtx" builds ahead of time for `compute_capability` ("8.6" if None) and times nothing;
    `.untimed` says so.
    data: as for `quantize`, of which the first sample is timed; made-up inputs without. shapes: as for `prove`. batch:
    samples in a run, where the models leave the first axis free. threads, ort_library: of ONNX Runtime; plugin: of
    TensorRT. seconds: of timing, in all. timeout: seconds a build may take.

    Returns a Bench with `.models`, each with its `.proof`, `.eager` and `.graph`; `.failed` has those that were not
    built. Raises a subclass of OnnxqError for models with different inputs, options that do not fit, and a GPU on
    which nothing runs.
    """
    given = [models] if isinstance(models, (str, Path, onnx.ModelProto)) else list(models)
    if not given:
        raise ConfigError("models", "none was given", "give at least one", code="Q304")
    for name, value, whole in (("batch", batch, True), ("seconds", seconds, False), ("timeout", timeout, False)):
        check_number(name, value, low=1 if whole else 0, whole=whole, above=not whole)
    check_number("threads", threads, low=0, whole=True)
    options = Options(ort_library=ort_library, plugin=plugin, provider=provider)
    chosen = make_config(config, None, options)
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"engine {engine!r}", "is not known", suggest_names(engine, ENGINES), code="Q312")
    place = find_provider(chosen.runtime.provider) if chosen.runtime.provider != "cpu" else CPU
    if provider is not None and engine not in (ORT, None):
        cause = "is of ONNX Runtime, and another engine was asked for"
        raise ConfigError("provider", cause, "leave it out", code="Q317")
    request = BenchRequest(
        engine=ORT if provider is not None else engine, capability=compute_capability, shapes=dict(shapes or {}),
        batch=batch, threads=threads, provider=place, plugins=chosen.runtime.plugins, seconds=seconds, timeout=timeout,
        progress=progress,
    )  # fmt: skip
    with use_libraries(chosen.runtime.libraries):
        return bench_models(given, data, chosen.data, request)
