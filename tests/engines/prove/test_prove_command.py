"""`onnxq prove`: tables, JSON, exit codes, files, and comparing two builds."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result

import onnxq
from tests.cli.kit import run as invoke
from tests.engines import kit

pytestmark = pytest.mark.usefixtures("engines_here")
QUANTIZED = ("--require", "quantized", "*")
needs_rtx = kit.needs_rtx[1]


def run(*args: object) -> Result:
    return invoke("prove", *args)


def run_ort(*args: object) -> Result:
    return run(*args, "--engine", "ort")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prove")
    onnx.save(kit.ort_residual(), path / "good.onnx")
    onnx.save(kit.ort_residual(zero=128), path / "bad.onnx")
    return path


def test_the_tables(folder):
    result = run_ort(folder / "bad.onnx")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("bad.onnx  (ONNX Runtime ")
    assert [line.split()[:4] for line in lines if line.startswith(("c/Conv", "d/Conv"))] == [
        ["c/Conv", "Conv", "float32", "FusedConv"],
        ["d/Conv", "Conv", "int8", "QLinearConv"],
        # Its weights are drawn from all of int8: what runs in float cannot saturate, what runs in int8 can.
        ["d/Conv", "Conv", "w", "32/32"],
    ]
    assert "Conv 1/2" in result.stdout
    assert any(line.startswith("x ") and "partly" in line for line in lines)
    assert "QLinearAdd" in run_ort(folder / "bad.onnx", "-v").stdout


def test_a_required_node_that_is_float_exits_with_1_and_is_named(folder):
    assert run_ort(folder / "good.onnx", "--require-int8", "Conv").exit_code == 0
    result = run_ort(folder / "bad.onnx", "--require-int8", "d/*", "--require-int8", "/onv$/")
    assert result.exit_code == 1
    assert "required  d/*: 1/1 in int8" in result.stdout
    assert "/onv$/: 1/2 in int8; not: c/Conv" in result.stdout
    assert "error[Q706]: `--require int8`: c/Conv: not in int8 (1 in all)" in result.stderr
    typo = run_ort(folder / "bad.onnx", "--require-int8", "c/Cnov")
    assert (typo.exit_code, typo.stdout) == (1, "")
    assert "'c/Conv'" in typo.stderr


def test_types_are_required_and_forbidden(folder):
    both = ("--require", "int8", "d/*", "--require", "float32", "c/*")
    assert run_ort(folder / "bad.onnx", *both, "--forbid", "float16").exit_code == 0
    result = run_ort(folder / "bad.onnx", *both, "--forbid", "float32")
    assert result.exit_code == 1
    assert "required   c/*: 1/1 in float32" in result.stdout
    assert "forbidden  float32: 1/2: c/Conv" in result.stdout
    assert "error[Q706]: `--forbid float32`: c/Conv: in float32 (1 in all)" in result.stderr
    typo = run_ort(folder / "bad.onnx", "--forbid", "flaot32")
    assert (typo.exit_code, typo.stdout) == (1, "")
    assert "error[Q312]: forbid: flaot32: is no type" in typo.stderr
    assert "float32" in typo.stderr


def test_what_has_pairs_is_required_to_run_so(folder, tmp_path):
    whole = run_ort(folder / "good.onnx", *QUANTIZED)
    assert (whole.exit_code, whole.stderr) == (0, "")
    assert "required  *: 2/2 quantized\n" in whole.stdout
    broken = run_ort(folder / "bad.onnx", *QUANTIZED)
    assert broken.exit_code == 1
    assert "required  *: 1/2 quantized; not: c/Conv\n" in broken.stdout
    assert "error[Q706]: `--require quantized`: c/Conv: not run as its pairs say (1 in all)" in broken.stderr
    # A file of which nothing is quantized meets no requirement.
    onnx.save(kit.graph("(float[1,8] x) => (float[1,8] y) { y = MatMul(x, w) }", 17, w=np.eye(8, dtype="f4")),
              tmp_path / "float.onnx")  # fmt: skip
    bare = run_ort(tmp_path / "float.onnx", *QUANTIZED)
    assert (bare.exit_code, bare.stdout) == (1, "")
    assert run_ort(folder / "good.onnx", "--forbid", "quantized").exit_code == 1
    assert "error[Q309]: require: *: matches none of the 0 nodes that are judged (products with pairs)" in bare.stderr


@pytest.mark.parametrize(("preset", "exit_code"), [("ort-int8", 0), ("ort-int8-weights", 1)])
def test_what_the_plan_left_float_is_not_required_to_be_quantized(tmp_path, preset, exit_code):
    """A stem and a small head stay float at the defaults; a Conv's weight alone is dequantized in each run."""
    model = Path(__file__).parents[3] / "examples" / "digits" / "digits.onnx"
    onnxq.quantize(model, config=preset, overrides={"latency": False, "effort": "fast"}, out=tmp_path / "q.onnx")
    done = run_ort(tmp_path / "q.onnx", *QUANTIZED)
    assert done.exit_code == exit_code, done.output


@pytest.mark.recent_ort
def test_a_weight_that_its_kernel_reads_in_4_bits_is_quantized(tmp_path):
    weight = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    model = kit.graph("(float[4,256] x) => (float[4,256] y) { y = MatMul(x, w) }", w=weight)
    onnxq.quantize(model, config="ort-int4-weights", overrides={"latency": False}, out=tmp_path / "q.onnx")
    done = run_ort(tmp_path / "q.onnx", *QUANTIZED)
    assert (done.exit_code, "1/1 quantized" in done.stdout) == (0, True), done.output


def test_two_builds_are_compared_by_name(folder, tmp_path):
    before = tmp_path / "before.json"
    before.write_text(run_ort(folder / "good.onnx", "--json").stdout)
    document = json.loads(before.read_text())
    assert document["holds"] is True
    assert document["nodes"]["c/Conv"]["type"] == "int8"
    assert document["sites"]["x"]["state"] == "fused"
    assert document["counts"]["ops"]["Conv"] == {"int8": 2}
    assert "since before.json  no difference" in run_ort(folder / "good.onnx", "--compare", before).stdout
    other = run_ort(folder / "bad.onnx", "--compare", before, "--json")
    told = {(change["kind"], change["name"]): change for change in json.loads(other.stdout)["changes"]}
    assert told["node", "c/Conv"]["before"] == "int8"
    assert told["node", "c/Conv"]["after"] == "float32"
    assert told["site", "x"]["after"] == "partly"
    assert ("node", "d/Conv") not in told


def test_files_go_where_they_are_asked_for_and_are_not_overwritten(folder, tmp_path):
    out = tmp_path / "out"
    result = run_ort(folder / "good.onnx", "--save", out)
    assert result.exit_code == 0, result.stderr
    assert [path.name for path in out.iterdir()] == ["optimized.onnx"]
    assert onnx.load(out / "optimized.onnx").graph.node
    again = run_ort(folder / "good.onnx", "--save", out)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "use `--force`" in again.stderr
    assert run_ort(folder / "good.onnx", "--save", out, "--force").exit_code == 0


@pytest.mark.skipif(find_spec("tensorrt") is not None, reason="tensorrt is there")
def test_a_missing_library_is_an_install_line(folder):
    result = run(folder / "good.onnx", "--engine", "tensorrt")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error[Q805]: tensorrt: cannot be imported" in result.stderr
    assert 'pip install "onnxq[trt]"' in result.stderr


@needs_rtx
def test_a_build_that_fails_exits_with_1_and_names_the_node(tmp_path):
    onnx.save(kit.conv(zero=np.int8(3)), tmp_path / "m.onnx")
    result = run(tmp_path / "m.onnx", "--save", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].startswith("refused     node xq/QuantizeLinear: ")
    assert "error[Q705]: node xq/QuantizeLinear: refused: " in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["build.log"]
    assert "Non-zero zero point" in (tmp_path / "out" / "build.log").read_text()


@needs_rtx
def test_what_an_engine_leaves(tmp_path):
    onnx.save(kit.conv(), tmp_path / "m.onnx")
    result = run(tmp_path / "m.onnx", "--save", tmp_path / "out", "--require-int8", "c/Conv")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["build.log", "layers.txt", "model.engine"]
    assert (tmp_path / "out" / "layers.txt").read_text().startswith("Layers:")
