"""Sentences of a summary: what each pass did, or why it did not; what was cut short; sums that can overflow."""

import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Group

from onnxq.annotate import WeightSums
from onnxq.engines.saturation.measure import NodeCost, OutputCost, SaturationCost
from onnxq.passes.journal import Outcome, PassReport, Shortage, Shortened
from onnxq.report import sentences
from onnxq.report.terminal import TextView
from onnxq.sites import Refusal
from tests.report.kit import printed

FIRST = WeightSums(
    node="/features/features.0/conv/Conv",
    op="Conv",
    weight="onnx::Conv_123",
    data="x",
    rows=3,
    all_rows=16,
    sums=5,
    all_sums=216,
)
EXACT = replace(FIRST, node="Gemm_9", op="Gemm", weight="fc.weight", exact="its data are at most 127")
SAFE = replace(FIRST, node="Conv_2", weight="w2", rows=0, sums=0)
COST = SaturationCost(
    data="8 samples",
    samples=8,
    nodes=(NodeCost(node=FIRST.node, saturated=25, sums=20_000),),
    outputs=(
        OutputCost(output="y", sqnr_db=31.26, max_abs=0.01234),
        OutputCost(output="z", sqnr_db=math.inf, max_abs=0.0),
    ),
    skipped=(Refusal("Gemm_9", "its data are made inside of a loop", code="R112"),),
)

PLAIN = """\
node                            op    weight          rows   sums
/features/features.0/conv/Conv  Conv  onnx::Conv_123  3/16  5/216

"""

VERBOSE = """\
node
  op    weight          rows   sums  saturated  exact
/features/features.0/conv/Conv
  Conv  onnx::Conv_123  3/16  5/216     0.125%
Gemm_9
  Gemm  fc.weight       3/16  5/216             its data are at most 127
Conv_2
  Conv  w2              0/16  0/216

"""


def table(weights: list[WeightSums], cost: SaturationCost | None, **view: Any) -> str:
    return printed(Group(*sentences.make_sums_tables(weights, cost, TextView(**view))))


def test_only_what_can_overflow_is_listed() -> None:
    assert table([FIRST, EXACT, SAFE], None) == PLAIN


def test_verbose_lists_all_with_how_often_they_did() -> None:
    assert table([FIRST, EXACT, SAFE], COST, verbose=True) == VERBOSE


def test_nothing_to_list_prints_nothing() -> None:
    assert table([EXACT, SAFE], None) == ""
    assert table([], COST, verbose=True) == ""


def test_top_counts_what_it_hides() -> None:
    assert "and 2 more; a larger `top=…` shows them" in table([FIRST, EXACT, SAFE], None, verbose=True, top=1)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([], ""),
        ([EXACT, SAFE], ""),
        ([FIRST], "3 of 16 rows of 1 weight can overflow 16-bit sums on x86 CPUs without VNNI: " + FIRST.node),
        (
            [replace(FIRST, node=name) for name in "abcde"],
            "15 of 80 rows of 5 weights can overflow 16-bit sums on x86 CPUs without VNNI: a, b, c and 2 more",
        ),
    ],
)
def test_the_summary(weights: list[WeightSums], said: str) -> None:
    assert sentences.saturation_summary(weights) == said


def test_the_cause_of_a_divergence() -> None:
    assert sentences.explain_saturation([]) == ""
    one = replace(FIRST, node="Conv_0", rows=1)
    assert sentences.explain_saturation([one]) == (
        "saturates: 1 row of the weight of Conv_0 overflow 16-bit sums on x86 CPUs without VNNI"
    )
    assert "4 rows of 2 weights (Conv_0, Conv_1)" in sentences.explain_saturation([one, replace(FIRST, node="Conv_1")])


def test_the_cost_at_each_output() -> None:
    assert sentences.format_cost(COST) == [
        "y: 31.3 dB on 8 samples, against exact sums, max abs 0.0123",
        "z: exact on 8 samples, against exact sums, max abs 0",
        "[R112] Gemm_9: its data are made inside of a loop",
    ]


# ---- The journal of a run.


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (("conv1: takes its batch norm in",), "fold: conv1: takes its batch norm in"),
        (("a: x", "b: y", "c: z"), "fold: a: x, … 3 in all"),
    ],
)
def test_a_rewrite_names_its_first_change_and_counts_all(changed: tuple[str, ...], line: str) -> None:
    assert sentences.describe_rewrite(PassReport("fold", changed)) == line


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
        (PassReport("rounding", outcome=Outcome.WORSE), "rolled back: no trial could judge it"),
    ],
)
def test_every_outcome_of_a_pass_has_its_words(report: PassReport, line: str) -> None:
    assert sentences.describe_pass(report) == f"rounding: {line}"


def test_no_outcome_is_without_words() -> None:
    lines = {outcome: sentences.describe_pass(PassReport("p", ("done",), outcome=outcome)) for outcome in Outcome}
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
    assert sentences.describe_shortage(one).startswith(f"budget: {line}")
