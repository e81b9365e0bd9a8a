"""Builds in child processes: a failed build poisons the next one in its process, and some graphs crash the library.

The child is `python -m onnxq.engines.builder.child FOLDER`: it reads job.json there, writes build.log line by line,
and at its end result.json, beside the engine and the list of its kernels. No result means that it crashed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onnxq.engines.builder.library import LIBRARIES, RTX
from onnxq.errors import ConfigError, MissingDependencyError, VerificationError
from onnxq.graph import ModelLike, save_model

JOB, LOG, RESULT, ENGINE, MODEL = "job.json", "build.log", "result.json", "engine", "model.onnx"
# ONNX Runtime's graph with the names of the model's tensors; TensorRT's kernels as its log or its inspector lists them.
OPTIMIZED, LAYERS, INSPECTION = "optimized.onnx", "layers.txt", "layers.json"
_STDERR, _LINKS = "stderr.txt", "links"
# Lines of the log and of stderr that are shown.
_TAIL = 12
# The differences between equal errors of two graphs: names in quotes or brackets, numbers, addresses.
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d+")
# Characters of an error that are compared: behind them libraries list their own stack.
_COMPARED = 120

Profile = Mapping[str, tuple[tuple[int, ...], ...]]


class BuildState(str, Enum):
    """How a build ended."""

    BUILT = "built"
    REFUSED = "refused"  # by the parser
    FAILED = "failed"  # in the builder
    CRASHED = "crashed"
    LATE = "timed out"
    # The library cannot work here: not installed, no GPU, not for the compute capability asked for, no such plugin.
    MISSING = "missing"
    UNABLE = "unable"
    NO_CAPABILITY = "no capability"
    NO_PLUGIN = "no plugin"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Job:
    """Orders for a child."""

    # Of ENGINES.
    engine: str
    # E.g. (8, 6), () for the GPU in this machine.
    capability: tuple[int, ...] = ()
    # (min, opt, max) of the inputs whose shape is not fixed.
    shapes: Profile = field(default_factory=dict)
    # A timing cache to read and write, "" none.
    cache: str = ""
    # Paths of libraries with custom operators, for ONNX Runtime, and with plugins, for TensorRT.
    operators: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    # TensorRT also gives the tensors that survive fusion; this prevents none, as outputs would.
    debug_tensors: bool = False
    # TensorRT may round float32 factors to it.
    tf32: bool = True


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """How a child ended."""

    state: BuildState
    seconds: float = 0.0
    # Why there is no engine, in the library's words, and the node that it blames.
    reason: str = ""
    node: str = ""
    # Its last lines, when it did not end well.
    log: tuple[str, ...] = ()
    engine_bytes: int = 0
    # Of a process that crashed.
    exit_code: int = 0

    def fails_like(self, other: BuildResult) -> bool:
        """True when both ended in one state, by the same signal and with the same words, names and numbers aside."""
        mine, theirs = (_VARYING.sub("", one.reason)[:_COMPARED] for one in (self, other))
        return (self.state, self.exit_code) == (other.state, other.exit_code) and mine == theirs


def build_engine(model: ModelLike, job: Job, folder: Path, *, timeout: float) -> BuildResult:
    """Build in a fresh process; its files lie in `folder` afterwards. Whatever goes wrong is a result.

    timeout: seconds.
    """
    save_model(model, folder / MODEL, overwrite=True)
    start = time.perf_counter()
    try:
        found = _link_library(job, folder)
        code = run_child("onnxq.engines.builder.child", folder, asdict(job), timeout=timeout, environment=found)
    except subprocess.TimeoutExpired:
        reason = f"the build did not end within {timeout:g} s"
        return BuildResult(state=BuildState.LATE, seconds=timeout, reason=reason, log=_last_lines(folder))
    row = read_result(folder)
    if row is None:
        crash = BuildResult(state=BuildState.CRASHED, reason=describe_death(code), exit_code=code)
        result = replace(crash, seconds=time.perf_counter() - start)
    else:
        result = BuildResult(**{**row, "state": BuildState(row["state"]), "log": ()})
    if result.state is BuildState.BUILT:
        return replace(result, engine_bytes=(folder / ENGINE).stat().st_size)
    return replace(result, log=_last_lines(folder))


def run_child(
    module: str,
    folder: Path,
    job: Mapping[str, Any],
    *,
    timeout: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run a module of onnxq with `folder` as its argument, where it finds its job; returns its exit code.

    The child finds the same packages as this process, wherever it has them from. timeout: seconds. environment:
    variables besides. Raises subprocess.TimeoutExpired.
    """
    (folder / RESULT).unlink(missing_ok=True)
    (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
    paths = [str(Path(__file__).resolve().parents[3]), *(path for path in sys.path if path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    with open(folder / _STDERR, "wb") as sink:
        done = subprocess.run(
            [sys.executable, "-m", module, str(folder)], stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
            check=False, timeout=timeout, env=variables,
        )  # fmt: skip
    return done.returncode


def _link_library(job: Job, folder: Path) -> dict[str, str]:
    """The environment in which TensorRT-RTX finds itself when it meets a plugin."""
    home = find_spec("tensorrt_rtx_libs") if job.engine == RTX and job.plugins and sys.platform == "linux" else None
    if home is None:
        return {}
    # TensorRT-RTX's parser loads libtensorrt_rtx.so by this name when it meets a plugin, and ends the process where it
    # is not found; the wheel holds it under its versioned name only.
    (folder / _LINKS).mkdir(exist_ok=True)
    for library in Path(next(iter(home.submodule_search_locations or ()))).glob("libtensorrt_rtx.so.*"):
        link = folder / _LINKS / "libtensorrt_rtx.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    known = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder / _LINKS), *known])}


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a child; None where it left none."""
    try:
        found: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return found


def describe_death(code: int) -> str:
    """The end of a process that left no result, by its exit code."""
    if code < 0:
        try:
            return f"the library crashed the process: {signal.Signals(-code).name} ({signal.strsignal(-code)})"
        except ValueError:
            return f"the library crashed the process: signal {-code}"
    return f"the process ended with exit code {code:#x} and no result"


def _last_lines(folder: Path) -> tuple[str, ...]:
    """The end of the log, and of the text that came on stderr past it."""
    lines: list[str] = []
    for name in (LOG, _STDERR):
        path = folder / name
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [line.rstrip() for line in text.splitlines() if line.strip()][-_TAIL:]
    return tuple(lines[-_TAIL:])


def check_library(result: BuildResult, engine: str) -> BuildResult:
    """The result, if the library could work at all. Raises MissingDependencyError or VerificationError if not.

    ConfigError for a plugin that it cannot load.
    """
    library = LIBRARIES[engine]
    if result.state is BuildState.NO_PLUGIN:
        fix = "give a shared library for this machine and this release that exports getCreators or getPluginCreators"
        raise ConfigError("plugin", f"{library.title} cannot load it: {result.reason}", fix, code="Q322")
    if result.state is BuildState.MISSING:
        cause = f"cannot be imported ({result.reason})"
        raise MissingDependencyError(library.module, cause, library.install, code="Q805")
    if result.state is BuildState.UNABLE:
        fix = "run it where there is one, or use `engine='tensorrt-rtx'`, which builds without a GPU"
        raise VerificationError(library.module, result.reason, fix, code="Q708")
    return result
