"""Build models for one engine, list their kernels, and time them side by side."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from onnxq.annotate import read_plan_note
from onnxq.arrays import InputShapes, map_shapes
from onnxq.backends import Engine, find_backend, find_engine
from onnxq.backends.building import build_engine, check_library
from onnxq.backends.engine import ENGINE, BuildState, EngineTimes, Job, TimedModel, Timing, Untimed
from onnxq.config import Config, ProveConfig
from onnxq.data import Dataset, load_data, make_synthetic
from onnxq.engines.prove.proof import Proof
from onnxq.engines.prove.prove import ProveRequest, choose_engine, prove_model
from onnxq.engines.shapes import is_dynamic, list_shapes, make_profile, parse_shapes, warn_guesses
from onnxq.errors import ConfigError, ModelError, VerificationError
from onnxq.files import ScratchFolder
from onnxq.graph import ModelLike, ModelSource, ValueInfo, add_libraries, load_model, name_nodes
from onnxq.graph.index import GraphIndex, get_index
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Latency, convert_floats
from onnxq.sites import Cautions, Names
from onnxq.wording import show_as_summary

# Seconds for the build of one engine of a placement.
_BUILDING = 3600.0


@dataclass(frozen=True, kw_only=True)
class BenchedModel:
    """One model. name: its file, as given. proof: the build and its kernels, None where a provider shows none.

    eager, graph, reason: as of EngineTimes; None and "" without one.
    """

    name: str
    proof: Proof | None = None
    eager: Latency | None = None
    graph: Latency | None = None
    reason: str = ""

    @property
    def best(self) -> Latency | None:
        """The faster way to run it."""
        # A captured graph saves launches, and is not faster for every network.
        timed = filter(None, (self.eager, self.graph))
        return min(timed, key=lambda one: one.median_ms, default=None)

    @property
    def types(self) -> Counter[str]:
        """How many heavy nodes run in which type."""
        return Counter(node.type for node in self.proof.nodes) if self.proof else Counter()

    @property
    def built(self) -> bool:
        """False when the engine was not built."""
        return self.proof is None or self.proof.built


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class Bench:
    """The comparison. version: of the engine. chosen: why it is this one, "" where the caller named it.

    device: as of EngineTimes. provider: of ONNX Runtime, "" for other engines. untimed: why nothing was timed, None
    where something was. shapes: of the inputs. data: the samples they are from.
    """

    engine: str
    version: str
    models: tuple[BenchedModel, ...]
    chosen: str = ""
    device: str = ""
    provider: str = ""
    untimed: Untimed | None = None
    shapes: InputShapes = field(default_factory=dict)
    data: str = ""
    synthetic: bool = False
    warnings: Cautions = ()

    @property
    def failed(self) -> tuple[BenchedModel, ...]:
        """Models whose engine was not built, or that were not timed where others were."""
        return tuple(
            one
            for one in self.models
            if not one.built or (self.untimed is None and one.best is None)
        )

    def ratio(self, model: BenchedModel) -> float | None:
        """How many times faster a model is than the first, each in its faster way; None where one was not timed."""
        base = self.models[0].best
        own = model.best
        return own.speedup(base) if base is not None and own is not None else None


@dataclass(frozen=True, eq=False)
class _Entry:
    """One model to time, with its own feeds."""

    name: str
    source: ModelSource
    index: GraphIndex
    feeds: Feeds = field(default_factory=dict)


def bench_models(
    models: Mapping[str, ModelSource],
    data: object,
    config: Config,
    named: str | None,
    progress: Progress,
) -> Bench:
    """Build and time the models; the first is the one that the others are compared with.

    models: by name. data: samples of their inputs, None for made-up ones; the first is timed. config: of which the
    sections `bench`, `data`, `verify` and `runtime` are used. named: the engine; None for that of the first plan in
    the models. A model whose engine is not built is listed with the reason. Raises OnnxqError for options or data
    that do not fit, and for models with other inputs than the first.
    """
    with progress("reading the models"):
        entries = _read_models(models, config.runtime.libraries)
        feeds, dataset, warnings = _make_feeds(entries[0].index, data, config, progress)
        # A float16 model reads another type than the float32 one beside it.
        entries = [replace(one, feeds=fit_feeds(one.index.inputs, feeds)) for one in entries]
    engine, chosen = _choose_engine(entries, named, config.bench.compute_capability)
    if engine.emulated:
        engine.demand_device(f"engine {engine.name}")
    capability, untimed = engine.choose_device(config.bench.compute_capability)
    with ScratchFolder() as folder:
        benched = []
        for k, entry in enumerate(entries):
            place = folder / str(k)
            place.mkdir()
            proof = _prove(entry, engine, capability, place, config, progress)
            benched.append(BenchedModel(name=entry.name, proof=proof))
        built = {k: entries[k] for k, model in enumerate(benched) if model.built}
        untimed = untimed if built else Untimed.NOT_BUILT
        times = EngineTimes() if untimed else _time_built(engine, built, folder, config, progress)
    return Bench(
        engine=engine.name,
        version=engine.describe_version(),
        models=tuple(
            replace(
                model,
                eager=times.eager.get(model.name),
                graph=times.graph.get(model.name),
                reason=times.reasons.get(model.name, ""),
            )
            for model in benched
        ),
        chosen=chosen,
        device=times.device,
        provider=config.runtime.provider if "provider" in engine.takes else "",
        untimed=untimed,
        shapes=map_shapes(feeds),
        data=dataset.describe(),
        synthetic=dataset.synthetic,
        warnings=warnings,
    )


def _read_models(models: Mapping[str, ModelSource], libraries: Names) -> list[_Entry]:
    """The models with their graphs. Raises ModelError where one has other inputs than the first."""
    entries = []
    for name, source in models.items():
        proto = add_libraries(load_model(source, lazy=True).light, libraries)
        entries.append(_Entry(name, source, GraphIndex(name_nodes(proto))))
    wanted = entries[0].index.input_names
    for entry in entries[1:]:
        own = entry.index.input_names
        if own != wanted:
            cause = f"it has other inputs than {entries[0].name}: {', '.join(sorted(own ^ wanted))}"
            raise ModelError(entry.name, cause, "time models of one network together", code="Q114")
    return entries


def _make_feeds(
    index: GraphIndex, data: object, config: Config, progress: Progress
) -> tuple[Feeds, Dataset, Cautions]:
    """The feeds of one run, the samples that they are from, and a warning where sizes were guessed."""
    inputs = index.inputs
    cautions: Cautions = ()
    given = parse_shapes(config.bench.shapes)
    if data is None:
        sizes, guessed = make_profile(index, given)
        cautions = warn_guesses(sizes, guessed, "timed with")
        inputs = tuple(
            replace(value, shape=sizes[value.name][1]) if value.name in sizes else value
            for value in index.inputs
        )
        dataset = make_synthetic(inputs, samples=1)
    else:
        dataset = load_data(data, inputs, config.data, index.model, progress=progress)
    return _repeat_sample(dataset[0], index, config.bench.batch), dataset, cautions


def _repeat_sample(sample: Feeds, index: GraphIndex, batch: int) -> Feeds:
    """So many samples in one run. Raises ConfigError where no input has a free first axis."""
    if batch == 1:
        return sample
    free = [
        value.name
        for value in index.inputs
        if is_dynamic(value) and not isinstance((value.shape or ("",))[0], int)
    ]
    if not free:
        cause = "the first axis of every input has a fixed size"
        raise ConfigError(f"batch {batch}", cause, "export the model with a free one", code="Q315")
    # Inputs of a fixed first axis, such as tables, are the same for all samples.
    return {**sample, **{name: np.concatenate([sample[name]] * batch) for name in free}}


def _choose_engine(
    entries: Sequence[_Entry], named: str | None, capability: str | None
) -> tuple[Engine, str]:
    """The engine, and why where the caller names none; where there is a device, the one that is installed for it."""
    if named is not None:
        return find_engine(named), ""
    protos = [entry.index.proto for entry in entries]
    planned = next((proto for proto in protos if read_plan_note(proto) is not None), protos[0])
    engine, reason = choose_engine(planned, capability)
    return (engine.find_local() if capability is None else engine), reason


def _prove(
    entry: _Entry,
    engine: Engine,
    capability: str | None,
    folder: Path,
    config: Config,
    progress: Progress,
) -> Proof | None:
    """The build of one model and its kernels; its engine lies in `folder`."""
    if config.runtime.provider:
        return None
    sizes = list_shapes(entry.index, [entry.feeds])
    shapes = {one.name: sizes[one.name] for one in entry.index.inputs if is_dynamic(one)}
    options = ProveConfig(
        engine=engine.name, compute_capability=capability, timeout=config.bench.timeout
    )
    request = ProveRequest(
        options=options, runtime=config.runtime, shapes=shapes, save=folder, progress=progress
    )
    return prove_model(entry.source, request)


def _time_built(
    engine: Engine, built: Mapping[int, _Entry], folder: Path, config: Config, progress: Progress
) -> EngineTimes:
    """Time the models whose engines lie in folders of their numbers."""
    seconds = config.bench.seconds
    runtime = config.runtime
    with progress(f"timing {len(built)} models side by side, for {seconds:g} s"):
        file = engine.saved[ENGINE]
        models = {
            entry.name: TimedModel(entry.index.model, folder / str(k) / file, entry.feeds)
            for k, entry in built.items()
        }
        timing = Timing(
            seconds=seconds,
            threads=config.verify.threads,
            provider=runtime.provider,
            plugins=runtime.plugins,
        )
        return engine.time_models(models, timing)


def fit_feeds(inputs: Sequence[ValueInfo], feeds: Feeds) -> Feeds:
    """The feeds of a model's inputs in its own float types."""
    return convert_floats({value.name: feeds[value.name] for value in inputs}, inputs)


def time_placements(
    target: str,
    models: Mapping[str, ModelLike],
    feeds: Feeds,
    rounds: int | None,
    *,
    seconds: float = Timing.seconds,
    plugins: Names = (),
    threads: int = 1,
) -> dict[str, Latency]:
    """Build models with the engine of a target and time them side by side; those that fail are left out.

    A captured graph counts before launches kernel by kernel. Raises VerificationError where none can be timed.
    """
    engine = demand_timer(target, "placement")
    with ScratchFolder() as folder:
        built = {}
        for k, (name, model) in enumerate(models.items()):
            index = get_index(model)
            place = folder / str(k)
            place.mkdir()
            own = fit_feeds(index.inputs, feeds)
            options = dict(engine.options)
            job = Job(shapes=list_shapes(index, [own]), plugins=plugins, options=options)
            result = check_library(
                build_engine(engine, model, job, place, timeout=_BUILDING), engine
            )
            if result.state is BuildState.BUILT:
                built[name] = TimedModel(model, place / ENGINE, own)
        timing = Timing(rounds=rounds, seconds=seconds, plugins=plugins, threads=threads)
        times = engine.time_models(built, timing)
    return {**times.eager, **times.graph}


def demand_timer(target: str, subject: str) -> Engine:
    """The engine of a target that can be timed here. Raises VerificationError naming `subject` where none can."""
    engine = find_backend(target).local
    if engine is None:
        raise VerificationError(subject, f"onnxq runs no engine of target {target}", code="Q708")
    engine.demand_device(subject)
    return engine
