"""Shared by every command: the stages of a run, announced as they begin, with wall time and peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from onnxq.passes.journal import StageCost
from onnxq.progress import Progress, silent


@dataclass
class Timers:
    """Collects the cost of each stage of a run. progress: who is told of each before it begins."""

    progress: Progress = silent
    costs: list[StageCost] = field(default_factory=list)

    @contextmanager
    def run(self, name: str, title: str) -> Iterator[None]:
        """Time the block as stage `name`, which `title` announces."""
        start = time.perf_counter()
        with self.progress(title):
            yield
        self.costs.append(StageCost(name=name, seconds=time.perf_counter() - start, peak_bytes=peak_bytes()))


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    try:
        # ru_maxrss still holds the peak of the process this one was forked from.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) * 1024
    except (OSError, StopIteration):
        # macOS counts bytes, other systems KiB.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
