"""TensorRT: what is said without it, the child that builds, and on a GPU the comparison itself."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import onnx
import pytest

import onnxq
from onnxq.backends import engine as base
from onnxq.backends import find_backend
from onnxq.backends.engine import Job
from onnxq.backends.trt import engine as trt
from onnxq.errors import ModelError
from onnxq.runtime import NodeError
from tests.engines.diff.models import WIDTH, chain, pairs, samples

AMPERE = (8, 6)
SHAPES = {"x": ((1, WIDTH), (1, WIDTH), (4, WIDTH))}

LOCAL = find_backend("trt").local


def find_obstacle():
    return find_backend("trt").local.find_obstacle()


ahead_of_time = pytest.mark.skipif(not LOCAL.builds_ahead, reason="only TensorRT for RTX builds without a GPU")


def test_what_stands_in_the_way_comes_with_a_way_out() -> None:
    found = find_obstacle()
    if found is None:
        assert LOCAL.installed
        return
    assert found.subject == LOCAL.name
    assert found.reason
    assert "pip install" in found.fix or "`out=…`" in found.fix


def test_without_the_library_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trt, base):
        monkeypatch.setattr(module, "find_spec", lambda _name: None)
    found = find_obstacle()
    assert "onnxq[trt]" in found.fix
    assert "onnxq[trt-rtx]" in found.fix


def test_without_polygraphy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (trt, base):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "polygraphy" else ModuleSpec(name, None))
    assert find_obstacle().fix == 'pip install "onnxq[polygraphy]"'


@pytest.mark.trt
@ahead_of_time
@pytest.mark.parametrize("debug_tensors", [False, True])
def test_the_child_builds_an_engine(tmp_path: Path, debug_tensors: bool) -> None:
    job = Job(shapes=SHAPES, debug_tensors=debug_tensors, capability=AMPERE)
    assert trt.build_trt(LOCAL, pairs(chain(), signed=True), job, tmp_path).stat().st_size > 1000


@pytest.mark.trt
@ahead_of_time
def test_what_tensorrt_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match="zero point") as caught:
        trt.build_trt(LOCAL, pairs(chain()), Job(shapes=SHAPES, capability=AMPERE), tmp_path)
    assert caught.value.node == "x/QuantizeLinear"


@pytest.mark.trt
@ahead_of_time
@pytest.mark.skipif(find_obstacle() is None, reason="there is a GPU")
def test_an_engine_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    engine = trt.build_trt(LOCAL, chain(), Job(shapes=SHAPES, capability=AMPERE), tmp_path)
    with pytest.raises(ModelError, match="engine"), trt.TrtRunner(LOCAL, "trt", engine):
        pass


@pytest.mark.trt
def test_an_engine_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no\.engine"), trt.TrtRunner(LOCAL, "trt", tmp_path / "no.engine"):
        pass


@pytest.mark.trt
@pytest.mark.gpu
def test_an_engine_runs(tmp_path: Path) -> None:
    engine = trt.build_trt(LOCAL, chain(), Job(shapes=SHAPES), tmp_path)
    with trt.TrtRunner(LOCAL, "trt", engine) as runner:
        found = runner.infer({"x": samples(1)["x"]})
    assert found["y"].shape == (1, WIDTH)


@pytest.mark.trt
@pytest.mark.gpu
def test_a_sound_model_agrees_in_tensorrt() -> None:
    quantized = pairs(chain(), signed=True)
    found = onnxq.diff(
        chain(), quantized, samples(), overrides={"engines": ["ort", "trt"], "layers": True, "bisect": True}
    )
    assert "trt" in [run.name for run in found.runs]
    assert found.missing == ()
    (y,) = found.outputs
    accuracy = {error.run: error.sqnr_db for error in y.accuracy}
    assert accuracy["trt"] == pytest.approx(accuracy["ort-off"], abs=3)
    assert [one for one in found.divergences if one.run == "trt"] == []
    assert any(error.run == "trt" for layer in found.layers for error in layer.engines)


@pytest.mark.trt
@pytest.mark.gpu
def test_what_tensorrt_refuses_is_missing_and_the_rest_is_done() -> None:
    """uint8 activations with a zero point: ORT runs them, TensorRT does not."""
    found = onnxq.diff(chain(), pairs(chain()), samples(), overrides={"engines": ["ort", "trt"]})
    assert found.missing == ("trt",)
    assert [run.name for run in found.runs] == ["float", "ort-off", "ort-on"]
    assert "zero point" in next(one.reason for one in found.skipped if one.subject == "trt")


@pytest.mark.trt
@pytest.mark.gpu
def test_results_of_this_gpu_are_compared_elsewhere(tmp_path: Path) -> None:
    float_model, quantized = tmp_path / "m.onnx", tmp_path / "m.q.onnx"
    onnx.save(chain(), float_model)
    onnx.save(pairs(chain(), signed=True), quantized)
    onnxq.diff(float_model, quantized, samples(), overrides={"engines": ["ort", "trt"]}, out=tmp_path / "gpu")
    found = onnxq.diff(float_model, quantized, overrides={"load": [tmp_path / "gpu"], "engines": ["ort"]})
    assert "trt" in [run.name for run in found.runs]
