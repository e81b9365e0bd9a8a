"""Build models for one engine, list their kernels, and time them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from onnxq.annotate import read_plan_note
from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.data.synthetic import make_synthetic
from onnxq.engines.bench.model import Bench, BenchedModel, EngineTimes, Untimed
from onnxq.engines.bench.trt import Feeds, fit_feeds, time_engines
from onnxq.engines.builder.gpu import count_gpus
from onnxq.engines.builder.library import ORT, RTX, name_version
from onnxq.engines.builder.process import ENGINE
from onnxq.engines.builder.shapes import Sizes, find_sample_shapes, is_dynamic, make_profile
from onnxq.engines.diff.trt import find_engine
from onnxq.engines.prove.choice import choose_engine
from onnxq.engines.prove.proof import Proof
from onnxq.engines.prove.prove import CURRENT, TIMEOUT, ProveRequest, find_saved_names, prove_model
from onnxq.errors import ConfigError, ModelError
from onnxq.files import ScratchFolder
from onnxq.graph import GraphIndex, add_libraries, load_model, name_nodes
from onnxq.progress import Progress, silent
from onnxq.runtime import detect_cpu, time_models
from onnxq.sites import Caution

Source = str | Path | onnx.ModelProto


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The options of `pipeline.bench`. engine: None for the one that the first plan in the models is for.

    shapes: (min, opt, max) of inputs of no fixed size; opt is timed. batch: samples in a run. threads, provider,
    libraries: of ONNX Runtime. plugins: of TensorRT. seconds: of timing, in all; timeout: of one build.
    """

    engine: str | None = None
    capability: str | None = None
    shapes: Mapping[str, Sizes] = field(default_factory=dict)
    batch: int = 1
    threads: int = 1
    provider: str = ""
    libraries: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    seconds: float = 10.0
    timeout: float = TIMEOUT
    progress: Progress = silent


@dataclass(frozen=True, eq=False)
class _Entry:
    """One model to time, with its own feeds."""

    name: str
    source: Source
    index: GraphIndex
    feeds: Feeds = field(default_factory=dict)


def bench_models(models: Sequence[Source], data: object, config: DataConfig, request: BenchRequest) -> Bench:
    """Build and time the models; the first is the one that the others are compared with.

    data: samples of their inputs, None for made-up ones; the first is timed. A model whose engine is not built is
    listed with the reason. Raises OnnxqError for options or data that do not fit, and for models with other inputs than
    the first.
    """
    with request.progress("reading the models"):
        entries = _read_models(models, request.libraries)
        feeds, dataset, warnings = _make_feeds(entries[0].index, data, config, request)
        entries = [replace(one, feeds=fit_feeds(one.index.inputs, feeds)) for one in entries]
    engine, chosen = _choose_engine(entries, request)
    capability, untimed = _choose_gpu(engine, request)
    with ScratchFolder() as folder:
        made = []
        for k, entry in enumerate(entries):
            (folder / str(k)).mkdir()
            made.append(
                BenchedModel(name=entry.name, proof=_prove(entry, engine, capability, folder / str(k), request))
            )
        built = {entry.name: entry for entry, one in zip(entries, made, strict=True) if one.built}
        untimed = untimed if built else Untimed.NOT_BUILT
        times = EngineTimes() if untimed else _time(engine, built, entries, folder, request)
    return Bench(
        engine=engine,
        version=name_version(engine),
        models=tuple(_add_times(one, times) for one in made),
        chosen=chosen,
        device=times.device,
        provider=request.provider if engine == ORT else "",
        untimed=untimed,
        shapes={name: tuple(value.shape) for name, value in feeds.items()},
        data=dataset.describe(),
        synthetic=dataset.synthetic,
        warnings=warnings,
    )


def _read_models(models: Sequence[Source], libraries: tuple[str, ...]) -> list[_Entry]:
    """The models with names of their own. Raises ModelError where one has other inputs than the first."""
    found: dict[str, _Entry] = {}
    for k, source in enumerate(models):
        name = f"model {k + 1}" if isinstance(source, onnx.ModelProto) else str(source)
        name = f"{name} ({k + 1})" if name in found else name
        found[name] = _Entry(name, source, GraphIndex(name_nodes(add_libraries(load_model(source).proto, libraries))))
    entries = list(found.values())
    wanted = {value.name for value in entries[0].index.inputs}
    for entry in entries[1:]:
        own = {value.name for value in entry.index.inputs}
        if own != wanted:
            cause = f"it has other inputs than {entries[0].name}: {', '.join(sorted(own ^ wanted))}"
            raise ModelError(entry.name, cause, "time models of one network together", code="Q114")
    return entries


def _make_feeds(
    index: GraphIndex, data: object, config: DataConfig, request: BenchRequest
) -> tuple[Feeds, Dataset, tuple[Caution, ...]]:
    """The feeds of one run, the samples that they are from, and a warning where sizes were guessed."""
    inputs = index.inputs
    guessed: list[str] = []
    if data is None:
        sizes, note = make_profile(index.model, index, request.shapes)
        guessed = [name for name in sizes if note and name not in request.shapes]
        inputs = tuple(
            replace(value, shape=sizes[value.name][1]) if value.name in sizes else value for value in index.inputs
        )
        dataset = make_synthetic(inputs, samples=1)
    else:
        dataset = load_data(data, inputs, config, index.model, progress=request.progress)
    feeds = _repeat_sample(dataset[0], index, request.batch)
    if not guessed:
        return feeds, dataset, ()
    listed = ", ".join(f"{name} {'x'.join(map(str, feeds[name].shape))}" for name in guessed)
    text = f"inputs of no fixed size were timed with one size: {listed}; `shapes=…` gives others"
    return feeds, dataset, (Caution("W112", text),)


def _repeat_sample(sample: Feeds, index: GraphIndex, batch: int) -> Feeds:
    """So many samples in one run. Raises ConfigError where no input has a free first axis."""
    if batch == 1:
        return sample
    free = [
        value.name for value in index.inputs if is_dynamic(value) and not isinstance((value.shape or ("",))[0], int)
    ]
    if not free:
        cause = "the first axis of every input has a fixed size"
        raise ConfigError(f"batch {batch}", cause, "export the model with a free one", code="Q315")
    return {**sample, **{name: np.concatenate([sample[name]] * batch) for name in free}}


def _choose_engine(entries: Sequence[_Entry], request: BenchRequest) -> tuple[str, str]:
    """The engine, and why where the caller names none; where a GPU is, the TensorRT that is installed."""
    if request.engine is not None:
        return request.engine, ""
    protos = [entry.index.proto for entry in entries]
    planned = next((proto for proto in protos if read_plan_note(proto) is not None), protos[0])
    engine, reason = choose_engine(planned, request.capability)
    if engine == RTX and request.capability is None and count_gpus():
        engine = find_engine() or RTX
    return engine, reason


def _choose_gpu(engine: str, request: BenchRequest) -> tuple[str | None, Untimed | None]:
    """The compute capability to build for, and why its engines cannot be timed here."""
    if engine != RTX:
        return request.capability, None
    if request.capability is not None:
        return request.capability, Untimed.OTHER_GPU
    return (CURRENT, None) if count_gpus() else (None, Untimed.NO_GPU)


def _prove(entry: _Entry, engine: str, capability: str | None, folder: Path, request: BenchRequest) -> Proof | None:
    """The build of one model and its kernels; its engine lies in `folder`."""
    if request.provider:
        return None
    dynamic = {value.name for value in entry.index.inputs if is_dynamic(value)}
    shapes = {name: sizes for name, sizes in find_sample_shapes(entry.index, [entry.feeds]).items() if name in dynamic}
    wanted = ProveRequest(
        engine=engine, capability=capability, shapes=shapes, libraries=request.libraries, plugins=request.plugins,
        save=folder, timeout=request.timeout, progress=request.progress,
    )  # fmt: skip
    return prove_model(entry.source, wanted)


def _time(
    engine: str, built: Mapping[str, _Entry], entries: Sequence[_Entry], folder: Path, request: BenchRequest
) -> EngineTimes:
    with request.progress(f"timing {len(built)} models side by side, for {request.seconds:g} s"):
        if engine != ORT:
            file = find_saved_names(engine)[ENGINE]
            places = {entry.name: folder / str(k) / file for k, entry in enumerate(entries)}
            ready = {name: (places[name], entry.feeds) for name, entry in built.items()}
            return time_engines(engine, ready, plugins=request.plugins, seconds=request.seconds)
        # Not the proof's graph, which is bound to no session; and no early end, since rare slow runs count here.
        found = time_models(
            {name: entry.index.model for name, entry in built.items()}, next(iter(built.values())).feeds,
            threads=request.threads, seconds=request.seconds, precision=0.0, provider=request.provider,
        )  # fmt: skip
        return EngineTimes(device=detect_cpu(), eager=found)


def _add_times(model: BenchedModel, times: EngineTimes) -> BenchedModel:
    return replace(
        model,
        eager=times.eager.get(model.name),
        graph=times.graph.get(model.name),
        reason=times.reasons.get(model.name, ""),
    )
