"""Models of an engine timed side by side, in one child process for all of them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.arrays import Array
from onnxq.backends.building import describe_death, read_result, run_child
from onnxq.backends.engine import Engine, TimedModel, Timing
from onnxq.errors import VerificationError
from onnxq.files import ScratchFolder
from onnxq.runtime import Feeds

FEEDS = "feeds.npz"
# Seconds besides those of the timing: loading engines, and compiling kernels.
_LOADING = 600.0


def time_in_child(engine: Engine, models: Mapping[str, TimedModel], timing: Timing) -> dict[str, Any]:
    """The result of the engine's `run_job` in a child: `times`, seconds of each run by round, `reasons`, `device`.

    Raises VerificationError where nothing can be timed: no device, a crash, a build for another one.
    """
    with ScratchFolder() as folder:
        places, arrays = _place_feeds({name: entry.feeds for name, entry in models.items()})
        np.savez(folder / FEEDS, **arrays)  # type: ignore[arg-type]
        job = {
            "plugins": list(timing.plugins),
            "rounds": timing.rounds,
            "seconds": timing.seconds,
            "threads": timing.threads,
            "feeds": places,
            "engines": {name: str(entry.path) for name, entry in models.items()},
            "options": dict(engine.options),
        }
        try:
            code = run_child(engine, folder, job, timeout=_LOADING + 2 * timing.seconds)
            result = read_result(folder) or {"failed": describe_death(code)}
        except subprocess.TimeoutExpired as error:
            result = {"failed": f"timing did not end within {error.timeout:g} s"}
    result = {"times": {}, "reasons": {}, **result}
    if not result["times"]:
        cause = result["failed"] or "; ".join(dict.fromkeys(result["reasons"].values()))
        raise VerificationError(engine.title, f"no engine could be timed: {cause}", "see the cause", code="Q710")
    return result


def _place_feeds(feeds: Mapping[str, Feeds]) -> tuple[dict[str, dict[str, str]], dict[str, Array]]:
    """The arrays under keys that a file can hold, and the key of every input of every engine."""
    places: dict[str, dict[str, str]] = {}
    arrays: dict[str, Array] = {}
    for name, own in feeds.items():
        places[name] = {}
        for key, value in own.items():
            places[name][key] = f"a{len(arrays)}"
            arrays[places[name][key]] = value
    return places, arrays


def read_feeds(folder: Path, places: Mapping[str, str]) -> dict[str, Array]:
    """The inputs of one model, in the child process. places: the model's part of the job's `feeds`."""
    with np.load(folder / FEEDS) as arrays:
        return {name: arrays[key] for name, key in places.items()}
