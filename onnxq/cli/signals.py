"""Signals that ask the command to stop end it as an exception, so that everything is cleaned up on the way out.

Only the command line does this: the library leaves the signals of the program that uses it alone.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# A closed terminal signals twice (the system and the shell), an impatient hand too: cleaning up goes on meanwhile.
_PATIENCE = 2.0
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(KeyboardInterrupt):
    """The command was asked to stop. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Stops:
    """The first signal that came, even where the exception for it was lost in a library."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler: raise Stopped, but not again while the first one is being dealt with."""
        now = time.monotonic()
        if self.number and now < self._since + _PATIENCE:
            return
        self.number, self._since = self.number or number, now
        raise Stopped(number)


@contextmanager
def stopping() -> Iterator[Stops]:
    """Raise Stopped for SIGINT, SIGTERM and SIGHUP while the block runs.

    Those that are ignored stay so, as `nohup` and background jobs of a shell want it; those that the calling program
    has handlers for are left to it.
    """
    stops = Stops()
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, stops)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            # A process that was stopped is about to end with a code of its own: no second signal may end it first.
            signal.signal(number, signal.SIG_IGN if stops.number else handler)
