"""TensorRT's engines timed in a child process: one for all of them, so that they can be timed side by side.

The child is `python -m onnxq.engines.bench.child FOLDER`: it reads job.json and feeds.npz there and writes result.json.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.engines.bench.engine import EAGER, FEEDS, GRAPH
from onnxq.engines.bench.model import EngineTimes
from onnxq.engines.builder.gpu import count_gpus
from onnxq.engines.builder.library import LIBRARIES, TRT
from onnxq.engines.builder.process import (
    ENGINE,
    BuildState,
    Job,
    build_engine,
    check_library,
    describe_death,
    read_result,
    run_child,
)
from onnxq.engines.builder.shapes import find_sample_shapes
from onnxq.engines.diff.trt import find_engine
from onnxq.errors import VerificationError
from onnxq.files import ScratchFolder
from onnxq.graph import ModelLike, ValueInfo, get_index
from onnxq.runtime import Latency, convert_floats, summarize_rounds

Feeds = Mapping[str, NDArray[Any]]
# Seconds besides those of the timing: loading engines, and for RTX compiling their kernels.
_LOADING = 600.0
# Seconds for the build of one engine.
_BUILDING = 3600.0


def time_engines(
    engine: str,
    built: Mapping[str, tuple[Path, Feeds]],
    *,
    plugins: Sequence[str] = (),
    rounds: int | None = None,
    seconds: float = 8.0,
) -> EngineTimes:
    """Time built engines on this machine's GPU, side by side.

    engine: the library. built: path and feeds of each engine, by name. rounds, seconds: as of `measure_rounds`.
    Raises VerificationError where none can be timed: no GPU, a crash, a build for another one.
    """
    title = LIBRARIES[engine].title
    with ScratchFolder() as folder:
        places, arrays = _place_feeds({name: feeds for name, (_, feeds) in built.items()})
        np.savez(folder / FEEDS, **arrays)  # type: ignore[arg-type]
        job = {
            "engine": engine, "plugins": list(plugins), "rounds": rounds, "seconds": seconds, "feeds": places,
            "engines": {name: str(path) for name, (path, _) in built.items()},
        }  # fmt: skip
        try:
            code = run_child("onnxq.engines.bench.child", folder, job, timeout=_LOADING + 2 * seconds)
            found = read_result(folder) or {"failed": describe_death(code)}
        except subprocess.TimeoutExpired as error:
            found = {"failed": f"timing did not end within {error.timeout:g} s"}
    times, reasons = found.get("times", {}), found.get("reasons", {})
    if not times:
        cause = found["failed"] or "; ".join(dict.fromkeys(reasons.values()))
        raise VerificationError(title, f"no engine could be timed: {cause}", "see the cause", code="Q710")
    by_mode = {
        mode: {name: summarize_rounds(times[key]) for name in built if (key := f"{name} {mode}") in times}
        for mode in (EAGER, GRAPH)
    }
    return EngineTimes(device=found["device"], eager=by_mode[EAGER], graph=by_mode[GRAPH], reasons=reasons)


def _place_feeds(feeds: Mapping[str, Feeds]) -> tuple[dict[str, dict[str, str]], dict[str, NDArray[Any]]]:
    """The arrays under keys that a file can hold, and the key of every input of every engine."""
    places: dict[str, dict[str, str]] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for name, own in feeds.items():
        places[name] = {}
        for key, value in own.items():
            places[name][key] = f"a{len(arrays)}"
            arrays[places[name][key]] = value
    return places, arrays


def demand_gpu(subject: str) -> str:
    """The TensorRT that can be timed here. Raises VerificationError naming `subject` where none can."""
    engine = find_engine()
    if engine is None or not count_gpus():
        cause = "TensorRT is not installed" if engine is None else "this machine has no NVIDIA GPU, or no driver"
        fix = f"take `placement='rules'`, or a machine with one and {LIBRARIES[TRT].install}"
        raise VerificationError(subject, f"TensorRT's engines are timed on a GPU: {cause}", fix, code="Q708")
    return engine


def time_models_on_gpu(
    models: Mapping[str, ModelLike], feeds: Feeds, rounds: int, *, plugins: tuple[str, ...] = ()
) -> dict[str, Latency]:
    """Build models for this machine's GPU and time them as CUDA graphs side by side; those that fail are left out.

    Raises VerificationError where none can be timed.
    """
    engine = demand_gpu("placement")
    with ScratchFolder() as folder:
        built = {}
        for k, (name, model) in enumerate(models.items()):
            index, place = get_index(model), folder / str(k)
            place.mkdir()
            own = fit_feeds(index.inputs, feeds)
            job = Job(engine=engine, shapes=find_sample_shapes(index, [own]), plugins=plugins)
            result = check_library(build_engine(model, job, place, timeout=_BUILDING), engine)
            if result.state is BuildState.BUILT:
                built[name] = place / ENGINE, own
        times = time_engines(engine, built, plugins=plugins, rounds=rounds)
    return {**times.eager, **times.graph}


def fit_feeds(inputs: Sequence[ValueInfo], feeds: Feeds) -> dict[str, NDArray[Any]]:
    """The feeds of a model's inputs in its own float types."""
    own = {value.name: feeds[value.name] for value in inputs}
    return convert_floats(own, {value.name: value.dtype for value in inputs})
