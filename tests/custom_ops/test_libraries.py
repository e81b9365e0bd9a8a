"""Libraries of custom operators: in every session of a model and of those made from it, and faults in words."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from onnxq.backends import load_config
from onnxq.errors import ConfigError, ModelError
from onnxq.graph import add_libraries, get_index, infer_shapes, name_nodes, strip_weights
from onnxq.graph.light import list_libraries
from onnxq.runtime import Session, UnknownOperatorError, check_libraries, optimize_graph, tap_tensors
from onnxq.sites import TensorId
from tests.custom_ops.models import network


@pytest.mark.parametrize("light", [False, True])
def test_sessions_of_a_model_with_libraries_have_the_operator_and_others_do_not(library: Path, light: bool) -> None:
    feeds = {"x": np.ones((1, 3, 16, 16), np.float32)}
    libraries = check_libraries([library, str(library)])
    assert libraries == (str(library),)
    model = add_libraries(strip_weights(network()) if light else network(), libraries)
    values = Session(model, optimize=False).run(feeds, ["y"])
    assert np.isfinite(values["y"]).all()
    with pytest.raises(UnknownOperatorError):
        Session(network())


def test_models_made_from_one_with_libraries_have_them_too(library: Path) -> None:
    model = add_libraries(network(), (str(library),))
    made = strip_weights(infer_shapes(name_nodes(model)))
    assert list_libraries(made) == list_libraries(get_index(made).model) == (str(library),)
    assert "Swell" in {node.op_type for node in optimize_graph(made).graph.node}
    tapped = tap_tensors(made, [TensorId("s")], only=True)
    Session(tapped.proto)
    assert list_libraries(network()) == ()


def test_the_error_names_the_operator_its_domain_and_what_to_give() -> None:
    with pytest.raises(ModelError) as caught:
        Session(network())
    assert caught.value.subject == "operator 'Swell' of domain 'example.ops'"
    assert "`ort_library`" in caught.value.fix
    assert "weights only" in caught.value.fix
    # A package that has the operators is named.
    proto = network()
    for node in proto.graph.node:
        node.domain = node.domain and "ai.onnx.contrib"
    proto.opset_import[1].domain = "ai.onnx.contrib"
    with pytest.raises(ModelError) as caught:
        Session(proto)
    assert "pip install onnxruntime-extensions" in caught.value.fix


def test_a_file_is_run_with_libraries_and_a_bare_name_is_one_in_the_working_directory(
    library: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Session(work / "model.onnx", libraries=[str(library)])
    monkeypatch.chdir(library.parent)
    assert check_libraries([library.name]) == (str(library),)


@pytest.mark.parametrize("content", [None, b"", b"no library at all"])
def test_what_is_no_library_is_an_error_in_words(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ops.so"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_libraries([path])
    assert caught.value.subject == f"operator library {path}"
    assert ("no such file" if content is None else "cannot load it") in caught.value.cause
    assert caught.value.fix


def test_the_configuration_names_libraries_relative_to_its_own_folder(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf" / "ops").mkdir(parents=True)
    shutil.copy(library, tmp_path / "conf" / "ops" / "swell.so")
    (tmp_path / "conf" / "base.yaml").write_text("runtime: {libraries: ops/swell.so}\n")
    (tmp_path / "top.yaml").write_text("extends: conf/base.yaml\ntarget: ort\n")
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "top.yaml").runtime.libraries == (str(tmp_path / "conf" / "ops" / "swell.so"),)


def test_a_wrong_key_of_the_section_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("runtime:\n  librarys: [a.so]\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: runtime\.librarys: unknown key.*\n.*libraries"):
        load_config(path)
    path.write_text("runtime:\n  libraries: 3\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: runtime\.libraries"):
        load_config(path)
