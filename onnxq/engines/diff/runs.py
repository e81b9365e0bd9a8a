"""The runs that are compared: which engines can run here, and a runner for each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onnxq.annotate import read_plan_note
from onnxq.data import Dataset
from onnxq.engines.builder.library import ORT, RTX, name_version
from onnxq.engines.builder.process import Profile
from onnxq.engines.builder.shapes import find_sample_shapes
from onnxq.engines.diff import trt
from onnxq.engines.diff.bisect import EngineRun, EngineUnderTest, run_optimized
from onnxq.engines.diff.levels import Array
from onnxq.engines.diff.model import FLOAT, OFF, ON, TRT, explain_absence
from onnxq.errors import OnnxqError
from onnxq.files import ScratchFolder
from onnxq.graph import GraphIndex, ModelLike
from onnxq.progress import Progress
from onnxq.runtime import Feeds, Session
from onnxq.sites import Refusal

ENGINES = ("ort", "trt")
_FIX = {ON: "without optimizations it may run all the same: keep what the message names float with a rule"}
_ORT_RUNS = {FLOAT: "float model, optimizations off", OFF: "optimizations off", ON: "all optimizations"}


class Runner(Protocol):
    """One model in one engine. seconds: of its last run."""

    name: str
    seconds: float

    def infer(self, feeds: Feeds) -> Mapping[str, Any]:
        """One sample: arrays by name, lists for sequences."""


class OrtRunner:
    """A Runner of a session of ONNX Runtime. outputs: those to compute, None for all."""

    def __init__(self, name: str, session: Session, outputs: Sequence[str] | None = None) -> None:
        self.name, self.seconds = name, 0.0
        self._session, self._outputs = session, outputs

    def infer(self, feeds: Feeds) -> Mapping[str, Any]:
        """One sample: arrays by name, lists for sequences."""
        start = time.perf_counter()
        # Samples hold the float model's choices too, which it does not take itself.
        values = self._session.run({value.name: feeds[value.name] for value in self._session.inputs}, self._outputs)
        self.seconds = time.perf_counter() - start
        return values


@dataclass(eq=False)
class Engines:
    """Both models in the engines asked for."""

    float_index: GraphIndex
    index: GraphIndex
    dataset: Dataset
    # Of ENGINES; () takes ORT and, where it can run, TensorRT.
    wanted: tuple[str, ...]
    threads: int
    folder: Path
    progress: Progress
    # Of ONNX Runtime with optimizations, "" for the CPU. Without them, as the reference, it runs on the CPU.
    provider: str = ""
    # Paths of TensorRT's.
    plugins: tuple[str, ...] = ()
    # The runs that work, float first.
    names: list[str] = field(default_factory=list)
    # Engines that do not run, with the reason; those of them that had to run; and errors of those that were tried.
    skipped: list[Refusal] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failed: dict[str, OnnxqError] = field(default_factory=dict)
    # Found when first needed: it takes a pass over all samples.
    _shapes: Profile = field(default_factory=dict)

    @contextmanager
    def open_runners(self, *, alone: bool) -> Iterator[list[Runner]]:
        """Runners of all runs that get through the first sample.

        alone: raise the first engine's error when none does, or the reason why it was not tried.
        """
        with ExitStack() as stack:
            # Outside the try: without the float model there is nothing to compare with.
            runners = [self._start(FLOAT, stack)]
            self.names.append(FLOAT)
            for name in self._find_candidates():
                try:
                    runners.append(self._start(name, stack))
                    self.names.append(name)
                except OnnxqError as error:
                    cause = f"{error.subject}: {error.cause}".splitlines()[0]
                    refusal = Refusal(name, cause, _FIX.get(name, error.fix), code="R111")
                    self._skip(refusal, required=self._is_required(name))
                    self.failed[name] = error
            if len(runners) == 1 and alone:
                raise next(iter(self.failed.values()), None) or explain_absence(self.skipped[0])
            yield runners

    def _find_candidates(self) -> list[str]:
        """The runs to try. TensorRT is only tried where it can run."""
        found = [OFF, ON] if not self.wanted or "ort" in self.wanted else []
        if self.wanted and TRT not in self.wanted:
            return found
        obstacle = trt.find_obstacle()
        if obstacle is None:
            return [*found, TRT]
        self._skip(obstacle, required=TRT in self.wanted)
        return found

    def _is_required(self, run: str) -> bool:
        """True for an engine that was named, or where none was, for the one that the model was made for."""
        if self.wanted:
            return (TRT if run == TRT else "ort") in self.wanted
        plan = read_plan_note(self.index.proto)
        return (run == TRT) == (plan is not None and plan.target == TRT)

    def _skip(self, refusal: Refusal, *, required: bool) -> None:
        self.skipped.append(refusal)
        if required:
            self.missing.append(refusal.subject)

    def _start(self, name: str, stack: ExitStack) -> Runner:
        """A runner that got through the first sample; open until the stack is closed."""
        # A runner that fails its first sample is closed at once: an engine holds the GPU's memory.
        with ExitStack() as trial:
            runner = self._open(name, trial)
            runner.infer(self.dataset[0])
            stack.enter_context(trial.pop_all())
        return runner

    def _open(self, name: str, stack: ExitStack) -> Runner:
        if name == TRT:
            with self.progress("building the TensorRT engine"):
                return self._open_trt("outputs", stack)
        model = (self.float_index if name == FLOAT else self.index).model
        with self.progress(f"loading {'the float' if name == FLOAT else 'the quantized'} model into ONNX Runtime"):
            provider = self.provider if name == ON else ""
            return OrtRunner(name, Session(model, optimize=name == ON, threads=self.threads, provider=provider))

    def _open_trt(self, name: str, stack: ExitStack, *, debug_tensors: bool = False) -> Runner:
        """TensorRT's runner, of an engine built in a folder of this name."""
        # One engine for all samples, so it must take the smallest and the largest.
        if not self._shapes:
            self._shapes = find_sample_shapes(self.index, self.dataset.samples())
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        engine = trt.build_trt(
            self.index.model, self._shapes, folder, debug_tensors=debug_tensors, plugins=self.plugins
        )  # fmt: skip
        return stack.enter_context(trt.TrtRunner(TRT, engine, self.plugins))

    def open_inner(self, stack: ExitStack) -> list[Runner]:
        """Runners that give inner tensors with their outputs: TensorRT's, if it runs."""
        if TRT not in self.names:
            return []
        try:
            with self.progress("building the TensorRT engine for its layers"):
                # Another engine than the outputs': inner tensors must be asked for when it is built.
                return [self._open_trt("layers", stack, debug_tensors=True)]
        except OnnxqError as error:
            fix = "the outputs are compared all the same"
            self._skip(Refusal(f"layers of {TRT}", error.cause, fix, code="R111"), required=False)
            return []

    def find_under_test(self, run: str) -> EngineUnderTest | None:
        """The engine that bisection runs parts of the model in; None for the reference and for loaded runs."""
        found: dict[str, EngineRun] = {ON: partial(run_optimized, provider=self.provider), TRT: self._run_trt}
        return EngineUnderTest(run, found[run]) if run in found else None

    def _run_trt(self, proto: ModelLike, feeds: Feeds) -> Mapping[str, Array]:
        with ScratchFolder(self.folder) as folder:
            shapes = find_sample_shapes(GraphIndex(proto), [feeds])
            engine = trt.build_trt(proto, shapes, folder, plugins=self.plugins)
            with trt.TrtRunner(TRT, engine, self.plugins) as runner:
                # Copies: the runner's buffers are gone when it is closed.
                return {name: np.array(value) for name, value in runner.infer(feeds).items()}


def describe_engine(run: str, provider: str = "") -> str:
    """The engine of a local run, for people. provider: of the run with optimizations."""
    if run == TRT:
        return name_version(trt.find_engine() or RTX)
    place = f" on {provider}" if run == ON and provider else ""
    return f"{name_version(ORT)}{place}, {_ORT_RUNS[run]}"
