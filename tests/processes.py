"""Child processes of tests, with signals as a terminal gives them, and engines that do without one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onnxq.backends.engine import Engine


@contextmanager
def build_here() -> Iterator[None]:
    """ONNX Runtime and OpenVINO build in this process: one of its own takes a second to start."""
    from onnxq.backends import building, child

    def run_here(engine: Engine, folder: Path, job: Mapping[str, Any], **how: Any) -> int:
        if engine.name not in ("ort", "openvino"):
            return run_child(engine, folder, job, **how)
        building._prepare_child(engine, folder, job, builds=how.get("builds", False))
        return child.main(folder)

    run_child = building.run_child
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(building, "run_child", run_here)
        monkeypatch.setattr(child, "end_with_parent", lambda: None)
        yield


def start(command: Sequence[str], *, ignored: Sequence[signal.Signals] = (), **how: Any) -> subprocess.Popen[str]:
    """Start a child that SIGINT, SIGTERM and SIGHUP end unless they are `ignored`, whatever the tests' own parent set.

    A shell's background jobs ignore SIGINT, and what is ignored stays so in children; what is handled does not.
    """
    asking = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in asking}
    for number in asking:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **how)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
