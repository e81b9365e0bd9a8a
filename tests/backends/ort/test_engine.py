"""ONNX Runtime's part of the child, and the child itself, in this process: what they leave in the folder."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import onnx
import pytest

from onnxq.backends import child, find_engine
from onnxq.backends.building import JOB, RESULT
from onnxq.backends.engine import ENGINE, MODEL, BuildState, Job
from onnxq.backends.ort.engine import OPTIMIZED
from tests.engines import kit

ORT = find_engine("ort")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    onnx.save(kit.ort_residual(), tmp_path / MODEL)
    return tmp_path


def test_two_graphs_come_of_a_model_one_as_it_runs_and_one_with_its_names(folder: Path) -> None:
    result = ORT.build(Job(), folder)
    assert (result.state, result.node, result.reason) == (BuildState.BUILT, "", "")
    assert result.seconds > 0
    for name in (ENGINE, OPTIMIZED):
        assert {"QLinearConv", "QLinearAdd"} <= {node.op_type for node in onnx.load(folder / name).graph.node}
    kept = {name for node in onnx.load(folder / OPTIMIZED).graph.node for name in node.output}
    assert {"y", "dq", "rq"} <= kept


def test_a_node_that_it_cannot_load_is_blamed(folder: Path) -> None:
    broken = kit.ort_residual()
    broken.graph.node[0].op_type = "Quantise"
    onnx.save(broken, folder / MODEL)
    result = ORT.build(Job(), folder)
    assert (result.state, result.node) == (BuildState.REFUSED, "xq/QuantizeLinear")
    assert "Quantise" in result.reason
    assert not (folder / ENGINE).exists()


def test_an_operator_of_nobody_is_told_with_what_to_give(folder: Path) -> None:
    custom = kit.ort_residual()
    custom.graph.node[-1].domain = "mine"
    custom.opset_import.add(domain="mine", version=1)
    onnx.save(custom, folder / MODEL)
    result = ORT.build(Job(), folder)
    assert (result.state, result.node) == (BuildState.REFUSED, "")
    assert "'mine'" in result.reason
    assert "`ort_library`" in result.reason


def test_without_the_library_that_is_the_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert ORT.build(Job(), folder).state is BuildState.MISSING


@pytest.mark.parametrize(("engine", "state"), [("ort", "built"), ("tensorrt", "missing")])
def test_a_child_does_the_job_it_finds(folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str, state: str) -> None:
    # This process is not to end with its parent.
    monkeypatch.setattr(child, "end_with_parent", lambda: None)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    (folder / JOB).write_text(json.dumps({"engine": engine, "builds": True, "job": asdict(Job())}))
    assert child.main(folder) == 0
    assert json.loads((folder / RESULT).read_text())["state"] == state
    assert (folder / ENGINE).exists() is (engine == "ort")
