"""onnxruntime-web as an engine: in Node.js, with the package that npm installed in this folder or one above it."""

from __future__ import annotations

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
    TimedModel,
    Timing,
)
from onnxq.backends.optimized import OPTIMIZED, GraphEngine
from onnxq.backends.web.node import (
    INSTALL,
    PACKAGE,
    Node,
    NodeRunner,
    explain_absence,
    find_package,
    read_version,
)
from onnxq.errors import ModelError
from onnxq.graph import ModelLike
from onnxq.runtime import NodeError, detect_cpu, summarize_rounds
from onnxq.sites import Refusal

# Runs of each model before those that count: WebAssembly is compiled once more, with optimizations, while it runs.
_WARM = 8
# Rounds at least, where seconds are given.
_ROUNDS = 10


class WebEngine(GraphEngine):
    """onnxruntime-web on WebAssembly with SIMD, in Node.js."""

    name = "web"
    title = family = PACKAGE
    place = "for browsers, in Node.js"
    module = PACKAGE
    install = INSTALL
    any_size = True
    judges = True

    @property
    def installed(self) -> bool:
        """True where Node.js and the package are found."""
        return explain_absence() is None

    def describe_version(self) -> str:
        """The package with its version."""
        package = find_package()
        return self.title if package is None else f"{self.title} {read_version(package)}"

    def build(self, job: Job, folder: Path) -> BuildResult:
        """Have the library write the graph that it runs, and the one before tensors are laid out anew."""
        absence = explain_absence()
        if absence is not None:
            return BuildResult(state=BuildState.MISSING, reason=absence[0], fix=absence[1])
        start = time.perf_counter()
        # Integer kernels lay channels out last at the highest level alone, under new names of tensors.
        try:
            with Node() as node:
                for level, name in (("all", ENGINE), ("extended", OPTIMIZED)):
                    node.optimize(folder / MODEL, level, folder / name)
        except ModelError as error:
            blamed = error.node if isinstance(error, NodeError) else ""
            return BuildResult(state=BuildState.REFUSED, reason=error.cause, node=blamed)
        return BuildResult(state=BuildState.BUILT, seconds=time.perf_counter() - start)

    def find_obstacle(self) -> Refusal | None:
        """Why nothing can be run here."""
        absence = explain_absence()
        return None if absence is None else Refusal(self.name, *absence, code="R111")

    @contextmanager
    def open_runner(
        self, name: str, model: ModelLike, job: Job, folder: Path
    ) -> Iterator[NodeRunner]:
        """The model in a process of Node.js."""
        with Node() as node:
            runner = NodeRunner(name, node, model)
            if not job.debug_tensors:
                # The check of `quantize` counts the kernels of what it runs.
                node.optimize(node.folder / MODEL, "extended", folder / OPTIMIZED)
            yield runner

    def time_models(self, models: Mapping[str, TimedModel], timing: Timing) -> EngineTimes:
        """Time the models themselves in turns, in one process of Node.js."""
        self.demand_device(f"engine {self.name}")
        with Node(timing.threads) as node:
            for name, entry in models.items():
                node.open_session(name, entry.model)
            # All sessions share one memory of WebAssembly, and code that is compiled for all of them.
            feeds = [entry.feeds for entry in models.values()]
            limits = {
                "warm": _WARM,
                "rounds": timing.rounds,
                "least": _ROUNDS,
                "seconds": timing.seconds,
            }
            times = node.time_sessions([*models], feeds, **limits)
        eager = {
            name: summarize_rounds([[one] for one in seconds], timing.threads)
            for name, seconds in zip(models, times, strict=True)
        }
        return EngineTimes(device=f"WebAssembly on this CPU ({detect_cpu()})", eager=eager)
