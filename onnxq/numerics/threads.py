"""Work on large arrays a part at a time, on all cores: numpy lets other threads run while it computes.

Parts do not depend on the number of threads, so neither does any result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

# 0: as many as there are cores.
_threads: ContextVar[int] = ContextVar("onnxq_threads", default=0)
# Elements, below which handing out parts takes longer than working on them.
_WORTH_THREADS = 1 << 20


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Work in this thread alone inside: other processes have the other cores."""
    token = _threads.set(1)
    try:
        yield
    finally:
        _threads.reset(token)


def map_parts(work: Callable[[slice], None], count: int, size: int, *, elements: int) -> None:
    """Call `work` with slices of at most `size` of `count` rows; in several threads where there are many `elements`.

    An exception of one call is raised, once the others are done.
    """
    parts = [slice(first, min(first + size, count)) for first in range(0, count, size)]
    threads = _threads.get() or count_cores()
    if threads < 2 or len(parts) < 2 or elements < _WORTH_THREADS:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(min(threads, len(parts))) as pool:
        for done in [pool.submit(work, part) for part in parts]:
            done.result()


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
