"""Workers of a running Dask cluster, on this machine or others that see the same folders."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from onnxq.errors import MissingDependencyError, WorkerError
from onnxq.workers.base import (
    Finished,
    Journal,
    NumberedPiece,
    R,
    T,
    Workers,
    count_threads,
    run_guarded,
)

# Pieces handed out for each thread of the workers.
_AHEAD = 2
# Deaths of workers over one piece, after which Dask gives it up.
_RETRIES = 3


class DaskWorkers(Workers):
    """The workers of the scheduler at an address, e.g. tcp://10.0.0.1:8786. patience: seconds to look for it.

    Raises MissingDependencyError without `distributed`; WorkerError where there is no scheduler, or its workers have
    another version of onnxq.
    """

    def __init__(self, address: str, journal: Journal | None = None, patience: float = 10) -> None:
        super().__init__(journal)
        distributed = _import_distributed()
        self._address = address
        try:
            self._client = distributed.Client(address, timeout=patience, set_as_default=False)
            versions = self._client.run(_read_version)
        except (OSError, ValueError, ImportError) as error:
            raise self._explain_loss(error) from error
        check_versions(versions)
        if not versions:
            raise WorkerError(
                address,
                "the scheduler has no workers",
                "start some: `dask worker ADDRESS`",
                code="Q902",
            )
        # 1 would count as this process alone (`plain`).
        self.count = max(sum(self._client.nthreads().values()), 2)

    def close(self) -> None:
        """Leave the cluster; pieces not yet done are given up."""
        self._client.close()

    def _finish_pieces(
        self, function: Callable[[T], R], todo: Sequence[NumberedPiece[T]]
    ) -> Iterator[Finished]:
        distributed = _import_distributed()
        waiting = deque(todo)
        running: dict[Any, NumberedPiece[T]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < _AHEAD * self.count:
                    k, piece = waiting.popleft()
                    call = (function, piece.task, count_threads())
                    # Not pure, or Dask would hash the arguments and take equal calls for one.
                    future = self._client.submit(run_guarded, *call, pure=False, retries=_RETRIES)
                    running[future] = k, piece
                with self._client.as_current():
                    done, _ = distributed.wait(list(running), return_when="FIRST_COMPLETED")
                for future in done:
                    k, piece = running[future]
                    result = future.result()
                    del running[future]
                    yield k, result
        except Exception as error:  # of Dask: those of pieces come as values
            if isinstance(error, distributed.scheduler.KilledWorker):
                cause = "workers died each time that they were at this"
                raise WorkerError(
                    piece.title, cause, "give them more memory", code="Q901"
                ) from error
            raise self._explain_loss(error) from error
        finally:
            for future in running:
                future.release()

    def _explain_loss(self, error: Exception) -> WorkerError:
        cause = f"there is no scheduler to talk to ({type(error).__name__}: {error})".splitlines()[
            0
        ]
        return WorkerError(
            self._address,
            cause,
            "start it (`dask scheduler`); `resume=…` goes on from what was finished",
            code="Q902",
        )


def check_versions(versions: Mapping[str, str]) -> None:
    """Raise WorkerError for a worker, by its address, with another version of onnxq than this process."""
    mine = _read_version()
    for address, other in versions.items():
        if other != mine:
            cause = f"has onnxq {other}, and this is {mine}: their results may differ"
            raise WorkerError(
                address, cause, "install the same version on all machines", code="Q903"
            )


def _read_version() -> str:
    return version("onnxq")


def _import_distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise MissingDependencyError(
            "distributed", f"cannot be imported ({error})", 'pip install "onnxq[dask]"', code="Q809"
        ) from error
    return distributed
