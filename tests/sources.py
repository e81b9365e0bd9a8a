"""The sources of the project, as tests read them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for room in ("onnxq", "torch_frontend") for path in sorted((ROOT / room).rglob("*.py"))]


def name_source(path: Path) -> str:
    """The path in the repository."""
    return path.relative_to(ROOT).as_posix()


@cache
def read_tree(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def list_nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree."""
    return tuple(ast.walk(read_tree(path)))


def list_texts(path: Path, *, docstrings: bool = False) -> Iterator[tuple[int, str]]:
    """The strings of a module with their lines, parts of f-strings too."""
    bodies = [node.body for node in list_nodes(path) if isinstance(getattr(node, "body", None), list)]
    documents = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in list_nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (docstrings or id(node) not in documents):
            yield node.lineno, node.value


def list_imports(path: Path) -> Iterator[tuple[int, str]]:
    """The modules that a module imports, lazily too, with their lines."""
    for node in list_nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
