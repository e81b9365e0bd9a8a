"""Progress: silent when short, a bar on a terminal, lines with the time left in a pipe."""

import io
import re
import time

import pytest

from onnxq.report import live, progress, silent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(live, "PATIENCE", 0.05)
    monkeypatch.setattr(live, "_LINE_EVERY", 0.05)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_short_stages_show_nothing(stream):
    with progress("calibrate", 3, stream=stream) as task:
        for _ in range(3):
            task.advance()
    assert stream.getvalue() == ""


def test_lines_say_how_far_and_how_long_still():
    stream = io.StringIO()
    with progress("calibrate", 4, stream=stream) as task:
        for _ in range(4):
            time.sleep(0.06)
            task.advance()
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"calibrate: 1/4, \d\.\d s left", lines[0])
    assert re.fullmatch(r"calibrate: 4/4 in \d\.\d s", lines[-1])
    assert "\x1b" not in stream.getvalue()


def test_unknown_length_counts():
    stream = io.StringIO()
    with progress("load", stream=stream) as task:
        time.sleep(0.06)
        task.advance(7)
    assert stream.getvalue().startswith("load: 7\n")


def test_a_terminal_gets_a_bar_even_if_nobody_reports():
    stream = Terminal()
    with progress("measure [1]", 4, stream=stream):
        time.sleep(0.3)
    assert "measure [1]" in stream.getvalue()
    assert "0/4" in stream.getvalue()


def stopped_inside(stream: io.StringIO) -> None:
    with progress("x", 4, stream=stream):
        time.sleep(0.1)
        raise KeyboardInterrupt


def test_an_error_inside_ends_the_bar_and_goes_on():
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt):
        stopped_inside(stream)
    before = stream.getvalue()
    time.sleep(0.2)
    assert stream.getvalue() == before


def test_silent_is_silent(capsys):
    with silent("x", 3) as task:
        task.advance(2)
    assert capsys.readouterr() == ("", "")
