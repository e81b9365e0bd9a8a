"""Weights that can overflow 16-bit sums, as sentences and tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Group

from onnxq.annotate import WeightSums
from onnxq.engines.saturation.measure import Cost, NodeCost, OutputCost
from onnxq.report.sentences import explain_saturation, format_cost, make_sums_tables, saturation_summary
from onnxq.report.terminal import View
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
COST = Cost(
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


def table(weights: list[WeightSums], cost: Cost | None, **view: Any) -> str:
    return printed(Group(*make_sums_tables(weights, cost, View(**view))))


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
    assert saturation_summary(weights) == said


def test_the_cause_of_a_divergence() -> None:
    assert explain_saturation([]) == ""
    one = replace(FIRST, node="Conv_0", rows=1)
    assert explain_saturation([one]) == (
        "saturates: 1 row of the weight of Conv_0 overflow 16-bit sums on x86 CPUs without VNNI"
    )
    assert "4 rows of 2 weights (Conv_0, Conv_1)" in explain_saturation([one, replace(FIRST, node="Conv_1")])


def test_the_cost_at_each_output() -> None:
    assert format_cost(COST) == [
        "y: 31.3 dB on 8 samples, against exact sums, max abs 0.0123",
        "z: exact on 8 samples, against exact sums, max abs 0",
        "[R112] Gemm_9: its data are made inside of a loop",
    ]
