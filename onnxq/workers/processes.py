"""Workers that are processes of this machine; the pieces of one that dies are done again.

Each has a pipe of its own. Those of `concurrent.futures` share one for results: a worker that is killed while it writes
a result leaves the others, and the reader, waiting for ever.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from onnxq.errors import WorkerError
from onnxq.files import describe_os_error
from onnxq.workers.base import (
    Finished,
    Journal,
    NumberedPiece,
    R,
    T,
    Workers,
    count_threads,
    run_guarded,
)

# Deaths over one piece, after which it is given up.
_PATIENCE = 4
# Seconds for a worker whose pipe has ended to end as well.
_LAST_WORDS = 10.0
# The exit code of a worker in which Python raised what is not of the piece: almost always while it imports the script.
_PYTHON_ERROR = 1
_GUARD_FIX = (
    'call onnxq in a file, below `if __name__ == "__main__":`, since each worker imports that file'
)


@dataclass(eq=False)
class _Member:
    """One process and its pipe. at: the piece that it is at, with its position; None while it is idle."""

    process: SpawnProcess
    # Of another class on Windows.
    pipe: Any
    at: NumberedPiece[Any] | None = None

    def end_process(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


class ProcessWorkers(Workers):
    """Spawned processes, which start with the first pieces and serve until `close`."""

    def __init__(self, count: int, journal: Journal | None = None) -> None:
        super().__init__(journal)
        self.count = count
        self.members: list[_Member] = []

    def close(self) -> None:
        """End the processes; what they are at is lost."""
        while self.members:
            self.members.pop().end_process()

    def _finish_pieces(
        self, function: Callable[[T], R], todo: Sequence[NumberedPiece[T]]
    ) -> Iterator[Finished]:
        waiting = deque(todo)
        deaths = Counter[int]()
        # Of an earlier generator that was left before its end: its results mean nothing here.
        self._drop_members([member for member in self.members if member.at is not None])
        while waiting or any(member.at for member in self.members):
            lost = self._hand_out(function, waiting)
            busy = {member.pipe: member for member in self.members if member.at is not None}
            for pipe in () if lost else wait([*busy]):
                member = busy[pipe]
                assert member.at is not None
                try:
                    result = member.pipe.recv()
                except (EOFError, OSError):
                    lost.append(member)
                else:
                    k, _ = member.at
                    member.at = None
                    yield k, result
            for member in lost:
                assert member.at is not None
                k, piece = member.at
                member.process.join(_LAST_WORDS)
                if member.process.exitcode == _PYTHON_ERROR:
                    cause = "a worker ended with the error that is printed above"
                    raise WorkerError(piece.title, cause, _GUARD_FIX, code="Q904")
                deaths[k] += 1
                if deaths[k] == _PATIENCE:
                    cause = f"a worker died each of the {_PATIENCE} times that it was at this"
                    fix = (
                        "give its processes more memory: fewer `workers`, or a lower `memory_limit`"
                    )
                    raise WorkerError(piece.title, cause, fix, code="Q901")
                waiting.appendleft(member.at)
            self._drop_members(lost)

    def _hand_out(
        self, function: Callable[[T], R], waiting: deque[NumberedPiece[T]]
    ) -> list[_Member]:
        """Give every idle process a piece, starting processes as they are needed; returns those found dead."""
        lost = []
        while waiting:
            member = next((member for member in self.members if member.at is None), None)
            if member is None:
                if len(self.members) == self.count:
                    break
                member = _start_member()
                self.members.append(member)
            member.at = waiting.popleft()
            try:
                member.pipe.send((function, member.at[1].task, count_threads()))
            except OSError:
                lost.append(member)
        return lost

    def _drop_members(self, lost: Sequence[_Member]) -> None:
        for member in lost:
            self.members.remove(member)
            member.end_process()


def _start_member() -> _Member:
    # Spawned, not forked: ONNX Runtime and BLAS have threads, which a fork would leave in pieces.
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    try:
        with _defer_interrupts():
            process.start()
    # An assertion of Python's: the process is a daemon, as those of task queues and data loaders are.
    except (AssertionError, OSError) as error:
        cause = f"no process can be started here ({describe_os_error(error)})"
        raise WorkerError("workers", cause, "leave `workers` out", code="Q904") from error
    # The other end is the worker's alone, so that its death shows as the end of the pipe.
    theirs.close()
    return _Member(process, mine)


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from this thread, and from processes that start in the block until they take it themselves."""
    if sys.platform == "win32":  # which has no masks
        yield
    else:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection) -> None:
    """Do pieces until the pipe ends."""
    # Ctrl-C reaches every process of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    while True:
        try:
            function, task, threads = pipe.recv()
        except EOFError:
            return
        pipe.send(run_guarded(function, task, threads))


def _end_with(sentinel: int) -> None:
    """End this process, in the middle of a piece, when the one that started it is killed."""
    wait([sentinel])
    os._exit(1)
