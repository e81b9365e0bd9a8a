"""The first tries of every fuzzer, the same ones each time: no failure among them, and enough that are not refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import describe_failures
from tests.fuzz.case import FAILED, FUZZERS, find_fuzzer, seeded
from tests.fuzz.run import Worker, run_tries

# About ten seconds each on one core.
TRIES = {"bytes": 250, "semantics": 80, "data": 160, "plans": 250, "configs": 160, "caches": 150}


@pytest.mark.slow
@pytest.mark.parametrize("fuzzer", list(FUZZERS))
def test_no_damage_is_more_than_a_refusal(fuzzer: str, tmp_path: Path) -> None:
    if fuzzer in ("data", "caches"):
        pytest.importorskip("PIL" if fuzzer == "data" else "polygraphy")
    tally = run_tries(fuzzer, 0, iter(range(TRIES[fuzzer])), save=tmp_path)
    assert not tally.failures, "\n".join(describe_failures(tally.failures))
    assert tally.tries == TRIES[fuzzer]
    assert tally.accepted > 0
    assert sum(tally.refused.values()) + tally.accepted == tally.tries


@pytest.mark.parametrize("fuzzer", list(FUZZERS))
def test_a_try_is_the_same_again(fuzzer: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("polygraphy")
    for folder in (tmp_path / "one", tmp_path / "other"):
        for number in range(4):
            (folder / str(number)).mkdir(parents=True)
            find_fuzzer(fuzzer).make_case(seeded(7, fuzzer, number), folder / str(number))
    first, second = ({p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()}
                     for f in (tmp_path / "one", tmp_path / "other"))  # fmt: skip
    assert first == second
    assert first


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("import os; os.abort()", "died of SIGABRT"),
        ("import time; time.sleep(60)", "hangs"),
        ("raise ZeroDivisionError", "ZeroDivisionError"),
        ("(work / 'half.tmp').write_text('')", "file left over"),
        ("global held; held = bytearray(b'x' * (700 << 20))", "memory"),
    ],
)
def test_the_judge_sees(code: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer that does what no try may do, run like the others."""
    (tmp_path / "wicked.py").write_text(
        f"def make_case(rng, folder):\n    return ''\n\ndef run_case(folder, work):\n    {code}\n    return []\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("wicked", tmp_path, 5.0)
    try:
        outcome = worker.run({"seed": 0, "number": 0})
    finally:
        worker.stop()
    assert (outcome.kind, outcome.label) == (FAILED, label)
