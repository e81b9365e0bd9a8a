"""What provokes Q9xx: workers that die, are not there, or are of another version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import onnxq
from onnxq.workers import Piece
from onnxq.workers.processes import ProcessWorkers
from tests.codes.kit import EVERYTHING, gemm, reach, rows, written
from tests.codes.reach_dependencies import without
from tests.workers.work import die


@reach("Q809")
def no_dask(_: Path):
    return without("distributed", "from onnxq.workers.dask import DaskWorkers; DaskWorkers('tcp://127.0.0.1:9')")


@reach("Q901", pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there"))
def deadly_piece(_: Path):
    workers = ProcessWorkers(1)
    try:
        list(workers.map(die, [Piece("piece 1", 1)]))
    finally:
        workers.close()


@reach("Q902", pytest.mark.skipif(sys.platform == "win32", reason="sockets wait there"))
def no_scheduler(_: Path):
    from onnxq.workers.dask import DaskWorkers

    pytest.importorskip("distributed")
    DaskWorkers("tcp://127.0.0.1:9", patience=0.1)


@reach("Q903")
def other_version(_: Path):
    from onnxq.workers.dask import check_versions

    check_versions({"tcp://10.0.0.7:4711": "0.0.1"})


@reach("W128")
def stale_pieces(folder: Path):
    written(folder, b"of another run", "other.piece")
    overrides = {"resume": str(folder), "latency": False}
    return onnxq.quantize(gemm(64, 64), rows(8, 64), EVERYTHING, overrides=overrides).report.warnings
