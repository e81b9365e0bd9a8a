"""Threads: of parts of large arrays, of matrix products, and of runs of samples.

numpy and ONNX Runtime let other threads run while they compute. Parts do not depend on the number of threads, so
neither does any result.

OpenBLAS lets its threads spin between products. With many small products they cost several times the processor time of
one thread, and take the cores from the inference engine that runs in between: on two busy cores the rounding of weights
took 15 s of processor time and 33 of wall instead of 3 and 7; `onnxq quantize` of MiniLM 22 s of wall instead of 13.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

from threadpoolctl import ThreadpoolController

# Elements, below which handing out parts takes longer than working on them.
_WORTH_THREADS = 1 << 20
T = TypeVar("T")
R = TypeVar("R")


def map_parts(work: Callable[[slice], None], count: int, size: int, *, elements: int) -> None:
    """Call `work` with slices of at most `size` of `count` rows; in several threads where there are many `elements`.

    An exception of one call is raised, once the others are done.
    """
    parts = [slice(first, min(first + size, count)) for first in range(0, count, size)]
    threads = count_cores()
    if threads < 2 or len(parts) < 2 or elements < _WORTH_THREADS:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(min(threads, len(parts))) as pool:
        for done in [pool.submit(work, part) for part in parts]:
            done.result()


def map_in_threads(work: Callable[[T], R], items: Iterable[T], *, threads: int = 0) -> Iterator[R]:
    """Yield the result of `work` for each item, in their order, as many at a time as there are threads; 0: all cores.

    Items are read here, one ahead of the threads, and no more results wait than there are threads. An exception of
    `work` is raised in the place of its result.
    """
    threads = threads or count_cores()
    if threads < 2:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def count_cores() -> int:
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
