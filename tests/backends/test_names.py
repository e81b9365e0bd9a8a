"""Names of engines stand in the folder of their backend, in presets, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxq.backends import list_backends, list_engines

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(backend.name for backend in list_backends())
# Engines to come, too.
NAMES = {*OWN, *list_engines(), "openvino", "qnn", "web"}
QUOTED = re.compile("|".join(rf"[\"'`]{re.escape(name)}[\"'`]" for name in sorted(NAMES)))
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


@pytest.mark.parametrize("own", OWN)
def test_no_module_imports_a_folder_of_another_engine(own: str) -> None:
    """Generic code asks the registry."""
    folder = f"onnxq.backends.{own}"
    importers = []
    for path in (ROOT / "onnxq").rglob("*.py"):
        if path.is_relative_to(ROOT / "onnxq" / "backends" / own):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(module == folder or module.startswith(f"{folder}.") for module in modules):
                importers.append(path.name)
    assert importers == []
