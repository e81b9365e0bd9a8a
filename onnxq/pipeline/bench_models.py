"""Bench: models built for one engine, their kernels, and their times side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from onnxq.backends import list_engines
from onnxq.config import Command
from onnxq.engines.bench import Bench, BenchRequest, bench_models
from onnxq.engines.shapes import parse_shapes
from onnxq.errors import ConfigError
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.progress import Progress, silent


def bench(
    models: Sequence[ModelSource] | ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    progress: Progress = silent,
) -> Bench:
    """Build models for an engine, list their kernels, and time them side by side: median, 99th percentile, rate.

    models: of one network, e.g. float32, float16 and quantized; the others are compared with the first. data: as for
    `quantize`, of which the first sample is timed; made-up inputs without. config, overrides: as for `quantize`, of
    which the sections `bench`, `data`, `verify` and `runtime` are used. `engine`: a name of
    `onnxq.backends.list_engines()`. TensorRT's run on the GPU of this machine, launched kernel by kernel and as a CUDA
    graph, timed by events of the GPU; ONNX Runtime runs on the CPU, or on `provider`. None: the one that the first plan
    in the models is for. Without a GPU TensorRT for RTX builds ahead of time for `compute_capability` ("8.6" if None)
    and times nothing; `.untimed` says so.

    Returns a Bench with `.models`, each with its `.proof`, `.eager` and `.graph`; `.failed` has those that were not
    built. Raises a subclass of OnnxqError for models with different inputs, options that do not fit, and a GPU on
    which nothing runs.
    """
    given = [models] if isinstance(models, (str, Path, onnx.ModelProto)) else list(models)
    if not given:
        raise ConfigError("models", "none was given", "give at least one", code="Q304")
    with open_run(given[0], config, overrides, Command.BENCH) as chosen:
        wanted, provider = chosen.bench, chosen.runtime.provider
        fitting = [engine.name for engine in list_engines(foreign=False).values() if "provider" in engine.takes]
        if (overrides or {}).get("provider") and wanted.engine not in (*fitting, None):
            cause = "is of ONNX Runtime, and another engine was asked for"
            raise ConfigError("provider", cause, "leave it out", code="Q317")
        request = BenchRequest(
            engine=wanted.engine or (fitting[0] if provider else None), capability=wanted.compute_capability,
            shapes=parse_shapes(wanted.shapes), batch=wanted.batch, threads=chosen.verify.threads, provider=provider,
            libraries=chosen.runtime.libraries, plugins=chosen.runtime.plugins, seconds=wanted.seconds,
            timeout=wanted.timeout, progress=progress,
        )  # fmt: skip
        return bench_models(given, data, chosen.data, request)
