"""Pieces of work and their results in order, whoever does them and whatever the order in which they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from onnxq.workers.journal import Journal

T = TypeVar("T")
R = TypeVar("R")
# (position among the pieces, result)
Finished = tuple[int, Any]

# Threads of a session of which no number is asked for; 0: all cores.
_threads: ContextVar[int] = ContextVar("onnxq_threads", default=0)


@dataclass(frozen=True)
class WorkPiece(Generic[T]):
    """One piece of work.

    title: for messages. task: the argument of the function, which can be pickled; large values stand in it as paths.
    key: hash of everything that the result depends on; "": never taken from an earlier run.
    """

    title: str
    task: T
    key: str = ""


class Workers:
    """Does pieces one after another in this process. count: pieces done at the same time.

    journal: the finished pieces of this run and of earlier ones; None: nothing is written.
    """

    count = 1

    def __init__(self, journal: Journal | None = None) -> None:
        self.journal = journal

    @property
    def plain(self) -> bool:
        """True where work in pieces gains nothing: there is one process, and nothing is kept of its results."""
        return self.count == 1 and self.journal is None

    def map(
        self,
        function: Callable[[T], R],
        pieces: Sequence[WorkPiece[T]],
        *,
        on_done: Callable[[WorkPiece[T]], None] = lambda _: None,
    ) -> Iterator[R]:
        """Yield the result of every piece, in the order of the pieces.

        function: a function of a module, which depends on nothing but its argument. on_done: called with each piece
        as its result arrives. Raises what the function raises for the first piece that fails, whoever ran ahead;
        WorkerError for a piece that workers die over.
        """
        results: dict[int, R] = {}
        finished = {k: piece.key for k, piece in enumerate(pieces) if self.journal and self.journal.holds(piece.key)}
        todo = [(k, piece) for k, piece in enumerate(pieces) if k not in finished]
        stream = self._finish_pieces(function, todo)
        for k, piece in enumerate(pieces):
            if self.journal is not None and k in finished:
                result = self.journal.read(piece.key)
                # A damaged file: done again, here, since it is rare.
                results[k] = function(piece.task) if result is None else result
                on_done(piece)
            while k not in results:
                at, value = next(stream)
                if isinstance(value, _Failure):
                    if at == k:
                        raise value.error
                elif self.journal is not None and pieces[at].key:
                    self.journal.write(pieces[at].key, value)
                results[at] = value
                on_done(pieces[at])
            if isinstance(results[k], _Failure):
                raise results[k].error  # type: ignore[attr-defined]
            yield results.pop(k)

    def close(self) -> None:
        """End the workers."""

    def _finish_pieces(
        self, function: Callable[[T], R], todo: Sequence[tuple[int, WorkPiece[T]]]
    ) -> Iterator[Finished]:
        """Yield results as they arrive; a _Failure for a piece whose function raised."""
        for k, piece in todo:
            yield k, run_guarded(function, piece.task, count_threads())


@dataclass(frozen=True)
class _Failure:
    """An exception of a piece, which counts once all pieces before it have ended."""

    error: Exception


def run_guarded(function: Callable[[T], R], task: T, threads: int = 0) -> R | _Failure:
    """Return the result of a piece, or its exception as a value. Workers of every kind call this.

    threads: `count_threads` of the process that hands the piece out.
    """
    try:
        with use_threads(threads):
            return function(task)
    except Exception as error:
        return _Failure(error)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Run sessions in so many threads inside, wherever no other number is asked for; 0: all cores.

    ONNX Runtime shares sums out among its threads, so that the last bits of a result depend on their number. It is the
    same in all workers, however many there are.
    """
    token = _threads.set(count)
    try:
        yield
    finally:
        _threads.reset(token)


def count_threads(requested: int = 0) -> int:
    """The number of threads of a session. asked: 0 for none in particular."""
    return requested or _threads.get()
