"""Builds in child processes: a failed build poisons the next one in its process, and some graphs crash the library.

The child is `python -m onnxq.backends.child FOLDER`: it reads job.json there, writes build.log line by line, and at its
end result.json, beside the engine and the list of its kernels. No result means that it crashed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

from onnxq.backends.engine import ENGINE, LOG, MODEL, BuildResult, BuildState, Engine, Job
from onnxq.errors import ConfigError, MissingDependencyError, ModelError, VerificationError
from onnxq.files import ScratchFolder, replace_files
from onnxq.graph import ModelLike, save_model
from onnxq.graph.scopes import has_bodies
from onnxq.runtime import NodeError
from onnxq.sites import EngineOptions, JsonObject, Lines

JOB = "job.json"
RESULT = "result.json"
_STDERR = "stderr.txt"
# Seconds. A large network takes minutes to build, as float graphs do; one that takes longer hangs.
COMPILING = 3600.0
# Lines of the log and of stderr that are shown.
_TAIL = 12
# The differences between equal errors of two graphs: names in quotes or brackets, numbers, addresses.
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d+")
# Characters of an error that are compared: behind them libraries list their own stack.
_COMPARED = 120


def build_engine(
    engine: Engine, model: ModelLike, job: Job, folder: Path, *, timeout: float
) -> BuildResult:
    """Build in a fresh process; its files lie in `folder` afterwards. Whatever goes wrong is a result.

    timeout: seconds.
    """
    save_model(model, folder / MODEL, overwrite=True)
    start = time.perf_counter()
    try:
        environment = engine.prepare_environment(job, folder)
        code = run_child(
            engine, folder, asdict(job), timeout=timeout, environment=environment, builds=True
        )
    except subprocess.TimeoutExpired:
        reason = f"the build did not end within {timeout:g} s"
        return BuildResult(
            state=BuildState.LATE, seconds=timeout, reason=reason, log=_read_last_lines(folder)
        )
    except MissingDependencyError as error:
        return BuildResult(state=BuildState.FAILED, reason=error.cause, fix=error.fix)
    row = read_result(folder)
    if row is None:
        result = BuildResult(
            state=BuildState.CRASHED,
            seconds=time.perf_counter() - start,
            reason=describe_death(code),
            exit_code=code,
        )
    else:
        result = BuildResult(**{**row, "state": BuildState(row["state"]), "log": ()})
    if result.state is BuildState.BUILT:
        return replace(result, engine_bytes=(folder / ENGINE).stat().st_size)
    return replace(result, log=_read_last_lines(folder))


def run_child(
    engine: Engine,
    folder: Path,
    job: JsonObject,
    *,
    timeout: float,
    environment: EngineOptions = MappingProxyType({}),
    builds: bool = False,
) -> int:
    """Have an engine do a job in a process of its own, which reads and writes in `folder`; returns its exit code.

    The child finds the same packages as this process, wherever it has them from. timeout: seconds. environment:
    variables besides. builds: the job is a build. Raises subprocess.TimeoutExpired.
    """
    command, variables = _prepare_child(engine, folder, job, environment, builds=builds)
    with open(folder / _STDERR, "wb") as sink:
        done = subprocess.run(
            command,
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=timeout,
            env=variables,
        )
    return done.returncode


def _prepare_child(
    engine: Engine,
    folder: Path,
    job: JsonObject,
    environment: EngineOptions = MappingProxyType({}),
    *,
    builds: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Write the job of a child process to its folder; returns its command line and its environment.

    Raises MissingDependencyError in a frozen program.
    """
    # It would start itself in the place of the child, which does so in turn.
    if getattr(sys, "frozen", False):
        cause = "engines work in a Python process of their own, and a frozen program has none"
        raise MissingDependencyError(engine.title, cause, "call this from an installed onnxq")
    # The result of an earlier job here must not be taken for that of this one.
    (folder / RESULT).unlink(missing_ok=True)
    task = {"engine": engine.name, "builds": builds, "job": job}
    (folder / JOB).write_text(json.dumps(task), encoding="utf-8")
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, sys.path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    return [sys.executable, "-m", "onnxq.backends.child", str(folder)], variables


# Sends a request, one line, to a process, and waits for the answer for so many seconds.
Ask = Callable[[float, str], str]


def serve_child(engine: Engine, folder: Path, *, timeout: float) -> AbstractContextManager[Ask]:
    """Have an engine answer requests in a process of its own, as long as the context is open, as `serve_process` does.

    Arguments and results lie in `folder`.
    """
    command, variables = _prepare_child(engine, folder, {"options": dict(engine.options)})
    return serve_process(engine.title, command, folder, variables, timeout=timeout)


@contextmanager
def serve_process(
    title: str,
    command: Sequence[str],
    folder: Path,
    variables: EngineOptions,
    *,
    timeout: float,
) -> Iterator[Ask]:
    """Start a process that answers requests as long as the context is open. Its first line says that it is ready.

    title: of the engine. folder: gets what the process writes to stderr. timeout: seconds until it is ready. Raises
    ModelError, with the end of its output, where it dies or takes longer.
    """
    # A file, not a pipe, which would fill up unread and stop the process.
    with open(folder / _STDERR, "wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            env=variables,
            text=True,
        )
    requests = process.stdin
    answers = process.stdout
    assert requests is not None
    assert answers is not None

    def wait_for_answer(seconds: float) -> str:
        # A process that is killed ends its output like one that crashes: this tells them apart.
        late = threading.Event()

        def end_process() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end_process)
        timer.start()
        answer = answers.readline()
        timer.cancel()
        if answer:
            return answer
        code = process.wait()
        cause = f"it did not answer within {seconds:g} s" if late.is_set() else describe_death(code)
        raise ModelError(title, "; ".join((cause, *_read_last_lines(folder)[-1:])), code="Q115")

    def ask(seconds: float, request: str) -> str:
        with suppress(OSError):  # the answer says that the process is dead
            requests.write(f"{request}\n")
            requests.flush()
        return wait_for_answer(seconds)

    with process:
        try:
            wait_for_answer(timeout)
            yield ask
        finally:
            process.kill()


def read_result(folder: Path) -> JsonObject | None:
    """The result of a child; None where it left none."""
    try:
        result: JsonObject = json.loads((folder / RESULT).read_bytes())
    except (OSError, ValueError):
        return None
    return result


def describe_death(code: int) -> str:
    """The end of a process that left no result, by its exit code."""
    # POSIX: the process ended by this signal.
    if code < 0:
        try:
            return f"the library crashed the process: {signal.Signals(-code).name} ({signal.strsignal(-code)})"
        except ValueError:
            return f"the library crashed the process: signal {-code}"
    # In hexadecimal, as Windows lists its own (0xc0000005).
    return f"the process ended with exit code {code:#x} and no result"


def _read_last_lines(folder: Path) -> Lines:
    """The end of the log, and of the text that came on stderr past it."""
    lines = []
    for name in (LOG, _STDERR):
        path = folder / name
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            lines += [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(lines[-_TAIL:])


def demand_build(
    engine: Engine, model: ModelLike, job: Job, folder: Path, *, subject: str, timeout: float
) -> Path:
    """Build in a fresh process; returns the path of the result in `folder`. timeout: seconds.

    Raises ModelError about `subject`, in the library's words and with the node that it blames, where there is none.
    """
    result = check_library(build_engine(engine, model, job, folder, timeout=timeout), engine)
    if result.state is BuildState.BUILT:
        return folder / ENGINE
    cause = f"cannot build the engine: {result.reason}"
    raise NodeError(subject, cause, result.fix, code="Q115").name_node(result.node)


def compile_model(engine: Engine, model: ModelLike, path: Path, *, overwrite: bool = False) -> None:
    """Write the model that an engine's compiler makes of one. Raises ModelError where nothing runs on its device."""
    if has_bodies(model.graph):
        cause = "ONNX Runtime writes no compiled form of If, Loop or Scan"
        raise ModelError(
            engine.title, cause, "use the model itself, which is compiled as it loads", code="Q115"
        )
    with ScratchFolder() as folder:
        job = Job(options=dict(engine.options))
        built = demand_build(engine, model, job, folder, subject=engine.title, timeout=COMPILING)
        placement = engine.read_placement(model, folder)
        if placement is not None and not placement.partitions:
            cause, fix = next(((one.reason, one.fix) for one in placement.left), ("", ""))
            raise ModelError(engine.title, f"no node runs on the device: {cause}", fix, code="Q115")
        copy_file(built, path, overwrite=overwrite)


def copy_file(source: Path, target: Path, *, overwrite: bool) -> None:
    """Copy a file of a build to where the user wants it, which appears whole or not at all."""
    with source.open("rb") as content, replace_files([target], overwrite=overwrite) as files:
        shutil.copyfileobj(content, files[0])


def fail_alike(result: BuildResult, other: BuildResult) -> bool:
    """True when both ended in one state, by the same signal and with the same words, names and numbers aside."""
    mine, theirs = (_VARYING.sub("", one.reason)[:_COMPARED] for one in (result, other))
    return (result.state, result.exit_code) == (other.state, other.exit_code) and mine == theirs


def check_library(result: BuildResult, engine: Engine) -> BuildResult:
    """The result, if the library could work at all. Raises MissingDependencyError or VerificationError if not.

    ConfigError for a plugin that it cannot load.
    """
    if result.state is BuildState.NO_PLUGIN:
        fix = "give a shared library for this machine and this release that exports getCreators or getPluginCreators"
        raise ConfigError(
            "plugin", f"{engine.title} cannot load it: {result.reason}", fix, code="Q322"
        )
    if result.state is BuildState.MISSING:
        cause = f"cannot be imported ({result.reason})"
        raise MissingDependencyError(
            engine.module, cause, result.fix or engine.install, code="Q805"
        )
    if result.state is BuildState.UNABLE:
        raise VerificationError(engine.module, result.reason, engine.unable_fix, code="Q708")
    return result
