"""Builds in child processes: a failed build poisons the next one in its process, and some graphs crash the library.

The child is `python -m onnxq.engines.build.child FOLDER`: it reads job.json there, writes build.log line by line as it goes,
and at its end result.json with the kernels, beside the engine. No result means that it crashed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxq.engines.prove.proof import CRASHED, LATE
from onnxq.errors import MissingDependencyError, VerificationError
from onnxq.graph import save_model

JOB, LOG, RESULT, LAYERS, ENGINE, MODEL = "job.json", "build.log", "result.json", "layers.txt", "engine", "model.onnx"
OPTIMIZED = "optimized.onnx"
_STDERR = "stderr.txt"
_TAIL = 12

Profile = Mapping[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a child builds. library: module to import. capability: e.g. "SM86", "" for the GPU in this machine.

    shapes: (min, opt, max) of the inputs whose shape is not fixed. cache: a timing cache to read and write, "" none.
    operators: paths of libraries with custom operators, for ONNX Runtime.
    """

    library: str
    capability: str = ""
    shapes: Profile = field(default_factory=dict)
    cache: str = ""
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a child ended. state: as of proof.Build, "missing" or "unable" when the library cannot work here.

    errors: what the library complained of, the parser's with their node. layers: the kernels as the library told them.
    """

    state: str
    version: str = ""
    seconds: float = 0.0
    reason: str = ""
    node: str = ""
    errors: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    layers: str = ""
    engine_bytes: int = 0


def build(proto: onnx.ModelProto, job: Job, folder: Path, *, timeout: float) -> Outcome:
    """Build in a fresh process; everything it makes lies in `folder` afterwards. Whatever goes wrong is an Outcome."""
    save_model(proto, folder / MODEL, overwrite=True)
    (folder / RESULT).unlink(missing_ok=True)
    (folder / JOB).write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "onnxq.engines.build.child", str(folder)]
    start = time.perf_counter()
    with open(folder / _STDERR, "wb") as sink:
        try:
            done = subprocess.run(
                command,
                stdout=sink,
                stderr=sink,
                stdin=subprocess.DEVNULL,
                check=False,
                timeout=timeout,
                env=_environ(),
            )
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    seconds = time.perf_counter() - start
    if code is None:
        reason = f"the build did not end within {timeout:g} s"
        return Outcome(state=LATE, seconds=seconds, reason=reason, log=_last_lines(folder))
    told = _result(folder)
    if told is None:
        return Outcome(state=CRASHED, seconds=seconds, reason=_death(code), log=_last_lines(folder))
    return _outcome(told, folder)


def _environ() -> dict[str, str]:
    """The child finds the same packages, wherever this process has them from."""
    paths = [path for path in sys.path if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parents[3]), *paths])}


def _result(folder: Path) -> dict[str, Any] | None:
    try:
        told = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return told if isinstance(told, dict) else None


def _outcome(told: Mapping[str, Any], folder: Path) -> Outcome:
    layers, engine = folder / LAYERS, folder / ENGINE
    well = not told.get("reason")
    return Outcome(
        state=str(told["state"]),
        version=str(told.get("version", "")),
        seconds=float(told.get("seconds", 0.0)),
        reason=str(told.get("reason", "")),
        node=str(told.get("node", "")),
        errors=tuple(told.get("errors", ())),
        log=() if well else _last_lines(folder),
        layers=layers.read_text(encoding="utf-8") if layers.exists() else "",
        engine_bytes=engine.stat().st_size if engine.exists() else 0,
    )


def _death(code: int) -> str:
    """What a process died of, as a person says it."""
    if code < 0:
        try:
            return f"the library crashed the process: {signal.Signals(-code).name} ({signal.strsignal(-code)})"
        except ValueError:
            return f"the library crashed the process: signal {-code}"
    return f"the process ended with exit code {code:#x} and no result"


def _last_lines(folder: Path) -> tuple[str, ...]:
    """The end of the log, and of what was said on stderr past it."""
    lines: list[str] = []
    for name in (LOG, _STDERR):
        path = folder / name
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [line.rstrip() for line in text.splitlines() if line.strip()][-_TAIL:]
    return tuple(lines[-_TAIL:])


def able(outcome: Outcome, library: str, install: str) -> Outcome:
    """The outcome, when the library could work at all. Raises MissingDependencyError or VerificationError if not."""
    if outcome.state == "missing":
        raise MissingDependencyError(library, f"cannot be imported ({outcome.reason})", install, code="Q805")
    if outcome.state == "unable":
        raise VerificationError(
            library,
            outcome.reason,
            "run it where there is one, or use `engine='tensorrt-rtx'`, which builds without a GPU",
            code="Q708",
        )
    return outcome
