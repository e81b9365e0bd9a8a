"""Work on large arrays a part at a time, on all cores: numpy lets other threads run while it computes.

Parts do not depend on the number of threads, so neither does any result.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Elements, below which handing out parts takes longer than working on them.
_WORTH_THREADS = 1 << 20


def map_parts(work: Callable[[slice], None], count: int, size: int, *, elements: int) -> None:
    """Call `work` with slices of at most `size` of `count` rows; in several threads where there are many `elements`.

    An exception of one call is raised, once the others are done.
    """
    parts = [slice(first, min(first + size, count)) for first in range(0, count, size)]
    threads = _count_cores()
    if threads < 2 or len(parts) < 2 or elements < _WORTH_THREADS:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(min(threads, len(parts))) as pool:
        for done in [pool.submit(work, part) for part in parts]:
            done.result()


def _count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
