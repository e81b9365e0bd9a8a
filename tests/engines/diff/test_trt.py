"""TensorRT: what is said without it, the child that builds, and on a GPU the comparison itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.engines.diff import trt as diff_trt
from onnxq.engines.diff.results import active, infer
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, name_nodes
from tests.engines.diff.models import WIDTH, chain, pairs, samples

AMPERE = (8, 6)
SHAPES = {"x": ((1, WIDTH), (1, WIDTH), (4, WIDTH))}

ahead_of_time = pytest.mark.skipif(
    diff_trt.library() != "tensorrt_rtx", reason="only TensorRT for RTX builds without a GPU"
)


def test_what_stands_in_the_way_comes_with_a_way_out() -> None:
    found = diff_trt.obstacle()
    if found is None:
        assert diff_trt.library() is not None
        return
    assert found.subject == "trt"
    assert found.reason
    assert "pip install" in found.fix or "`save=…`" in found.fix


def test_without_the_library_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_trt, "find_spec", lambda _name: None)
    found = diff_trt.obstacle()
    assert found is not None
    assert "onnxq[trt]" in found.fix
    assert "onnxq[trt-rtx]" in found.fix


def test_the_profile_covers_all_samples() -> None:
    index = GraphIndex(name_nodes(chain()))
    feeds = [{"x": np.zeros((count, WIDTH), np.float32)} for count in (2, 1, 5)]
    assert diff_trt.shapes_of(index, feeds) == {"x": ((1, WIDTH), (2, WIDTH), (5, WIDTH))}


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (-11, "", "signal 11"),
        (-11, "[E] bad graph\n", "signal 11): bad graph"),
        (1, "[W] slow\n[E] In node 0: unsupported\n[!] Invalid engine\n", "In node 0: unsupported; Invalid engine"),
        (1, "Traceback\nKeyError: 'x'\n", "KeyError: 'x'"),
        (3, "", "exit code 3"),
    ],
)
def test_why_a_build_failed(code: int, text: str, expected: str) -> None:
    assert expected in diff_trt.reason(code, text)


@pytest.mark.trt
@ahead_of_time
@pytest.mark.parametrize("layers", [False, True])
def test_the_child_builds_an_engine(tmp_path: Path, layers: bool) -> None:
    engine = diff_trt.build(pairs(chain(), signed=True), SHAPES, tmp_path, layers=layers, capability=AMPERE)
    assert engine.stat().st_size > 1000


@pytest.mark.trt
@ahead_of_time
def test_what_tensorrt_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="zero point"):
        diff_trt.build(pairs(chain()), SHAPES, tmp_path, capability=AMPERE)


@pytest.mark.trt
@ahead_of_time
@pytest.mark.skipif(diff_trt.obstacle() is None, reason="there is a GPU")
def test_an_engine_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    engine = diff_trt.build(chain(), SHAPES, tmp_path, capability=AMPERE)
    with pytest.raises(ModelError, match="engine"), active([diff_trt.trt_runner("trt", engine)]):
        pass


@pytest.mark.trt
def test_an_engine_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no\.engine"), active([diff_trt.trt_runner("trt", tmp_path / "no.engine")]):
        pass


@pytest.mark.trt
@pytest.mark.gpu
def test_an_engine_runs(tmp_path: Path) -> None:
    engine = diff_trt.build(chain(), SHAPES, tmp_path)
    runner = diff_trt.trt_runner("trt", engine)
    with active([runner]):
        found = infer(runner, {"x": samples(1)["x"]})
    assert found["y"].shape == (1, WIDTH)


@pytest.mark.trt
@pytest.mark.gpu
def test_a_sound_model_agrees_in_tensorrt() -> None:
    quantized = pairs(chain(), signed=True)
    found = onnxq.diff(chain(), quantized, samples(), engines=["ort", "trt"], layers=True, bisect=True)
    assert "trt" in [run.name for run in found.runs]
    assert found.missing == ()
    (y,) = found.outputs
    accuracy = {error.run: error.sqnr_db for error in y.accuracy}
    assert accuracy["trt"] == pytest.approx(accuracy["ort-off"], abs=3)
    assert [part for part in found.parted if part.run == "trt"] == []
    assert any(error.run == "trt" for layer in found.layers for error in layer.engines)


@pytest.mark.trt
@pytest.mark.gpu
def test_what_tensorrt_refuses_is_missing_and_the_rest_is_done() -> None:
    """uint8 activations with a zero point: ORT runs them, TensorRT does not."""
    found = onnxq.diff(chain(), pairs(chain()), samples(), engines=["ort", "trt"])
    assert found.missing == ("trt",)
    assert [run.name for run in found.runs] == ["float", "ort-off", "ort-on"]
    assert "zero point" in next(one.reason for one in found.skipped if one.subject == "trt")


@pytest.mark.trt
@pytest.mark.gpu
def test_results_of_this_gpu_are_compared_elsewhere(tmp_path: Path) -> None:
    float_model, quantized = tmp_path / "m.onnx", tmp_path / "m.q.onnx"
    onnx.save(chain(), float_model)
    onnx.save(pairs(chain(), signed=True), quantized)
    onnxq.diff(float_model, quantized, samples(), engines=["ort", "trt"], save=tmp_path / "gpu")
    found = onnxq.diff(float_model, quantized, load=[tmp_path / "gpu"], engines=["ort"])
    assert "trt" in [run.name for run in found.runs]
