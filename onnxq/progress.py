"""The protocol by which long work reports its steps. `onnxq.report.live` shows them; other rooms only report."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")
# Called behind every sample or step of work.
Tick = Callable[[], None]


class OutOfTime(Exception):
    """A pass has used up its share of the time. Only the time budget catches it; hence not an OnnxqError."""


class Task(Protocol):
    """A running step."""

    def advance(self, steps: int = 1) -> None:
        """Count `steps` as done. May raise OutOfTime."""


class Progress(Protocol):
    """`with progress("calibrating", 32) as task: … task.advance()`. total: None if unknown. Steps may nest.

    Begin a step before any work that may take seconds, also before work that cannot report from within.
    """

    def __call__(self, description: str, total: int | None = None) -> AbstractContextManager[Task]:
        """Begin a step."""


class _Nobody:
    def advance(self, steps: int = 1) -> None:
        """Do nothing."""


@contextmanager
def silent(description: str, total: int | None = None) -> Iterator[Task]:
    """A Progress that shows nothing."""
    yield _Nobody()


def count_items(items: Iterable[T], task: Task) -> Iterator[T]:
    """Yield the items and count each as done once the next one is requested."""
    for item in items:
        yield item
        # After the yield: an item counts when its consumer has finished with it.
        task.advance()
