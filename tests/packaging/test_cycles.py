"""No module of onnxq imports, at once or later, one that imports it again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def modules(*packages: str) -> dict[str, Path]:
    """Every module of the packages by its dotted name; a package's is its own __init__.py."""
    paths = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(source: str, known: frozenset[str]) -> Iterator[str]:
    """The known modules that a source imports anywhere: a name of a package counts as its module where it is one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & known
            if not inner <= known:
                yield str(node.module)


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, the first again at the end; empty where there is none."""
    done: set[str] = set()
    for start in edges:
        path: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = []
        if start not in done:
            path, stack = [start], [(start, iter(sorted(edges[start])))]
        while stack:
            name, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                done.add(name)
                stack.pop()
                path.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                path.append(following)
                stack.append((following, iter(sorted(edges[following]))))
    return []


def test_there_is_no_import_cycle() -> None:
    known = modules("onnxq", "torch_frontend")
    names = frozenset(known)
    edges = {name: set(imported(path.read_text(encoding="utf-8"), names)) - {name} for name, path in known.items()}
    assert sum(map(len, edges.values())) > len(edges)
    assert find_cycle(edges) == []


@pytest.mark.parametrize(
    ("edges", "cycle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, ["b", "c", "b"]),
    ],
)
def test_a_cycle_is_seen(edges: dict[str, set[str]], cycle: list[str]) -> None:
    assert find_cycle(edges) == cycle


def test_lazy_imports_count() -> None:
    source = "def f():\n    from onnxq.graph.light import LightModel\n    from onnxq import graph\n"
    assert set(imported(source, frozenset({"onnxq", "onnxq.graph", "onnxq.graph.light"}))) == {
        "onnxq.graph",
        "onnxq.graph.light",
    }
