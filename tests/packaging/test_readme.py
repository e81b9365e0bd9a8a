"""The README's commands run from top to bottom as they stand, in a folder that has what they name; its Python too."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import numpy_helper, parser

import onnxq
from onnxq.cli import cli

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = next(block for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) if "onnxq quantize" in block)


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
    assert capsys.readouterr().out.startswith("y (")
    assert (folder / "model.q.onnx").stat().st_size < (folder / "model.onnx").stat().st_size / 2
