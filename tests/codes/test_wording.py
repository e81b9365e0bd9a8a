"""The library names its parameters; the command line shows its options in their place."""

import inspect
import re
from collections.abc import Iterator

import click
import pytest

import onnxq
from onnxq.cli import cli
from onnxq.cli.options import list_flags, name_options
from onnxq.config import list_options
from onnxq.errors import DataError
from onnxq.files import check_outputs
from onnxq.report.terminal import TextView
from onnxq.wording import translate_text, use_translation
from tests.cli.kit import run
from tests.sources import ROOT, SOURCES, list_texts, name_source

COMMANDS = {name: cli.get_command(click.Context(cli), name) for name in cli.list_commands(click.Context(cli))}
KNOWN = {option for command in COMMANDS.values() for one in command.params for option in one.opts if option[:1] == "-"}
# Options of compilers, which are not ours.
COMPILERS = {"onnxq/kernels/device.py": {"--threads", "-o"}, "onnxq/kernels/host.py": {"-o"}}
CLI = ROOT / "onnxq" / "cli"
LIBRARY = [path for path in SOURCES if CLI not in path.parents]


def named_parameters() -> Iterator[tuple[str, str]]:
    """Every parameter that a message names, with where."""
    for path in LIBRARY:
        for line, text in list_texts(path):
            for name in re.findall(r"`(\w+)=", text) if "\n" not in text else ():
                yield f"{name_source(path)}:{line}", name


@pytest.mark.parametrize("path", LIBRARY, ids=name_source)
def test_the_library_names_no_option_of_the_command_line(path) -> None:
    allowed = COMPILERS.get(name_source(path), set())
    named = [
        f"line {line}: {option}"
        for line, text in list_texts(path, docstrings=True)
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


def test_python_hears_of_parameters_and_the_command_line_of_options(tmp_path) -> None:
    model, output = tmp_path / "m.onnx", tmp_path / "m.q.onnx"
    model.touch()
    output.touch()
    with pytest.raises(onnxq.OnnxqError, match="`force=True`"):
        check_outputs(model, output)
    assert "--" not in str(DataError("x", "y"))
    assert "overwrite it with `--force`" in run("quantize", model).stderr
