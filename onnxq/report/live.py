"""Progress for people: bars on a terminal, lines in a pipe; what is being done, since when, and the time left."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich import progress as bars
from rich.console import Console
from rich.table import Column
from rich.text import Text

from onnxq.progress import Progress, Task, silent
from onnxq.report.columns import shorten
from onnxq.report.terminal import seconds, write

# Seconds. A command that is done sooner says nothing; later no step stays unnamed for longer.
PATIENCE = 1.0
# The first sign of life of a step in a pipe, and those after it.
_FIRST, _EVERY = 2.0, 10.0
# What a bar's figures take: 1000/1000 (100%), 10 min 10 s left.
_COUNT = 36
# Reading such a file stops every thread of this process for long, so that it has to be announced before.
_LARGE = 64 * 2**20


@contextmanager
def watched(title: str, *sources: str | os.PathLike[str] | None, quiet: bool = False) -> Iterator[Progress]:
    """A Progress on stderr for one command, which is its outermost step. sources: the files that it reads."""
    if quiet:
        yield silent
        return
    shown = display(patience=0.0 if any(map(_large, sources)) else PATIENCE)
    with shown(title):
        yield shown


def display(stream: IO[str] | None = None, *, patience: float = PATIENCE) -> Progress:
    """A Progress that shows itself on `stream` (stderr) once `patience` seconds have passed."""
    stream = sys.stderr if stream is None else stream
    return Bars(stream, patience) if Console(file=stream).is_terminal else Lines(stream, patience)


def _large(source: str | os.PathLike[str] | None) -> bool:
    """The file, or weights that may lie beside it."""
    path = Path(source or "")
    files = (path, path.with_name(f"{path.name}.data"), path.with_name(f"{path.name}_data")) if path.name else ()
    return any(one.is_file() and one.stat().st_size >= _LARGE for one in files)


@dataclass(eq=False)
class _Step:
    """One open step. told: a line has named it. due: when the next line is, in seconds of the clock."""

    description: str
    total: int | None
    begun: float
    look: Callable[[], None]
    done: int = 0
    told: bool = False
    beats: int = 0
    due: float = 0.0

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        self.look()

    def line(self, now: float) -> str:
        """calibrating: 12/32 (38%), 20 s left; reading x.onnx: 12 s so far."""
        passed, text = now - self.begun, self.description
        count = f"{self.done}, " if self.done else ""
        if self.total:
            share = f" ({100 * self.done // self.total}%)" if self.done else ""
            text += f": {self.done}/{self.total}{share}"
            if 0 < self.done < self.total:
                return f"{text}, {seconds(passed / self.done * (self.total - self.done))} left"
            return f"{text}, {seconds(passed)} so far" if passed >= _FIRST else text
        return f"{text}: {count}{seconds(passed)} so far" if passed >= _FIRST else text

    def ended(self, now: float) -> str:
        """The last line of a step that has shown how far it got."""
        count = f"{self.done}/{self.total} " if self.total else ""
        return f"{self.description}: {count}in {seconds(now - self.begun)}"


@dataclass(eq=False)
class Lines:
    """A line for every step that lasts, and one now and then while it does, from a thread that ends with the steps.

    The outermost step and those directly in it are named as they begin, others when two seconds have passed without a
    line. Nobody is named after what is in it.
    clock: monotonic seconds. alone: without the thread, lines come only when steps begin, end and advance.
    """

    stream: IO[str]
    patience: float = PATIENCE
    clock: Callable[[], float] = time.monotonic
    alone: bool = False
    _open: list[_Step] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._born = self._last = self.clock()

    @contextmanager
    def __call__(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Begin a step, inside those that are open."""
        step = self._begin(description, total)
        try:
            yield step
        finally:
            self._end(step)

    def _begin(self, description: str, total: int | None) -> _Step:
        with self._changed:
            now, parent = self.clock(), self._open[-1] if self._open else None
            step = _Step(description, total, now, self._look)
            main = len(self._open) < 2
            step.due = max(self._born + self.patience, now if main else self._last + _FIRST)
            if parent is not None and parent.description == description and parent.told:
                step.told, step.due = True, now + _FIRST
            self._open.append(step)
            self._look()
            if self._thread is None and not self.alone:
                self._thread = threading.Thread(target=self._watch, name="onnxq-progress", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return step

    def _end(self, step: _Step) -> None:
        with self._changed:
            now = self.clock()
            self._open.remove(step)
            if step.beats and now - step.begun >= _EVERY:
                self._write(step.ended(now))
            if self._open and self._open[-1].told:
                self._open[-1].due = now + _FIRST
            thread = None if self._open else self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()
            self._thread = None

    def _look(self) -> None:
        """Write the line that is due, if one is."""
        with self._changed:
            if not self._open:
                return
            step, now = self._open[-1], self.clock()
            if now < step.due:
                return
            if not self._open[0].told and step is not self._open[0]:
                self._write(self._open[0].description)
            step.beats += step.told
            self._write(step.line(now))
            alive = step.begun + _FIRST
            step.due = alive if alive - now > 0.5 else now + _EVERY
            for one in self._open:
                one.told = True

    def _watch(self) -> None:
        with self._changed:
            while self._open:
                self._look()
                self._changed.wait(max(self._open[-1].due - self.clock(), 0.01))

    def _write(self, text: str) -> None:
        self._last = self.clock()
        # Whoever reads the pipe may have gone; the work goes on.
        with suppress(OSError, ValueError):
            write(f"{text}\n", self.stream)


class Bars:
    """A line for each open step, alive from the first second on, that goes when the outermost step ends."""

    def __init__(self, stream: IO[str], patience: float = PATIENCE) -> None:
        self._stream, self._patience = stream, patience
        self._lock = threading.RLock()
        self._open: list[tuple[bars.TaskID, str]] = []
        self._bars: bars.Progress | None = None
        self._timer: threading.Timer | None = None

    @contextmanager
    def __call__(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Begin a step, inside those that are open."""
        with self._lock:
            shown = self._opened()
            if self._open and self._open[-1][1] == description:
                shown.update(self._open[-1][0], visible=False)
            title = shorten("  " * len(self._open) + description, max(shown.console.width - _COUNT, _COUNT))
            one = shown.add_task(title, total=total)
            self._open.append((one, description))
        try:
            yield _Row(shown, one)
        finally:
            with self._lock:
                shown.remove_task(one)
                self._open.remove((one, description))
                if self._open:
                    shown.update(self._open[-1][0], visible=True)
                else:
                    self._close(shown)

    def _opened(self) -> bars.Progress:
        if self._bars is not None:
            return self._bars
        title = bars.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        made = bars.Progress(
            bars.SpinnerColumn(), title, _Count(), console=Console(file=self._stream, highlight=False), transient=True,
            refresh_per_second=5, redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip
        self._bars = made
        if self._patience <= 0:
            made.start()
        else:
            self._timer = threading.Timer(self._patience, self._start, (made,))
            self._timer.daemon = True
            self._timer.start()
        return made

    def _start(self, shown: bars.Progress) -> None:
        with self._lock:
            if shown is self._bars:
                shown.start()

    def _close(self, shown: bars.Progress) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._bars = self._timer = None
        if shown.live.is_started:
            shown.stop()


class _Row:
    def __init__(self, shown: bars.Progress, task: bars.TaskID) -> None:
        self._shown, self._task = shown, task

    def advance(self, steps: int = 1) -> None:
        self._shown.advance(self._task, steps)


class _Count(bars.ProgressColumn):
    """12/32 (38%), 20 s left; or the seconds so far."""

    def render(self, task: bars.Task) -> Text:
        """One step's cell."""
        passed = seconds(task.elapsed or 0.0)
        if not task.total:
            return Text(passed)
        text = f"{task.completed:.0f}/{task.total:.0f} ({task.percentage:.0f}%), "
        left = task.time_remaining
        return Text(text + (passed if left is None else f"{seconds(left)} left"))
