"""Shards of a calibration by the command line: merged, they make the file that one process makes."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.cli import kit
from tests.pipeline.models import images, residual


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    onnx.save(residual(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **images(16))
    (tmp_path / "c.yaml").write_text("effort: fast\nrules:\n  - {op: '*', set: {quantize: true}}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str, code: int = 0) -> str:
    given = () if args[0] == "merge" else ("--data", "d.npz", "--config", "c.yaml")
    result = kit.run(*args, *given)
    assert result.exit_code == code, result.output
    return result.output + result.stderr


def test_shards_make_the_same_file(folder: Path) -> None:
    run("quantize", "m.onnx", "-o", "plain.onnx", "--no-latency")
    said = run("calibrate", "m.onnx", "--shard", "2/3", "-o", "2.json")
    assert "2.json: 6 ranges over 5 of 14 samples; 9 are in other parts" in said
    run("calibrate", "m.onnx", "--shard", "1/3", "--workers", "1", "-o", "1.json")
    run("calibrate", "m.onnx", "--shard", "3/3", "-o", "3.json")
    said = run("merge", "3.json", "1.json", "2.json", "-o", "r.json", "--json")
    assert json.loads(said)["missing"] == []
    run("quantize", "m.onnx", "-o", "merged.onnx", "--no-latency", "--ranges", "r.json")
    assert (folder / "merged.onnx").read_bytes() == (folder / "plain.onnx").read_bytes()
    # Observers of other settings, and a part alone, are refused.
    other = ("quantize", "m.onnx", "-o", "o.onnx", "--no-latency", "--ranges")
    assert "r.json: was made with another configuration than this run" in run(
        *other, "r.json", "--set", "activations.observer=mse", code=1
    )
    assert "2.json: lacks 9 of 14 samples" in run(*other, "2.json", code=1)
    assert not (folder / "o.onnx").exists()


def test_shards_that_there_are_not(folder: Path) -> None:
    for shard, said in (("3/2", "is not NUMBER/COUNT"), ("two", "is not NUMBER/COUNT"), ("1/99", "only 14 samples")):
        assert said in run("calibrate", "m.onnx", "--shard", shard, code=1)
    assert "nothing to calibrate" in run("calibrate", "m.onnx", "--set", "mode=weight-only", code=1)
