"""The first tries of every fuzzer, the same ones each time: no failure among them, and enough that are not refused."""

import os
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import describe_failures
from tests.fuzz.case import FAILED, FUZZERS, find_fuzzer, seeded
from tests.fuzz.kills import stop_often
from tests.fuzz.run import Worker, run_tries
from tests.fuzz.worker import run_try

# Some seconds each on one core; `python -m tests.fuzz` goes on from there.
TRIES = {
    "bytes": 120, "semantics": 40, "data": 80, "plans": 120, "configs": 80, "caches": 80, "motifs": 12, "engines": 6,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_no_damage_is_more_than_a_refusal(fuzzer: str, tmp_path: Path) -> None:
    if fuzzer == "data":
        pytest.importorskip("PIL")
    tally = run_tries(fuzzer, 0, iter(range(TRIES[fuzzer])), save=tmp_path)
    assert not tally.failures, "\n".join(describe_failures(tally.failures))
    assert tally.tries == TRIES[fuzzer]
    assert tally.accepted > 0
    assert sum(tally.refused.values()) + tally.accepted == tally.tries


@pytest.mark.parametrize("fuzzer", ["bytes", "semantics", "data", "configs"])
def test_a_try_is_the_same_again(fuzzer: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for folder in (tmp_path / "one", tmp_path / "other"):
        for number in range(4):
            (folder / str(number)).mkdir(parents=True)
            find_fuzzer(fuzzer).make_case(seeded(7, fuzzer, number), folder / str(number))
    first, second = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()}
                     for f in (tmp_path / "one", tmp_path / "other"))  # fmt: skip
    assert first == second
    assert first


def wicked(folder: Path, code: str) -> None:
    """A fuzzer that does what no try may do."""
    (folder / "wicked.py").write_text(
        f"def make_case(rng, folder):\n    return ''\n\ndef run_case(folder, work):\n    {code}\n    return []\n"
    )


@pytest.mark.parametrize(
    ("code", "limit", "label"),
    [("import os; os.abort()", 60.0, "died of SIGABRT"), ("import time; time.sleep(60)", 2.0, "hangs")],
)
def test_a_crash_and_a_hang_are_failures(
    code: str, limit: float, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wicked(tmp_path, code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("wicked", tmp_path, limit)
    try:
        outcome = worker.run({"seed": 0, "number": 0})
        assert (outcome.kind, outcome.label) == (FAILED, label)
        assert worker.ended()
    finally:
        worker.stop()


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("raise ZeroDivisionError", "ZeroDivisionError"),
        ("(work / 'half.tmp').write_text('')", "file left over"),
        ("import tempfile; tempfile.mkdtemp()", "file left over"),
        ("b'x' * (600 << 20)", "memory"),
        ("from onnxq.errors import ModelError; raise ModelError('the model', '')", "refusal without words"),
        ("from tests.fuzz.case import Wrong; raise Wrong('far away: 1 dB')", "wrong result"),
    ],
)
def test_the_judge_sees(code: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wicked(tmp_path, code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wicked", raising=False)
    outcome = run_try("wicked", tmp_path / "try")
    assert (outcome.kind, outcome.label) == (FAILED, label)


# ---- A few of the moments that `python -m tests.fuzz.kills` tries.


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_stopped_at_any_moment_nothing_half_written_is_left(tmp_path: Path) -> None:
    endings, wrong = stop_often(5, 1, tmp_path)
    assert wrong == []
    assert sum(endings.values()) == 5
