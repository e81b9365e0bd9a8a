"""Threads of numpy's work: of parts of large arrays, and of matrix products.

numpy lets other threads run while it computes. Parts do not depend on the number of threads, so neither does any
result.

OpenBLAS lets its threads spin between products. With many small products they cost several times the processor time of
one thread, and take the cores from the inference engine that runs in between: on two busy cores the rounding of weights
took 15 s of processor time and 33 of wall instead of 3 and 7; `onnxq quantize` of MiniLM 22 s of wall instead of 13.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache

from threadpoolctl import ThreadpoolController

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


@contextmanager
def use_one_blas_thread() -> Iterator[None]:
    """Compute matrix products in one thread inside; as before afterwards."""
    with _find_libraries()[0].limit(limits=1):
        yield


@contextmanager
def use_all_blas_threads() -> Iterator[None]:
    """Use as many threads as there were at first, for products large enough to gain by them."""
    controller, usual = _find_libraries()
    with controller.limit(limits=usual):
        yield


# Once: looking through all loaded libraries takes milliseconds.
@lru_cache(maxsize=1)
def _find_libraries() -> tuple[ThreadpoolController, int]:
    """Find the loaded BLAS libraries and their number of threads."""
    controller = ThreadpoolController().select(user_api="blas")
    return controller, max((library["num_threads"] for library in controller.info()), default=1)
