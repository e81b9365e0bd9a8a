"""This machine: work on all of its cores, its kind of CPU, freed memory back to the system.

numpy and ONNX Runtime let other threads run while they compute. Parts do not depend on the number of threads, so
neither does any result.

OpenBLAS lets its threads spin between products. With many small products they cost several times the processor time of
one thread, and take the cores from the inference engine that runs in between: on two busy cores the rounding of weights
took 15 s of processor time and 33 of wall instead of 3 and 7; `onnxq quantize` of MiniLM 22 s of wall instead of 13.
"""

import ctypes
import os
import platform
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache, lru_cache
from pathlib import Path
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
    deque(map_in_threads(work, parts, threads=int(elements < _WORTH_THREADS)), maxlen=0)


def map_in_threads(work: Callable[[T], R], items: Iterable[T], *, threads: int = 0) -> Iterator[R]:
    """Yield the result of `work` for each item, in their order, as many at a time as there are threads; 0: all cores.

    Items are read here, one ahead of the threads, and no more results wait than there are threads. An exception of
    `work` is raised in the place of its result.
    """
    threads = _count_threads(threads)
    if threads < 2:
        yield from map(work, items)
        return
    waiting: deque[Future[R]] = deque()
    pool = _open_pool(threads)
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # A caller that stops reading leaves work behind.
        for running in waiting:
            running.cancel()
        wait(waiting)


@contextmanager
def work_beside(work: Callable[[], R], *, allowed: bool = True) -> Iterator[Callable[[], R]]:
    """Begin `work` in another thread, and yield the function that waits for its result; on one core that does the work.

    Parts of both take turns in the threads that `map_in_threads` has. An exception of `work` is raised by the function.
    allowed: False does the work as on one core.
    """
    if not allowed or _count_threads(0) < 2:
        yield work
        return
    # At the end of the block the thread has ended: nothing outlives the caller, whose files and models it works on.
    with ThreadPoolExecutor(1, "onnxq") as thread:
        # With the number of threads that this run may take, which is a context's.
        yield thread.submit(copy_context().run, work).result


class _Here(threading.local):
    """in_pool: true in the threads of a pool, whose own parts run one after the other: others wait for this thread."""

    in_pool = False


_here = _Here()


def _count_threads(threads: int) -> int:
    """The threads to share work among here; 0: all cores."""
    return 1 if _here.in_pool else threads or count_cores()


# Kept: one `quantize` shares work hundreds of times, and to start threads and end them took a tenth of a small
# network's time.
@cache
def _open_pool(threads: int) -> ThreadPoolExecutor:
    """A pool of so many threads."""
    return ThreadPoolExecutor(threads, "onnxq", lambda: setattr(_here, "in_pool", True))


if hasattr(os, "register_at_fork"):
    # A fork has none of the threads.
    os.register_at_fork(after_in_child=_open_pool.cache_clear)


def share_cores(runs: int) -> int:
    """The threads for each of so many runs side by side, and as well the runs for so many threads each; at least 1."""
    return max(1, count_cores() // max(runs, 1))


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def use_blas_threads(*, one: bool) -> Iterator[None]:
    """Compute matrix products in one thread inside, or in as many as there were at first; as before afterwards.

    one: False for products large enough to gain by more.
    """
    controller, usual = _find_libraries()
    with controller.limit(limits=1 if one else usual):
        yield


# Once: looking through all loaded libraries takes milliseconds.
@lru_cache(maxsize=1)
def _find_libraries() -> tuple[ThreadpoolController, int]:
    """Find the loaded BLAS libraries and their number of threads."""
    controller = ThreadpoolController().select(user_api="blas")
    return controller, max((library["num_threads"] for library in controller.info()), default=1)


_CPUINFO = Path("/proc/cpuinfo")
_X86 = ("x86_64", "amd64", "i386", "i686")
_ARM = ("aarch64", "arm64")

# Kind -> how people call it.
CPU_KINDS: Mapping[str, str] = {
    "vnni": "x86 with VNNI",
    "avx2": "x86 with AVX2, without VNNI",
    "x86": "x86 without AVX2",
    "arm64": "ARM, 64 bits",
    "unknown": "a CPU of unknown kind",
}


def detect_cpu() -> str:
    """The kind of this machine's CPU, one of CPU_KINDS.

    x86 can be told apart on Linux only, by the flags in /proc/cpuinfo. An emulator may show the flags of its host.
    """
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return classify_cpu(platform.machine(), text)


def classify_cpu(machine: str, cpuinfo: str) -> str:
    """The kind of CPU of a machine type (`uname -m`) whose /proc/cpuinfo reads so; "" where there is none."""
    if machine.lower() in _ARM:
        return "arm64"
    lists = [line.partition(":")[2] for line in cpuinfo.splitlines() if line.startswith("flags")]
    if machine.lower() not in _X86 or not lists:
        return "unknown"
    # Of several kinds of cores the least counts: a thread may run on any of them.
    flags = set.intersection(*(set(line.split()) for line in lists))
    if flags & {"avx512_vnni", "avx_vnni"}:
        return "vnni"
    return "avx2" if "avx2" in flags else "x86"


def trim_memory() -> None:
    """Return the freed memory that the C library keeps to the system; does nothing where it has no such call.

    glibc learns from large freed buffers to keep their like, and fragmentation then makes the peak of the next run
    add to that of the last (measured: 208 MiB in place of 143 for 52 MB of taps).
    """
    _find_trim()(0)


@lru_cache(maxsize=1)
def _find_trim() -> Callable[[int], object]:
    if sys.platform == "linux":
        # Other C libraries than glibc have none.
        with suppress(OSError, AttributeError):
            trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
            return trim
    return lambda _: None
