"""What provokes Q9xx, and Q51x of parts: workers that die or are of another version, parts that do not fit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import onnxq
from onnxq.calibrate.parts import join_parts
from onnxq.workers import WorkPiece
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
        list(workers.map(die, [WorkPiece("piece 1", 1)]))
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


@reach("Q511")
def part_of_another(_: Path):
    whole = onnxq.calibrate_part(gemm(64, 64), rows(8, 64), EVERYTHING)
    other = onnxq.calibrate_part(gemm(64, 64), rows(9, 64), EVERYTHING)
    join_parts([whole, other])


@reach("Q512")
def part_given_twice(_: Path):
    join_parts([onnxq.calibrate_part(gemm(64, 64), rows(8, 64), EVERYTHING, shard="1/2")] * 2)


@reach("Q513")
def no_part(folder: Path):
    onnxq.merge_parts([written(folder, "{}", "p.json")])
