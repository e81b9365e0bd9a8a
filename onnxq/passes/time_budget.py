"""Wall-clock time: the cost of each stage, and a budget: who gets how much of it, who goes without, a record of each.

In the order in which they run, steps may each use a share of the time then left. A step that takes longer is given up
for the state before it; calibration takes fewer samples, promotion keeps the steps it has made, the check looks at
fewer samples. Always done: loading, planning, a calibration on some samples, writing, a check on one.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from onnxq.data import Dataset
from onnxq.passes.journal import Shortage, Shortened, StageCost
from onnxq.progress import OutOfTime, Progress, Task, silent
from onnxq.runtime import Feeds

# It is not there on Windows.
if sys.platform != "win32":
    import resource

T = TypeVar("T")
Clock = Callable[[], float]

# Writing and checking, as a multiple of what loading and preparing took, and at least so many seconds.
_END = 2.0
_LEAST_END = 0.3
# Seconds; beginning something with less is of no use.
_USELESS = 0.2


@dataclass(eq=False)
class TimeBudget:
    """seconds: None for no limit. shortened: the steps cut short or left out. clock: monotonic seconds.

    reserve: seconds kept for writing and checking.
    """

    seconds: float | None = None
    clock: Clock = time.monotonic
    shortened: list[Shortened] = field(default_factory=list)
    reserve: float = _LEAST_END
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()

    @property
    def limited(self) -> bool:
        """True when there is a limit."""
        return self.seconds is not None

    def prepared(self) -> None:
        """Loading is done: the time reserved for the end is in proportion to that of loading."""
        self.reserve = max(_LEAST_END, _END * self.spent())

    def left(self) -> float:
        """Seconds until the end must begin; inf without a limit."""
        if self.seconds is None:
            return math.inf
        return self.seconds - self.reserve - self.spent()

    def spent(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self.begun

    def over(self) -> bool:
        """True when all of it is spent, the reserve too."""
        return self.seconds is not None and self.spent() >= self.seconds

    @contextmanager
    def limit(self, name: str, share: float, progress: Progress) -> Iterator[Progress | None]:
        """A progress that gives the block up after this share of the time left; None where that is too little to begin.

        share: 0: not limited. A block that is given up or left out is recorded.
        """
        if not self.limited or not share:
            yield progress
            return
        seconds = self.left() * share
        if seconds < _USELESS:
            self.note(name, Shortage.LEFT_OUT)
            yield None
            return
        try:
            yield _Watch(progress, self.clock, self.clock() + seconds)
        except OutOfTime:
            self.note(name, Shortage.GIVEN_UP, seconds=seconds)

    def fitting(
        self,
        name: str,
        samples: Dataset,
        seed: int,
        progress: Progress,
        work: Callable[[Dataset, Progress], T],
    ) -> T:
        """The result of `work` on all samples, or on as many as half of the time left is enough for."""
        if not self.limited:
            return work(samples, progress)
        fewer = samples
        # Each try knows the pace of the one before, and has half of what is left.
        for _ in range(3):
            share = self.left() / 2
            if share < _USELESS or len(fewer) <= 1:
                break
            watch = _Watch(progress, self.clock, self.clock() + share)
            try:
                done_all = work(fewer, watch)
                self._note_samples(name, len(fewer), len(samples))
                return done_all
            except OutOfTime:
                # As many as were done in this half, for half of what is left; fewer by a fifth, as the pace varies.
                done = len(fewer) * watch.done / max(watch.total, 1)
                fewer = samples.take(
                    max(1, int(done * max(self.left() / 2, 0.0) / share * 0.8)), seed
                )
        if self.left() <= 0:
            fewer = samples.take(1, seed)
        self._note_samples(name, len(fewer), len(samples))
        return work(fewer, progress)

    def _note_samples(self, name: str, fewer: int, samples: int) -> None:
        if fewer < samples:
            self.note(name, Shortage.FEWER_SAMPLES, samples=(fewer, samples))

    def take_while_left(self, name: str, samples: Dataset) -> Iterator[Feeds]:
        """Samples as long as there is time, one in any case."""
        for k, sample in enumerate(samples.samples()):
            if k and self.over():
                self._note_samples(name, k, len(samples))
                return
            yield sample

    def note(
        self,
        name: str,
        how: Shortage,
        *,
        seconds: float = math.nan,
        samples: tuple[int, int] = (0, 0),
    ) -> None:
        """Record that something was cut short."""
        self.shortened.append(Shortened(name, how, self.seconds or 0.0, seconds, samples))


@dataclass
class _Watch:
    """A progress that watches the clock. done, total: the steps so far, of all its tasks."""

    progress: Progress
    clock: Clock
    deadline: float
    done: int = 0
    total: int = 0

    @contextmanager
    def __call__(self, description: str, total: int | None = None) -> Iterator[Task]:
        self.total += total or 0
        with self.progress(description, total) as task:
            yield _WatchedTask(self, task)


@dataclass(frozen=True)
class _WatchedTask:
    watch: _Watch
    task: Task

    def advance(self, steps: int = 1) -> None:
        """Count, then look at the clock."""
        self.task.advance(steps)
        self.watch.done += steps
        # Only here: work that cannot report a step cannot be stopped either.
        if self.watch.clock() > self.watch.deadline:
            raise OutOfTime


@dataclass
class Timers:
    """Collects the cost of each stage of a run. progress: who is told of each before it begins."""

    progress: Progress = silent
    costs: list[StageCost] = field(default_factory=list)

    @contextmanager
    def run(self, name: str, title: str) -> Iterator[None]:
        """Time the block as stage `name`, which `title` announces; a block without a title is too short for a line."""
        if not title:
            yield
            return
        start = time.perf_counter()
        with self.progress(title):
            yield
        self.costs.append(
            StageCost(name=name, seconds=time.perf_counter() - start, peak_bytes=peak_bytes())
        )


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    if sys.platform == "win32":
        from psutil import Process

        peak = Process().memory_info().peak_wset
    else:
        # macOS counts bytes, other systems KiB.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    with suppress(OSError, StopIteration):
        # On Linux ru_maxrss still holds the peak of the process this one was forked from.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
    return int(peak)
