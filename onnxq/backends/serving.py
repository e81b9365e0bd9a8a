"""Answers and times of an engine's models, by processes of their own: its library may crash, and may take minutes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnxq.arrays import RunValues
from onnxq.backends import building
from onnxq.backends.engine import Engine, Job, TimedModel, Timing
from onnxq.errors import ModelError, VerificationError
from onnxq.files import ScratchFolder
from onnxq.graph import GraphIndex, ModelLike
from onnxq.runtime import Feeds
from onnxq.sites import JsonObject, NameSet, drop_repeats
from onnxq.workers import read_value, write_value

# Samples and answers of the process that runs a built model, and the inputs of each model that is timed.
FEEDS = "feeds.npz"
ANSWERS = "answers.npz"
# Seconds to compute one sample, and to load a built model.
_RUNNING = 600.0
# Seconds besides those of the timing: loading engines, and compiling kernels.
_LOADING = 600.0
Answer = Callable[[Feeds], Mapping[str, Any]]


@dataclass(eq=False)
class ServedRunner:
    """A Runner of a built model. seconds: of its last run there."""

    name: str
    folder: Path
    ask: building.Ask
    inputs: NameSet
    seconds: float = 0.0

    def infer(self, feeds: Feeds) -> RunValues:
        """One sample: arrays by name. Raises ModelError where the engine fails, or takes too long."""
        given = {name: value for name, value in feeds.items() if name in self.inputs}
        write_value(self.folder / FEEDS, given)
        reply = json.loads(self.ask(_RUNNING, ""))
        if "error" in reply:
            raise ModelError(
                self.name, f"the engine cannot run the model: {reply['error']}", code="Q115"
            )
        self.seconds = reply["seconds"]
        answers: RunValues = read_value(self.folder / ANSWERS)
        return answers


@contextmanager
def serve_model(
    engine: Engine, name: str, model: ModelLike, job: Job, folder: Path
) -> Iterator[ServedRunner]:
    """Build a model and open it in a child process. Raises ModelError, naming the node, where it is not built."""
    building.demand_build(
        engine,
        model,
        replace(job, options=dict(engine.options)),
        folder,
        subject=name,
        timeout=building.COMPILING,
    )
    inputs = frozenset(value.name for value in GraphIndex(model).inputs)
    with building.serve_child(engine, folder, timeout=_RUNNING) as ask:
        yield ServedRunner(name, folder, ask, inputs)


def answer_samples(
    open_model: Callable[[], Answer], describe: Callable[[Exception], str], folder: Path
) -> None:
    """In the child process: answer each sample that a line on stdin announces with a line on stdout, until stdin ends.

    open_model: loads the model, which may print; it and the model raise whatever their library does.
    """
    # The library prints to stdout as well, which is the parent's.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    compute = open_model()
    print(json.dumps({"seconds": 0.0}), file=replies, flush=True)
    for _ in sys.stdin:
        reply: JsonObject = {}
        try:
            feeds = read_value(folder / FEEDS)
            start = time.perf_counter()
            answers = compute(feeds)
            reply["seconds"] = time.perf_counter() - start
            write_value(folder / ANSWERS, answers)
        except Exception as error:
            reply["error"] = describe(error)
        print(json.dumps(reply), file=replies, flush=True)


def time_in_child(engine: Engine, models: Mapping[str, TimedModel], timing: Timing) -> JsonObject:
    """The result of the engine's `run_job` in a child: `times`, seconds of each run by round, `reasons`, `device`.

    Raises VerificationError where nothing can be timed: no device, a crash, a build for another one.
    """
    with ScratchFolder() as folder:
        write_value(folder / FEEDS, {name: entry.feeds for name, entry in models.items()})
        job = {
            "plugins": list(timing.plugins),
            "rounds": timing.rounds,
            "seconds": timing.seconds,
            "threads": timing.threads,
            "engines": {name: str(entry.path) for name, entry in models.items()},
            "options": dict(engine.options),
        }
        try:
            code = building.run_child(engine, folder, job, timeout=_LOADING + 2 * timing.seconds)
            result = building.read_result(folder) or {"failed": building.describe_death(code)}
        except subprocess.TimeoutExpired as error:
            result = {"failed": f"timing did not end within {error.timeout:g} s"}
    result = {"failed": "", "times": {}, "reasons": {}, **result}
    if not result["times"]:
        cause = result["failed"] or "; ".join(drop_repeats(result["reasons"].values()))
        raise VerificationError(
            engine.title, f"no engine could be timed: {cause}", "see the cause", code="Q710"
        )
    return result
