"""Names of models in text: no control, no line and no command of a CI system of theirs is left."""

import json
import pickle

import pytest

from onnxq.compat.options import CompatWarning
from onnxq.errors import DataError, Location, dump_json, escape_json, escape_line, escape_lines
from onnxq.sites import Caution

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
