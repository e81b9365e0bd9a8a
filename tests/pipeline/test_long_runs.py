"""Long runs: by workers, killed and gone on with, within a budget, and stopped in any stage, leaving nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.errors import ConfigError
from tests.cli import kit
from tests.pipeline.models import BALANCED, EVERYTHING, images, list_accounts, quantize, residual
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
    bare = onnx.ModelProto.FromString(model.SerializeToString())
    del bare.metadata_props[:]
    return bare.SerializeToString(deterministic=True)


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(ConfigError, match="workers were both given"):
        find_bytes(workers=2, dask="tcp://127.0.0.1:9")
    with pytest.raises(ConfigError, match="the model is no file"):
        find_bytes(resume="auto")


def test_a_profile_by_workers_is_the_same(tmp_path: Path) -> None:
    def find(**overrides: Any) -> Any:
        return onnxq.profile_model(NET, data=images(8), config=CONFIG, overrides={"by": ["node"], **overrides})

    wanted = find()
    assert len(wanted.groups) > 5
    assert find(workers=2, resume=str(tmp_path)) == wanted
    assert find(resume=str(tmp_path)) == wanted


@pytest.fixture(scope="module")
def unhurried() -> float:
    begun = time.monotonic()
    onnxq.quantize(residual(), images(64), BALANCED)
    return time.monotonic() - begun


@pytest.mark.parametrize("share", [0.02, 0.4, 0.7])
def test_a_run_keeps_to_it(unhurried: float, share: float) -> None:
    # The smallest is less than reading the model takes, on any machine.
    allowed = unhurried * share if share > 0.1 else 0.005
    begun = time.monotonic()
    done = onnxq.quantize(residual(), images(64), BALANCED, overrides={"budget": allowed})
    spent = time.monotonic() - begun
    told = list_accounts(done, "budget")
    assert told
    assert min(done.report.checks[0].sqnr_db) > 25
    # One step more than planned, on a machine that others use too; the least of it takes what it takes.
    assert spent < max(1.5 * allowed + 0.5, 0.8 * unhurried)
    if share < 0.1:
        assert any("too small" in line for line in told)
        assert done.report.checked == 1
        assert done.report.latency is None


def test_enough_of_it_changes_nothing(unhurried: float) -> None:
    free, done = (
        quantize(residual(), images(32), BALANCED, **budget) for budget in ({}, {"budget": 100 * unhurried + 100})
    )
    assert done.model.SerializeToString() == free.model.SerializeToString()
    assert not list_accounts(done, "budget")


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
@pytest.mark.parametrize("at", ["ready", "calibrating", "measuring", "moving"])
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
    assert any(line.startswith(at) for line in child.stderr)
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert errors.splitlines()[-1] == "stopped; nothing half-written is left"
    assert "Traceback" not in errors
    assert out == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# ---- Shards of a calibration by the command line: merged, they make the file that one process makes.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(residual(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **images(16))
    (tmp_path / "c.yaml").write_text("effort: fast\nrules:\n  - {op: '*', set: {quantize: true}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str, code: int = 0) -> str:
    given = () if args[0] == "merge" else ("--data", "d.npz", "--config", "c.yaml")
    result = kit.run(*args, *given)
    assert result.exit_code == code, result.output
    return result.output + result.stderr


def test_shards_make_the_same_file(folder: Path) -> None:
    run("quantize", "m.onnx", "-o", "plain.onnx", "--no-latency")
    said = run("calibrate", "m.onnx", "--shard", "2/3", "-o", "2.json")
    assert "2.json: 6 ranges over 5 of 14 samples; 9 are in other parts" in said
    run("calibrate", "m.onnx", "--shard", "1/3", "--workers", "1", "-o", "1.json")
    run("calibrate", "m.onnx", "--shard", "3/3", "-o", "3.json")
    said = run("merge", "3.json", "1.json", "2.json", "-o", "r.json", "--json")
    assert json.loads(said)["missing"] == []
    run("quantize", "m.onnx", "-o", "merged.onnx", "--no-latency", "--ranges", "r.json")
    assert (folder / "merged.onnx").read_bytes() == (folder / "plain.onnx").read_bytes()
    # Observers of other settings, and a part alone, are refused.
    other = ("quantize", "m.onnx", "-o", "o.onnx", "--no-latency", "--ranges")
    assert "r.json: was made with another configuration than this run" in run(
        *other, "r.json", "--set", "activations.observer=mse", code=1
    )
    assert "2.json: lacks 9 of 14 samples" in run(*other, "2.json", code=1)
    assert not (folder / "o.onnx").exists()


def test_shards_that_there_are_not(folder: Path) -> None:
    for shard, said in (("3/2", "is not NUMBER/COUNT"), ("two", "is not NUMBER/COUNT"), ("1/99", "only 14 samples")):
        assert said in run("calibrate", "m.onnx", "--shard", shard, code=1)
    assert "nothing to calibrate" in run("calibrate", "m.onnx", "--set", "mode=weight-only", code=1)
