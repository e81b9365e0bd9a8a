"""Run a command as a child and say what it cost: wall seconds, peak memory. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """What one child did. peak_mb is its largest resident set; output is stdout and stderr together.

    seconds are wall time, cpu_seconds what it and its own children computed: on a busy machine the fairer figure.
    """

    code: int
    seconds: float
    peak_mb: float
    output: str
    cpu_seconds: float = 0.0

    @property
    def last_line(self) -> str:
        """The last line that is not empty."""
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "")

    def checked(self, what: str) -> Run:
        """This run if it succeeded; otherwise the benchmark ends here with the child's output."""
        if self.code:
            sys.exit(f"{what} failed with exit code {self.code}:\n{self.output}")
        return self


def run(command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> Run:
    """Run `command` to its end.

    NOTE: Linux counts the parent's resident set at the fork into the child's peak, so a benchmark that calls this
    must stay small itself: no numpy, no onnxruntime in the parent.
    """
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        child = subprocess.Popen(
            [str(part) for part in command],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        output = log.read().decode(errors="replace")
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = usage.ru_utime + usage.ru_stime
    return Run(child.returncode, seconds, usage.ru_maxrss * unit / 2**20, output, cpu)


def onnxq(*arguments: str | Path) -> list[str | Path]:
    """The onnxq command of this very interpreter."""
    return [sys.executable, "-m", "onnxq.cli", *arguments]


def table(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    """A Markdown table; the first column to the left, numbers to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
