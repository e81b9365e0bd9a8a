"""Plain prose, as far as a machine can check it: docstrings begin with their subject or verb."""

import ast

import pytest

from tests.sources import ROOT, list_nodes

ROOMS = (
    "codes", "config", "data", "errors.py", "files", "kernels", "nearest.py", "numerics", "observers", "progress.py",
    "report", "sites.py", "spec.py", "wording.py",
)  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("room", ROOMS)
def test_no_docstring_begins_with_a_question_word(room: str) -> None:
    place = ROOT / "onnxq" / room
    begins = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}"
        for path in (place.rglob("*.py") if place.is_dir() else [place])
        for node in list_nodes(path)
        if isinstance(node, DOCUMENTED)
        and (ast.get_docstring(node) or "x").split()[0].rstrip(",") in ("What", "Which", "Who", "Where", "How", "Why")
    ]
    assert begins == []
