"""Options with a grammar of their own."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from onnxq.cli import cli
from tests.pipeline.models import residual


@pytest.mark.parametrize("text", ["0", "ten", "-1s", "5d"])
def test_times_that_are_none(text: str, tmp_path: Path) -> None:
    onnx.save(residual(), tmp_path / "m.onnx")
    done = CliRunner().invoke(cli, ["quantize", str(tmp_path / "m.onnx"), "--budget", text])
    assert done.exit_code == 2


@pytest.mark.parametrize(("text", "wanted"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("0.5 m", 30)])
def test_times(text: str, wanted: float) -> None:
    from onnxq.cli.options import parse_seconds

    assert parse_seconds(None, None, text) == wanted  # type: ignore[arg-type]
