"""Tables, sheets and numbers as people see them, at 80 columns and in a pipe."""

import builtins
import io
import re
from pathlib import Path

import pytest
from rich.console import Group

from onnxq.report import terminal
from onnxq.report.columns import Text
from onnxq.report.terminal import TextView, join_lines, make_sheet, make_table, print_renderable
from onnxq.sites import Caution
from onnxq.wording import use_translation
from tests.report.kit import Terminal, printed

ROWS = [
    ("/model/layers.0/self_attn/q_proj/MatMul_output_0", "MatMul", "38.2 dB", "a rule of the configuration says so"),
    ("/model/layers.1/self_attn/q_proj/MatMul_output_0", "MatMul", "exact", ""),
    ("y", "Softmax", "n/a", "int8 would not pay"),
]
COLUMNS = ("tensor", "op", "SQNR", "why it stays")


def made() -> object:
    return make_table(COLUMNS, ROWS, right=("SQNR",), names=("tensor",), fold=("why it stays",))


AT_80 = """\
tensor                          op          SQNR  why it stays
/model/layers.0/sel…l_output_0  MatMul   38.2 dB  a rule of the configuration
                                                  says so
/model/layers.1/sel…l_output_0  MatMul     exact
y                               Softmax      n/a  int8 would not pay
"""

AT_40 = """\
tensor
  op          SQNR  why it stays
/model/layers.0/sel…proj/MatMul_output_0
  MatMul   38.2 dB  a rule of the
                    configuration says
                    so
/model/layers.1/sel…proj/MatMul_output_0
  MatMul     exact
y
  Softmax      n/a  int8 would not pay
"""


def test_a_table_at_80_columns() -> None:
    assert printed(made()) == AT_80


def test_a_narrow_table_puts_names_above_their_rows() -> None:
    text = printed(made(), width=40)
    assert text == AT_40
    assert max(map(len, text.splitlines())) <= 40


def test_a_pipe_gets_one_line_for_each_row_and_every_letter() -> None:
    lines = printed(made(), width=None).splitlines()
    assert len(lines) == 1 + len(ROWS)
    for line, row in zip(lines[1:], ROWS, strict=True):
        assert all(cell in line for cell in row)
        assert line == line.rstrip()


SHEET = """\
size    18.6 MB -> 4.8 MB
passes  one
        two
table   a  b
        1  2
"""


def test_a_sheet_indents_its_contents_as_one_column() -> None:
    rows = [
        ("size", Text("18.6 MB -> 4.8 MB")),
        ("passes", Text("one", "two")),
        ("table", make_table(("a", "b"), [("1", "2")])),
    ]
    assert printed(make_sheet(rows)) == SHEET


def test_a_warning_has_its_code_and_the_words_of_its_reader() -> None:
    warning = Caution("W101", "give `data=…`")
    assert terminal.format_warning(warning).plain == "warning[W101]: give `data=…`"
    with use_translation(lambda text: text.replace("`data=…`", "--data")):
        assert terminal.format_warning(warning).plain == "warning[W101]: give --data"


def test_letters_that_a_stream_cannot_encode_become_question_marks() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    terminal.write_stream("names… ×2\n", stream)
    assert raw.getvalue() == b"names? ?2\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (terminal.format_bytes(0), "0 B"),
        (terminal.format_bytes(999), "999 B"),
        (terminal.format_bytes(1000), "1.0 kB"),
        (terminal.format_bytes(99_940), "99.9 kB"),
        (terminal.format_bytes(99_950), "100 kB"),
        (terminal.format_bytes(999_499), "999 kB"),
        (terminal.format_bytes(18_600_000), "18.6 MB"),
        (terminal.format_bytes(999_960_000), "1.0 GB"),
        (terminal.format_bytes(2 * 10**12), "2000 GB"),
        (terminal.format_decibel(16.54), "16.5 dB"),
        (terminal.format_decibel(-3.0), "-3.0 dB"),
        (terminal.format_decibel(float("inf")), "exact"),
        (terminal.format_decibel(float("-inf")), "-inf dB"),
        (terminal.format_decibel(float("nan")), "n/a"),
        (terminal.format_milliseconds(0.3051), "0.305 ms"),
        (terminal.format_milliseconds(5.312), "5.31 ms"),
        (terminal.format_milliseconds(120.4), "120 ms"),
        (terminal.format_milliseconds(0.0), "n/a"),
        (terminal.format_milliseconds(float("nan")), "n/a"),
        (terminal.format_seconds(0.44), "0.4 s"),
        (terminal.format_seconds(9.96), "10 s"),
        (terminal.format_seconds(12.4), "12 s"),
        (terminal.format_seconds(59.4), "59 s"),
        (terminal.format_seconds(59.6), "1 min 00 s"),
        (terminal.format_seconds(185), "3 min 05 s"),
        (terminal.format_scale(0.02, 0.02), "0.02"),
        (terminal.format_scale(2.1e-4, 9.8e-3), "0.00021..0.0098"),
    ],
)
def test_numbers_at_the_edges_of_their_units(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("view", "out", "err"),
    [
        ({}, "the result\nmind this\n", ""),
        ({"verbose": True}, "the result\nmind this\n", ""),
        ({"quiet": True}, "", "mind this\n"),
        ({"as_json": True}, "{}\n", "mind this\n"),
        ({"as_json": True, "quiet": True}, "{}\n", "mind this\n"),
    ],
)
@pytest.mark.parametrize("loud", [True, False])
def test_warnings_are_seen_in_every_form(view: dict[str, bool], out: str, err: str, loud: bool) -> None:
    streams = io.StringIO(), io.StringIO()
    shown = TextView(**view, stream=streams[0], errors=streams[1])  # type: ignore[arg-type]
    terminal.print_result(shown, lambda: "{}\n", [Text("the result")], iter([Text("mind this")] if loud else []))
    wanted = (out, err) if loud else (out.replace("mind this\n", ""), "")
    assert (streams[0].getvalue(), streams[1].getvalue()) == wanted


def test_a_text_is_plain_and_shown_nowhere_else_in_notebooks_and_under_force_color(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As rich tells a notebook.
    monkeypatch.setattr(builtins, "get_ipython", type("ZMQInteractiveShell", (), {}), raising=False)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("displayed"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    print_renderable(Text("the result " * 20, style="bold"), stream, None)
    assert stream.getvalue() == "the result " * 19 + "the result\n"
    assert "the result" in terminal.render_parts([Text("the result")])


def test_a_result_that_is_not_shown_is_not_made() -> None:
    def parts() -> object:
        raise AssertionError
        yield Text("")

    for view in ({"quiet": True}, {"as_json": True}):
        stream = io.StringIO()
        terminal.print_result(TextView(**view, stream=stream), lambda: "{}", parts(), [])  # type: ignore[arg-type]
        assert stream.getvalue() == ("{}" if "as_json" in view else "")


@pytest.mark.parametrize(
    ("lines", "verbose", "between", "text"),
    [
        ("", False, "\n", ""),
        ("ab", False, "\n", "a\nb"),
        ("abcd", False, "\n", "a\nb\nand 2 more; `verbose=True` lists them all"),
        ("abcd", True, "\n", "a\nb\nc\nd"),
        ("abcd", False, ", ", "a, b, and 2 more; `verbose=True` lists them all"),
    ],
)
def test_lines_beyond_the_usual_are_counted(lines: str, verbose: bool, between: str, text: str) -> None:
    assert join_lines(lines, verbose, 2, between).plain == text


# It clears the screen and begins a line of its own, which CI systems take for a command.
EVIL = "a\x1b[2J\n::add-mask::x"


def test_names_are_escaped_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Group(
        Text(EVIL, EVIL, style="bold").join_text(EVIL, style="dim"),
        make_table((EVIL, "b"), [(EVIL, EVIL)], names=(EVIL,), fold=("b",)),
        make_sheet([(EVIL, Text(EVIL)), ("c", join_lines([EVIL] * 3, False, 2))]),
        terminal.format_warning(Caution("W101", EVIL)),
    )
    monkeypatch.setenv("TERM", "xterm-256color")
    for stream, width in ((io.StringIO(), 200), (Terminal(), 200), (Terminal(), 30)):
        print_renderable(parts, stream, width)
        text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
        assert "\x1b" not in text
        assert not re.search(r"^\s*::", text, re.MULTILINE)
        assert text.count("\\x1b[2J\\n::add-mask") >= (10 if width == 200 else 0)
    assert "\x1b[1m" in stream.getvalue()


def test_reports_make_no_text_but_the_escaped_one() -> None:
    """So that no name can be forgotten."""
    package = Path(terminal.__file__).parents[1]
    files = [*package.glob("report/*.py"), *package.glob("commands/**/*.py"), *package.glob("cli/*.py")]
    assert [path.name for path in files if "rich.text" in path.read_text("utf-8")] == ["columns.py"]
