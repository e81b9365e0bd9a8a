"""Builds in child processes, and how they end."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxq.backends import find_engine, list_engines
from onnxq.backends.building import build_engine, fail_alike
from onnxq.backends.engine import ENGINE, BuildResult, BuildState, Job
from onnxq.backends.ort.engine import OPTIMIZED
from tests.engines import kit

ORT = find_engine("ort")


def test_a_graph_that_onnx_runtime_optimized_lies_in_the_folder(tmp_path: Path) -> None:
    result = build_engine(ORT, kit.ort_residual(), Job(), tmp_path, timeout=60)
    assert result.state is BuildState.BUILT
    assert (result.reason, result.log, result.exit_code) == ("", (), 0)
    assert result.engine_bytes == (tmp_path / ENGINE).stat().st_size
    assert onnx.load(tmp_path / OPTIMIZED).graph.node


def test_a_refused_model_names_its_node(tmp_path: Path) -> None:
    model = kit.graph("(float[2,3] x) => (float[2,5] y) { y = MatMul(x, w) }", w=np.ones((5, 5), np.float32))
    result = build_engine(ORT, model, Job(), tmp_path, timeout=60)
    assert result.state is BuildState.REFUSED
    assert result.node == "y/MatMul"
    assert not (tmp_path / ENGINE).exists()


def test_a_build_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    result = build_engine(ORT, kit.conv(), Job(), tmp_path, timeout=0.05)
    assert result.state is BuildState.LATE
    assert "0.05 s" in result.reason


def failed(reason: str = "", state: BuildState = BuildState.FAILED, exit_code: int = 0) -> BuildResult:
    return BuildResult(state=state, reason=reason, exit_code=exit_code)


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (failed("no kernel for node 'b' of 3 inputs"), True),
        (failed("no memory"), False),
        (failed("no kernel for node 'a' of 2 inputs", BuildState.REFUSED), False),
    ],
)
def test_failures_are_alike_but_for_names_and_numbers(other: BuildResult, alike: bool) -> None:
    assert fail_alike(failed("no kernel for node 'a' of 2 inputs"), other) is alike


def test_crashes_are_alike_by_their_signal() -> None:
    crash = failed("signal", BuildState.CRASHED, -11)
    assert fail_alike(crash, failed("signal", BuildState.CRASHED, -11))
    assert not fail_alike(crash, failed("signal", BuildState.CRASHED, -6))


@pytest.mark.parametrize("engine", list_engines())
def test_versions_come_from_packages(engine: str) -> None:
    assert find_engine(engine).describe_version().startswith(find_engine(engine).title)
    assert ORT.describe_version()[-1].isdigit()
