"""Errors as programs read them: one JSON document on stdout, whatever went wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from click.testing import Result

from onnxq.codes import CODES
from tests.cli.kit import read, run, run_failing
from tests.codes.kit import written
from tests.networks import parse_text

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
