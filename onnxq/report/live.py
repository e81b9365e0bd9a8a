"""Progress for people: bars on a terminal, lines in a pipe, with the step, its duration and the time left."""

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

from onnxq.errors import escape_line
from onnxq.progress import Progress, Task, Tick, silent
from onnxq.report.columns import Text, shorten_name
from onnxq.report.terminal import format_seconds, write_stream

# Seconds. A command that ends sooner prints nothing; afterwards no step stays unnamed for longer.
PATIENCE = 1.0
# Seconds from the start of a step to its first line in a pipe, and between later lines.
_FIRST = 2.0
_EVERY = 10.0
# Columns of a bar's figures: 1000/1000 (100%), 10 min 10 s left.
_COUNT = 36
# Bytes. Reading a file of this size blocks all threads of the process for long, so it is announced before.
_LARGE = 64 * 2**20


@contextmanager
def show_progress(
    title: str, *sources: str | os.PathLike[str] | None, quiet: bool = False
) -> Iterator[Progress]:
    """Show progress on stderr for one command, which is the outermost step. sources: the files that it reads."""
    if quiet:
        yield silent
        return
    patience = 0.0 if any(map(_is_large, sources)) else PATIENCE
    shown = open_display(sys.stderr, patience=patience)
    with shown(title):
        yield shown


def open_display(stream: IO[str], *, patience: float) -> Progress:
    """Make a Progress that appears on `stream` after `patience` seconds."""
    return Bars(stream, patience) if Console(file=stream).is_terminal else Lines(stream, patience)


def _is_large(source: str | os.PathLike[str] | None) -> bool:
    """True if the file, or weights that may lie beside it, are large."""
    path = Path(source or "")
    # The names of external data that torch's exporter and Optimum write.
    files = (
        (path, path.with_name(f"{path.name}.data"), path.with_name(f"{path.name}_data"))
        if path.name
        else ()
    )
    return any(os.path.isfile(file) and file.stat().st_size >= _LARGE for file in files)


@dataclass(eq=False)
class _Step:
    """One open step."""

    description: str
    total: int | None
    # Seconds of the clock.
    begun: float
    # Called after every advance.
    update: Tick
    done: int = 0
    # A line has named the step.
    named: bool = False
    # Number of lines after that.
    beats: int = 0
    # Time of the next line, in seconds of the clock.
    due: float = 0.0

    def advance(self, steps: int = 1) -> None:
        self.done += steps
        self.update()

    def format_state(self, now: float) -> str:
        """Format the state: calibrating: 12/32 (38%), 20 s left; reading x.onnx: 12 s so far."""
        done = self.done
        total = self.total
        passed = now - self.begun
        parts = []
        if total:
            share = f" ({100 * done // total}%)" if done else ""
            parts.append(f"{done}/{total}{share}")
        elif done and passed >= _FIRST:
            parts.append(str(done))
        if total and 0 < done < total:
            parts.append(f"{format_seconds(passed / done * (total - done))} left")
        elif passed >= _FIRST:
            parts.append(f"{format_seconds(passed)} so far")
        return f"{self.description}: {', '.join(parts)}" if parts else self.description

    def format_end(self, now: float) -> str:
        """Format the last line of a step of which lines were shown."""
        count = f"{self.done}/{self.total} " if self.total else ""
        return f"{self.description}: {count}in {format_seconds(now - self.begun)}"


@dataclass(eq=False)
class Lines:
    """Prints a line for every step that lasts, and further ones at intervals, from a thread that ends with the steps.

    The outermost step and those directly inside it are named when they begin, others after two seconds without a line.
    An outer step is never named after an inner one.
    """

    stream: IO[str]
    patience: float = PATIENCE
    # Monotonic seconds.
    clock: Callable[[], float] = time.monotonic
    # Without the thread: lines are printed only when steps begin, end and advance.
    alone: bool = False
    # From the outermost to the innermost.
    _open: list[_Step] = field(default_factory=list)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._born = self._last = self.clock()

    @contextmanager
    def __call__(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Begin a step inside the open ones."""
        step = self._begin_step(description, total)
        try:
            yield step
        finally:
            self._end_step(step)

    def _begin_step(self, description: str, total: int | None) -> _Step:
        with self._changed:
            now = self.clock()
            parent = self._open[-1] if self._open else None
            step = _Step(escape_line(description), total, now, self._print_due)
            main = len(self._open) < 2
            step.due = max(self._born + self.patience, now if main else self._last + _FIRST)
            # A step of its parent's name continues it: one line for both.
            if parent is not None and parent.description == step.description and parent.named:
                step.named = True
                step.due = now + _FIRST
            self._open.append(step)
            self._print_due()
            if self._thread is None and not self.alone:
                self._thread = threading.Thread(
                    target=self._watch_steps, name="onnxq-progress", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return step

    def _end_step(self, step: _Step) -> None:
        with self._changed:
            now = self.clock()
            self._open.remove(step)
            if step.beats and now - step.begun >= _EVERY:
                self._write_line(step.format_end(now))
            if self._open and self._open[-1].named:
                self._open[-1].due = now + _FIRST
            thread = None if self._open else self._thread
            self._changed.notify_all()
        if thread is not None:  # outside the lock, which the thread needs to end
            thread.join()
            self._thread = None

    def _print_due(self) -> None:
        """Print the line that is due, if any."""
        with self._changed:
            if not self._open:
                return
            step = self._open[-1]
            now = self.clock()
            if now < step.due:
                return
            if not self._open[0].named and step is not self._open[0]:
                self._write_line(self._open[0].description)
            step.beats += step.named
            self._write_line(step.format_state(now))
            alive = step.begun + _FIRST
            step.due = alive if alive - now > 0.5 else now + _EVERY
            for outer in self._open:
                outer.named = True

    def _watch_steps(self) -> None:
        with self._changed:
            while self._open:
                self._print_due()
                self._changed.wait(max(self._open[-1].due - self.clock(), 0.01))

    def _write_line(self, text: str) -> None:
        self._last = self.clock()
        # The reader of the pipe may be gone; the work goes on.
        with suppress(OSError, ValueError):
            write_stream(f"{text}\n", self.stream)


class Bars:
    """Shows a line for each open step, updated from the first second on and removed when the outermost step ends."""

    def __init__(self, stream: IO[str], patience: float = PATIENCE) -> None:
        self._stream = stream
        self._patience = patience
        self._lock = threading.RLock()
        self._open: list[tuple[bars.TaskID, str]] = []
        self._bars: bars.Progress | None = None
        self._timer: threading.Timer | None = None

    @contextmanager
    def __call__(self, description: str, total: int | None = None) -> Iterator[Task]:
        """Begin a step inside the open ones."""
        with self._lock:
            shown = self._open_bars()
            if self._open and self._open[-1][1] == description:  # one line for both
                shown.update(self._open[-1][0], visible=False)
            title = "  " * len(self._open) + escape_line(description)
            width = max(shown.console.width - _COUNT, _COUNT)
            task = shown.add_task(shorten_name(title, width), total=total)
            self._open.append((task, description))
        try:
            yield _Row(shown, task)
        finally:
            with self._lock:
                shown.remove_task(task)
                self._open.remove((task, description))
                if self._open:
                    shown.update(self._open[-1][0], visible=True)
                else:
                    self._close_bars(shown)

    def _open_bars(self) -> bars.Progress:
        if self._bars is not None:
            return self._bars
        title = bars.TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True)
        )
        self._bars = bars.Progress(
            bars.SpinnerColumn(),
            title,
            _Count(),
            console=Console(file=self._stream, highlight=False),
            transient=True,
            refresh_per_second=5,
            redirect_stdout=sys.stdout.isatty(),
        )
        if self._patience <= 0:
            self._bars.start()
        else:
            self._timer = threading.Timer(self._patience, self._start_bars, (self._bars,))
            self._timer.daemon = True
            self._timer.start()
        return self._bars

    def _start_bars(self, shown: bars.Progress) -> None:
        with self._lock:
            if shown is self._bars:
                shown.start()

    def _close_bars(self, shown: bars.Progress) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._bars = self._timer = None
        if shown.live.is_started:
            shown.stop()


class _Row:
    def __init__(self, shown: bars.Progress, task: bars.TaskID) -> None:
        self._shown = shown
        self._task = task

    def advance(self, steps: int = 1) -> None:
        self._shown.advance(self._task, steps)


class _Count(bars.ProgressColumn):
    """Column with 12/32 (38%), 20 s left; or the seconds so far."""

    def render(self, task: bars.Task) -> Text:
        """Make one step's cell."""
        passed = format_seconds(task.elapsed or 0.0)
        if not task.total:
            return Text(passed)
        text = f"{task.completed:.0f}/{task.total:.0f} ({task.percentage:.0f}%), "
        left = task.time_remaining
        return Text(text + (passed if left is None else f"{format_seconds(left)} left"))
