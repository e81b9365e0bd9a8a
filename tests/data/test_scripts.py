"""Samples from scripts, and from Polygraphy's JSON; what goes wrong in a user's function is told with the way there."""

import base64
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxq.data import load_data
from onnxq.errors import DataError
from onnxq.evaluation.metric import load_metric
from tests.cli.kit import run
from tests.data.kit import X, feed, firsts
from tests.graph.kit import model

SCRIPT = """
import numpy as np
from neighbour import LEVEL

def load_data():
    for k in range(3):
        yield {"x": np.full((1, 3), LEVEL + k, np.float32)}

def as_arrays():
    return {"x": np.arange(12, dtype=np.float32).reshape(4, 3)}

def as_path():
    return __file__.replace("loader.py", "calib.npz")

def wants(count):
    return []
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("LEVEL = 5\n")
    (tmp_path / "loader.py").write_text(SCRIPT)
    np.savez(tmp_path / "calib.npz", x=np.ones((2, 3), np.float32))
    return tmp_path / "loader.py"


def test_scripts_give_what_their_function_returns(script: Path) -> None:
    assert firsts(load_data(script, [X])) == [5, 6, 7]
    assert firsts(load_data(f"{script}:load_data", [X])) == [5, 6, 7]
    assert firsts(load_data(f"{script}:as_arrays", [X])) == [0, 3, 6, 9]
    assert firsts(load_data(f"{script}:as_path", [X])) == [1, 1]
    assert load_data(script, [X]).describe() == "loader.py:load_data: 3 samples"


def test_scripts_that_do_not_run(script: Path) -> None:
    with pytest.raises(DataError, match="wants arguments"):
        load_data(f"{script}:wants", [X])
    script.write_text("import nothing_of_that_name\n")
    with pytest.raises(DataError, match="nothing_of_that_name"):
        load_data(script, [X])


def encoded(array: np.ndarray) -> dict[str, str]:
    """As Polygraphy 0.49 to 0.53 write an array."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return {"array": base64.b64encode(out.getvalue()).decode(), "polygraphy_class": "ndarray"}


def test_polygraphy_inputs(tmp_path: Path) -> None:
    path = tmp_path / "inputs.json"
    path.write_text(json.dumps([{"x": encoded(feed(k)["x"])} for k in range(3)]))
    assert firsts(load_data(path, [X])) == [0, 1, 2]
    folder = tmp_path / "iterations"
    folder.mkdir()
    for k in range(3):
        (folder / f"{k:010}.json").write_text(json.dumps([{"x": encoded(feed(k)["x"])}]))
    assert firsts(load_data(folder, [X])) == [0, 1, 2]


def test_polygraphy_itself_writes_that(tmp_path: Path) -> None:
    pytest.importorskip("polygraphy.json").save_json([feed(4)], str(tmp_path / "inputs.json"))
    assert firsts(load_data(tmp_path / "inputs.json", [X])) == [4]


# A .npy whose header is no dictionary of one.
ODD_HEADER = base64.b64encode(b"\x93NUMPY\x01\x00\x10\x00{'descr': ((((\n     ").decode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{not json", "is not JSON"),
        ("\0", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ('[{"x": ' + "9" * 5000 + "}]", "is not JSON|not a list of"),
        (f'[{{"x": {{"array": "{ODD_HEADER}", "polygraphy_class": "ndarray"}}}}]', "cannot be decoded"),
        ("[]", "empty"),
        ('[{"x": [1, 2]}]', "not a list of"),
        ('{"runners": []}', "not a list of"),
        ('[{"x": {"tensor": "AAAA", "polygraphy_class": "Tensor"}}]', "Polygraphy Tensor"),
        ('[{"x": {"array": "!!!!", "polygraphy_class": "ndarray"}}]', "cannot be decoded"),
        ('[{"x": {"array": "AAAA", "polygraphy_class": "ndarray"}}]', "cannot be decoded"),
    ],
)
def test_json_that_is_no_inputs_file(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=told):
        load_data(tmp_path / "a.json", [X])


FAULTY = """
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
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "s.py").write_text(FAULTY)
    (tmp_path / "helper.py").write_text("def divide(x):\n    return x / 0  # by nothing\n")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32))
    (tmp_path / "c.yaml").write_text("rules:\n  - {op: MatMul, set: {quantize: true}}\n")
    text = "g (float[N,3] x) => (float[N,3] y) { [product] y = MatMul(x, w) }"
    onnx.save(model(text, w=np.eye(3, dtype=np.float32) + np.float32(0.1)), tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
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
    result = run("quantize", "m.onnx", *given, "--config", "c.yaml", "--no-latency")
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
