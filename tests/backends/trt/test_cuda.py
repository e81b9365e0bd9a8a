"""The driver's calls: in words without a GPU, real work with one."""

import ctypes
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from onnxq.backends import find_engine
from onnxq.backends.building import JOB, RESULT
from onnxq.backends.serving import FEEDS
from onnxq.backends.trt import cuda
from onnxq.backends.trt.cuda import Cuda, count_gpus
from onnxq.kernels import driver
from onnxq.kernels.driver import DriverError
from onnxq.workers import write_value


@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU")
def test_without_a_gpu_the_driver_is_what_is_missing() -> None:
    with pytest.raises(DriverError, match=r"driver|cuInit|cuDevice"):
        Cuda()


@pytest.mark.gpu
def test_events_measure_captured_work() -> None:
    cuda = Cuda()
    assert cuda.name
    source, target = cuda.upload(np.ones(2**20, np.float32)), cuda.allocate(2**22)
    launched = []

    def work() -> None:
        launched.append(1)
        given = ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(2**22)
        cuda.call_driver("cuMemcpyDtoDAsync_v2", *given, cuda.stream)

    launch = cuda.capture(work)
    first, second = cuda.make_events(2)
    cuda.record(first)
    launch()
    cuda.record(second)
    cuda.synchronize()
    assert 0 < cuda.measure(first, second) < 1
    assert len(launched) == 1


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("no such library")

    monkeypatch.setattr(driver, "load_driver", fail)
    assert cuda.count_gpus() == 0


@pytest.mark.gpu
def test_this_machines_are_counted() -> None:
    assert cuda.count_gpus() > 0


# ---- The process that times engines: a job in, times or reasons out.

JOB_OF_NOTHING = {"plugins": [], "rounds": 1, "seconds": 0.1, "engines": {}}


@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU")
def test_without_a_gpu_the_result_says_why(tmp_path: Path) -> None:
    write_value(tmp_path / FEEDS, {})
    assert "driver" in find_engine("tensorrt-rtx").run_job(JOB_OF_NOTHING, tmp_path)["failed"]


@pytest.mark.trt
@pytest.mark.skipif(count_gpus() > 0 and find_spec("tensorrt_rtx") is None, reason="no tensorrt-rtx")
def test_the_child_leaves_a_result(tmp_path: Path) -> None:
    write_value(tmp_path / FEEDS, {})
    (tmp_path / JOB).write_text(json.dumps({"engine": "tensorrt-rtx", "builds": False, "job": JOB_OF_NOTHING}))
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    command = [sys.executable, "-m", "onnxq.backends.child", str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    found = json.loads((tmp_path / RESULT).read_text())
    assert found["failed"] or found["device"]
