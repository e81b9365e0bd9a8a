"""The library names its parameters; the command line shows its options in their place."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import onnxq
from onnxq.cli import cli
from onnxq.cli.options import list_flags, name_options
from onnxq.config import list_options
from onnxq.errors import DataError
from onnxq.report.terminal import TextView
from onnxq.wording import translate_text, use_translation

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli))}
KNOWN = {option for command in COMMANDS.values() for one in command.params for option in one.opts if option[:1] == "-"}
# Options of compilers, which are not ours.
COMPILERS = {"onnxq/kernels/device.py": {"--threads", "-o"}, "onnxq/kernels/host.py": {"-o"}}
SOURCES = [
    path
    for room in ("onnxq", "torch_frontend")
    for path in sorted((ROOT / room).rglob("*.py"))
    if ROOT / "onnxq" / "cli" not in path.parents
]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def strings(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def docstrings(path: Path) -> set[int]:
    bodies = [node.body for node in nodes(path) if hasattr(node, "body") and isinstance(node.body, list)]
    firsts = [body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)]
    return {first.lineno for first in firsts if isinstance(first, ast.Constant)}


def named_parameters() -> Iterator[tuple[str, str]]:
    """Every parameter that a message names, with where."""
    for path in SOURCES:
        documented = docstrings(path)
        for line, text in strings(path):
            if "\n" in text or line in documented:
                continue
            for name in re.findall(r"`(\w+)=", text):
                yield f"{path.relative_to(ROOT).as_posix()}:{line}", name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_library_names_no_option_of_the_command_line(path) -> None:
    allowed = COMPILERS.get(path.relative_to(ROOT).as_posix(), set())
    named = [
        f"line {line}: {option}"
        for line, text in strings(path)
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)
        if option in KNOWN - allowed
    ]
    assert named == []


def test_every_parameter_a_message_names_has_its_option_and_is_there() -> None:
    functions = [getattr(onnxq, name) for name in onnxq.__all__ if inspect.isfunction(getattr(onnxq, name))]
    functions += [onnxq.Result.save, TextView]
    there = {name for function in functions for name in inspect.signature(function).parameters}
    there |= {option.name for option in list_options()}
    found = {name: where for where, name in named_parameters()}
    assert {where: name for name, where in found.items() if name not in list_flags()} == {}
    assert set(list_flags()) - there == set()
    assert set(list_flags().values()) - KNOWN == set()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("pass `force=True`", "pass `--force`"),
        ("`placement='measured'` helps", "`--placement measured` helps"),
        ("give `data=…`, or `samples=…`", "give `--data`, or `--samples`"),
        ("`other=True` and `quantize: true` stay", "`other=True` and `quantize: true` stay"),
        ("a=b, no backticks: force=True", "a=b, no backticks: force=True"),
    ],
)
def test_parameters_become_options(said, shown) -> None:
    assert name_options(said) == shown


def test_a_text_is_translated_while_the_command_line_speaks() -> None:
    with use_translation(name_options):
        assert translate_text("`force=True`") == "`--force`"
    assert translate_text("`force=True`") == "`force=True`"


def test_python_hears_of_parameters(tmp_path) -> None:
    (tmp_path / "m.q.onnx").touch()
    (tmp_path / "m.onnx").touch()
    from onnxq.files import check_outputs

    with pytest.raises(onnxq.OnnxqError, match="`force=True`"):
        check_outputs(tmp_path / "m.onnx", tmp_path / "m.q.onnx")
    assert "--" not in str(DataError("x", "y"))


def test_the_command_line_hears_of_options(tmp_path) -> None:
    from click.testing import CliRunner

    (tmp_path / "m.onnx").touch()
    (tmp_path / "m.q.onnx").touch()
    result = CliRunner().invoke(cli, ["quantize", str(tmp_path / "m.onnx")])
    assert "overwrite it with `--force`" in result.stderr
