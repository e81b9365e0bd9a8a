"""Shared by every command: wall time and peak memory by stage."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from onnxq.report import StageCost


@dataclass
class Stages:
    """Collects what each stage cost."""

    done: list[StageCost] = field(default_factory=list)

    @contextmanager
    def run(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`."""
        start = time.perf_counter()
        yield
        self.done.append(StageCost(name=name, seconds=time.perf_counter() - start, peak_bytes=peak_bytes()))


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
