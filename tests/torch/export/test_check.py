"""The written file is run on the example inputs, and a difference beyond rounding is a warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from tests.torch.exporting import Depthwise, quantized, wish
from torch_frontend.export import ExportWarning, export_onnx


class Doubled(nn.Module):
    """Another network while it is exported."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return 2 * y if torch.onnx.is_in_onnx_export() else y


def test_the_file_is_the_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, x = quantized(Depthwise, wish())
    with caplog.at_level(logging.INFO, "onnxq"):
        found = export_onnx(model, tmp_path / "net.onnx", x).check
    assert found is not None
    assert found.as_written > 100
    # Kernels of other CPUs round a value to the next step here and there.
    assert found.as_run > found.quantization > 20
    assert not found.beyond_rounding
    assert found.max_abs < 1e-2
    assert "net.onnx differs from torch by -" in caplog.text
    assert export_onnx(model, tmp_path / "net.onnx", x, overwrite=True, check=False).check is None


def test_another_network_is_a_warning(tmp_path: Path) -> None:
    model, x = quantized(Depthwise, wish())
    with pytest.warns(ExportWarning, match=r"net\.onnx differs from torch by .*\[W126\]"):
        found = export_onnx(Doubled(model.model).eval(), tmp_path / "net.onnx", x, target="virtual").check
    assert found is not None
    assert found.beyond_rounding
