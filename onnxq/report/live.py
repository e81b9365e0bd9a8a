"""Progress with the time left, for whatever takes more than two seconds: a bar on a terminal, lines in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Protocol

from rich import progress as bars
from rich.console import Console

from onnxq.report.terminal import seconds, write

PATIENCE = 2.0
_LINE_EVERY = 5.0


class Task(Protocol):
    """One running stage; `advance` says that so many more steps are done."""

    def advance(self, steps: int = 1) -> None:
        """Count `steps` as done."""


class Progress(Protocol):
    """`with progress("calibrate", 32) as task: … task.advance()`; total None: of unknown length."""

    def __call__(self, description: str, total: int | None = None) -> AbstractContextManager[Task]:
        """Begin a stage."""


@contextmanager
def silent(description: str, total: int | None = None) -> Iterator[Task]:
    """A Progress that shows nothing."""
    yield _Nothing()


@contextmanager
def progress(description: str, total: int | None = None, *, stream: IO[str] | None = None) -> Iterator[Task]:
    """A Progress that shows itself on `stream` (stderr) once two seconds have passed."""
    stream = sys.stderr if stream is None else stream
    terminal = Console(file=stream).is_terminal
    shown = _Bar(description, total, stream) if terminal else _Lines(description, total, stream)
    try:
        yield shown
    finally:
        shown.close()


class _Nothing:
    def advance(self, steps: int = 1) -> None:
        """Nobody is looking."""


class _Bar:
    """A rich bar that a timer starts, so that a stage which never reports still shows that it lives."""

    def __init__(self, description: str, total: int | None, stream: IO[str]) -> None:
        self._lock = threading.Lock()
        counts: tuple[bars.ProgressColumn, ...] = (bars.TimeElapsedColumn(),)
        if total:
            counts = (bars.BarColumn(bar_width=None), bars.MofNCompleteColumn(), bars.TimeRemainingColumn())
        columns = (bars.SpinnerColumn(), bars.TextColumn("{task.description}", markup=False), *counts)
        self._bar = bars.Progress(*columns, console=Console(file=stream, highlight=False), transient=True)
        self._task = self._bar.add_task(description, total=total)
        self._closed = self._started = False
        self._timer = threading.Timer(PATIENCE, self._start)
        self._timer.daemon = True
        self._timer.start()

    def _start(self) -> None:
        with self._lock:
            if not self._closed:
                self._bar.start()
                self._started = True

    def advance(self, steps: int = 1) -> None:
        self._bar.advance(self._task, steps)

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._started:
                self._bar.stop()


class _Lines:
    """A line every few seconds, and one at the end if there was any."""

    def __init__(self, description: str, total: int | None, stream: IO[str]) -> None:
        self._description, self._total, self._stream = description, total, stream
        self._done = 0
        self._begun = time.monotonic()
        self._next = self._begun + PATIENCE
        self._spoke = False

    def advance(self, steps: int = 1) -> None:
        self._done += steps
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LINE_EVERY
        self._spoke = True
        left = ""
        if self._total and 0 < self._done < self._total:
            left = f", {seconds((now - self._begun) / self._done * (self._total - self._done))} left"
        write(f"{self._description}: {self._count()}{left}\n", self._stream)

    def close(self) -> None:
        if self._spoke:
            write(f"{self._description}: {self._count()} in {seconds(time.monotonic() - self._begun)}\n", self._stream)

    def _count(self) -> str:
        return f"{self._done}/{self._total}" if self._total else f"{self._done}"
