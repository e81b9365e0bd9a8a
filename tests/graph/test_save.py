"""Writing models: the same bytes for the same model, and never a half-written file."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from onnx import ModelProto, TensorProto, numpy_helper

from onnxq.errors import OutputError
from onnxq.graph import load_model, save_model
from onnxq.graph.storage import omit_weights, restore_weights
from tests.graph.kit import copy, model, models

W = np.random.default_rng(0).standard_normal((4, 5000)).astype(np.float32)


def wide() -> ModelProto:
    """Large initializers in the main graph and in a body, one of them not as raw bytes, and a small one."""
    proto = model(
        """g (float[4] x, bool c) => (float[5000] y) {
            [m] a = MatMul(x, w)
            [i] y = If(c) <then_branch = t () => (float[5000] b) { [n] b = Add(a, inner) },
                           else_branch = e () => (float[5000] b) { [o] b = Mul(a, small) }> }""",
        w=W,
        small=2.0,
    )
    body = proto.graph.node[1].attribute[0].g
    body.initializer.add(name="inner", data_type=TensorProto.FLOAT, dims=[5000], float_data=W[0].tolist())
    proto.graph.initializer[0].metadata_props.add(key="k", value="v")
    return proto


def test_external_data_comes_back_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    save_model(wide(), path, external=True)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx_data"]
    assert path.stat().st_size < 2000
    raw = onnx.load(path, load_external_data=False)
    assert {e.key: e.value for e in raw.graph.initializer[0].external_data}["location"] == "m.onnx_data"
    assert not raw.graph.initializer[1].external_data
    again = load_model(path).proto
    assert again.graph.initializer[0] == wide().graph.initializer[0]
    inner = again.graph.node[1].attribute[0].g.initializer[0]
    np.testing.assert_array_equal(numpy_helper.to_array(inner), W[0])
    feeds = {"x": np.ones(4, np.float32), "c": np.array(True)}
    inside = ort.InferenceSession(wide().SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(ort.InferenceSession(path).run(None, feeds)[0], inside[0])


@pytest.mark.parametrize("external", [False, True])
def test_the_bytes_are_the_same_each_time(tmp_path: Path, external: bool) -> None:
    written = []
    for _ in range(2):
        save_model(wide(), tmp_path / "m.onnx", external=external, overwrite=True)
        written.append([file.read_bytes() for file in sorted(tmp_path.iterdir())])
    assert written[0] == written[1]


def test_without_large_weights_there_is_no_data_file(tmp_path: Path) -> None:
    proto = model("g (float[4] x) => (float[4] y) { y = Add(x, w) }", w=1.0)
    save_model(proto, tmp_path / "m.onnx", external=True)
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_text("precious")
    with pytest.raises(OutputError, match="exists already"):
        save_model(wide(), path)
    assert path.read_text() == "precious"
    (tmp_path / "n.onnx_data").write_text("precious")
    with pytest.raises(OutputError, match=r"n\.onnx_data"):
        save_model(wide(), tmp_path / "n.onnx", external=True)
    assert not (tmp_path / "n.onnx").exists()
    save_model(wide(), path, overwrite=True)
    assert load_model(path).proto == wide()


def test_folders_are_told(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder"):
        save_model(wide(), tmp_path, overwrite=True)
    with pytest.raises(OutputError, match="there is no folder"):
        save_model(wide(), tmp_path / "no" / "m.onnx")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond a few bytes, not the log of the tests either: what a full disk is, for root too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("external", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, external: bool) -> None:
    path = tmp_path / "m.onnx"
    save_model(wide(), path, external=external)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with full_disk(), pytest.raises(OutputError, match="no room left"):
        save_model(wide(), path, external=external, overwrite=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_interrupt_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    save_model(wide(), path)
    before = path.read_bytes()

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(model("g (float[4] x) => (float[4] y) { y = Relu(x) }"), path, overwrite=True)
    assert os.listdir(tmp_path) == ["m.onnx"]
    assert path.read_bytes() == before


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    target, link = tmp_path / "input.onnx", tmp_path / "out.onnx"
    target.write_text("input")
    link.symlink_to(target)
    save_model(wide(), link, overwrite=True)
    assert target.read_text() == "input"
    assert not link.is_symlink()


def test_files_get_the_users_permissions(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        save_model(wide(), tmp_path / "m.onnx")
    finally:
        os.umask(old)
    assert (tmp_path / "m.onnx").stat().st_mode & 0o777 == 0o640


def test_an_unforeseen_fault_is_not_dressed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OutputError, match="Input/output error"):
        save_model(wide(), tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


@given(models())
def test_light_models_get_their_weights_back(proto: ModelProto) -> None:
    """Also when nodes, the holders of bodies among them, have no names."""
    heavy = copy(proto)
    for k, node in enumerate(heavy.graph.node):
        node.name = ""
        for attr in node.attribute:
            weight = np.full(2000, k if attr.name == "then_branch" else -k, np.float32)
            attr.g.initializer.append(numpy_helper.from_array(weight, "same"))
    light, payload = omit_weights(heavy)
    assert len(light.SerializeToString()) < 20000
    assert restore_weights(light, payload) == heavy
