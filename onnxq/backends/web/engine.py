"""onnxruntime-web as an engine: in Node.js, with the package that npm installed in this folder or one above it.

A process of Node.js answers requests (serve.mjs).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnxq.arrays import RunValues
from onnxq.backends import engine
from onnxq.backends.building import COMPILING, Ask, serve_process
from onnxq.backends.engine import ENGINE, MODEL, BuildResult, BuildState, Job
from onnxq.backends.optimized import OPTIMIZED, GraphEngine
from onnxq.errors import CauseAndFix, ModelError, OnnxqError
from onnxq.files import ScratchFolder
from onnxq.graph import GraphIndex, ModelLike, name_nodes, save_model
from onnxq.runtime import Feeds, detect_cpu, summarize_rounds
from onnxq.runtime.faults import explain_load_failure, explain_run_failure
from onnxq.runtime.timing import order_round
from onnxq.sites import JsonObject, Refusal

PACKAGE = "onnxruntime-web"
# The release that costs and kernels were measured on.
VERSION = "1.30.0"
INSTALL = f"npm install {PACKAGE}@{VERSION} --ignore-scripts"
SERVER = Path(__file__).with_name("serve.mjs")
# Seconds to start, and to run one sample; of a large model the first run takes some.
_STARTING = 120.0
_RUNNING = 600.0
_FEEDS = "feeds"
_ANSWERS = "answers"
_ERROR = re.compile(r"ERROR_CODE: (\d+), ERROR_MESSAGE: (.*)", re.DOTALL)
# ONNX Runtime's code of a node without a kernel, and its words in front of the message elsewhere.
_NO_KERNEL = "9"
_NO_KERNEL_WORDS = "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : "
# Here it does not say which node has the operator.
_UNREGISTERED = re.compile(r"No Op registered for (\S+) with")
# Runs of each model before those that count: WebAssembly is compiled once more, with optimizations, while it runs.
_WARM = 8
# Rounds at least, where seconds are given.
_ROUNDS = 10


def find_package() -> Path | None:
    """The folder of the package as Node.js finds it from this folder: here or above, else by NODE_PATH."""
    here = Path.cwd()
    places = [place / "node_modules" for place in (here, *here.parents)]
    places += [Path(place) for place in os.environ.get("NODE_PATH", "").split(os.pathsep) if place]
    return next(
        (place / PACKAGE for place in places if (place / PACKAGE / "package.json").is_file()), None
    )


def read_version(package: Path) -> str:
    """The release of the package in a folder."""
    return str(json.loads((package / "package.json").read_bytes())["version"])


def explain_absence() -> CauseAndFix | None:
    """Why nothing can be run here, and the remedy; None where it can."""
    if shutil.which("node") is None:
        return (
            "Node.js is not installed (no program `node`)",
            "install Node.js 20 or newer, from https://nodejs.org",
        )
    if find_package() is None:
        return f"the npm package {PACKAGE} is neither in this folder nor in one above it", INSTALL
    return None


class Node:
    """A process of Node.js with the package, open in a `with` block; arrays and models go through its folder.

    Raises ModelError where it dies, or does not answer in time.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._stack = ExitStack()
        self._count = 0

    @cached_property
    def folder(self) -> Path:
        """A folder of its own."""
        return Path(self._stack.enter_context(ScratchFolder()))

    @cached_property
    def _ask(self) -> Ask:
        command = ["node", str(SERVER), str(find_package()), str(self._threads)]
        server = serve_process(PACKAGE, command, self.folder, os.environ, timeout=_STARTING)
        return self._stack.enter_context(server)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def request(self, action: str, timeout: float = _RUNNING, **arguments: Any) -> JsonObject:
        """Have the process do something. Raises _Fault with ONNX Runtime's words where it fails."""
        answer: JsonObject = json.loads(self._ask(timeout, json.dumps({"do": action, **arguments})))
        if "error" in answer:
            found = _ERROR.search(answer["error"])
            words = _NO_KERNEL_WORDS if found and found[1] == _NO_KERNEL else ""
            raise _Fault(f"{words}{found[2] if found else answer['error']}")
        return answer

    def optimize(self, model: Path, level: str, output: Path) -> None:
        """Write the graph that a file becomes at a level. Raises ModelError, naming the node."""
        try:
            self.request("optimize", COMPILING, model=str(model), level=level, output=str(output))
        except _Fault as fault:
            raise _explain_fault(
                fault, PACKAGE, onnx.load(model, load_external_data=False)
            ) from None

    def open_session(self, name: str, model: ModelLike) -> None:
        """Load a model. Raises ModelError, naming the node."""
        save_model(model, self.folder / MODEL, overwrite=True)
        try:
            self.request("open", COMPILING, session=name, model=str(self.folder / MODEL))
        except _Fault as fault:
            raise _explain_fault(fault, name, model) from None

    def write_feeds(self, feeds: Feeds) -> JsonObject:
        """The feeds in a file, as requests name them."""
        self._count += 1
        path = self.folder / f"{_FEEDS}{self._count}"
        # WebAssembly's memory is not this process': arrays go through files.
        arrays = {name: np.asarray(value) for name, value in feeds.items()}
        path.write_bytes(b"".join(value.tobytes() for value in arrays.values()))
        inputs = [
            {"name": name, "type": str(value.dtype), "dims": value.shape}
            for name, value in arrays.items()
        ]
        return {"file": str(path), "inputs": inputs}

    def time_sessions(
        self, names: Sequence[str], feeds: Sequence[Feeds], **limits: Any
    ) -> list[list[float]]:
        """Seconds of each run of each session, in turns. limits: as of the action `time`."""
        written = [self.write_feeds(arrays) for arrays in feeds]
        places = range(len(names))
        orders = [list(order_round(places, turn)) for turn in range(2 * len(names))]
        times: list[list[float]] = self.request(
            "time", COMPILING, names=names, feeds=written, orders=orders, **limits
        )["times"]
        return times


class _Fault(Exception):
    """ONNX Runtime's own words."""


def _explain_fault(fault: _Fault, subject: str, model: ModelLike) -> OnnxqError:
    """Why a model was refused, naming the node."""
    # Messages name nodes as the file does; unnamed ones by the name that they get here.
    nodes = GraphIndex(name_nodes(model)).nodes
    missing = _UNREGISTERED.search(str(fault))
    blamed = next((node for node in nodes if missing and node.op_type == missing[1]), None)
    text = f"{fault} operator ({blamed.op_type}) in node ({blamed.name})" if blamed else str(fault)
    return explain_load_failure(_Fault(text), subject, nodes={node.name for node in nodes})


class NodeRunner:
    """A Runner of a model in Node.js."""

    def __init__(self, name: str, node: Node, model: ModelLike) -> None:
        self.name = name
        self.seconds = 0.0
        self._node = node
        self._inputs = [value.name for value in GraphIndex(model).inputs]
        node.open_session(name, model)

    def infer(self, feeds: Feeds) -> RunValues:
        """One sample: arrays by name. Raises ModelError where the run fails."""
        given = self._node.write_feeds({name: feeds[name] for name in self._inputs})
        path = self._node.folder / _ANSWERS
        try:
            answer = self._node.request("run", session=self.name, feeds=given, output=str(path))
        except _Fault as fault:
            raise explain_run_failure(fault, self.name) from None
        finally:
            Path(given["file"]).unlink()
        self.seconds = answer["seconds"]
        data = path.read_bytes()
        arrays = {}
        start = 0
        for spec in answer["outputs"]:
            value = np.frombuffer(data, spec["type"], int(np.prod(spec["dims"])), start)
            arrays[spec["name"]] = value.reshape(spec["dims"])
            start += value.nbytes
        return arrays


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
            return BuildResult(state=BuildState.REFUSED, reason=error.cause, node=error.node)
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

    def time_models(
        self, models: Mapping[str, engine.TimedModel], timing: engine.Timing
    ) -> engine.EngineTimes:
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
        return engine.EngineTimes(device=f"WebAssembly on this CPU ({detect_cpu()})", eager=eager)
