"""The public names: sorted, there, typed by the package itself, and found only when asked for."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import onnxq


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
    assert (Path(__file__).resolve().parents[2] / "onnxq" / "py.typed").is_file()
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


# ---- docs/api.md lists what is public, as it is now.

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_api.py"
_spec = importlib.util.spec_from_file_location("make_api", SCRIPT)
make_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_api)


def test_the_page_is_current() -> None:
    assert make_api.PAGE.read_text(encoding="utf-8") == make_api.make_page(), "run `make docs`"


def test_every_public_name_is_on_the_page() -> None:
    assert re.findall(r"^### onnxq\.(\w+)$", make_api.make_page(), re.MULTILINE) == list(onnxq.__all__)


@pytest.mark.parametrize("package", make_api.PACKAGES)
def test_chosen_names_are_public(package: str) -> None:
    _, chosen = make_api.PACKAGES[package]
    assert set(chosen) <= set(make_api.list_public(package))
