"""Progress: silent when short, bars on a terminal, lines in a pipe that name every step that lasts."""

import io
import threading
import time

import pytest

from onnxq.progress import OutOfTime, count_items, silent
from onnxq.report.live import Bars, Lines, open_display, show_progress
from tests.passes.context import Clock
from tests.report.kit import Terminal


def lines(patience: float = 1.0) -> tuple[Lines, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return Lines(stream, patience, clock, alone=True), clock, stream


def alive() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "onnxq-progress"]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_short_commands_show_nothing(stream: io.StringIO) -> None:
    shown = open_display(stream, patience=60.0)
    with shown("quantizing"), shown("calibrating", 3) as task:
        for _ in range(3):
            task.advance()
    assert stream.getvalue() == ""


def test_steps_are_named_before_they_begin() -> None:
    """Also with what cannot report from within: the line is there before the work is."""
    shown, clock, stream = lines()
    with shown("quantizing m.onnx"):
        clock.now += 1.5
        with shown("reading the model"):
            assert stream.getvalue().splitlines() == ["quantizing m.onnx", "reading the model"]
            clock.now += 30
        with shown("calibrating", 32):
            assert stream.getvalue().splitlines()[-1] == "calibrating: 0/32"
    assert alive() == []


def test_how_far_and_how_long_still() -> None:
    shown, clock, stream = lines(patience=0.0)
    with shown("quantizing"), shown("calibrating", 40) as task:
        # A large model is announced at once.
        assert stream.getvalue().startswith("quantizing\n")
        for _ in range(40):
            clock.now += 0.5
            task.advance()
    assert stream.getvalue().splitlines()[1:] == [
        "calibrating: 0/40",
        "calibrating: 4/40 (10%), 18 s left",
        "calibrating: 24/40 (60%), 8.0 s left",
        "calibrating: 40/40 in 20 s",
    ]


def test_unknown_length_counts_seconds() -> None:
    shown, clock, stream = lines(patience=0.0)
    with shown("x"), shown("reading samples") as task:
        clock.now += 2
        task.advance(7)
    assert stream.getvalue().splitlines()[-1] == "reading samples: 7, 2.0 s so far"
    with shown("x"), shown("samples", 3) as task:
        for _ in count_items("abc", task):
            clock.now += 2
    assert stream.getvalue().splitlines()[-1].startswith("samples: 1/3 (33%), 4.0 s left")


def test_no_two_seconds_without_a_name() -> None:
    """Whatever the steps are: two seconds after the last line the innermost one is named, and every ten after that."""
    shown, clock, stream = lines()
    with shown("quantizing"), shown("rounding"):
        clock.now += 1
        with shown("judging", 4) as task:
            task.advance()
            assert stream.getvalue() == ""
            clock.now += 1
            task.advance()
            assert stream.getvalue().splitlines() == ["quantizing", "judging: 2/4 (50%), 1.0 s left"]
        with shown("rounding", 100) as task:
            for _ in range(100):
                clock.now += 1
                task.advance()
    said = stream.getvalue().splitlines()[2:]
    assert said[0] == "rounding: 2/100 (2%), 1 min 38 s left"
    assert said[1] == "rounding: 12/100 (12%), 1 min 28 s left"
    assert len(said) == 11
    assert said[-1] == "rounding: 100/100 in 1 min 40 s"


def test_a_step_within_its_namesake_is_not_named_again() -> None:
    shown, _, stream = lines(patience=0.0)
    with shown("x"), shown("calibrating"), shown("calibrating", 4):
        pass
    assert stream.getvalue().splitlines() == ["x", "calibrating"]


def test_what_never_reports_shows_that_it_lives() -> None:
    stream = io.StringIO()
    shown = Lines(stream, 0.02)
    with shown("quantizing"), shown("loading"):
        end = time.monotonic() + 30
        while "loading" not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert stream.getvalue().splitlines()[:2] == ["quantizing", "loading"]
    assert alive() == []


def test_bars_wait_for_a_timer() -> None:
    stream = Terminal()
    with Bars(stream, 0.02)("measure"):
        end = time.monotonic() + 30
        while "measure" not in stream.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
    assert "measure" in stream.getvalue()


def test_bars_nest_and_begin_anew() -> None:
    stream = Terminal()
    shown = Bars(stream, 0.0)
    # Also if nobody reports.
    with shown("measure [1]", 4):
        pass
    assert "measure [1]" in stream.getvalue()
    assert "0/4" in stream.getvalue()
    for _ in range(2):
        with shown("outer"), shown("inner", 2) as task:
            task.advance()
            with shown("innermost"):
                pass
    assert stream.getvalue().count("    innermost") == 2
    assert " 1/2 (50%)" in stream.getvalue()


def test_bars_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with Bars(stream, 0.0)("comparing " + "/a/long/folder" * 9 + "/model.onnx", 1200) as task:
        task.advance(120)
    assert "comparing /a/long" in stream.getvalue()
    assert "der/model.onnx" in stream.getvalue()
    assert "0/1200 (0%), 0.0 s" in stream.getvalue()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutOfTime, ValueError])
@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_an_error_inside_ends_everything_and_goes_on(stream: io.StringIO, error: type[BaseException]) -> None:
    shown = open_display(stream, patience=0.0)
    with pytest.raises(error), shown("outer"), shown("inner", 4):
        raise error
    before = stream.getvalue()
    assert alive() == []
    assert not [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    with shown("again"):
        pass
    assert stream.getvalue().startswith(before)


def test_a_reader_that_has_gone_stops_nothing() -> None:
    stream = io.StringIO()
    shown = Lines(stream, 0.0)
    stream.close()
    with shown("x") as task:
        task.advance()


def test_silent_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with silent("x", 3) as task:
        task.advance(2)
    with show_progress("x", quiet=True) as progress, progress("y"):
        pass
    assert capsys.readouterr() == ("", "")


def test_watched_writes_to_stderr(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("onnxq.report.live._LARGE", 10)
    (tmp_path / "m.onnx").write_bytes(b"small")
    (tmp_path / "m.onnx.data").write_bytes(b"and large weights")
    with show_progress("quantizing m.onnx", tmp_path / "m.onnx", None) as progress, progress("reading the model"):
        pass
    assert capsys.readouterr() == ("", "quantizing m.onnx\nreading the model\n")


def test_names_are_escaped() -> None:
    shown, clock, stream = lines(0.0)
    with shown("reading a\x1b[2J\n::x.onnx"):
        clock.now += 3
    assert stream.getvalue().splitlines() == ["reading a\\x1b[2J\\n::x.onnx"]
    terminal = Terminal()
    with Bars(terminal, 0.0)("reading a\x9b2J\n::x.onnx"):
        pass
    assert "\x9b" not in terminal.getvalue()
    assert "\\x9b2J\\n::x.onnx" in terminal.getvalue()
