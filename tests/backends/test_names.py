"""Names of engines stand in the folder of their backend, in presets, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from onnxq.backends import list_backends, list_engines

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(backend.name for backend in list_backends())
# Engines to come, too.
NAMES = {*OWN, *list_engines(), "openvino", "qnn", "web"}
QUOTED = re.compile("|".join(rf"[\"'`]{re.escape(name)}[\"'`]" for name in sorted(NAMES)))
# As a word of a text; names of presets begin with one. "web" is a word, and "openvino" a provider of ONNX Runtime too.
WORD = re.compile(
    "|".join(rf"(?<![\w./-]){re.escape(name)}(?![\w./-])" for name in sorted(NAMES - {"web", "openvino"}))
)
# Other tools' vocabulary.
ALLOWED = {
    # Sparsebit's words for its backends, and ours for them: read below the room of backends.
    "onnxq/config/sparsebit.py",
    # What the names in TensorRT's calibration cache stand for.
    "onnxq/interop/matching.py",
}


def list_files() -> Iterator[Path]:
    """All modules outside the room of backends."""
    for folder in ("onnxq", "torch_frontend"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_relative_to(ROOT / "onnxq" / "backends"):
                yield path


def test_no_engine_is_named_outside_its_folder() -> None:
    found = {}
    for path in list_files():
        name = path.relative_to(ROOT).as_posix()
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if QUOTED.search(line)]
        if lines and name not in ALLOWED:
            found[name] = lines
    assert found == {}


@cache
def read_tree(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def list_texts(path: Path) -> Iterator[str]:
    """The strings of a module, parts of f-strings too, but no docstrings."""
    tree = read_tree(path)
    documented = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    docstrings = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_no_text_names_an_engine() -> None:
    """Options and messages ask the registry for names; examples of commands have to write one."""
    examples = {"onnxq/cli/commands.py"}
    names = (path.relative_to(ROOT).as_posix() for path in list_files())
    found = {
        name: list(filter(WORD.search, list_texts(ROOT / name))) for name in names if name not in ALLOWED | examples
    }
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize("own", OWN)
def test_no_module_imports_a_folder_of_another_engine(own: str) -> None:
    """Generic code asks the registry."""
    folder = f"onnxq.backends.{own}"
    importers = []
    for path in (ROOT / "onnxq").rglob("*.py"):
        if path.is_relative_to(ROOT / "onnxq" / "backends" / own):
            continue
        for node in ast.walk(read_tree(path)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(module == folder or module.startswith(f"{folder}.") for module in modules):
                importers.append(path.name)
    assert importers == []
