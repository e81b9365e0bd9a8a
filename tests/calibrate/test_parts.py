"""Parts of a calibration: joined in any order they are the whole; others are refused."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxq.calibrate import calibrate
from onnxq.calibrate.parts import Part, join_parts, read_part, split_evenly, write_part
from onnxq.calibrate.run import observe_part
from onnxq.errors import CalibrationError, PlanError
from onnxq.observers import list_observers
from onnxq.plan import Plan
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, Workers
from tests.calibrate.kit import EXACT, EXACT_SITES, dataset, integers, numbers, plan, site, watch_steps
from tests.passes.rounding.test_shared_work import Twice

ROWS = integers(10)
SAMPLES = dataset(EXACT, ROWS)
PLAN = plan(*(site(name, observer) for name, observer in zip(EXACT_SITES, list_observers(), strict=False)))
SHARDS = [range(4), range(4, 5), range(5, 10)]


def save(folder: Path, part: Part, name: str) -> Part:
    path = folder / name
    path.write_text(write_part(part))
    return read_part(path)


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    return [save(tmp_path, observe_part(EXACT, PLAN, SAMPLES, run), f"{k}.json") for k, run in enumerate(SHARDS)]


def test_joined_parts_give_the_same_numbers(parts: list[Part], tmp_path: Path) -> None:
    assert [len(part.missing) for part in parts] == [6, 9, 5]
    first = save(tmp_path, join_parts([parts[2], parts[0]]), "some.json")
    whole = save(tmp_path, join_parts([parts[1], first]), "all.json")
    found = calibrate(EXACT, PLAN, SAMPLES, observed=whole)
    assert numbers(found) == numbers(calibrate(EXACT, PLAN, SAMPLES))


def test_a_constant_of_a_group_counts_once() -> None:
    shared = plan(*(site(name, group="g") for name in ("m", "c")))
    part = observe_part(EXACT, shared, SAMPLES, range(10))
    found = calibrate(EXACT, shared, SAMPLES, observed=part)
    assert numbers(found) == numbers(calibrate(EXACT, shared, SAMPLES))


def test_parts_that_do_not_belong_together_are_refused(parts: list[Part]) -> None:
    with pytest.raises(CalibrationError, match=r"lacks 6 of 10 samples: .*sample 4, .* and 1 more \[Q512\]"):
        calibrate(EXACT, PLAN, SAMPLES, observed=parts[0])
    with pytest.raises(CalibrationError, match=r"holds sample 4, which another part holds too \[Q512\]"):
        join_parts([parts[1], parts[1]])
    whole = join_parts(parts)
    for changed, name in (
        ({"proto": EXACT, "plan": plan(site("x"))}, "configuration"),
        ({"dataset": dataset(EXACT, integers(10, seed=3))}, "data"),
    ):
        given: dict[str, Any] = {"proto": EXACT, "plan": PLAN, "dataset": SAMPLES} | changed
        with pytest.raises(CalibrationError, match=rf"made with another {name} than this run \[Q511\]"):
            calibrate(**given, observed=whole)
        other = observe_part(**given, positions=range(5))
        with pytest.raises(CalibrationError, match=rf"another {name} than "):
            join_parts([parts[2], other])
    # The first sample alone tells data sets apart; the others show when they are read.
    rows = ROWS.copy()
    rows[7] = 0
    with pytest.raises(CalibrationError, match=r"made with other values of .*sample 7 \[Q511\]"):
        calibrate(EXACT, PLAN, dataset(EXACT, rows), observed=whole)


def test_a_plan_of_weights_has_no_parts() -> None:
    with pytest.raises(PlanError, match="nothing to calibrate"):
        observe_part(EXACT, plan(), SAMPLES, range(3))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "onnxq.ranges", "schema": 2}', '{"kind": "onnxq.ranges", "schema": 1}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match="Q513"):
        read_part(path)


def test_damaged_numbers_are_refused(parts: list[Part], tmp_path: Path) -> None:
    good = (tmp_path / "0.json").read_text()
    for old, new in (
        ('"arrays": [\n  "', '"arrays": [\n  "AAAA'),
        ("minimum", "minimal"),
        ('\\"aciq\\"', '\\"aciqq\\"'),
    ):
        assert old in good
        (tmp_path / "0.json").write_text(good.replace(old, new))
        with pytest.raises(CalibrationError, match=r"is damaged .*\[Q513\]"):
            read_part(tmp_path / "0.json")


# ---- Parts that workers do: the same numbers as in this process, whoever did which chunk, and from a journal.


def test_processes_and_journals_give_the_same_numbers(processes: Crew, tmp_path: Path) -> None:
    wanted = numbers(calibrate(EXACT, PLAN, SAMPLES))

    def find(crew: Crew, given: Plan = PLAN) -> list[tuple[bytes, bytes] | None]:
        return numbers(calibrate(EXACT, given, SAMPLES, batch=3, crew=crew))

    assert find(processes) == wanted
    assert find(Crew(Workers(Journal(tmp_path)))) == wanted
    assert len(list(tmp_path.iterdir())) == len(ROWS)
    with Crew(Workers(Journal(tmp_path))) as again:
        assert find(again) == wanted
        assert again.workers.journal is not None
        assert again.workers.journal.used == len(ROWS)
        # Of another configuration none is taken.
        other = plan(*(site(name, "percentile") for name in EXACT_SITES))
        assert find(again, other) != wanted
        assert again.workers.journal.used == len(ROWS)


@pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there")
def test_a_killed_worker_changes_nothing(processes: Crew) -> None:
    killed: list[int] = []

    def kill(_: int) -> None:
        if not killed:
            killed.append(processes.workers.members[0].process.pid)  # type: ignore[attr-defined]
            os.kill(killed[0], signal.SIGKILL)

    found = calibrate(EXACT, PLAN, SAMPLES, crew=processes, progress=watch_steps(kill))
    assert killed
    assert numbers(found) == numbers(calibrate(EXACT, PLAN, SAMPLES))


def test_the_sample_at_fault_is_named(processes: Crew) -> None:
    rows = ROWS.copy()
    rows[[5, 7], 0, 0] = np.finfo(np.float32).max
    # The last one of these crews meets sample 7 first.
    for crew in (None, processes, Crew(Twice())):
        with pytest.raises(CalibrationError, match=r"y: .*, sample 5"):
            calibrate(EXACT, plan(site("y")), dataset(EXACT, {"x": rows}), crew=crew)


def test_runs_are_even_and_none_is_empty() -> None:
    assert [list(run) for run in split_evenly(range(7), 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(run) for run in split_evenly(range(2), 64)] == [[0], [1]]
