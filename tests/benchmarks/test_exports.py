"""The benchmark of exports: one net on its way from torch to two quantized files and their figures."""

import importlib
from pathlib import Path

import pytest
from torch import Tensor, nn, randn

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def make_net() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
    return nn.Sequential(*layers), randn(2, 3, 16, 16)


def test_a_net_is_exported_quantized_twice_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    exports = importlib.import_module("exports")
    row = exports.measure_net("small", make_net, "ort", tmp_path)
    assert row.reason == ""
    assert row.own_db > 25
    assert row.static_db > 15
    exports.print_table([row, exports.Row("none", reason="not exported: it has a loop")], "ort")
    printed = capsys.readouterr().out
    assert "1 of 1 by onnxq, 1 by quantize_static" in printed
    assert "`none`: not exported" in printed
