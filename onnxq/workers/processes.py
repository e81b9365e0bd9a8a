"""Workers that are processes of this machine; the pieces of one that dies are done again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_sentinel
from typing import Any

from onnxq.errors import WorkerError
from onnxq.workers.base import Finished, Piece, R, T, Workers, count_threads, run_guarded
from onnxq.workers.journal import Journal

# Deaths over one piece alone in the pool, after which it is given up.
_PATIENCE = 3
# Pieces handed out for each worker: one runs and one waits, so that results do not pile up.
_AHEAD = 2


class ProcessWorkers(Workers):
    """A pool of spawned processes, started with the first pieces."""

    def __init__(self, count: int, journal: Journal | None = None) -> None:
        super().__init__(journal)
        self.count = count
        self._pool: ProcessPoolExecutor | None = None

    def close(self) -> None:
        """End the processes; what they are at is lost."""
        pool, self._pool = self._pool, None
        if pool is not None:
            processes = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()

    def _finish_pieces(self, function: Callable[[T], R], todo: Sequence[tuple[int, Piece[T]]]) -> Iterator[Finished]:
        waiting, deaths = deque(todo), Counter[int]()
        running: dict[Future[Any], tuple[int, Piece[T]]] = {}
        try:
            while waiting or running:
                # After a second death one at a time, until it is known which piece the workers die over.
                most = 1 if max(deaths.values(), default=0) > 1 else _AHEAD * self.count
                try:
                    while waiting and len(running) < most:
                        task: Any = waiting[0][1].task
                        future = self._open_pool().submit(run_guarded, function, task, count_threads())
                        running[future] = waiting.popleft()
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        result = future.result()
                        k, _ = running.pop(future)
                        deaths.pop(k, None)
                        yield k, result
                except BrokenProcessPool as error:
                    self._replace_pool(running, deaths, error)
                    waiting.extendleft(sorted(running.values(), key=lambda one: one[0], reverse=True))
                    running.clear()
        finally:
            for future in running:
                future.cancel()

    def _replace_pool(
        self, running: dict[Future[Any], tuple[int, Piece[T]]], deaths: Counter[int], error: Exception
    ) -> None:
        """Count the death of a worker, and let the next piece start a new pool."""
        self.close()
        deaths.update(k for k, _ in running.values())
        guilty = [piece for k, piece in running.values() if deaths[k] > _PATIENCE and len(running) == 1]
        if guilty:
            cause = f"a worker died each of the {_PATIENCE + 1} times that it was at this"
            fix = "give its processes more memory: fewer `workers`, or a lower `memory_limit`"
            raise WorkerError(guilty[0].title, cause, fix, code="Q901") from error

    def _open_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawned, not forked: ONNX Runtime and BLAS have threads, which a fork would leave in pieces.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, context, _end_with_parent)
        return self._pool


def _end_with_parent() -> None:
    """Let this worker end when the process that started it is killed, which would leave it waiting for ever."""
    # Ctrl-C reaches every process of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait_for_sentinel([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
