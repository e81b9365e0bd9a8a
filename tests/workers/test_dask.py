"""Pieces done by a Dask cluster, of which a worker, then the scheduler is killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnxq.config import Config, TensorConfig
from onnxq.errors import DataError, WorkerError
from onnxq.passes.rounding.sequential import round_sequentially
from onnxq.plan import to_json
from onnxq.progress import silent
from onnxq.runtime.crew import Crew
from onnxq.workers import Journal, WorkPiece
from onnxq.workers.dask import DaskWorkers
from tests.passes.rounding.kit import ALL, calibrated
from tests.passes.rounding.test_sequential import matmuls, tokens
from tests.processes import start
from tests.workers.work import die_once, refuse_odd, square

dask = pytest.importorskip("dask")
pytest.importorskip("distributed")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    """The address and the process of a scheduler with two workers, which are processes of their own."""
    script = (
        "import sys\n"
        "from distributed import LocalCluster\n"
        "if __name__ == '__main__':\n"
        "    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50)\n"
        "    print(cluster.scheduler_address, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    path = tmp_path_factory.mktemp("cluster") / "cluster.py"
    path.write_text(script)
    # Workers unpickle what the tests ask of them by its name: they import `tests` from where it lies.
    places = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    how: dict[str, Any] = {"env": os.environ | {"PYTHONPATH": places}}
    how |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with start([sys.executable, str(path)], **how) as process:
        yield process.stdout.readline().strip(), process
        process.kill()


def test_a_cluster_does_pieces(cluster: tuple[str, Any], tmp_path: Path) -> None:
    address, process = cluster
    # Seconds to wait for a scheduler that may come back: usually 30.
    with dask.config.set({"distributed.comm.timeouts.connect": 1}):
        _use_and_kill(DaskWorkers(address), process, tmp_path)


def _round(crew: Crew | None) -> str:
    weights = Config(mode="weight-only", weights=TensorConfig(granularity="channel", bits=8), rules=ALL)
    prepared, plan, samples = calibrated(matmuls(), tokens(6), weights)
    return to_json(round_sequentially(prepared.model, plan, samples, crew=crew, progress=silent).plan)


def _use_and_kill(workers: DaskWorkers, process: Any, tmp_path: Path) -> None:
    assert list(workers.map(square, [WorkPiece(f"piece {k}", k) for k in range(5)])) == [0, 1, 4, 9, 16]
    with pytest.raises(DataError, match="task 3"):
        list(workers.map(refuse_odd, [WorkPiece(str(k), k) for k in (2, 4, 3, 6)]))
    # Samples and second moments are shared out, and do not show it.
    assert _round(Crew(workers)) == _round(None)
    # One of the workers is killed: its pieces are done by the other.
    pieces = [WorkPiece(f"piece {k}", (str(tmp_path), k)) for k in range(4)]
    assert list(workers.map(die_once, pieces)) == [0, 1, 4, 9]
    # The scheduler too: what was finished is taken from the journal by whoever goes on.
    workers.journal = Journal(tmp_path / "journal")
    found = workers.map(square, [WorkPiece(f"piece {k}", k, f"key{k}") for k in range(40)])
    assert next(found) == 0
    process.kill()
    with pytest.raises(WorkerError, match="no scheduler to talk to"):
        list(found)
    workers.close()


def test_no_scheduler_is_said() -> None:
    with pytest.raises(WorkerError, match="no scheduler"):
        DaskWorkers("tcp://127.0.0.1:9", patience=0.2)
