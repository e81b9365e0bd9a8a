"""The README's commands run from top to bottom as they stand, in a folder that has what they name; its Python too.

What it shows of other tools' files is what is printed, and its figures are those of docs/results.md.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser
from onnxruntime import quantization

import onnxq
from onnxq.cli import cli
from onnxq.runtime import detect_cpu

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) if "onnxq " in block]
BLOCK = next(block for block in BLOCKS if "onnxq plan" in block)
SHOWN = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)


BODY = """g (float[N,32,8,8] x) => (float[N,32,8,8] y) {
    c = Conv <pads=[1,1,1,1]>(x, w0, b0)
    r = Relu(c)
    y = Conv <pads=[1,1,1,1]>(r, w1, b1)
}"""


def network() -> onnx.ModelProto:
    """Two convolutions, wide enough for int8 to pay."""
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{BODY}')
    rng = np.random.default_rng(0)
    for k in range(2):
        weight, bias = rng.standard_normal((32, 32, 3, 3)) / 17, rng.standard_normal(32) / 8
        proto.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), f"w{k}"))
        proto.graph.initializer.append(numpy_helper.from_array(bias.astype(np.float32), f"b{k}"))
    return proto


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what the README takes as there."""
    monkeypatch.chdir(tmp_path)
    proto = network()
    onnx.save(proto, "model.onnx")
    proto.producer_name = "exported again"
    onnx.save(proto, "again.onnx")
    samples = np.random.default_rng(1).standard_normal((12, 32, 8, 8)).astype(np.float32)
    np.savez("samples.npz", x=samples)
    (tmp_path / "my.yaml").write_text("extends: ort-int8\nactivations: {observer: percentile}\n")
    scales = "".join(f"{name}: 3d010a14\n" for name in "xcry")
    (tmp_path / "trt.cache").write_text(f"TRT-8601-EntropyCalibration2\n{scales}")
    weights = onnxq.quantize("model.onnx", config="ort-int8-weights", overrides={"latency": False})
    weights.save("other.qdq.onnx")
    return tmp_path


@pytest.mark.slow
def test_the_commands_run_from_top_to_bottom(folder: Path) -> None:
    for line in BLOCK.splitlines():
        program, command, *arguments = shlex.split(line, comments=True)
        assert program == "onnxq", line
        done = run(command, *arguments)
        assert done.exit_code == 0, f"{line}\n{done.output}"
    assert {"model.q.onnx", "small.onnx", "plan.json", "again.q.onnx"} <= {path.name for path in folder.iterdir()}
    # The plan of small.onnx, on the same network exported again.
    assert onnx.load("again.q.onnx").graph == onnx.load("small.onnx").graph


def test_the_python_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "README.md", "exec"), {})
    assert "\ny (" in capsys.readouterr().out
    assert (folder / "model.q.onnx").stat().st_size < (folder / "model.onnx").stat().st_size / 2


class Digits(quantization.CalibrationDataReader):
    """The digits that the repository carries, one after the other."""

    def __init__(self, path: Path) -> None:
        self.left = iter([{"image": one[None]} for one in np.load(path)["image"]])

    def get_next(self):
        return next(self.left, None)


@pytest.fixture
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which the README looks at a file of another tool."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger(), "level", logging.ERROR)
    examples = ROOT / "examples" / "digits"
    shutil.copy(examples / "digits.onnx", "model.onnx")
    shutil.copy(examples / "digits.npz", "samples.npz")
    quantization.quantize_static("model.onnx", "model.int8.onnx", Digits(Path("samples.npz")))


def is_printed(line: str, printed: list[str]) -> bool:
    """True where a line is printed so, but for three percent of each figure that is measured; … stands for anything."""
    pieces = re.split(r"(-?\d+\.\d+)", line)
    known = [float(one) for one in pieces[1::2]]
    texts = (re.escape(one).replace("…", ".*") for one in pieces[::2])
    pattern = r"(-?\d+\.\d+)".join(texts)
    found = (re.fullmatch(pattern, one) for one in printed)
    return any(match and np.allclose([float(one) for one in match.groups()], known, rtol=0.03) for match in found)


@pytest.mark.slow
@pytest.mark.recent_ort
@pytest.mark.usefixtures("digits")
def test_what_is_shown_of_another_tools_file_is_what_is_printed() -> None:
    prove, diff = BLOCKS[0].splitlines()
    ends, parts, overflows = SHOWN
    # The last block is of other CPUs.
    more = overflows if detect_cpu() == "avx2" else ""
    for line, shown in ((prove, ends), (diff, parts + more)):
        done = run(*shlex.split(line, comments=True)[1:])
        assert done.exit_code == 0, done.output
        printed = [one.rstrip() for one in done.output.splitlines()]
        assert [one for one in shown.splitlines() if not is_printed(one, printed)] == []


def test_its_figures_are_those_of_the_results() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:-1] for line in TEXT.splitlines() if re.match(r"\| [A-Z].*\d", line)]
    assert len(rows) == 4
    section = results[results.index("## Beside every peer, in one run") :].split("\n## ")[0]
    cells = [[cell.split(" / ")[0].strip(" *") for cell in line.split("|")[3:-1]] for line in section.splitlines()]
    for values in rows:
        _, *ours = [value.strip(" *") for value in values]
        # Without `fast`, the first column there.
        assert ours in cells, ours
        assert values[0].strip() in results
