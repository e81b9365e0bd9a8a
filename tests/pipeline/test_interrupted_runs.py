"""Ctrl-C in any stage of a run leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.pipeline.models import images, residual
from tests.processes import start

# The command, saying aloud what it begins, and slow in the stage that its first argument names.
_SLOW = """
import os, sys, time
from contextlib import contextmanager
from onnxq.report import live

at = sys.argv.pop(1)

def say(text):
    print(text, file=sys.stderr, flush=True)

class Task:
    def __init__(self, seconds):
        self.seconds = seconds

    def advance(self, steps=1):
        time.sleep(self.seconds)

@contextmanager
def slow(description, total=None):
    say(description)
    yield Task(0.5 * description.startswith(at))

def replace(*names, real=os.replace):
    say("moving")
    time.sleep(5)
    real(*names)

@contextmanager
def watched(*_, **__):
    yield slow

live.show_progress, os.replace = watched, replace
from onnxq.cli import main
say("ready")
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("at", ["ready", "calibrating", "ranking", "moving"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, at: str) -> None:
    """Stopped early and late, over an earlier result, up to the moment before the finished file takes its place."""
    onnx.save(residual(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **images(48))
    (tmp_path / "c.yaml").write_text("rules:\n  - {op: '*', set: {quantize: true}}\n")
    (tmp_path / "m.q.onnx").write_bytes(b"an earlier result")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    wanted = ["m.onnx", "--data", "d.npz", "--config", "c.yaml", "--force", "--plan", "p.json", "--no-latency"]
    command = [sys.executable, "-c", _SLOW, at, "quantize", *wanted, "--effort", "balanced", "--min-sqnr", "300"]
    child = start(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stderr is not None
    assert any(line.startswith(at) for line in child.stderr)
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert errors.splitlines()[-1] == "stopped; nothing half-written is left"
    assert "Traceback" not in errors
    assert out == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
