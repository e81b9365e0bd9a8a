"""The library names its parameters; the command line shows its options in their place."""

import inspect
import json
import pickle
import re
from collections.abc import Iterator

import click
import pytest

import onnxq
from onnxq.cli import cli
from onnxq.cli.options import list_flags, name_options
from onnxq.compat.options import CompatWarning
from onnxq.config import list_options
from onnxq.errors import DataError, Location, dump_json, escape_json, escape_line, escape_lines
from onnxq.files import check_outputs
from onnxq.report.terminal import TextView
from onnxq.sites import Caution
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
        (r"`trust='C:\\work\\m.yaml'`", r"`--trust C:\work\m.yaml`"),
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


# ---- Names of models in text: no control, no line and no command of a CI system of theirs is left.

CONTROLS = [chr(k) for k in (*range(32), *range(0x7F, 0xA0), 0x061C, 0x200E, *range(0x2028, 0x202F), 0x2066, 0x2069)]


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_are_written_as_python_writes_them(control: str) -> None:
    assert escape_line(f"a{control}b") == f"a{ascii(control)[1:-1]}b"


def test_letters_of_all_languages_stay() -> None:
    for text in ("Größe", "语言模型", "שלום", "می‌خواهم", "👩‍🔬", "µ × … – “”", ""):
        assert escape_lines(text) == escape_line(text) == text
        assert json.loads(escape_json(json.dumps(text, ensure_ascii=False))) == text


def test_a_text_keeps_its_own_lines() -> None:
    assert escape_lines("one\n  two \x1b[2J\n") == "one\n  two \\x1b[2J\n"


def test_no_line_is_a_command_of_a_ci_system() -> None:
    for text, escaped in (
        ("::add-mask::x\n  ::error::y\nIf_0.then::z", "\\x3a:add-mask::x\n  \\x3a:error::y\nIf_0.then::z"),
        ("a ##vso[x]\n##[error]\n##teamcity[y]\n## b", "a \\x23#vso[x]\n\\x23#[error]\n\\x23#teamcity[y]\n## b"),
    ):
        assert escape_lines(text) == escaped


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_json_document_stays_the_same(ascii_only: bool) -> None:
    value = {"".join(CONTROLS): ["##vso[task]", "::x\n::y", "caf\ufffd", 1.5, None]}
    document = escape_json(json.dumps(value, indent=1, ensure_ascii=ascii_only))
    assert json.loads(document) == json.loads(dump_json(value)) == value
    for text in (document, dump_json(value)):
        assert not set(CONTROLS) - {"\n"} & set(text)
        assert "##" not in text


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert escape_line("caf\udce9") == escape_lines("caf\udce9") == escape_json("caf\udce9") == "caf\ufffd"


def test_an_error_is_escaped_as_text_only() -> None:
    details = ("also x\ny: bad",)
    error = DataError(Location("a\nb", 3), "no input \x1b[2J", "rename\nit", details=details)
    for copy in (error, error.replace_text(), error.name_file("a\nb"), pickle.loads(pickle.dumps(error))):
        fields = (copy.subject, copy.cause, copy.fix, copy.details)
        assert fields == ("a\nb:3", "no input \x1b[2J", "rename\nit", details)
        assert str(copy) == "a\\nb:3: no input \\x1b[2J [Q200]\n  fix: rename\\nit\n  also x\\ny: bad"
    assert str(CompatWarning(Caution("W130", "a\nb"))) == "a\\nb [W130]"
