"""Signals that ask to stop are obeyed with everything cleaned up; those that are ignored are left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import onnxq
from onnxq.cli import cli
from onnxq.cli.group import Stopped, catch_signals
from onnxq.files import ScratchFolder
from tests.codes.kit import model, saved, written
from tests.processes import start

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals")
_NEG = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Samples that overflow into a temporary folder, then a wait with the folder still there.
_DATA = """
import sys, time
import numpy as np
from onnxq.data import sources
sources._IN_MEMORY = 0
def load():
    for k in range(4):
        yield {"x": np.ones((1, 4), np.float32)}
    print("here", file=sys.stderr, flush=True)
    deadline = time.monotonic() + float(sys.argv[-1])
    while time.monotonic() < deadline:
        time.sleep(0.05)
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    saved(tmp_path, model("g (float[N,4] x) => (float[N,4] y) { y = Neg(x) }"))
    written(tmp_path, _DATA, "slow.py")
    (tmp_path / "tmp").mkdir()
    return tmp_path


def begin(work: Path, module: str, wait: float, **how) -> subprocess.Popen[str]:
    """A run that stands still for so many seconds while it reads its data."""
    given = ["quantize", "m.onnx", "--data", "slow.py:load", "--no-latency", "--effort", "fast", "--holdout", str(wait)]
    environ = {**os.environ, "TMPDIR": str(work / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = start([sys.executable, "-m", module, *given], cwd=work, env=environ, **pipes, **how)
    while "here" not in child.stderr.readline():
        assert child.poll() is None
    return child


def scratch(work: Path) -> list[str]:
    return [name for name in os.listdir(work / "tmp") if name.startswith(".onnxq-")]


@pytest.mark.parametrize(
    ("number", "module"), [(signal.SIGINT, "onnxq"), (signal.SIGTERM, "onnxq"), (signal.SIGHUP, "onnxq.cli")]
)
def test_a_stopped_run_leaves_nothing_and_says_which_signal_it_was(work: Path, number: int, module: str) -> None:
    child = begin(work, module, 60)
    assert len(scratch(work)) == 1
    child.send_signal(number)
    time.sleep(0.02)
    child.send_signal(number)  # a terminal that closes signals twice; cleaning up goes on
    out, errors = child.communicate(timeout=30)
    assert (child.returncode, out) == (128 + number, "")
    assert errors.strip() == "stopped; nothing half-written is left"
    assert scratch(work) == []
    assert sorted(os.listdir(work)) == ["m.onnx", "slow.py", "tmp"]


def test_signals_that_are_ignored_stay_ignored(work: Path) -> None:
    """As `nohup`, and a shell's background jobs, want it."""
    child = begin(work, "onnxq", 1, ignored=_ASKING)
    for number in _ASKING:
        child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert (work / "m.q.onnx").exists()


def test_a_killed_run_is_cleaned_up_after_by_the_next(work: Path) -> None:
    child = begin(work, "onnxq", 60)
    child.kill()
    child.communicate()
    assert len(scratch(work)) == 1
    with ScratchFolder(work / "tmp") as folder:
        assert scratch(work) == [folder.name]


def test_the_library_leaves_signals_alone(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(number) for number in _ASKING]
    monkeypatch.setattr(signal, "signal", None)  # who calls it fails
    samples = {"x": np.ones((4, 4), np.float32)}
    onnxq.quantize(work / "m.onnx", samples, overrides={"latency": False, "effort": "fast"}, out=work / "q.onnx")
    assert [signal.getsignal(number) for number in _ASKING] == before
    monkeypatch.undo()
    # A caller of the command gets them back.
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert [signal.getsignal(number) for number in _ASKING] == before


def test_repeated_signals_do_not_disturb_the_cleaning_up() -> None:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _ASKING}
    try:
        with catch_signals() as stops:
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert stops.number == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_BUILDS = """
import subprocess, sys
from pathlib import Path
from onnx import parser
from onnxq.cli.group import catch_signals
from onnxq.backends import find_engine
from onnxq.backends.building import build_engine
from onnxq.backends.engine import Job
run = subprocess.run
def slow(command, **how):
    # A library that takes long: the process announces itself, and stands still.
    code = "import os, sys, time; from onnxq.backends import child; child.end_with_parent();"
    code += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    return run([sys.executable, "-c", code, sys.argv[1] + "/pid"], **how)
subprocess.run = slow
model = parser.parse_model(MODEL)
with catch_signals():
    build_engine(find_engine("ort"), model, Job(), Path(sys.argv[1]), timeout=60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_builds_ends_with_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM reaches the command alone, not what it started; SIGKILL leaves it no time to do anything."""
    if number is signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux can do that")
    command = [sys.executable, "-c", _BUILDS.replace("MODEL", repr(_NEG)), str(tmp_path)]
    child = start(command, stderr=subprocess.PIPE)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert child.poll() is None
        time.sleep(0.05)
    builder = int((tmp_path / "pid").read_text())
    child.send_signal(number)
    child.communicate(timeout=30)
    for _ in range(100):  # the system does it a moment later
        if not _lives(builder):
            return
        time.sleep(0.05)
    pytest.fail("it lives on")


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
