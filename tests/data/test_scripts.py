"""Samples from scripts and from Polygraphy's JSON."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest

from onnxq.data import load_data
from onnxq.errors import DataError
from tests.data.kit import X, feed, firsts

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

def fails():
    raise ValueError("no such camera")
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


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("laod_data", "did you mean 'load_data'"),
        ("wants", "wants arguments"),
        ("fails", "raised ValueError: no such camera"),
    ],
)
def test_scripts_that_do_not_work(script: Path, function: str, told: str) -> None:
    with pytest.raises(DataError, match=told):
        load_data(f"{script}:{function}", [X])


def test_scripts_that_do_not_run(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(DataError, match="nothing_of_that_name"):
        load_data(tmp_path / "bad.py", [X])
    with pytest.raises(DataError, match="no such file"):
        load_data(f"{tmp_path}/absent.py:load", [X])


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
    polygraphy_json = pytest.importorskip("polygraphy.json")
    polygraphy_json.save_json([feed(4)], str(tmp_path / "inputs.json"))
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
