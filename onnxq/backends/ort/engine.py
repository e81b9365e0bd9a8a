"""ONNX Runtime as an engine: a build is the graph that it optimizes a model into."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from onnxq.backends.engine import (
    ENGINE,
    MODEL,
    BuildResult,
    BuildState,
    EngineTimes,
    Job,
    Kernels,
    SessionRunner,
    TimedModel,
    Timing,
)
from onnxq.backends.optimized import OPTIMIZED, GraphEngine, read_optimized
from onnxq.errors import MissingDependencyError, ModelError
from onnxq.graph import ModelLike, save_model
from onnxq.runtime import UnknownOperatorError, declare_types, detect_cpu, time_models
from onnxq.runtime.session import Session, optimize_graph
from onnxq.sites import Refusal


class OrtEngine(GraphEngine):
    """ONNX Runtime on the CPU of this machine, or on one of its providers."""

    name = "ort"
    title = family = "ONNX Runtime"
    place = "for this CPU"
    module = "onnxruntime"
    packages = ("onnxruntime", "onnxruntime-gpu")
    install = 'pip install "onnxq[cpu]"'
    takes = ("ort_library", "provider")
    any_size = True
    saturates = True

    def build(self, job: Job, folder: Path) -> BuildResult:
        """Optimize the model. Beside the graph as it runs (`engine`), the one before tensors are laid out anew:

        same fusions, but every tensor that survives still has its own name, by which kernels find their nodes.
        """
        start = time.perf_counter()
        try:
            for layout, name in ((True, ENGINE), (False, OPTIMIZED)):
                optimized = optimize_graph(folder / MODEL, layout=layout, libraries=job.operators)
                declare_types(optimized)
                save_model(optimized, folder / name, overwrite=True)
        except MissingDependencyError as error:
            return BuildResult(state=BuildState.MISSING, reason=error.cause)
        except UnknownOperatorError as error:
            reason = f"{error.fault}; {error.fix}"
            return BuildResult(state=BuildState.REFUSED, reason=reason, node=error.node)
        except ModelError as error:
            return BuildResult(state=BuildState.REFUSED, reason=error.cause, node=error.node)
        return BuildResult(state=BuildState.BUILT, seconds=time.perf_counter() - start)

    def list_kernels(self, model: ModelLike) -> Kernels:
        """The kernels of a model, optimized in this process."""
        return read_optimized(model, optimize_graph(model, layout=False))

    @contextmanager
    def open_runner(
        self, name: str, model: ModelLike, job: Job, folder: Path
    ) -> Iterator[SessionRunner]:
        """The model in a session, as its users run it; its kernels can be read from the folder."""
        save_model(optimize_graph(model, layout=False), folder / OPTIMIZED, overwrite=True)
        yield SessionRunner(name, Session(model, threads=1))

    def find_obstacle(self) -> Refusal | None:
        """None: without ONNX Runtime there is no reference either."""
        return None

    def time_models(self, models: Mapping[str, TimedModel], timing: Timing) -> EngineTimes:
        """Time the models themselves: the graphs that builds leave are bound to no session."""
        # No early end, since rare slow runs count here.
        times = time_models(
            {name: entry.model for name, entry in models.items()},
            next(iter(models.values())).feeds,
            threads=timing.threads,
            rounds=timing.rounds,
            seconds=timing.seconds,
            precision=0.0,
            provider=timing.provider,
        )
        return EngineTimes(device=detect_cpu(), eager=times)
