"""Commands that analyse models, from the command line."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli.kit import run
from tests.pipeline.models import HEADLESS, images, residual

BRIEF = ("--effort", "fast", "--no-latency")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    onnx.save(residual(text=HEADLESS), folder / "m.onnx")
    np.savez(folder / "d.npz", **images(8))
    return folder


def test_the_folder_stands_beside_the_model(work: Path) -> None:
    done = run("variants", work / "m.onnx", "--data", work / "d.npz", "--only", "fp16,int8,q4", *BRIEF)
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"m.onnx -> {work / 'm-variants' / 'onnx'}  (SQNR on 1 sample)")
    files = [["fp32", "m.onnx"], ["fp16", "m_fp16.onnx"], ["int8", "m_int8.onnx"]]
    assert [line.split()[:2] for line in lines[2:5]] == files
    assert lines[5].split(maxsplit=1) == ["q4", "NOTHING QUANTIZED"]
    assert "left out q4: nothing was quantized" in " ".join(done.stdout.split())
    again = run("variants", work / "m.onnx", "--data", work / "d.npz", "--only", "fp16", *BRIEF)
    assert again.exit_code == 1
    assert "fix: choose another name, or overwrite it with --force" in again.stderr.replace("`", "")


def test_json_is_the_record(work: Path) -> None:
    done = run("variants", work / "m.onnx", "--only", "q8", "--json", "-o", work / "json", *BRIEF)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((work / "json" / "onnx" / "m_quantize_config.json").read_text())
    assert "warning[W101]" in done.stderr


def test_not_one_that_can_be_used_is_an_error(work: Path) -> None:
    done = run("variants", work / "m.onnx", "--only", "int8", "--json", "-o", work / "none", *BRIEF)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "Q711"
    assert "int8: its ranges come from samples, and none were given" in done.stderr
