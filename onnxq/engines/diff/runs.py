"""The runs that are compared: which engines can run here, and a runner for each."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from onnxq.annotate import read_plan_note
from onnxq.arrays import ArrayDict, Arrays
from onnxq.backends import Backend, find_backend, find_reference, list_backends, list_parts
from onnxq.backends.engine import Engine, Job, Profile, Runner, SessionRunner
from onnxq.config import Config
from onnxq.data import Dataset
from onnxq.engines.diff.model import FLOAT, OFF, ON, explain_absence
from onnxq.engines.shapes import list_shapes
from onnxq.errors import OnnxqError
from onnxq.files import ScratchFolder
from onnxq.graph import GraphIndex, ModelLike, fix_noise
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session, tap_tensors, trim_memory
from onnxq.sites import Refusal, TensorId, drop_repeats

# Gives the outputs of a model on feeds.
EngineRun = Callable[[ModelLike, Feeds], Arrays]
_FIX = {
    ON: "without optimizations it may run all the same: keep what the message names float with a rule"
}
_RUNS = {FLOAT: "float model, optimizations off", OFF: "optimizations off", ON: "all optimizations"}


class Reference:
    """Tensors of one sample as ORT computes them without optimizations; each computed when first asked for."""

    def __init__(self, index: GraphIndex, feeds: Feeds, *, threads: int = 0) -> None:
        self._index = index
        self._feeds = feeds
        self._threads = threads
        self._known: ArrayDict = dict(feeds)

    def __call__(self, names: Iterable[str]) -> ArrayDict:
        """The arrays of these tensors of the main graph."""
        wanted = drop_repeats(names)
        missing = [TensorId(name) for name in wanted if name not in self._known]
        if missing:
            tapped = tap_tensors(self._index.model, missing, only=True)
            session = Session(tapped.proto, optimize=False, threads=self._threads, arena=False)
            values = session.run({value.name: self._feeds[value.name] for value in session.inputs})
            self._known.update(
                {tensor.name: values[name] for tensor, name in tapped.outputs.items()}
            )
            # The session holds its buffers, which would add to those of the runs that follow.
            del session
            trim_memory()
        return {name: self._known[name] for name in wanted}


def run_part(
    proto: ModelLike, feeds: Feeds, *, optimize: bool = True, provider: str = ""
) -> Arrays:
    """The outputs of ORT with all optimizations, as users run it, or with none. provider: "" for the CPU."""
    return Session(proto, optimize=optimize, threads=1, arena=False, provider=provider).run(feeds)


@dataclass(eq=False)
class Engines:
    """Both models in the engines asked for. A backend's run has its name; the reference has two: OFF and ON."""

    float_index: GraphIndex
    index: GraphIndex
    dataset: Dataset
    config: Config
    folder: Path
    progress: Progress
    # The runs that work, float first.
    names: list[str] = field(default_factory=list)
    # Engines that do not run, with the reason; those of them that had to run; and errors of those that were tried.
    skipped: list[Refusal] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failed: dict[str, OnnxqError] = field(default_factory=dict)

    @contextmanager
    def open_runners(self, *, alone: bool) -> Iterator[list[Runner]]:
        """Runners of all runs that get through the first sample.

        alone: raise the first engine's error when none does, or the reason why it was not tried.
        """
        with ExitStack() as stack:
            # Outside the try: without the float model there is nothing to compare with.
            runners = [self._start_runner(FLOAT, stack)]
            self.names.append(FLOAT)
            for name in self._find_candidates():
                try:
                    runners.append(self._start_runner(name, stack))
                    self.names.append(name)
                except OnnxqError as error:
                    cause = error.fault.splitlines()[0]
                    self._skip_run(Refusal(name, cause, _FIX.get(name, error.fix), code="R111"))
                    self.failed[name] = error
            if len(runners) == 1 and alone:
                raise next(iter(self.failed.values()), None) or explain_absence(self.skipped[0])
            yield runners

    @cached_property
    def _shapes(self) -> Profile:
        """The sizes of all samples; it takes a pass over them."""
        return list_shapes(self.index, self.dataset.samples())

    @cached_property
    def _planned(self) -> list[Backend]:
        """Those with engines that the model was made for."""
        plan = read_plan_note(self.index.proto)
        return [] if plan is None else [part for part in list_parts(plan.target) if part.engines]

    def _list_backends(self) -> list[Backend]:
        """The reference first."""
        if wanted := self.config.diff.engines:
            backends = [find_backend(name) for name in wanted]
        else:
            backends = [
                one for one in list_backends() if one.local is not None and not one.local.judges
            ]
            backends += [backend for backend in self._planned if backend not in backends]
        return sorted(backends, key=lambda backend: not backend.reference)

    def _find_candidates(self) -> list[str]:
        """The runs to try. Other engines than the reference are only tried where they can run."""
        runs = []
        for backend in self._list_backends():
            obstacle = None if backend.local is None else backend.local.find_obstacle()
            if backend.reference:
                runs += [OFF, ON]
            elif obstacle is None:
                runs.append(backend.name)
            else:
                self._skip_run(replace(obstacle, subject=backend.name))
        # Engines are compared with the file as it is, whether or not the reference was named.
        return runs if OFF in runs or not runs else [OFF, *runs]

    def _skip_run(self, refusal: Refusal) -> None:
        """Skip a run, or its layers. An engine must run that was named; where none was, those of the model's plan."""
        self.skipped.append(refusal)
        reference = find_reference().name
        backend = reference if refusal.subject in (OFF, ON) else refusal.subject
        required = self.config.diff.engines or [one.name for one in self._planned] or [reference]
        if backend in required:
            self.missing.append(refusal.subject)

    def _start_runner(self, name: str, stack: ExitStack) -> Runner:
        """A runner that got through the first sample; open until the stack is closed."""
        # A runner that fails its first sample is closed at once: an engine holds the GPU's memory.
        with ExitStack() as trial:
            runner = self._open_runner(name, trial)
            runner.infer(self.dataset[0])
            stack.enter_context(trial.pop_all())
        return runner

    def _open_runner(self, name: str, stack: ExitStack) -> Runner:
        if name not in (FLOAT, OFF, ON):
            with self.progress(f"building the {_find_local(name).family} engine"):
                return self._open_engine(name, "outputs", stack)
        model = (self.float_index if name == FLOAT else self.index).model
        with self.progress(
            f"loading {'the float' if name == FLOAT else 'the quantized'} model into ONNX Runtime"
        ):
            # Without optimizations, as the reference, it runs on the CPU.
            provider = self.config.runtime.provider if name == ON else ""
            return SessionRunner(
                name,
                Session(
                    model,
                    optimize=name == ON,
                    threads=self.config.verify.threads,
                    provider=provider,
                ),
            )

    def _open_engine(
        self, name: str, place: str, stack: ExitStack, *, inner: bool = False
    ) -> Runner:
        """A backend's runner, of an engine built in a folder of this name."""
        folder = self.folder / name / place
        folder.mkdir(parents=True, exist_ok=True)
        engine = _find_local(name).with_options(self.config.runtime)
        # One engine for all samples, so it must take the smallest and the largest.
        job = Job(shapes=self._shapes, plugins=self.config.runtime.plugins, debug_tensors=inner)
        return stack.enter_context(
            engine.open_runner(name, fix_noise(self.index.model), job, folder)
        )

    def open_inner(self, stack: ExitStack) -> list[Runner]:
        """Runners that give inner tensors with their outputs: those of other engines than the reference that run."""
        runners = []
        for name in self.names:
            if name in (FLOAT, OFF, ON) or not _find_local(name).shows_inner:
                continue
            try:
                with self.progress(
                    f"building the {_find_local(name).family} engine for its layers"
                ):
                    # Another engine than the outputs': inner tensors must be asked for when it is built.
                    runners.append(self._open_engine(name, "layers", stack, inner=True))
            except OnnxqError as error:
                fix = "the outputs are compared all the same"
                self._skip_run(Refusal(f"layers of {name}", error.cause, fix, code="R111"))
        return runners

    def find_under_test(self, run: str) -> EngineRun | None:
        """The engine that bisection runs parts of the model in; None for the reference and for loaded runs."""
        if run == ON:
            return partial(run_part, provider=self.config.runtime.provider)
        if run in (FLOAT, OFF) or (run not in self.names and run not in self.failed):
            return None
        return partial(self._run_part, run)

    def _run_part(self, name: str, proto: ModelLike, feeds: Feeds) -> Arrays:
        """The outputs of a part of the model in a backend's engine."""
        with ScratchFolder(self.folder) as folder:
            shapes = list_shapes(GraphIndex(proto), [feeds])
            job = Job(shapes=shapes, plugins=self.config.runtime.plugins)
            engine = _find_local(name).with_options(self.config.runtime)
            with engine.open_runner(name, fix_noise(proto), job, folder) as runner:
                # Copies: the runner's buffers are gone when it is closed.
                return {output: np.array(value) for output, value in runner.infer(feeds).items()}


def _find_local(name: str) -> Engine:
    """The engine that runs the models of a backend here."""
    engine = find_backend(name).local
    # Backends without engines are no candidates.
    assert engine is not None
    return engine


def describe_engine(run: str, provider: str) -> str:
    """The engine of a local run, for people. provider: of the run with optimizations."""
    if run not in _RUNS:
        return _find_local(run).describe_version()
    place = f" on {provider}" if run == ON and provider else ""
    return f"{_find_local(find_reference().name).describe_version()}{place}, {_RUNS[run]}"
