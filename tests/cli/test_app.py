"""The command line itself: help, options, exit codes, and that nothing heavy is loaded before it is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from click.testing import Result

from onnxq.codes import CODES
from onnxq.errors import ModelError
from tests.cli.kit import read, run, run_failing
from tests.codes.kit import model, saved, written
from tests.networks import parse_text

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
    (["quantize", "m.onnx", "--min-sqnr", "abc"], "must be a valid number, not 'abc'"),
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
    (["quantize", "."], "is a folder, not a model\n  fix: name"),
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


# ---- Errors as programs read them: one JSON document on stdout, whatever went wrong.

KEYS = {"code", "kind", "subject", "cause", "fix", "details", "file", "line", "exit"}


def read_error(result: Result, keys: set[str]) -> tuple[int, dict, str]:
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    assert set(document["error"]) == keys
    return result.exit_code, document["error"], result.stderr


def failed(*args: object) -> tuple[int, dict, str]:
    return read_error(run(*args), KEYS)


def test_an_error_is_one_document_on_stdout_and_a_line_on_stderr(tmp_path) -> None:
    path = tmp_path / "none.onnx"
    code, error, said = failed("inspect", path, "--json")
    assert code == error["exit"] == 1
    assert (error["code"], error["kind"], error["file"], error["line"]) == ("Q101", "model", str(path), None)
    assert said.startswith(f"error[Q101]: {path}: there is no such file\n")
    # Behind two dashes it is no option.
    assert run("inspect", "--", "--json").stdout == ""


def save_model(path: Path, text: str) -> Path:
    onnx.save(parse_text(text, "me"), path)
    return path


# Faults of a node, which names no file by itself.
NODE_FAULTS = {
    "a cycle": ("g (float[1,4] x) => (float[1,4] y) { y = Add(x, z) z = Relu(y) }", ["inspect"], "Q103"),
    "an unknown operator": ("g (float[1,4] x) => (float[1,4] y) { y = me.Foo(x) }", ["plan", "quantize"], "Q113"),
}


@pytest.mark.parametrize("fault", list(NODE_FAULTS))
def test_a_fault_of_a_node_has_the_file_of_its_model(tmp_path, fault) -> None:
    text, commands, code = NODE_FAULTS[fault]
    path = save_model(tmp_path / "m.onnx", text)
    for command in commands:
        _, error, said = failed(command, path, "--json")
        assert (error["code"], error["file"], error["line"]) == (code, str(path), None)
        assert error["subject"] != str(path)
        assert said.startswith(f"error[{code}]: {error['subject']}: ")


def test_of_two_models_neither_is_blamed(tmp_path) -> None:
    path = save_model(tmp_path / "m.onnx", NODE_FAULTS["a cycle"][0])
    _, error, _ = failed("diff", path, path, "--json")
    assert (error["code"], error["file"]) == ("Q103", "")


def test_an_error_of_the_configuration_has_file_and_line(tmp_path) -> None:
    model = save_model(tmp_path / "m.onnx", "g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }")
    config = written(tmp_path, "target: ort\nwieghts: {bits: 8}\n", "my.yaml")
    _, error, _ = failed("plan", model, "--config", config, "--json")
    assert (error["code"], error["file"], error["line"]) == ("Q303", str(config), 2)
    assert "weights" in error["fix"]


@pytest.mark.parametrize(
    "line", ["inspct --json", "inspect --json", "quantize m.onnx --json --effort huge", "plan --json --nope"]
)
def test_a_wrong_command_line_is_json_too(line) -> None:
    code, error, said = failed(*line.split())
    assert code == error["exit"] == 2
    assert (error["code"], error["kind"]) == ("Q001", "usage")
    assert f"error[Q001]: {error['cause']}" in said


def test_a_defect_is_json_with_its_traceback_and_shows_it_on_stderr_too_and_no_memory_is_json() -> None:
    code, error, said = read_error(run_failing(RuntimeError("surprise"), "--json"), {*KEYS, "traceback"})
    assert code == error["exit"] == 70
    assert [error[key] for key in ("code", "kind", "subject", "cause")] == [
        "Q003",
        "defect",
        "RuntimeError",
        "surprise",
    ]
    assert "Traceback (most recent call last)" in error["traceback"]
    assert "RuntimeError: surprise" in said
    code, error, _ = read_error(run_failing(MemoryError(), "--json"), KEYS)
    assert code == error["exit"] == 1
    assert (error["code"], error["kind"]) == ("Q002", "memory")
    assert "`--memory-limit`" in error["fix"]


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}])
def test_a_file_name_that_is_not_utf8_gives_valid_json(tmp_path, environment) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9.onnx"
    done = subprocess.run(
        [sys.executable, "-m", "onnxq.cli", "inspect", name, "--json"],
        capture_output=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    error = json.loads(done.stdout.decode("utf-8"))["error"]
    assert error["file"].endswith("caf\ufffd.onnx")
    error["file"].encode("utf-8")
    assert b"Traceback" not in done.stderr


def test_explain_tells_one_code_and_knows_the_nearest() -> None:
    result = run("explain", "q303")
    assert result.exit_code == 0
    assert result.stdout.startswith("Q303: unknown key\n")
    assert CODES["Q303"].fix in result.stdout
    result = run("explain", "Q3O3")
    assert result.exit_code == 2
    assert "'Q303'" in result.stderr


def test_explain_lists_all_codes() -> None:
    shown = run("explain").stdout
    assert [code for code in CODES if f"  {code}  " not in shown] == []
    assert [entry["id"] for entry in read("explain")["codes"]] == list(CODES)
