"""Compilers as child processes."""

from __future__ import annotations

import subprocess

from onnxq.errors import MissingDependencyError

# Seconds; nvcc takes minutes for all architectures.
_TIMEOUT = 600
# Lines of a compiler's output that a message repeats: the first errors, which cause the others.
_LINES = 10


def run_compiler(command: list[str], subject: str, if_absent: str, if_failed: str) -> str:
    """Run a compiler and return its output. Raises MissingDependencyError about `subject` with one of the two fixes."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(subject, f"{command[0]} does not run: {error}", if_absent, code="Q807") from error
    if done.returncode:
        output = " | ".join((done.stderr or done.stdout).strip().splitlines()[:_LINES])
        raise MissingDependencyError(subject, f"{command[0]} failed: {output}", if_failed, code="Q807")
    return done.stdout
