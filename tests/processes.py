"""Child processes of tests: with signals as a terminal gives them, and those of engines without their time to start."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.reduction import DupFd
from typing import Any


def start(command: Sequence[str], *, ignored: Sequence[signal.Signals] = (), **how: Any) -> subprocess.Popen[str]:
    """Start a child that SIGINT, SIGTERM and SIGHUP end unless they are `ignored`, whatever the tests' own parent set.

    A shell's background jobs ignore SIGINT, and what is ignored stays so in children; what is handled does not.
    """
    asking = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in asking}
    for number in asking:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **how)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_CHILD = "onnxq.backends.child"
# Modules that it imports; not the engines' libraries, which start threads: a fork leaves these behind.
_IMPORTED = ["tests.processes", *(f"onnxq.backends.{name}" for name in ("serving", "ort.engine", "openvino.build"))]
_IMPORTED += [f"onnxq.backends.{name}" for name in ("openvino.engine", "qnn.build", "qnn.engine")]
# Linux and macOS; on Windows these processes start on their own.
_SERVER = get_context("forkserver") if "forkserver" in get_all_start_methods() else None
if _SERVER is not None:
    _SERVER.set_forkserver_preload(_IMPORTED)
_start_process = subprocess.Popen


@dataclass(frozen=True)
class _Stream:
    """A file that goes to the forked process, where it is a number."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _take_stream, (DupFd(self.number),)


def _take_stream(duplicate: Any) -> int:
    return int(duplicate.detach())


def _run_child(folder: str, streams: Sequence[int], variables: Mapping[str, str]) -> None:
    """In the forked process: become the one that the command would have started."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = [_CHILD, folder]
    runpy.run_module(_CHILD, run_name="__main__", alter_sys=True)


class ForkedProcess:
    """An engine's process, forked from one with our modules imported; used as `subprocess.Popen` is."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: Any, stderr: Any, env: Mapping[str, str], text: bool = True
    ) -> None:
        assert _SERVER is not None
        self.args, self.stdin, self.stdout = command, None, None
        with ExitStack() as files:
            source, sink = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
            given = files.enter_context(open(source, "rb"))
            if sink is not None:
                self.stdin = open(sink, "w", encoding="utf-8")  # noqa: SIM115
            if stdout == subprocess.PIPE:
                source, sink = os.pipe()
                self.stdout = open(source, encoding="utf-8")  # noqa: SIM115
                stdout = files.enter_context(open(sink, "wb"))
            streams = [_Stream(file.fileno()) for file in (given, stdout, stderr)]
            work = (command[-1], streams, dict(env))
            self._process = _SERVER.Process(target=_run_child, args=work, daemon=True)
            self._process.start()
        self.kill = self._process.kill

    def __enter__(self) -> "ForkedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()

    def communicate(self, _: None = None, timeout: float | None = None) -> tuple[None, None]:
        """Wait for the end; nothing more is read or written."""
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self.wait(timeout)
        return None, None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; that of a signal is negative."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, None as long as it runs."""
        return self._process.exitcode


def fork_process(command: Any, *arguments: Any, **how: Any) -> Any:
    """In place of `subprocess.Popen`: processes of engines are forked, and all else is started."""
    is_engine = list(command[:3]) == [sys.executable, "-m", _CHILD]
    # One that writes to the streams of this process is not forked: those of the server are others.
    if _SERVER is None or not is_engine or not {"stdin", "stdout", "stderr"} <= how.keys():
        return _start_process(command, *arguments, **how)
    return ForkedProcess(command, **how)
