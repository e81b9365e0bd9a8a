"""The public names: sorted, there, typed by the package itself, and found only when asked for."""

import ast
import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import onnxq

ROOT = Path(__file__).resolve().parents[2]


def test_public_names_are_sorted_there_and_documented() -> None:
    assert list(onnxq.__all__) == sorted(set(onnxq.__all__))
    assert set(onnxq.__all__) <= set(dir(onnxq))
    public = {name: getattr(onnxq, name) for name in onnxq.__all__}
    assert [name for name, thing in public.items() if thing is None] == []
    assert [name for name, thing in public.items() if callable(thing) and not inspect.getdoc(thing)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="quantise"):
        _ = onnxq.quantise


def test_the_package_says_that_it_is_typed_and_its_version() -> None:
    assert (ROOT / "onnxq" / "py.typed").is_file()
    assert onnxq.__version__ == metadata.version("onnxq")


def test_the_door_to_the_front_end_says_what_is_missing() -> None:
    code = """
import sys
sys.modules["torch"] = None
from onnxq import qat
try:
    qat.observing
except ImportError as error:
    print(type(error).__name__)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "MissingDependencyError" in done.stdout
    assert "onnxq[torch]" in done.stdout


def test_type_checkers_see_the_names_that_are_looked_up() -> None:
    tree = ast.parse(Path(onnxq.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert seen == onnxq._HOMES
