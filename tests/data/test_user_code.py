"""Functions of the user's own: whatever goes wrong in them is told with function, file, line and the way there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper, save

from onnxq.cli import cli
from onnxq.data import load_data
from onnxq.errors import DataError
from onnxq.evaluation.metric import load_metric
from onnxq.graph import ValueInfo

X = ValueInfo("x", 1, ("N", 3))
SCRIPT = """
import sys
import numpy as np
from helper import divide

def leaves():
    sys.exit(0)

def leaves_later():
    yield {"x": np.zeros((1, 3), np.float32)}
    exit("no more")

def fails():
    return divide(1)

def score(model):
    return divide(0)

def leaves_score(model):
    raise SystemExit
"""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("def divide(x):\n    return x / 0  # by nothing\n")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32))
    (tmp_path / "c.yaml").write_text("rules:\n  - {op: MatMul, set: {quantize: true}}\n")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in "xy"]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    weight = numpy_helper.from_array(np.eye(3, dtype=np.float32) + 0.1, "w")
    graph = helper.make_graph([node], "net", values[:1], values[1:], [weight])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)
    sys.modules.pop("helper", None)


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        (("--data", "s.py:leaves"), "s.py:leaves", "called sys.exit(0)"),
        (("--data", "s.py:leaves_later"), "s.py:leaves_later", "called sys.exit('no more')"),
        (("--data", "d.npz", "--metric", "s.py:leaves_score"), "s.py:leaves_score", "called sys.exit()"),
        (("--data", "s.py:fails"), "s.py:fails", "raised ZeroDivisionError: division by zero"),
        (("--data", "d.npz", "--metric", "s.py:score"), "s.py:score", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_the_command_ends_with_an_error_that_names_the_function(
    work: Path, given: tuple[str, ...], named: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    result = CliRunner().invoke(cli, ["quantize", "m.onnx", *given, "--config", "c.yaml", "--no-latency"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error[Q213]: {named}: {said}\n  fix: ")
    assert "\n  at " in result.stderr
    assert "Traceback" not in result.stderr
    assert not (work / "m.q.onnx").exists()
    assert not (work / "__pycache__").exists()


def test_the_calls_are_shown_from_the_function_to_the_fault(work: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_data("s.py:fails", [X])
    assert caught.value.cause == "raised ZeroDivisionError: division by zero"
    assert [call.replace(f"{work}/", "") for call in caught.value.details] == [
        "at s.py:14, in fails: return divide(1)",
        "at helper.py:2, in divide: return x / 0  # by nothing",
    ]


def test_of_many_calls_the_innermost_are_shown(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text("def load(n=50):\n    return load(n - 1) if n else {}[3]\n")
    with pytest.raises(DataError, match="raised KeyError: 3") as caught:
        load_data(f"{tmp_path}/deep.py:load", [X])
    assert len(caught.value.details) == 5


def test_a_file_that_is_no_python_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def load():\n    return (1\n")
    with pytest.raises(DataError, match=r"raised SyntaxError(.|\n)*bad\.py:2: return \(1"):
        load_data(f"{tmp_path}/bad.py:load", [X])


@pytest.mark.parametrize("read", [load_metric, lambda source: load_data(source, [X])])
def test_a_missing_file_or_function_is_told_with_the_nearest_name(work: Path, read) -> None:
    with pytest.raises(DataError, match=r"t\.py: there is no such file \[Q201\]\n  fix: did you mean 's\.py'\?"):
        read("t.py:score")
    with pytest.raises(
        DataError, match=r"s\.py:scor: the file has no such function \[Q213\]\n  fix: did you mean 'score'"
    ):
        read("s.py:scor")


def test_functions_given_from_python_are_told_too() -> None:
    def leaving() -> None:
        raise SystemExit(3)

    with pytest.raises(DataError, match=r"leaving: called sys.exit\(3\)"):
        load_data(leaving, [X])


def test_an_interrupt_in_a_function_stays_one(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("def load():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_data(f"{tmp_path}/s.py:load", [X])
