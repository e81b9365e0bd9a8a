"""The journal of a run as lines: what each pass did, or why it did not, and what the time was too short for."""

from __future__ import annotations

import pytest

from onnxq.passes.journal import Outcome, PassReport, Shortage, Shortened
from onnxq.report.sentences import describe_pass, describe_rewrite, describe_shortage


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (("conv1: takes its batch norm in",), "fold: conv1: takes its batch norm in"),
        (("a: x", "b: y", "c: z"), "fold: a: x, … 3 in all"),
    ],
)
def test_a_rewrite_names_its_first_change_and_counts_all(changed: tuple[str, ...], line: str) -> None:
    assert describe_rewrite(PassReport("fold", changed)) == line


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (PassReport("rounding", ("12 weights",), trial_db=(20.04, 23.96)), "12 weights, 20.0 to 24.0 dB in a trial"),
        (PassReport("rounding", ("12 weights", "more")), "12 weights"),
        (PassReport("rounding", ("2 chains",), difference=1.25e-6), "2 chains, max |difference| 1.25e-06"),
        (PassReport("rounding"), ""),
        (PassReport("rounding", outcome=Outcome.NO_GAIN), "nothing to gain"),
        (PassReport("rounding", ("all exact",), outcome=Outcome.NO_GAIN), "nothing to gain: all exact"),
        (
            PassReport("rounding", outcome=Outcome.NOT_EQUIVALENT, difference=0.5),
            "rolled back: it changed the float outputs, max |difference| 0.5",
        ),
        (
            PassReport("rounding", outcome=Outcome.WORSE, trial_db=(24.0, 20.0)),
            "rolled back: 24.0 to 20.0 dB in a trial",
        ),
        (PassReport("rounding", outcome=Outcome.WORSE), "rolled back: a trial could not run"),
    ],
)
def test_every_outcome_of_a_pass_has_its_words(report: PassReport, line: str) -> None:
    assert describe_pass(report) == f"rounding: {line}"


def test_no_outcome_is_without_words() -> None:
    lines = {outcome: describe_pass(PassReport("p", ("done",), outcome=outcome)) for outcome in Outcome}
    assert len(set(lines.values())) == len(Outcome)


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (Shortened("rounding", Shortage.LEFT_OUT, 90.0), "rounding: left out, the budget of 1 min 30 s leaves no time"),
        (
            Shortened("ranges", Shortage.GIVEN_UP, 60.0, seconds=12.3),
            "ranges: given up after its 12 s of the budget of 1 min 00 s",
        ),
        (
            Shortened("calibration", Shortage.FEWER_SAMPLES, 5.0, samples=(3, 32)),
            "calibration: 3 of 32 samples, the budget of 5.0 s leaves no time for more",
        ),
        (
            Shortened("the run", Shortage.EXCEEDED, 1.0, seconds=7.25),
            "the budget of 1.0 s was too small: 7.2 s is the least it takes",
        ),
    ],
)
def test_every_shortage_says_what_was_cut_and_why(one: Shortened, line: str) -> None:
    assert describe_shortage(one).startswith(f"budget: {line}")
