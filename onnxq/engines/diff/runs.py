"""The runs that are compared: which engines can run here, their Polygraphy runners, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxq.config.schema import JsonText
from onnxq.data import Dataset
from onnxq.emit import PLAN_KEY
from onnxq.engines.diff import trt as diff_trt
from onnxq.engines.diff.bisect import Rival, optimized
from onnxq.engines.diff.measure import Array
from onnxq.engines.diff.model import FLOAT, OFF, ON, TRT
from onnxq.engines.diff.results import Feeds, active, infer, ort_runner
from onnxq.errors import ModelError, OnnxqError
from onnxq.files import ScratchFolder
from onnxq.graph import GraphIndex
from onnxq.progress import Progress
from onnxq.runtime import Session
from onnxq.runtime.engine import engine
from onnxq.sites import Refusal

ENGINES = ("ort", "trt")
_FIX = {ON: "without optimizations it may run all the same: keep what the message names float with a rule"}


@dataclass(eq=False)
class Engines:
    """Both models in the engines asked for.

    wanted: of ENGINES; () takes ORT and, where it can run, TensorRT. names: the runs that work, float first.
    skipped: engines that do not run, with the reason; missing: those of them that were to run in any case; failed: what
    those that were tried raised.
    """

    float_index: GraphIndex
    index: GraphIndex
    dataset: Dataset
    wanted: tuple[str, ...]
    threads: int
    folder: Path
    progress: Progress
    names: list[str] = field(default_factory=list)
    skipped: list[Refusal] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    _shapes: diff_trt.Shapes = field(default_factory=dict)
    failed: dict[str, OnnxqError] = field(default_factory=dict)

    @contextmanager
    def running(self, *, alone: bool) -> Iterator[list[Any]]:
        """Active runners of all runs that get through the first sample.

        alone: raise the first engine's error when none does.
        """
        with ExitStack() as stack:
            runners = [self._start(FLOAT, stack)]
            self.names.append(FLOAT)
            for name in self._candidates():
                try:
                    runners.append(self._start(name, stack))
                    self.names.append(name)
                except OnnxqError as error:
                    refusal = Refusal(
                        name, f"{error.subject}: {error.cause}".splitlines()[0], _FIX.get(name, error.fix), code="R111"
                    )
                    self._skip(refusal, required=self._required(name))
                    self.failed[name] = error
            if len(runners) == 1 and self.failed and alone:
                raise next(iter(self.failed.values()))
            yield runners

    def _candidates(self) -> list[str]:
        """The runs to try. TensorRT is only tried where it can run."""
        found = [OFF, ON] if not self.wanted or "ort" in self.wanted else []
        if self.wanted and TRT not in self.wanted:
            return found
        obstacle = diff_trt.obstacle()
        if obstacle is None:
            return [*found, TRT]
        self._skip(obstacle, required=TRT in self.wanted)
        return found

    def _required(self, run: str) -> bool:
        """Must it run? What was named must; unnamed, the engine that the model was not made for need not."""
        named = TRT if run == TRT else "ort"
        return named in self.wanted if self.wanted else (run == TRT) == (target_of(self.index.proto) == TRT)

    def _skip(self, refusal: Refusal, *, required: bool) -> None:
        self.skipped.append(refusal)
        if required:
            self.missing.append(refusal.subject)

    def _start(self, name: str, stack: ExitStack) -> Any:
        runner = self._made(name)
        with ExitStack() as trial:
            try:
                trial.enter_context(active([runner]))
                infer(runner, self.dataset[0])
            except (AttributeError, TypeError, RuntimeError) as error:
                if name != TRT:
                    raise
                # Polygraphy and TensorRT grow apart with their releases; a mismatch shows as one of these.
                fix = "install releases of polygraphy and TensorRT that belong together"
                raise ModelError(TRT, f"{type(error).__name__}: {error}", fix, code="Q115") from error
            stack.enter_context(trial.pop_all())
        return runner

    def _made(self, name: str) -> Any:
        if name == TRT:
            with self.progress("building the TensorRT engine"):
                return diff_trt.trt_runner(TRT, self._build("outputs"))
        proto = (self.float_index if name == FLOAT else self.index).proto
        with self.progress(f"loading {'the float' if name == FLOAT else 'the quantized'} model into ONNX Runtime"):
            return ort_runner(name, Session(proto, optimize=name == ON, threads=self.threads))

    def _build(self, name: str, *, layers: bool = False) -> Path:
        if not self._shapes:
            self._shapes = diff_trt.shapes_of(self.index, self.dataset.samples())
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return diff_trt.build(self.index.proto, self._shapes, folder, layers=layers)

    def inner(self, stack: ExitStack) -> list[Any]:
        """Active runners that give inner tensors with their outputs: TensorRT's, if it runs."""
        if TRT not in self.names:
            return []
        try:
            with self.progress("building the TensorRT engine for its layers"):
                runner = diff_trt.trt_runner(TRT, self._build("layers", layers=True))
            stack.enter_context(active([runner]))
        except OnnxqError as error:
            self._skip(
                Refusal(f"layers of {TRT}", error.cause, "the outputs are compared all the same", code="R111"),
                required=False,
            )
            return []
        return [runner]

    @property
    def rivals(self) -> Mapping[str, Rival]:
        """What bisection runs a piece of the model in, by run."""
        return {ON: optimized, TRT: self._rival_trt}

    def _rival_trt(self, proto: onnx.ModelProto, feeds: Feeds) -> Mapping[str, Array]:
        with ScratchFolder(self.folder) as folder:
            shapes = diff_trt.shapes_of(GraphIndex(proto), [feeds])
            runner = diff_trt.trt_runner(TRT, diff_trt.build(proto, shapes, folder))
            with active([runner]):
                return {name: np.array(value) for name, value in infer(runner, feeds).items()}


def target_of(proto: onnx.ModelProto) -> str:
    """The engine a model of ours was made for; "" for a model of another tool."""
    stored = next((entry.value for entry in proto.metadata_props if entry.key == PLAN_KEY), "{}")
    try:
        plan = JsonText(PLAN_KEY, stored).parse(ModelError, "")
    except ModelError:
        return ""
    return str(plan.get("target", "")) if isinstance(plan, dict) else ""


def engine_text(run: str) -> str:
    """What a local run is, for people."""
    if run == TRT:
        return diff_trt.version()
    how = {
        FLOAT: "float model, optimizations off",
        OFF: "optimizations off",
        ON: "all optimizations",
    }[run]
    return f"ONNX Runtime {engine().__version__}, {how}"
