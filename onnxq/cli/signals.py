"""SIGINT, SIGTERM and SIGHUP as an exception, so that a command cleans up before it ends.

Only the command line does this: the library leaves signals to the program that uses it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Seconds in which a second signal is ignored: a closed terminal sends two (the system and the shell), an impatient user
# too, and cleaning up must not be interrupted.
_PATIENCE = 2.0
# By name, since Windows has no SIGHUP.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(KeyboardInterrupt):
    """A signal asked the command to stop. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Stops:
    """The number of the first signal, 0 before one; it is kept also where a library swallows the exception."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler: raise Stopped, except shortly after an earlier signal."""
        now = time.monotonic()
        if self.number and now < self._since + _PATIENCE:
            return
        self.number, self._since = self.number or number, now
        raise Stopped(number)


@contextmanager
def catch_signals() -> Iterator[Stops]:
    """Raise Stopped for SIGINT, SIGTERM and SIGHUP while the block runs.

    Ignored signals stay ignored, as `nohup` and background jobs of a shell need it; signals that the calling program
    handles stay with it.
    """
    stops = Stops()
    before: dict[signal.Signals, Any] = {}
    # Python lets only the main thread set handlers.
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, stops)
    try:
        yield stops
    finally:
        for number, handler in before.items():
            # A stopped process is about to exit with its own code: no second signal may end it before.
            signal.signal(number, signal.SIG_IGN if stops.number else handler)
