"""How long work says what it is doing: one protocol for all rooms; who shows it, and where, is not their business."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class OutOfTime(Exception):
    """A pass has used up its share. Not an OnnxqError: nothing is wrong, and nobody but the budget may catch it."""


class Task(Protocol):
    """A running step that is told how far it got."""

    def advance(self, steps: int = 1) -> None:
        """Count `steps` as done. May raise OutOfTime."""


class Progress(Protocol):
    """`with progress("calibrating", 32) as task: … task.advance()`; total None: of unknown length. Steps may nest.

    Begin a step before anything that may take seconds: what cannot report from within is announced at least.
    """

    def __call__(self, description: str, total: int | None = None) -> AbstractContextManager[Task]:
        """Begin a step."""


class _Nobody:
    def advance(self, steps: int = 1) -> None:
        """Nobody is looking."""


@contextmanager
def silent(description: str, total: int | None = None) -> Iterator[Task]:
    """A Progress that shows nothing."""
    yield _Nobody()


def counted(items: Iterable[T], task: Task) -> Iterator[T]:
    """The items; each is counted as done when the next one is asked for."""
    for one in items:
        yield one
        task.advance()
