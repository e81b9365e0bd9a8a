"""Names that steer a terminal or a CI system: no command prints one as it is."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import Result
from onnx import TensorProto, helper, numpy_helper

from tests.cli import kit

pytestmark = pytest.mark.usefixtures("engines_here")
# It clears the screen, sets the title, turns the direction of text, and begins lines of its own.
EVIL = "\x1b[2J\x1b]0;t\x07\x9b2J\x7f\u202e\u2028\r\nFORGED\n::add-mask::x\n##[error]z"
HARMFUL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|##\\[|^\\s*(?:::|FORGED)", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A network of two convolutions whose every name is one of these, its samples, and its quantized file."""
    folder = tmp_path_factory.mktemp("names")
    rng = np.random.default_rng(0)
    names = [EVIL + letter for letter in "abcdefg"]
    x, hidden, active, y, first, second, size = names
    weights = [numpy_helper.from_array(rng.normal(size=(32, 32, 3, 3)).astype("f4") / 17, name) for name in names[4:6]]
    nodes = [
        helper.make_node("Conv", [x, first], [hidden], name=f"1{EVIL}", pads=[1] * 4),
        helper.make_node("Relu", [hidden], [active], name=f"2{EVIL}"),
        helper.make_node("Conv", [active, second], [y], name=f"3{EVIL}", pads=[1] * 4),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, 32, 16, 16]) for name in (x, y)]
    graph = helper.make_graph(nodes, EVIL, values[:1], values[1:], weights, doc_string=EVIL)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name=EVIL)
    helper.set_model_props(model, {EVIL: EVIL, "onnxq.bits": EVIL, "onnxq.plan": EVIL})
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "d.npz", **{x: rng.normal(size=(8, 32, 16, 16)).astype("f4")})
    np.savez(folder / "other.npz", **{f"other{EVIL}": np.zeros((8, 3), "f4")})
    run(folder, "quantize m.onnx --data d.npz --effort fast --no-latency --plan p.json -o q.onnx")
    (folder / "cache").write_text(f"TRT-100-EntropyCalibration2\n{x!r}: 3c010a14\n", encoding="utf-8")
    return folder


def run(folder: Path, line: str, *more: str) -> Result:
    """Run a command on files of a folder; what it prints is harmless."""
    words = [folder / word if Path(word).suffix or word in ("cache", "hub") else word for word in line.split()]
    result = kit.run(*words, *more)
    for text in (result.stdout, result.stderr):
        harm = HARMFUL.search(text)
        assert harm is None, text[max(harm.start() - 200, 0) : harm.end() + 50]
    assert result.exit_code != 70, result.stderr
    return result


COMMANDS = (
    "quantize m.onnx --data d.npz --effort fast --no-latency --force -v -o again.onnx",
    "quantize m.onnx --data d.npz --effort fast --target trt --force -v -o trt.onnx",
    "quantize m.onnx --config ort-dynamic --no-latency --force -v -o dynamic.onnx",
    "variants m.onnx --data d.npz --force -o hub",
    "plan m.onnx",
    "plan m.onnx -v",
    "apply m.onnx p.json --force -o applied.onnx",
    "prove q.onnx --engine ort -v",
    "bench m.onnx q.onnx --seconds .1s",
    "diff m.onnx q.onnx --data d.npz --layers --bisect -v",
    "profile m.onnx q.onnx --data d.npz",
    "calibrate m.onnx --data d.npz --shard 1/1 --force -o part.json",
    "inspect q.onnx -v",
    "export-calibration q.onnx --format tensor-quant-overrides --model m.onnx --force -o e.json -v",
    "annotate-bits q.onnx --bits *=8 --force -o noted.onnx",
)
FAILING = (
    "prove q.onnx --engine ort --require-int8 Relu",
    "import-calibration cache --model m.onnx --force -o trt.json -v",
    "quantize m.onnx --data other.npz --force -o none.onnx",
    "annotate-bits q.onnx --bits nope=8 --force -o noted.onnx",
    "apply q.onnx p.json --force -o applied.onnx",
    "perplexity m.onnx --data d.npz",
)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("line", [*COMMANDS, *FAILING])
def test_no_command_prints_a_name_as_it_is(folder: Path, line: str, as_json: bool) -> None:
    result = run(folder, line, *(["--json"] if as_json else []))
    assert (result.exit_code == 0) == (line in COMMANDS), result.output
    if as_json:
        json.loads(result.stdout)


@pytest.mark.parametrize("rule", ["{match: {node: nope}, exclude: true}", "{match: {op: Nope}, exclude: true}"])
def test_nor_does_an_error(folder: Path, rule: str) -> None:
    assert run(folder, "plan m.onnx --set", f"rules=[{rule}]").exit_code == 1


def test_json_means_the_name(folder: Path) -> None:
    document = json.loads(run(folder, "inspect q.onnx --json").stdout)
    assert f"{EVIL}a" in {pair["site"] for pair in document["pairs"]}
    plan = (folder / "p.json").read_text("utf-8")
    assert HARMFUL.search(plan) is None
    assert f"{EVIL}a" in {site["tensor"] for site in json.loads(plan)["sites"] if "tensor" in site}
