"""The files of an export: all of them, or none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import pytest

torch = pytest.importorskip("torch")
from onnxq.errors import OutputError
from tests.torch.exporting import (
    Depthwise,
    quantized,
    wish,
)
from torch_frontend.export import export_onnx
from torch_frontend.export.run import write_all
from torch_frontend.quant_model import State


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    model, x = quantized(Depthwise, wish())
    (tmp_path / "net.plan.json").write_text("mine")
    with pytest.raises(OutputError, match=r"net\.plan\.json: exists"):
        export_onnx(model, tmp_path / "net.onnx", x)
    assert os.listdir(tmp_path) == ["net.plan.json"]
    assert model.state is State.FROZEN
    export_onnx(model, tmp_path / "net.onnx", x, overwrite=True, float_path=tmp_path / "float.onnx")
    assert sorted(os.listdir(tmp_path)) == ["float.onnx", "net.onnx", "net.plan.json"]
    assert (tmp_path / "net.plan.json").read_text() != "mine"


def test_an_export_never_replaces_a_device() -> None:
    model = onnx.ModelProto()
    with pytest.raises(OutputError, match="is a pipe or device"):
        write_all({Path("/dev/null"): model}, {}, overwrite=True)
    assert Path("/dev/null").is_char_device()


def test_a_failure_leaves_no_file_and_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = quantized(Depthwise, wish())
    model.train()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_frontend.export.run.write_text", full)
    with pytest.raises(OutputError, match="No space left"):
        export_onnx(model, tmp_path / "net.onnx", x)
    assert os.listdir(tmp_path) == []
    assert model.training
    assert model.model.training
    assert not any("marked" in name for name, _ in model.named_buffers())
