"""The written file is run on the example inputs, and a difference beyond rounding is a warning."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn

from tests.torch.exporting import Depthwise, quantized, wish
from torch_frontend.export import ExportWarning, export_onnx
from torch_frontend.export.check import ExportCheck


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
    assert re.search(r"net\.onnx against torch: SQNR (\d+\.\d dB|exact) as written, ", caplog.text)
    assert export_onnx(model, tmp_path / "net.onnx", x, overwrite=True, check=False).check is None


def test_the_line_says_how_near_the_file_is_in_decibels_as_other_reports_do() -> None:
    assert str(ExportCheck(math.inf, 41.26, 0.00123, 38.0)) == (
        "against torch: SQNR exact as written, 41.3 dB as ONNX Runtime optimizes it (at most 0.0012 apart); "
        "of quantization itself 38.0 dB"
    )
    assert str(ExportCheck(not_run="no session")) == "was not compared with torch: no session"


def test_another_network_is_a_warning(tmp_path: Path) -> None:
    model, x = quantized(Depthwise, wish())
    with pytest.warns(ExportWarning, match=r"net\.onnx against torch: SQNR .*: it does not .*\[W126\]"):
        found = export_onnx(Doubled(model.model).eval(), tmp_path / "net.onnx", x, target="virtual").check
    assert found is not None
    assert found.beyond_rounding
