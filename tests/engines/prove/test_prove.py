"""Options of a proof that are refused before anything is built, and the folder that results go into."""

from pathlib import Path

import pytest

from onnxq.backends import find_engine
from onnxq.config import ProveConfig
from onnxq.engines.prove.prove import ProveRequest, open_output_folder, prove_model
from onnxq.errors import ConfigError, OutputError
from tests.engines.kit import matmul


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        pytest.param({"engine": "tensort"}, "Q312", "engine 'tensort': is not known", id="an unknown engine"),
        pytest.param({"engine": "ort", "compute_capability": "8.6"}, "Q317", "ort builds for this machine",
                     id="a capability for ONNX Runtime"),
        pytest.param({"engine": "tensorrt", "compute_capability": "8.6"}, "Q317", "tensorrt builds for this machine",
                     id="a capability for TensorRT"),
        pytest.param({"engine": "tensorrt", "require_exact": True}, "Q317", "TensorRT's sums are exact",
                     id="exact sums of TensorRT"),
        pytest.param({"engine": "tensorrt-rtx", "compute_capability": "Ampere"}, "Q304", "is none",
                     id="a capability in words"),
        pytest.param({"engine": "tensorrt-rtx", "compute_capability": "8"}, "Q304", "write it as 8.6",
                     id="half a capability"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_refused_before_a_build(options, code, words):
    with pytest.raises(ConfigError, match=words) as caught:
        prove_model(matmul(), ProveRequest(options=ProveConfig(**options)))
    assert caught.value.code == code


def test_an_earlier_proof_that_cannot_be_read_is_found_out_first(tmp_path: Path):
    # Before the options, and so before minutes of building.
    missing = tmp_path / "proof.json"
    with pytest.raises(Exception, match=r"proof\.json"):
        prove_model(matmul(), ProveRequest(options=ProveConfig(engine="tensort", compare=str(missing))))


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("ort", {"build.log", "optimized.onnx"}),
        ("tensorrt", {"build.log", "layers.txt", "model.engine"}),
        ("tensorrt-rtx", {"build.log", "layers.txt", "model.engine"}),
    ],
)
def test_files_of_a_build_have_names_for_people(engine, names):
    assert set(find_engine(engine).saved.values()) == names


@pytest.mark.parametrize(
    ("engine", "held", "refused"),
    [
        pytest.param("ort", "optimized.onnx", True, id="a result"),
        pytest.param("ort", "reduced.onnx", True, id="the smallest part that fails"),
        pytest.param("ort", "model.engine", False, id="a result of another engine"),
        pytest.param(None, "model.engine", True, id="a result of an engine that the model may choose"),
        pytest.param("tensorrt", "notes.txt", False, id="another file"),
        pytest.param("tensorrt", "timing.cache", False, id="the timing cache, which grows"),
    ],
)
def test_earlier_results_are_overwritten_by_force_only(tmp_path: Path, engine, held, refused):
    (tmp_path / held).write_text("earlier", encoding="utf-8")
    if refused:
        with pytest.raises(OutputError, match=held) as caught, open_output_folder(tmp_path, engine, force=False):
            pytest.fail("opened")
        assert caught.value.code == "Q601"
    with open_output_folder(tmp_path, engine, force=refused):
        # Nothing is lost before there is something new.
        assert (tmp_path / held).read_text(encoding="utf-8") == "earlier"


def test_a_folder_is_made_where_there_is_none(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    with open_output_folder(folder, "ort", force=False):
        assert folder.is_dir()
    with open_output_folder(None, "ort", force=False):
        pass
