"""What provokes Q8xx, Q9xx, Q51x: absent packages and compilers, workers that die or differ, parts that do not fit."""

import subprocess
import sys
from pathlib import Path

import pytest

import onnxq
from onnxq.calibrate.parts import join_parts
from onnxq.kernels.device import find_nvcc
from onnxq.kernels.host import build_host
from onnxq.workers import WorkPiece, dask
from onnxq.workers.processes import ProcessWorkers
from tests.codes.kit import EVERYTHING, gemm, reach, reach_each, rows, written
from tests.workers.work import die

_ABSENT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from onnxq.errors import OnnxqError
try:
    import {module} as module
    module.{call}
except OnnxqError as error:
    print(error.code)
"""
# What reads an image: the path, how, and what for.
_IMAGE = "read_image(module.Path('a.png'), module.ImageConfig(size=(4, 4)), module.ValueInfo('x', 1, (1, 3, 4, 4)))"


def without(package: str, module: str, call: str) -> str:
    """The code that the call ends with in a process that cannot import the package."""
    code = _ABSENT.format(package=package, module=module, call=call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@reach("Q806")
def no_compiler(_: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXQ_NVCC", "no-such-nvcc")
        find_nvcc()


@reach("Q807", pytest.mark.skipif(sys.platform == "win32", reason="a shell script"))
def failing_compiler(folder: Path):
    bad = written(folder, '#!/bin/sh\n[ "$1" = --version ] && echo bad && exit 0\nexit 1\n', "c++")
    bad.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(bad))
        build_host(folder)


@reach("Q901", pytest.mark.skipif(sys.platform == "win32", reason="signals end no process there"))
def deadly_piece(_: Path):
    workers = ProcessWorkers(1)
    try:
        list(workers.map(die, [WorkPiece("piece 1", 1)]))
    finally:
        workers.close()


@reach("Q902", pytest.mark.skipif(sys.platform == "win32", reason="sockets wait there"))
def no_scheduler(_: Path):
    pytest.importorskip("distributed")
    dask.DaskWorkers("tcp://127.0.0.1:9", patience=0.1)


@reach("W128")
def stale_pieces(folder: Path):
    written(folder, b"of another run", "other.piece")
    overrides = {"resume": str(folder), "latency": False}
    return onnxq.quantize(gemm(64, 64), rows(8, 64), EVERYTHING, overrides=overrides).report.warnings


def part(count: int = 8, shard: str = "1/1") -> onnxq.Part:
    return onnxq.calibrate_part(gemm(64, 64), rows(count, 64), EVERYTHING, shard=shard)


reach_each(
    {
        "Q511": lambda _: join_parts([part(8), part(9)]),
        "Q512": lambda _: join_parts([part(shard="1/2")] * 2),
        "Q513": lambda folder: onnxq.merge_parts([written(folder, "{}", "p.json")]),
        "Q802": lambda _: without("torch", "onnxq.qat", "prepare_qat"),
        "Q803": lambda _: without("PIL", "onnxq.data.images", _IMAGE),
        "Q804": lambda _: without("polygraphy", "onnxq.backends.trt.run", "load_polygraphy('logger')"),
        "Q809": lambda _: without("distributed", "onnxq.workers.dask", "DaskWorkers('tcp://127.0.0.1:9')"),
        "Q810": lambda folder: without(
            "tokenizers", "onnxq.data.text", f"load_tokenizer({str(written(folder, '{}', 'tokenizer.json'))!r})"
        ),
        "Q903": lambda _: dask.check_versions({"tcp://10.0.0.7:4711": "0.0.1"}),
    }
)
