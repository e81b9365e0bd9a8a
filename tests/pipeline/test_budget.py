"""A budget is kept, what gave way is said, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import onnxq
from onnxq.cli import cli
from onnxq.config import DataConfig, load_config
from onnxq.data import load_data
from onnxq.graph import ValueInfo
from onnxq.passes.journal import Shortage, Shortened
from onnxq.passes.time_budget import TimeBudget
from onnxq.progress import OutOfTime
from onnxq.report import Progress, silent
from tests.pipeline.models import EVERYTHING, images, residual
from tests.processes import start

BALANCED = EVERYTHING.model_copy(update={"effort": "balanced"})


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def budget(seconds: float, reserve: float = 1.0) -> tuple[TimeBudget, Clock]:
    clock = Clock()
    made = TimeBudget(seconds, clock)
    made.reserve = reserve
    return made, clock


def steps(clock: Clock, count: int, each: float):
    def work(progress: Progress) -> str:
        with progress("work", count) as task:
            for _ in range(count):
                clock.now += each
                task.advance()
        return "done"

    return work


def test_a_pass_is_given_up_after_its_share_and_at_most_one_step_more() -> None:
    made, clock = budget(11)
    assert made.tried("sweep", 0.5, silent, steps(clock, 100, 0.4), "before") == "before"
    assert 5.0 <= made.spent() <= 5.4 + 1e-9
    assert made.shortened == [Shortened("sweep", Shortage.GIVEN_UP, 11, 5.0)]
    assert made.tried("promotion", 0.5, silent, steps(clock, 2, 0.4), "before") == "done"


def test_what_has_no_time_is_left_out() -> None:
    made, clock = budget(2)
    clock.now += 0.9
    assert made.tried("sweep", 0.5, silent, steps(clock, 1, 0), "before") == "before"
    assert (made.shortened[0].name, made.shortened[0].how) == ("sweep", Shortage.LEFT_OUT)


def test_without_a_limit_nobody_looks_at_the_clock() -> None:
    made = TimeBudget(None, clock=Clock())
    work = steps(Clock(), 1000, 100.0)
    assert made.tried("sweep", 0.1, silent, work, "before") == "done"
    assert made.shortened == []
    assert not made.over()


def test_calibration_takes_as_many_samples_as_fit() -> None:
    x = ValueInfo("x", onnx.TensorProto.FLOAT, (1, 2))
    data = load_data({"x": np.zeros((40, 1, 2), np.float32)}, [x], DataConfig())
    made, clock = budget(11)
    seen = []

    def work(samples, progress: Progress) -> int:
        seen.append(len(samples))
        steps(clock, len(samples), 0.5)(progress)
        return len(samples)

    count = made.fitting("calibration", data, 0, silent, work)
    assert 1 <= count < 40
    assert seen[0] == 40
    assert seen[-1] == count
    assert made.spent() <= 11
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (count, 40))


def test_one_sample_is_always_checked() -> None:
    made, clock = budget(2)
    clock.now += 5

    x = ValueInfo("x", onnx.TensorProto.FLOAT, (1, 2))
    data = load_data({"x": np.zeros((5, 1, 2), np.float32)}, [x], DataConfig())
    assert len(list(made.take_while_left("check", data))) == 1
    assert (made.shortened[0].how, made.shortened[0].samples) == (Shortage.FEWER_SAMPLES, (1, 5))


def test_nothing_but_the_budget_catches_it() -> None:
    from onnxq.errors import OnnxqError

    assert not issubclass(OutOfTime, OnnxqError)


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
    told = [line for line in done.report.accounts if line.startswith("budget: ")]
    assert told
    assert min(done.report.checks[0].sqnr_db) > 25
    # One step more than planned, on a machine that others use too; the least of it takes what it takes.
    assert spent < max(1.5 * allowed + 0.5, 0.8 * unhurried)
    if share < 0.1:
        assert any("too small" in line for line in told)
        assert done.report.checked == 1
        assert done.report.latency is None


def test_enough_of_it_changes_nothing(unhurried: float) -> None:
    free = onnxq.quantize(residual(), images(32), BALANCED, overrides={"latency": False})
    done = onnxq.quantize(
        residual(), images(32), BALANCED, overrides={"latency": False, "budget": 100 * unhurried + 100}
    )
    assert done.model.SerializeToString() == free.model.SerializeToString()
    assert not [line for line in done.report.accounts if line.startswith("budget: ")]


def test_promotion_keeps_the_steps_it_made() -> None:
    made, clock = budget(100)
    from onnxq.passes.mixed_precision import promotion

    class Search:
        late = False

        @staticmethod
        def expired() -> bool:
            return made.left() <= 0

        def steps(self) -> Iterator[str]:
            for k in range(10):
                clock.now += 30
                yield f"step {k}"

        in_time = promotion._Search.in_time
        end = promotion._Search.end

    search = Search()
    assert list(search.in_time()) == ["step 0", "step 1", "step 2", "step 3"]  # type: ignore[misc]
    assert search.end() == "the budget ran out"  # type: ignore[misc]


@pytest.mark.parametrize("text", ["0", "ten", "-1s", "5d"])
def test_times_that_are_none(text: str, tmp_path: Path) -> None:
    onnx.save(residual(), tmp_path / "m.onnx")
    done = CliRunner().invoke(cli, ["quantize", str(tmp_path / "m.onnx"), "--budget", text])
    assert done.exit_code == 2


@pytest.mark.parametrize(("text", "wanted"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("0.5 m", 30)])
def test_times(text: str, wanted: float) -> None:
    assert load_config(None, {"budget": text}).budget == wanted


# The command, but slow, and saying aloud what it begins.
_SLOW = """
import os, sys, time
from contextlib import contextmanager
from onnxq import report

def say(text):
    print(text, file=sys.stderr, flush=True)

class Task:
    def advance(self, steps=1):
        time.sleep(0.02)

@contextmanager
def slow(description, total=None):
    say(description)
    yield Task()

def replace(*names, real=os.replace):
    say("moving")
    time.sleep(5)
    real(*names)

@contextmanager
def watched(*_, **__):
    yield slow

report.show_progress, os.replace = watched, replace
from onnxq.cli import main
say("ready")
main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("at", ["ready", "calibrating", "equalizing", "sweeping", "ranking", "moving"])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, at: str) -> None:
    """Stopped in every stage, over an earlier result, up to the moment before the finished file takes its place."""
    onnx.save(residual(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **images(48))
    (tmp_path / "c.yaml").write_text("rules:\n  - {op: '*', set: {quantize: true}}\n")
    (tmp_path / "m.q.onnx").write_bytes(b"an earlier result")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    wanted = ["m.onnx", "--data", "d.npz", "--config", "c.yaml", "--force", "--plan", "p.json", "--no-latency"]
    command = [sys.executable, "-c", _SLOW, "quantize", *wanted, "--effort", "balanced", "--min-sqnr", "300"]
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
