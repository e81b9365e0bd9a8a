"""Answers of an engine by a process of its own: its library may crash, and a large model may take minutes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.backends.building import COMPILING, demand_build, serve_child
from onnxq.backends.engine import Engine, Job, Profile
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, ModelLike
from onnxq.runtime import Feeds

# Samples and answers of the process that runs a built model.
FEEDS, ANSWERS = "feeds.npz", "answers.npz"
# Seconds to compute one sample, and to load a built model.
_RUNNING = 600.0
Answer = Callable[[Feeds], Mapping[str, Any]]


class ServedRunner:
    """A Runner of a built model. seconds: of its last run there."""

    def __init__(self, name: str, folder: Path, ask: Callable[[float], str], inputs: frozenset[str]) -> None:
        self.name, self.seconds = name, 0.0
        self._folder, self._ask, self._inputs = folder, ask, inputs

    def infer(self, feeds: Feeds) -> Mapping[str, Any]:
        """One sample: arrays by name. Raises ModelError where the engine fails, or takes too long."""
        given: dict[str, Any] = {name: value for name, value in feeds.items() if name in self._inputs}
        np.savez(self._folder / FEEDS, **given)
        reply = json.loads(self._ask(_RUNNING))
        if "error" in reply:
            raise ModelError(self.name, f"the engine cannot run the model: {reply['error']}", code="Q115")
        self.seconds = reply["seconds"]
        with np.load(self._folder / ANSWERS) as answers:
            return dict(answers)


@contextmanager
def serve_model(
    engine: Engine, name: str, model: ModelLike, shapes: Profile, folder: Path, *, inputs: frozenset[str] | None = None
) -> Iterator[ServedRunner]:
    """Build a model and open it in a child process. inputs: names of those of its feeds that it reads; None: its own.

    Raises ModelError, naming the node, where the model is not built.
    """
    job = Job(shapes=shapes, options=dict(engine.options))
    demand_build(engine, model, job, folder, subject=name, timeout=COMPILING)
    known = frozenset(value.name for value in GraphIndex(model).inputs) if inputs is None else inputs
    with serve_child(engine, folder, {"options": dict(engine.options)}, timeout=_RUNNING) as ask:
        yield ServedRunner(name, folder, ask, known)


def answer_samples(open_model: Callable[[], Answer], describe: Callable[[Exception], str], folder: Path) -> None:
    """In the child process: answer each sample that a line on stdin announces with a line on stdout, until stdin ends.

    open_model: loads the model, which may print; it and the model raise whatever their library does.
    """
    # The library prints to stdout as well, which is the parent's.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    compute = open_model()
    print(json.dumps({"seconds": 0.0}), file=replies, flush=True)
    for _ in sys.stdin:
        reply: dict[str, Any] = {}
        try:
            with np.load(folder / FEEDS) as feeds:
                start = time.perf_counter()
                answers = compute(dict(feeds))
            reply["seconds"] = time.perf_counter() - start
            given: dict[str, Any] = dict(answers)
            np.savez(folder / ANSWERS, **given)
        except Exception as error:
            reply["error"] = describe(error)
        print(json.dumps(reply), file=replies, flush=True)
