"""The command line itself: help, options, exit codes, and that nothing heavy is loaded before it is needed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

from onnxq.errors import ModelError
from tests.cli.kit import read, run, run_failing
from tests.codes.kit import model, saved

COMMANDS = ("quantize", "plan", "apply", "prove", "inspect", "annotate-bits", "variants", "build-kernels")


def qdq_model(path: Path) -> Path:
    body = """g (float[1,4] x) => (float[1,4] y) {
        [clip] c = Clip(x, lo, hi) [quant] q = QuantizeLinear(c, s, z)
        [dequant] d = DequantizeLinear(q, s, z) [neg] y = Neg(d) }"""
    values = {"s": np.float32(0.1), "z": np.uint8(0), "lo": np.float32(0), "hi": np.float32(1.5)}
    return saved(path.parent, model(body, **values), path.name)


def test_help_lists_every_command_and_the_exit_codes():
    result = run("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"  {command} " in result.stdout
    for code in ("0", "1", "2", "3", "70", "130"):
        assert f"\n    {code} " in result.stdout
    assert run("--version").stdout.startswith("onnxq, version ")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = run(command, "-h")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: cli {command} ")


HEAVY = {"onnx", "onnxruntime", "numpy", "torch", "rich"}


@pytest.mark.parametrize(
    ("lines", "unwanted"),
    [
        # The options of a command are made of the configuration, which the help of all and of `inspect` needs not.
        (["--help", "inspect --help", "explain Q303"], {*HEAVY, "pydantic", "yaml"}),
        ([f"{name} --help" for name in ("quantize", "plan", "diff", "annotate-bits", "variants")], HEAVY),
    ],
)
def test_help_loads_nothing_of_the_engine(lines, unwanted):
    code = (
        "import sys\nfrom onnxq.cli import cli\n"
        f"for line in {lines}:\n"
        "    try:\n        cli.main(line.split())\n    except SystemExit as done:\n        assert done.code == 0\n"
        f"loaded = {unwanted} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


USAGE = [
    ([], ""),
    (["quantise", "m.onnx"], "did you mean 'quantize'?"),
    (["quantize"], "Missing argument 'MODEL'"),
    (["quantize", "m.onnx", "--sampels", "3"], "--samples"),
    (["quantize", "m.onnx", "--samples", "0"], "x>=1"),
    (["quantize", "m.onnx", "--min-sqnr", "nan"], "must be a finite number"),
    (["quantize", "m.onnx", "--set", "weights.bits"], "is not KEY=VALUE"),
    (
        ["diff", "m", "q", "--engines", "ort,trrt"],
        "'trrt' is not one of openvino, ort, qnn, trt, web; did you mean 'trt'?",
    ),
    (["prove", "m.onnx", "--engine", "trt"], "'trt' is not one of tensorrt-rtx, tensorrt, openvino, ort"),
    (["profile", "m.onnx", "--by", "node,layer"], "'layer' is not one of node, segment, site"),
    *((["quantize", "m.onnx", "--budget", text], "'--budget'") for text in ("0", "ten", "-1s", "5d")),
    (["diff", "m.onnx", "q.onnx", "--min-agreement", "2"], "must be less than or equal to 1"),
    (["quantize", "m.onnx", "--placement", "x"], "'measured'"),
    (["quantize", "m.onnx", "--cpu", "arm"], "'avx2'"),
    (["plan", "m.onnx", "--cpu", "arm"], "'vnni'"),
    (["quantize", "m.onnx", "--memory-limit", "3XB"], "512MB, 2GB or 1.5GiB"),
    (["quantize", "m.onnx", "--memory-limit", "0"], "no amount of memory"),
    (["apply", "m.onnx"], "Missing argument 'PLAN'"),
    (["annotate-bits", "m.onnx", "--bits", "x"], "is not PATTERN=N"),
    (["annotate-bits", "m.onnx", "--bits", "=8"], "is not PATTERN=N"),
    (["inspect", "a", "b"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("args", "said"), USAGE)
def test_a_wrong_command_line_exits_with_2(args, said):
    result = run(*args)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


FAULTS = [
    (["quantize", "{d}/none.onnx"], "there is no such file"),
    (["quantize", "{d}/broken.onnx"], "broken.onnx"),
    (["inspect", "{d}/empty.onnx"], "is empty"),
    (["quantize", "{d}/m.onnx", "-o", "{d}/m.onnx"], "is the input model"),
    (["quantize", "{d}/m.onnx", "-o", "{d}/m.onnx", "--force"], "is the input model"),
    (["quantize", "{d}/m.onnx", "-o", "{d}/link.onnx", "--force"], "is the input model"),
    (["quantize", "{d}/m.onnx", "-o", "{d}/empty.onnx"], "overwrite it with `--force`"),
    (["quantize", "{d}/m.onnx", "--plan", "{d}/empty.onnx"], "overwrite it with `--force`"),
    (["quantize", "{d}/m.onnx", "--plan", "{d}/m.q.onnx"], "asked for twice"),
    (["quantize", "{d}/m.onnx", "-o", "{d}/no/such.onnx"], "there is no folder"),
    (["quantize", "{d}/m.onnx", "-o", "{d}"], "is a folder"),
    (["plan", "{d}/m.onnx", "-o", "{d}/empty.onnx"], "overwrite it with `--force`"),
    (["quantize", "{d}/m.onnx", "--config", "ort-int9"], "'ort-int8'"),
    (["quantize", "{d}/m.onnx", "--target", "trrt"], "option: target: 'trrt': there is none of this name"),
    (["quantize", "{d}/m.onnx", "--set", "weights.bits=9"], "option: weights.bits: 9 is not one of 2, 3"),
    (["quantize", "{d}/m.onnx", "--set", "weight.bits=8"], "weight.bits: unknown key\n  fix: did you mean 'weights'"),
    (["quantize", "{d}/m.onnx", "--config", "{d}/c.yaml"], "c.yaml:2: weights.bit: unknown key 'bit'"),
    (["quantize", "{d}/m.onnx", "--data", "{d}/bad.npz"], "'x'"),
    (["apply", "{d}/m.onnx", "{d}/none.json"], "none.json"),
    (["annotate-bits", "{d}/m.onnx", "--bits", "zzz=8"], "matches no pair"),
    (["annotate-bits", "{d}/m.onnx", "-o", "{d}/m.onnx", "--force"], "is the input model"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    qdq_model(path / "m.onnx")
    (path / "broken.onnx").write_bytes((path / "m.onnx").read_bytes()[:60])
    (path / "empty.onnx").write_bytes(b"")
    (path / "link.onnx").symlink_to(path / "m.onnx")
    (path / "c.yaml").write_text("weights:\n  bit: 8\n")
    np.savez(path / "bad.npz", z=np.zeros((2, 4), np.float32))
    return path


@pytest.mark.parametrize(("args", "said"), FAULTS)
def test_a_users_fault_exits_with_1_says_the_fix_and_leaves_everything(folder, args, said):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = run(*(arg.format(d=folder) for arg in args))
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.match(r"error\[Q\d{3}\]: ", result.stderr)
    assert said in result.stderr
    assert "\n  fix: " in result.stderr
    assert "Traceback" not in result.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_inspect_prints_one_json_document(tmp_path):
    assert read("inspect", qdq_model(tmp_path / "m.onnx"))["pairs"] == [
        {
            "site": "x", "scope": "", "role": "activation", "ops": ["Neg"], "bits": 4, "origin": "clip",
            "type": "uint8", "scheme": "asymmetric", "granularity": "tensor", "scales": 1,
            "scale_min": pytest.approx(0.1), "scale_max": pytest.approx(0.1),
            "quantize": "quant", "dequantize": "dequant", "clip": "clip",
        }
    ]  # fmt: skip


def test_annotate_bits_writes_beside_the_model_and_says_so(tmp_path):
    source = qdq_model(tmp_path / "m.onnx")
    before = source.read_bytes()
    result = run("annotate-bits", source, "--bits", "x=4", "--bits", "*=8", "--rename")
    assert result.exit_code == 1  # the second pattern has nothing left: a typo until said otherwise
    result = run("annotate-bits", source, "--bits", "x=3", "--rename")
    assert result.exit_code == 0, result.stderr
    assert f"written: {tmp_path / 'm.bits.onnx'}" in result.stdout
    assert source.read_bytes() == before
    names = [node.name for node in onnx.load(tmp_path / "m.bits.onnx").graph.node]
    assert names == ["x/Clip", "x/QuantizeLinear", "x/DequantizeLinear", "neg"]
    again = read("inspect", tmp_path / "m.bits.onnx")["pairs"][0]
    assert (again["bits"], again["origin"]) == (3, "metadata")
    assert run("annotate-bits", source).exit_code == 1
    assert run("annotate-bits", source, "--force").exit_code == 0


def test_annotate_bits_checks_strips_and_carries_notes_beside_the_model(tmp_path):
    source, notes, bare = qdq_model(tmp_path / "m.onnx"), tmp_path / "n.json", tmp_path / "bare.onnx"
    noted = tmp_path / "m.bits.onnx"
    assert run("annotate-bits", source, "--bits", "x=3", "--sidecar", notes).exit_code == 0
    assert run("annotate-bits", noted, "--strip", "-o", bare).exit_code == 0
    before = sorted(tmp_path.iterdir())
    result = run("annotate-bits", noted, "--check", "--json")
    assert (result.exit_code, sorted(tmp_path.iterdir())) == (1, before)
    document = json.loads(result.stdout)
    assert document["error"]["code"] == "Q713"
    assert document["disagreements"][0]["noted"] == "model metadata 3, node metadata 3"
    assert "of 4 bits" in run("annotate-bits", noted, "--check").stdout
    assert run("annotate-bits", bare, "--check").exit_code == 0
    result = run("annotate-bits", bare, "--from", notes, "--json", "-o", tmp_path / "again.onnx")
    assert [(pair["bits"], pair["origin"]) for pair in json.loads(result.stdout)["pairs"]] == [(3, "by name")]
    for options in (["--check", "--strip"], ["--check", "-o", bare], ["--strip", "--emit", "qcdq"]):
        result = run("annotate-bits", source, *options, "--force")
        assert (result.exit_code, "error[Q309]" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("error", "code", "said", "traced"),
    [
        (ModelError("conv", "is odd", "mend it"), 1, "error[Q100]: conv: is odd\n  fix: mend it\n", False),
        (KeyboardInterrupt(), 130, "stopped; nothing half-written is left\n", False),
        (MemoryError(), 1, "--memory-limit", False),
        (RuntimeError("surprise"), 70, "please report it", True),
        (AssertionError(), 70, "defect of onnxq", True),
        (click.UsageError("no"), 2, "error[Q001]: no\n", False),
        (SystemExit(5), 5, "", False),
    ],
)
def test_every_ending_has_its_code(error, code, said, traced):
    result = run_failing(error)
    assert result.exit_code == code
    assert said in result.stderr
    assert ("Traceback" in result.stderr) is traced


def test_the_module_gives_exit_codes_without_traceback():
    done = subprocess.run([sys.executable, "-m", "onnxq.cli", "inspect"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
