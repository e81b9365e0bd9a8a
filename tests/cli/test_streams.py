"""Standard streams that are full, closed or gone: an exit code, a message where it can be read, no traceback."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import onnx
import pytest

from onnxq.cli.group import _forgive_closed_pipe
from tests.cli import kit as cli
from tests.codes.kit import gemm

ONNXQ = f"{sys.executable} -m onnxq.cli"
# The document of a result is written by what writes that of `explain`, which starts in a fifth of the time.
COMMANDS = ("inspect m.onnx", "explain", "explain --json", "--help", "--version", "inspect no.onnx")
pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    onnx.save(gemm(), folder / "m.onnx")
    return folder


def run(folder: Path, line: str) -> tuple[int, str, str]:
    done = subprocess.run(["sh", "-c", f"{ONNXQ} {line}"], cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


# On streams that are open.
run_plainly = cache(run)


@pytest.mark.parametrize("line", COMMANDS[:-1])
def test_a_full_standard_output_is_an_error_that_says_so(folder: Path, line: str) -> None:
    code, _, said = run(folder, f"{line} >/dev/full")
    assert code == 1
    assert said.startswith("error[Q604]: the standard output or a temporary file: cannot be written (No space left")
    code, _, said = run(folder, f"{line} 1</dev/null")
    assert code == 1
    assert said.startswith("error[Q604]: the standard output or a temporary file: cannot be written (")


@pytest.mark.parametrize("line", COMMANDS)
def test_closed_streams_change_nothing_but_what_is_seen(folder: Path, line: str) -> None:
    code, shown, said = run_plainly(folder, line)
    assert run(folder, f"{line} >&-") == (code, "", said)
    assert run(folder, f"{line} 2>&-") == (code, shown, "")
    assert run(folder, f"{line} <&- >&- 2>&-") == (code, "", "")
    assert run(folder, f"{line} 2>/dev/full") == (code, shown, "")


@pytest.mark.parametrize("line", [*COMMANDS, "inspect no.onnx --json", "no-command --json"])
def test_a_reader_that_has_gone_is_no_error(folder: Path, line: str) -> None:
    """Its process is started here: of a pipe, a shell tells the code of the reader."""
    code, _, said = run_plainly(folder, line)
    reader, writer = os.pipe()
    os.close(reader)
    words = (*ONNXQ.split(), *line.split())
    for errors in (subprocess.PIPE, subprocess.STDOUT):
        done = subprocess.run(words, cwd=folder, stdout=writer, stderr=errors, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, said if errors == subprocess.PIPE else None)
    os.close(writer)


NAMING = """
quantize NAME --config ort-int8-weights -o q.onnx --force
quantize m.onnx --config ort-int8-weights --no-latency -o NAME --force
quantize m.onnx --data NAME
quantize m.onnx --config NAME.yaml
quantize m.onnx --config ort-int8-weights --resume NAME -o q.onnx --force
quantize m.onnx --config ort-int8-weights --external-data -o NAME --force
plan NAME
plan m.onnx --ort-library NAME
plan m.onnx --data NAME:f.py
plan m.onnx --tokenizer NAME
apply m.onnx NAME -o a.onnx --force
inspect NAME
prove NAME --engine ort
prove m.onnx --engine ort -o NAME
bench NAME --seconds 0.1s
diff NAME m.onnx
diff m.onnx m.onnx --load NAME
diff m.onnx m.onnx -o NAME --force
profile m.onnx NAME
calibrate NAME --data NAME
merge NAME -o p.json
variants NAME -o NAME --force
import-calibration NAME --model m.onnx
export-calibration NAME --format aimet-2.0
export-calibration NAME --format aimet-2.0 -o NAME --force
import-weights m.onnx NAME
annotate-bits NAME --bits *=8 --force
perplexity NAME --data NAME
"""


@pytest.mark.usefixtures("engines_here")
@pytest.mark.parametrize("length", [250, 255, 300, 5000])
@pytest.mark.parametrize("line", NAMING.strip().splitlines())
def test_long_names_are_files_or_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str, length: int) -> None:
    """A name may be 255 bytes long; with the ending of one that is made beside it, it may be too long."""
    monkeypatch.chdir(folder)
    name = "n" * (length - 5) + ".onnx"
    if length <= 255:
        onnx.save(gemm(), name)
    done = cli.run(*line.replace("NAME", name).split())
    assert done.exit_code in (0, 1, 2), done.stderr
    if done.exit_code:
        assert re.search(r"^error\[Q\d+\]: ", done.stderr, re.MULTILINE)


def test_the_pipe_of_an_engine_is_none_of_these() -> None:
    with pytest.raises(BrokenPipeError), _forgive_closed_pipe():
        raise BrokenPipeError
