"""TensorRT's engines timed in a child process: loaded, fed, and run between events of the GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.arrays import Array, Arrays
from onnxq.backends.engine import LOG, Engine, EngineTimes, TimedModel, Timing
from onnxq.backends.serving import FEEDS, time_in_child
from onnxq.backends.trt.build import load_plugins, make_logger
from onnxq.backends.trt.cuda import Cuda, CudaError, Launch
from onnxq.runtime import summarize_rounds
from onnxq.runtime.exchange import read_values
from onnxq.runtime.timing import count_block_runs, measure_rounds
from onnxq.sites import JsonObject

# Seconds of work before anything is timed: a GPU that idles runs at a lower clock.
_WARM_UP = 0.5
# How an engine runs: launched kernel by kernel, or as one captured graph.
EAGER = "eager"
GRAPH = "graph"


def time_engines(engine: Engine, models: Mapping[str, TimedModel], timing: Timing) -> EngineTimes:
    """Time built engines on this machine's GPU, side by side, in a child process: one for all of them.

    Raises VerificationError where none can be timed: no GPU, a crash, a build for another one.
    """
    result = time_in_child(engine, models, timing)
    times = result["times"]
    eager, graph = (
        {
            name: summarize_rounds(times[key])
            for name in models
            if (key := f"{name} {mode}") in times
        }
        for mode in (EAGER, GRAPH)
    )
    return EngineTimes(device=result["device"], eager=eager, graph=graph, reasons=result["reasons"])


def time_job(engine: Engine, job: JsonObject, folder: Path) -> JsonObject:
    """Time the engines of a job side by side, each launched kernel by kernel and as a graph.

    job: as `time_in_child` writes it. Returns the GPU's name, the seconds of each run by round, for every engine and
    way of running it that works, and why the others do not.
    """
    try:
        cuda = Cuda()
    except CudaError as error:
        return {"device": "", "failed": str(error)}
    library = import_module(engine.module)
    with open(folder / LOG, "w", encoding="utf-8") as sink:
        logger = make_logger(library, sink)
        if missing := load_plugins(library, logger, job["plugins"]):
            return {"device": cuda.name, "failed": missing}
        blocks = {}
        reasons: dict[str, str] = {}
        feeds = read_values(folder / FEEDS)
        for name, path in job["engines"].items():
            try:
                loaded = LoadedEngine(library, logger, cuda, Path(path), feeds[name])
                blocks[f"{name} {EAGER}"] = loaded.make_block(loaded.enqueue)
            except (
                Exception
            ) as error:  # the library's own kinds have no common base; the other engines are timed
                told = next(iter(logger.errors[-1:]), "")
                reasons[name] = f"{type(error).__name__}: {error}" + (f" ({told})" if told else "")
                continue
            try:
                blocks[f"{name} {GRAPH}"] = loaded.make_block(cuda.capture(loaded.enqueue))
            except Exception as error:  # work that waits for the CPU cannot be captured
                reasons[name] = f"no CUDA graph: {type(error).__name__}: {error}"
        times = measure_rounds(blocks, rounds=job["rounds"], seconds=job["seconds"], precision=0.0)
    return {"device": cuda.name, "failed": "", "times": times, "reasons": reasons}


class LoadedEngine:
    """An engine with its inputs and outputs on the GPU."""

    def __init__(self, library: Any, logger: Any, cuda: Cuda, path: Path, feeds: Arrays) -> None:
        self._cuda = cuda
        self._runtime = library.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise RuntimeError("the engine cannot be loaded")
        self._context = self._engine.create_execution_context()
        # Buffers of inputs that the CPU reads must live as long as the context.
        self._held: list[Array] = []
        names = [self._engine.get_tensor_name(k) for k in range(self._engine.num_io_tensors)]
        inputs = [
            name
            for name in names
            if self._engine.get_tensor_mode(name) == library.TensorIOMode.INPUT
        ]
        for name in inputs:
            self._bind_input(library, name, np.asarray(feeds[name], order="C"))
        for name in names:
            if name not in inputs:
                size = self._context.get_max_output_size(name)
                self._context.set_tensor_address(name, cuda.allocate(int(size)))

    def _bind_input(self, library: Any, name: str, array: Array) -> None:
        on_cpu = self._engine.get_tensor_location(name) == library.TensorLocation.HOST
        # Inputs that sizes are computed from.
        if on_cpu:
            self._held.append(array)
        else:
            self._context.set_input_shape(name, tuple(array.shape))
        self._context.set_tensor_address(
            name, int(array.ctypes.data) if on_cpu else self._cuda.upload(array)
        )

    def enqueue(self) -> None:
        """Put one run into the stream."""
        if not self._context.execute_async_v3(self._cuda.stream.value):
            raise RuntimeError("the engine does not run")

    def make_block(self, launch: Launch) -> Callable[[], list[float]]:
        """Warm up a way to run, and make a block of it that lasts long enough to be measured."""
        single = partial(_time_launches, self._cuda, launch, self._cuda.make_events(2))
        end = time.perf_counter() + _WARM_UP
        while time.perf_counter() < end:
            single()
        events = self._cuda.make_events(count_block_runs(single) + 1)
        return partial(_time_launches, self._cuda, launch, events)


def _time_launches(cuda: Cuda, launch: Launch, events: Sequence[Any]) -> list[float]:
    """Seconds between neighbouring events with a launch between each two."""
    cuda.record(events[0])
    for event in events[1:]:
        launch()
        cuda.record(event)
    cuda.synchronize()
    return list(starmap(cuda.measure, pairwise(events)))
