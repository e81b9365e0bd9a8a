"""A run by workers, one that is killed and goes on, and one as ever: the same file."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.errors import ConfigError
from tests.pipeline.models import EVERYTHING, images, residual
from tests.processes import start

# Every operator, so that there is something to calibrate and to round in a small net; and no other search.
LEFT_OUT = "cross_layer_equalization, bias_absorption, smoothquant, ranges, float_ops, dynamic_scales, sensitive_ops"
CONFIG = onnxq.load_config(
    EVERYTHING, {"verify.latency": False, "effort": "balanced", "skip": tuple(LEFT_OUT.split(", "))}
)
NET, DATA = residual(), images(48)


def find_bytes(**overrides: Any) -> bytes:
    return onnxq.quantize(NET, DATA, CONFIG, overrides=overrides).model.SerializeToString(deterministic=True)


@pytest.fixture(scope="module")
def wanted() -> bytes:
    return find_bytes()


def test_workers_give_the_same_file(wanted: bytes, tmp_path: Path) -> None:
    assert find_bytes(workers=2, resume=str(tmp_path)) == wanted
    pieces = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert pieces
    # All of them are there: nothing is done or written again.
    assert find_bytes(resume=str(tmp_path)) == wanted
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == pieces


# The command, which is killed once it has rounded two operators.
_KILLED = """
import os, signal
from onnxq.workers import Journal
left = 2

def write(journal, key, value, real=Journal.write):
    global left
    real(journal, key, value)
    left -= type(value).__name__ == "OperatorNumbers"
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.write = write
from onnxq.cli import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there")
def test_a_killed_command_goes_on(wanted: bytes, tmp_path: Path) -> None:
    onnx.save(NET, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **DATA)
    config = f"effort: balanced\nskip: [{LEFT_OUT}]\nrules:\n  - {{op: '*', set: {{quantize: true}}}}\n"
    (tmp_path / "c.yaml").write_text(config)
    given = ["quantize", "m.onnx", "--data", "d.npz", "--config", "c.yaml", "--no-latency", "-q", "--resume"]
    with start([sys.executable, "-c", _KILLED, *given], cwd=tmp_path) as process:
        assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "m.q.onnx").exists()
    pieces = {path: path.stat().st_mtime_ns for path in (tmp_path / "m.onnx.resume").glob("*.piece")}
    # One of the calibration's, at least, and two operators.
    assert len(pieces) > 2
    made = onnxq.quantize(tmp_path / "m.onnx", DATA, CONFIG, overrides={"resume": "auto"})
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "m.onnx.resume").glob("*.piece")}
    # The rest is done, and nothing again.
    assert pieces.items() < after.items()
    # Its metadata name the file.
    assert _strip(made.model) == _strip(onnx.load_from_string(wanted))


def _strip(model: onnx.ModelProto) -> bytes:
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.metadata_props[:]
    return bare.SerializeToString(deterministic=True)


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(ConfigError, match="workers were both given"):
        find_bytes(workers=2, dask="tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match="the model is no file"):
        find_bytes(resume="auto")


def test_a_profile_by_workers_is_the_same(tmp_path: Path) -> None:
    def find(**overrides: Any) -> Any:
        return onnxq.profile_model(NET, data=images(8), config=CONFIG, overrides=overrides)

    wanted = find()
    assert len(wanted.groups) > 8
    assert find(workers=2, resume=str(tmp_path)) == wanted
    assert find(resume=str(tmp_path)) == wanted
