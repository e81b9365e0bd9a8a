"""Builds in child processes, and how they end."""

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxq
from onnxq.backends import engine, find_engine, list_engines
from onnxq.backends.building import build_engine, fail_alike
from onnxq.backends.engine import ENGINE, BuildResult, BuildState, Job
from onnxq.backends.ort.engine import OPTIMIZED
from tests.backends.qnn.graphs import needs_qnn
from tests.engines import kit
from tests.passes.kit import parse

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


def test_a_frozen_program_does_not_start_itself_in_the_place_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As PyInstaller sets them. A shell would take `-m` for an option of its own.
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    result = build_engine(ORT, kit.conv(), Job(), tmp_path, timeout=60)
    assert (result.state, result.exit_code) == (BuildState.FAILED, 0)
    assert "frozen" in result.reason


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


# ---- The libraries that build engines: their versions without importing them.


def test_every_engine_has_a_library_with_an_install_line() -> None:
    for one in list_engines().values():
        assert re.fullmatch(r'pip install "onnxq\[[\w-]+\]"|npm install [\w-]+@[\d.]+ --ignore-scripts', one.install)
        # Packages of npm are described by their own folder.
        assert one.packages or one.install.startswith("npm")


def test_the_version_is_that_of_the_installed_package() -> None:
    assert re.fullmatch(r"ONNX Runtime \d+\.\d+\.\d+\S*", find_engine("ort").describe_version())


def test_of_several_packages_the_first_that_is_there_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"tensorrt-cu12": "10.9", "tensorrt-cu13": "10.13"}

    def version(name: str) -> str:
        if name not in held:
            raise engine.PackageNotFoundError(name)
        return held[name]

    monkeypatch.setattr(engine, "version", version)
    assert find_engine("tensorrt").describe_version() == "TensorRT 10.13"
    held.clear()
    assert find_engine("tensorrt").describe_version() == "TensorRT"


def test_a_missing_package_is_said_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = find_engine("openvino")
    monkeypatch.setattr(type(engine), "module", "openvino_that_is_not_there")
    assert engine.find_obstacle().fix == 'pip install "onnxq[openvino]"'


# ---- Answers of all kinds that ONNX Runtime has come back from the process of an engine.

RNG = np.random.default_rng(0)


def make_classifier() -> onnx.ModelProto:
    """A classifier as skl2onnx writes it: a map of probabilities for each sample."""
    graph = "g (float[N, 64] x) => (float[N, 4] s) { m = MatMul(x, w) r = Relu(m) z = MatMul(r, v) s = Softmax(z) }"
    first, second = RNG.standard_normal((64, 64)), RNG.standard_normal((64, 4))
    proto = parse(graph, w=first.astype(np.float32) / 8, v=second.astype(np.float32) / 8)
    zipped = helper.make_node("ZipMap", ["s"], ["p"], name="p/ZipMap", domain="ai.onnx.ml", classlabels_int64s=range(4))
    proto.graph.node.append(zipped)
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    probability = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None)
    entry = helper.make_map_type_proto(onnx.TensorProto.INT64, probability)
    proto.graph.output[0].CopyFrom(helper.make_value_info("p", helper.make_sequence_type_proto(entry)))
    return proto


@needs_qnn
def test_a_classifier_that_gives_maps_is_checked_in_the_emulator() -> None:
    data = {"x": RNG.standard_normal((32, 64)).astype(np.float32)}
    (check,) = onnxq.quantize(make_classifier(), data, "qnn-int8").report.engines
    assert check.reason == ""
    (output,) = check.outputs
    assert output.name == "p"
    assert output.agreement_db > 30
