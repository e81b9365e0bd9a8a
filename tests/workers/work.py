"""Functions that workers are given in tests."""

import os
import signal
import time
from pathlib import Path

from onnxq.errors import DataError


def square(task: int) -> int:
    return task * task


def refuse_odd(task: int) -> int:
    # Later pieces fail first.
    time.sleep(0.05 / task)
    if task % 2:
        raise DataError(f"task {task}", "is odd", code="Q203")
    return task


def die_once(task: tuple[str, int]) -> int:
    """Kill the worker the first time that anybody is at number 2."""
    folder, number = task
    mark = Path(folder) / "died"
    if number == 2 and not mark.exists():
        mark.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def die(task: int) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return task
