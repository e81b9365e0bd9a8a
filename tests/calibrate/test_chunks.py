"""Calibration by workers: the same numbers as in this process, whoever did which chunk, and from a journal."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxq.calibrate import calibrate
from onnxq.calibrate.parts import split_evenly
from onnxq.errors import CalibrationError
from onnxq.observers import list_observers
from onnxq.plan import Plan
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, Workers
from tests.calibrate.kit import EXACT, EXACT_SITES, dataset, integers, numbers, plan, site

ROWS = integers(9)
PLAN = plan(*(site(name, observer) for name, observer in zip(EXACT_SITES, list_observers(), strict=False)))


def test_processes_and_journals_give_the_same_numbers(processes: Crew, tmp_path: Path) -> None:
    samples = dataset(EXACT, ROWS)
    wanted = numbers(calibrate(EXACT, PLAN, samples))

    def find(crew: Crew, given: Plan = PLAN) -> list[tuple[bytes, bytes] | None]:
        return numbers(calibrate(EXACT, given, samples, batch=3, crew=crew))

    assert find(processes) == wanted
    assert find(Crew(Workers(Journal(tmp_path)))) == wanted
    assert len(list(tmp_path.iterdir())) == 9
    with Crew(Workers(Journal(tmp_path))) as again:
        assert find(again) == wanted
        assert again.workers.journal is not None
        assert again.workers.journal.used == 9
        # Of another configuration none is taken.
        other = plan(*(site(name, "percentile") for name in EXACT_SITES))
        assert find(again, other) != wanted
        assert again.workers.journal.used == 9


@pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there")
def test_a_killed_worker_changes_nothing(processes: Crew) -> None:
    samples, killed = dataset(EXACT, ROWS), []

    class Killing:
        """A progress that kills a worker after some samples."""

        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Killing:
            return self

        def __exit__(self, *_: object) -> None: ...

        def advance(self, steps: int = 1) -> None:
            if not killed:
                killed.append(processes.workers.members[0].process.pid)  # type: ignore[attr-defined]
                os.kill(killed[0], signal.SIGKILL)

    found = calibrate(EXACT, PLAN, samples, crew=processes, progress=Killing)
    assert killed
    assert numbers(found) == numbers(calibrate(EXACT, PLAN, samples))


def test_the_sample_at_fault_is_named(processes: Crew) -> None:
    rows = ROWS.copy()
    rows[[5, 7], 0, 0] = np.finfo(np.float32).max
    for crew in (None, processes):
        with pytest.raises(CalibrationError, match=r"y: .*, sample 5"):
            calibrate(EXACT, plan(site("y")), dataset(EXACT, {"x": rows}), crew=crew)


def test_runs_are_even_and_none_is_empty() -> None:
    assert [list(run) for run in split_evenly(range(7), 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(run) for run in split_evenly(range(2), 64)] == [[0], [1]]
