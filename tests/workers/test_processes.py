"""Pieces done by processes: in order, again where one dies, with the error of the first piece that fails."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from onnxq.errors import DataError
from onnxq.workers import WorkPiece, processes
from onnxq.workers.processes import ProcessWorkers
from tests.workers.work import die_once, refuse_odd, square

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there")


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessWorkers]:
    made = ProcessWorkers(2)
    yield made
    made.close()


def test_results_come_in_order_and_the_first_failure_counts(workers: ProcessWorkers) -> None:
    done: list[str] = []
    pieces = [WorkPiece(f"piece {k}", k) for k in range(5)]
    found = workers.map(square, pieces, on_done=lambda piece: done.append(piece.title))
    assert list(found) == [0, 1, 4, 9, 16]
    assert sorted(done) == [piece.title for piece in pieces]
    with pytest.raises(DataError, match="task 3"):
        list(workers.map(refuse_odd, [WorkPiece(str(k), k) for k in (2, 4, 3, 6, 5, 7)]))


def test_the_piece_of_a_dead_worker_is_done_again(workers: ProcessWorkers, tmp_path: Path) -> None:
    pieces = [WorkPiece(f"piece {k}", (str(tmp_path), k)) for k in range(4)]
    assert list(workers.map(die_once, pieces)) == [0, 1, 4, 9]
    assert (tmp_path / "died").exists()


def test_ctrl_c_while_a_worker_starts_is_for_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = processes._start_member

    def interrupt() -> processes._Member:
        member = start()
        os.kill(member.process.pid or 0, signal.SIGINT)
        return member

    monkeypatch.setattr(processes, "_start_member", interrupt)
    with closing(ProcessWorkers(1)) as workers:
        assert list(workers.map(square, [WorkPiece("piece 1", 3)])) == [9]


_SCRIPT = """
from onnxq.workers import WorkPiece
from onnxq.workers.processes import ProcessWorkers
from tests.workers.work import square

list(ProcessWorkers(1).map(square, [WorkPiece("piece 1", 1)]))
"""


@pytest.mark.parametrize("stdin", [False, True])
def test_a_script_that_workers_cannot_import_is_told_how_at_once(tmp_path: Path, stdin: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-" if stdin else str(script)]
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, input=_SCRIPT, capture_output=True, text=True, env=env)
    assert ended.returncode == 1
    assert 'below `if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]
    assert ended.stderr.count("Traceback") == 2
