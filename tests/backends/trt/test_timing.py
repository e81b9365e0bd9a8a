"""The process that times engines: a job in, times or reasons out."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from onnxq.backends import find_engine
from onnxq.backends.building import JOB, RESULT
from onnxq.backends.serving import FEEDS
from onnxq.backends.trt.cuda import count_gpus
from onnxq.backends.trt.timing import time_job
from onnxq.runtime.exchange import write_values

JOB_OF_NOTHING = {"plugins": [], "rounds": 1, "seconds": 0.1, "engines": {}}


@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU")
def test_without_a_gpu_the_result_says_why(tmp_path: Path) -> None:
    write_values(tmp_path / FEEDS, {})
    assert "driver" in time_job(find_engine("tensorrt-rtx"), JOB_OF_NOTHING, tmp_path)["failed"]


@pytest.mark.trt
@pytest.mark.skipif(count_gpus() > 0 and find_spec("tensorrt_rtx") is None, reason="no tensorrt-rtx")
def test_the_child_leaves_a_result(tmp_path: Path) -> None:
    write_values(tmp_path / FEEDS, {})
    (tmp_path / JOB).write_text(json.dumps({"engine": "tensorrt-rtx", "builds": False, "job": JOB_OF_NOTHING}))
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    command = [sys.executable, "-m", "onnxq.backends.child", str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120)
    found = json.loads((tmp_path / RESULT).read_text())
    assert found["failed"] or found["device"]
