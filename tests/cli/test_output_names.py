"""Outputs that are no names: `-`, which is a standard stream elsewhere, and nothing."""

import re
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

from onnxq.cli import cli
from tests.cli.kit import CONTEXT, find_command, run
from tests.codes.kit import gemm
from tests.interop.checkpoints import gptq, write_safetensors
from tests.interop.test_checkpoints import GPTQ, draw

# Each option that names an output of a command, with all that the command needs to come so far.
LINES = """\
quantize m.onnx --no-latency -o NAME
quantize m.onnx --no-latency --plan NAME
plan m.onnx -o NAME
apply m.onnx p.json -o NAME
apply m.onnx p.json --plan NAME
variants m.onnx -o NAME
prove m.onnx --engine ort -o NAME
prove m.onnx --engine ort --save NAME
diff m.onnx m.onnx -o NAME
quantize m.onnx --no-latency --report NAME
search m.onnx --no-latency --max-size 1KB -o NAME
search m.onnx --no-latency --max-size 1KB --plan NAME
search m.onnx --no-latency --max-size 1KB --rules NAME
search m.onnx --no-latency --max-size 1KB --csv NAME
search m.onnx --no-latency --max-size 1KB --plot NAME
convert m.onnx --to trt -o NAME
convert m.onnx --to trt --plan NAME
report m.onnx m.onnx -o NAME
report m.onnx m.onnx --markdown NAME
report m.onnx m.onnx --mermaid NAME
report m.onnx m.onnx --node-data NAME
report m.onnx m.onnx --graph NAME
diff m.onnx m.onnx --save NAME
calibrate m.onnx --data s.npz --shard 1/1 -o NAME
merge r.json -o NAME
import-calibration t.cache --model m.onnx --allow-missing -o NAME
import-calibration t.cache --model m.onnx --allow-missing --apply NAME
export-calibration p.json --format aimet-1.0 -o NAME
import-weights m.onnx c --allow-missing -o NAME
import-weights m.onnx c --allow-missing --plan NAME
annotate-bits m.onnx -o NAME
annotate-bits m.onnx --sidecar NAME
build-kernels -o NAME
"""
COMMANDS = cli.list_commands(CONTEXT)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(gemm(), "m.onnx")
    np.savez("s.npz", x=np.zeros((4, 64), np.float32))
    for name in ("p.json", "r.json"):
        Path(name).write_text("{}")
    write_safetensors(Path("c/m.safetensors"), gptq("m", *draw(0, 4, 8, 32, 32), np.zeros(32, int), 4)[0], GPTQ)
    Path("t.cache").write_text("TRT-8601-EntropyCalibration2\nx: 3c010a14\n")
    return tmp_path


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_no_output_is_a_standard_stream(folder: Path, line: str) -> None:
    before = sorted(folder.iterdir())
    done = run(*line.replace("NAME", "-").split())
    assert done.exit_code == 1, done.output
    assert "error[Q603]: " in done.stderr
    assert "fix: name a f" in done.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("line", [*LINES.strip().splitlines(), "inspect NAME", "quantize m.onnx --data NAME",
                                  "prove m.onnx --require-int8 NAME", "bench m.onnx NAME"])  # fmt: skip
def test_a_word_that_is_empty_is_refused(folder: Path, line: str) -> None:
    """An output went to the default place, samples were made up: `-o "$OUT"` of a variable that was never set."""
    before = sorted(folder.iterdir())
    done = run(*("" if word == "NAME" else word for word in line.split()))
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.search(r"Invalid value for '.+': it is empty\.", done.stderr)
    assert sorted(folder.iterdir()) == before


def test_the_lines_have_every_option_for_an_output() -> None:
    there = {
        (name, flag)
        for name in COMMANDS
        for param in find_command(name).params
        if isinstance(param, click.Option) and param.name in ("out", "applied", "plan_out", "sidecar")
        for flag in param.opts
    }
    tried = {(words[0], flag) for words in map(str.split, LINES.splitlines()) for flag in words if flag[0] == "-"}
    # A part takes the options of `quantize`, and writes itself alone.
    assert {(name, flag) for name, flag in there if flag != "--output"} - tried == {("calibrate", "--plan")}
