"""The grade of a result, the line that says it, warnings that follow from numbers, and groups of reasons."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Group

from onnxq.annotate import WeightSums
from onnxq.commands.results import show
from onnxq.engines.saturation import NodeCost, OutputCost, SaturationCost
from onnxq.evaluation.agreement import ChoiceAgreement
from onnxq.passes.journal import Outcome, PassReport, Promotion, Shortage, Shortened
from onnxq.plan import KeepReason, KeptFloat32, PrecisionPlan
from onnxq.planner.precision.reasons import round_figure
from onnxq.report import model, sentences
from onnxq.report.terminal import TextView
from onnxq.sites import Caution, LeftFloat, Refusal
from onnxq.spec import FloatType
from onnxq.wording import group_by_text
from tests.report.kit import printed, shown

FIGURE = model.RunFigure(output="y", run="as ORT runs it", sqnr_db=31.0)


@pytest.mark.parametrize(
    ("sqnr_db", "top_1", "rows", "grade"),
    [
        (30.0, math.nan, 0, "good"),
        (29.9, math.nan, 0, "acceptable"),
        (19.9, math.nan, 0, "degraded"),
        (9.9, math.nan, 0, "broken"),
        (math.inf, math.nan, 0, "good"),
        (-math.inf, math.nan, 0, "broken"),
        (math.nan, math.nan, 0, "broken"),
        (40.0, 0.98, 1000, "good"),
        (40.0, 0.96, 1000, "acceptable"),
        (40.0, 0.8, 1000, "degraded"),
        (40.0, 0.4, 1000, "broken"),
        # One row of four may differ by chance; agreement mends no figure.
        (40.0, 0.75, 4, "good"),
        (40.0, 0.5, 4, "degraded"),
        (15.0, 1.0, 1000, "degraded"),
    ],
)
def test_the_grade_is_what_both_figures_reach(sqnr_db: float, top_1: float, rows: int, grade: str) -> None:
    assert replace(FIGURE, sqnr_db=sqnr_db, top_1=top_1, rows=rows, classes=True).grade.name == grade


def test_agreement_counts_only_where_classes_are_sure() -> None:
    assert replace(FIGURE, top_1=0.4, rows=100).grade.name == "good"


def test_the_worst_output_is_named_and_the_agreement_of_another() -> None:
    scores = replace(FIGURE, output="logits", sqnr_db=36.0, top_1=0.99, rows=200, classes=True)
    assert model.find_worst_figure([FIGURE, scores]) is FIGURE
    text = "y has 31.0 dB against float as ORT runs it; logits: top-1 the same in 198 of 200"
    assert model.describe_figures([scores, FIGURE]) == text
    as_file = replace(FIGURE, run="as the file says", sqnr_db=30.5)
    assert model.find_worst_figure([as_file, FIGURE]) is FIGURE
    assert model.find_worst_figure([replace(as_file, sqnr_db=29.0), FIGURE]) != FIGURE
    lost = replace(scores, top_1=0.6)
    assert model.describe_figures([FIGURE, lost]).endswith("as ORT runs it; top-1 the same in 120 of 200")
    assert model.describe_figures([replace(FIGURE, run="qnn")]).endswith(" against float on qnn")
    same = replace(FIGURE, sqnr_db=math.inf)
    assert model.describe_figures([same]) == "y is exact against float as ORT runs it"


def test_choices_that_an_output_holds_are_told() -> None:
    label = ChoiceAgreement(
        node="a", op="ArgMax", values=("h",), outputs=(), decides=("label",), chosen=1.0, shared=0.96875
    )
    inside = replace(label, node="b", decides=(), shared=0.5)
    grade, text = model.make_verdict([FIGURE], [inside, label], ["2.0x smaller"])
    assert (grade.name, text) == (
        "good", "y has 31.0 dB against float as ORT runs it; label: 96.88 % chosen as in float; 2.0x smaller"
    )  # fmt: skip


REPORT = model.Report(
    source="m.onnx", source_bytes=200, output_bytes=100, pairs=2, target="ort",
    checks=(model.OutputCheck(name="y", sqnr_db=(32.0, 31.0), cosine=(1.0, 1.0), agreement_db=50.0),),
    latency=model.LatencyRatio(float_ms=2.0, int8_ms=1.0),
)  # fmt: skip
FIGURES = "y has 31.0 dB against float as ORT runs it"
NEAR = "y has 15.0 dB against float as ORT runs it"
POOR = replace(
    REPORT,
    checks=(replace(REPORT.checks[0], sqnr_db=(15.0, 15.0)),),
    latency=None,
    promotion=Promotion(
        asked="at least 20 dB at every output", unit="dB", met=False, value=15.0, least=20.0, required=True
    ),
)
REFUSING = model.EngineCheck(engine="OpenVINO", reason="no kernel", refusal="it takes the float model")


@pytest.mark.parametrize(("report", "line"), [
    (REPORT, f"good: {FIGURES}; 2.0x smaller; 2.00x faster"),
    (replace(REPORT, latency=model.LatencyRatio(float_ms=1.0, int8_ms=2.0)),
     f"good: {FIGURES}; 2.0x smaller; 0.50x the speed of float"),
    (replace(REPORT, target="trt", latency=None),
     "good: y has 32.0 dB against float as the file says; 2.0x smaller"),
    (replace(REPORT, checks=(), latency=None, unchecked="nothing was checked"),
     "unchecked: nothing was checked; 2.0x smaller"),
    (replace(REPORT, latency=None, made_up="8 made-up inputs, seed 0"),
     f"good: {FIGURES}; on made-up inputs, which are not the task's; 2.0x smaller"),
    (replace(POOR, promotion=None), f"degraded: {NEAR}; 2.0x smaller; `min_sqnr=20` leaves float what costs most"),
    # Of a broken one W108 says so.
    (replace(POOR, promotion=None, checks=(replace(REPORT.checks[0], sqnr_db=(5.0, 5.0)),)),
     "broken: y has 5.0 dB against float as ORT runs it; 2.0x smaller"),
    # Where that was asked for, or there are no samples to do it by.
    (POOR, f"degraded: {NEAR}; at least 20 dB at every output does NOT hold; 2.0x smaller"),
    (replace(POOR, promotion=None, made_up="8 made-up inputs, seed 0"),
     f"degraded: {NEAR}; on made-up inputs, which are not the task's; 2.0x smaller"),
    (replace(REPORT, pairs=0, latency=None, left_float=(LeftFloat("a", "no faster"),)),
     "unchanged: int8 would not pay, so that nothing is quantized; 2.0x smaller"),
    # Whatever it says as the file says.
    (replace(REPORT, target="openvino", latency=None, engines=(REFUSING,)),
     "refused by OpenVINO: y has 32.0 dB against float as the file says; 2.0x smaller"),
    (replace(REPORT, pairs=0, latency=None, mode="float"), "unchanged: nothing is quantized; 2.0x smaller"),
    (replace(REPORT, pairs=0, latency=None, float_types=PrecisionPlan(type=FloatType.FLOAT16)),
     "unchanged: nothing is quantized; 2.0x smaller"),
    (replace(REPORT, pairs=0, latency=None, refusals=(Refusal("a", "no"),)),
     "unchanged: what was asked for was refused; 2.0x smaller"),
    (replace(REPORT, pairs=0, latency=None, refusals=(Refusal("a", "no"),), left_float=(LeftFloat("b", "slow"),)),
     "unchanged: what was asked for was refused or would not pay; 2.0x smaller"),
])  # fmt: skip
def test_the_summary_begins_with_the_verdict(report: model.Report, line: str) -> None:
    lines = shown(show, report, width=None).splitlines()
    assert re.fullmatch(r"verdict +(.*)", lines[1])[1] == line  # type: ignore[index]


@pytest.mark.parametrize(
    ("sqnr_db", "grade", "codes"), [(29.5, "good", []), (28.5, "acceptable", ["W109"]), (0.6, "broken", ["W109"])]
)
def test_an_emulator_counts_where_it_computes_something_else(sqnr_db: float, grade: str, codes: list[str]) -> None:
    output = model.EngineOutput(name="y", sqnr_db=sqnr_db, agreement_db=20.0)
    engine = model.EngineCheck(engine="HTP", emulated=True, samples=2, outputs=(output,))
    report = replace(REPORT, target="qnn", engines=(engine,))
    assert model.make_verdict(report.figures)[0].name == grade
    assert [alarm.code for alarm in report.alarms()] == codes
    assert "no products" in shown(show, report, width=None)


def test_an_engine_is_described_in_whole_words() -> None:
    engine = model.EngineCheck(
        engine="HTP", emulated=True, samples=1, partitions=1, left=("If_3",), types=(("unseen", 3), ("int8", 2))
    )
    text = shown(show, replace(REPORT, target="qnn", engines=(engine,)), width=None)
    assert "products 3 in a type that it does not show, 2 in int8" in text
    assert "1 node left to the CPU, e.g. If_3" in text
    assert re.search("pairs +1 Q/DQ pair$", shown(show, replace(REPORT, pairs=1, roles=()), width=None), re.MULTILINE)


def test_a_node_that_rounds_nothing_is_named_without_decibels() -> None:
    """A plan's JSON cannot hold its infinity, and 339999999999999996123846586046231871488 dB were told."""
    kept = [
        KeptFloat32(node=name, reason=KeepReason.TRIAL, figure=round_figure(db))
        for name, db in (("a", 74.2), ("b", math.inf))
    ]
    types = PrecisionPlan(type=FloatType.FLOAT16, kept=tuple(kept))
    assert list(sentences.format_precision(types, True))[1] == (
        "2 x float32: the answers were worse without it (a: 74 dB, b)"
    )


def test_a_comparison_that_never_holds_is_not_a_share_of_nothing() -> None:
    never = ChoiceAgreement(
        node="p", op="GreaterOrEqual", values=("x",), outputs=("y",), decides=(), chosen=0.0, shared=0.0
    )
    text = shown(show, replace(REPORT, choices=(never,)), width=None)
    assert "p (GreaterOrEqual): nothing is chosen on these samples; y: compared" in text


@pytest.mark.parametrize(("float_db", "text"), [
    (np.inf, "`onnxq diff` finds the operator"), (40.0, "`onnxq diff` finds the operator"),
    (-2.0, "the float model has -2.0 dB there, so an operator is computed otherwise"),
])  # fmt: skip
def test_an_engine_that_computes_the_float_model_otherwise_is_named_as_the_cause(float_db: float, text: str) -> None:
    output = model.EngineOutput(name="y", sqnr_db=-1.5, agreement_db=-1.0, float_db=float_db)
    (alarm,) = replace(REPORT, engines=(model.EngineCheck(engine="OpenVINO", samples=2, outputs=(output,)),)).alarms()[
        -1:
    ]
    assert alarm == f"output y is 33.5 dB worse as OpenVINO runs it than as the file says: {text}"


def test_a_float_result_has_one_warning_and_no_alarm() -> None:
    other = Caution("W103", "on CPUs of kind vnni it would pay")
    report = replace(REPORT, pairs=0, warnings=(other,), left_float=(LeftFloat("a", "no faster"),))
    text = shown(show, report, width=None)
    assert text.count("warning[") == 1
    assert "it would pay" in text


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs", "cli.md").read_text(encoding="utf-8")
    rows = [f"| {one.name} | {one.sqnr_db:g} dB | {one.top_1:.0%} |".replace("%", " %") for one in model.GRADES[:-1]]
    assert "\n".join(rows) in page


def test_a_run_of_weights_alone_is_not_told_of_its_own_mode() -> None:
    left = (LeftFloat("n", "its table costs too much"),)
    static = model.Report(source_bytes=100, left_float=left)
    for report, told in ((static, True), (replace(static, mode="weight-only"), False)):
        (alarm,) = report.alarms()
        assert ("`mode: weight-only`" in str(alarm)) == told


# ---- Warnings that follow from the numbers, and the groups of what is not quantized.


def check(off: float, on: float, *, optimized: bool = True) -> model.OutputCheck:
    return model.OutputCheck(name="y", sqnr_db=(off, on), cosine=(1.0, 1.0), agreement_db=50.0, optimized=optimized)


GOOD = model.Report(
    source="m.onnx", source_bytes=100, output_bytes=50, pairs=2, target="ort", checks=(check(40.0, 40.0),)
)


@pytest.mark.parametrize(
    ("report", "codes"),
    [
        (GOOD, []),
        (replace(GOOD, pairs=0), ["W111"]),
        (replace(GOOD, checks=(check(9.9, 9.9),)), ["W108"]),
        (replace(GOOD, checks=(check(40.0, 9.9),)), ["W108"]),
        (replace(GOOD, checks=(check(40.0, math.nan),)), ["W108"]),
        (replace(GOOD, checks=(check(math.nan, 40.0),)), ["W108"]),
        (replace(GOOD, checks=(check(-math.inf, -math.inf),)), ["W108"]),
        (replace(GOOD, checks=(check(math.inf, math.inf),)), []),
        (replace(GOOD, checks=(check(40.0, math.nan, optimized=False),)), []),
        (replace(GOOD, checks=(check(40.0, 36.9),)), ["W109"]),
        (replace(GOOD, checks=(check(40.0, 37.1),)), []),
        # So near to float the order of additions makes as much of a difference.
        (replace(GOOD, checks=(check(137.0, 125.0),)), []),
        (replace(GOOD, checks=(check(math.inf, 41.0),)), []),
        (replace(GOOD, checks=(replace(check(20.0, 20.0), top_1=(0.7, 0.4), rows=100, classes=True),)), ["W108"]),
        (replace(GOOD, pairs=0, latency=model.LatencyRatio(float_ms=1.0, int8_ms=1.1)), ["W111"]),
        (replace(GOOD, target="trt", checks=(check(40.0, 5.0),)), ["W109"]),
        (replace(GOOD, latency=model.LatencyRatio(float_ms=1.0, int8_ms=1.1)), ["W110"]),
        (replace(GOOD, latency=model.LatencyRatio(float_ms=1.0, int8_ms=0.9)), []),
        (replace(GOOD, latency=model.LatencyRatio(float_ms=1.0, int8_ms=0.0)), []),
    ],
)
def test_alarms(report: model.Report, codes: list[str]) -> None:
    assert [alarm.code for alarm in report.alarms()] == codes


def test_what_another_placement_would_gain_stands_in_the_alarm_that_nothing_is_quantized() -> None:
    other = Caution("W103", "on CPUs of kind vnni it would pay")
    kept = LeftFloat("a", "no faster")
    float_still = replace(GOOD, pairs=0, warnings=(other,), left_float=(kept,))
    text = "int8 would not pay: nothing was quantized, and the result computes what the model did; "
    text += "`mode: weight-only` makes the file smaller, and no faster; "
    assert float_still.alarms() == (f"{text}{other}",)
    both = replace(float_still, refusals=(Refusal("b", "no"),))
    assert both.alarms()[0].startswith("everything was refused or would not pay")
    assert replace(both, left_float=()).alarms()[0].startswith("everything was refused: ")


@pytest.mark.parametrize("left", [(), (LeftFloat("a", "left float by rule node=*", "configuration", "F101"),)])
def test_an_alarm_blames_no_speed_where_there_was_nothing_to_choose(left: tuple[LeftFloat, ...]) -> None:
    text = "the model has no operator for it, or rules leave them float: nothing was quantized, "
    text += "and the result computes what the model did"
    assert replace(GOOD, pairs=0, left_float=left).alarms() == (text,)


def test_an_alarm_names_the_reason_where_it_is_known() -> None:
    slow = replace(GOOD, latency=model.LatencyRatio(float_ms=1.0, int8_ms=2.0, reason="no VNNI"))
    assert slow.alarms()[0] == "the quantized model is slower than the float one: no VNNI"
    far = replace(GOOD, checks=(check(30.0, 2.0),))
    assert "far from the float model's: output y (2.0 dB); check" in far.alarms()[0]
    (alarm,) = replace(far, checks=far.checks * 8).alarms()
    assert alarm.count("(2.0 dB)") == 6
    assert "and 2 more; check" in alarm
    assert "effort" not in far.alarms()[0]
    assert "take more bits or smaller blocks, or" in replace(far, mode="weight-only").alarms()[0]
    assert "take `effort: balanced`, try" in replace(far, effort="fast").alarms()[0]
    drifted = replace(GOOD, checks=(check(math.inf, 30.0),))
    assert "y: exact as the file says, 30.0 dB with ONNX Runtime's optimizations on: its fusions" in drifted.alarms()[0]
    drifted = replace(drifted, saturating="2 rows overflow")
    assert drifted.alarms()[0].endswith("optimizations on: 2 rows overflow")


@pytest.mark.parametrize(
    ("roles", "calibrated"),
    [((), True), ((("weight", 3),), False), ((("weight", 3), ("activation", 0)), False), ((("output", 1),), True)],
)
def test_weights_alone_are_not_calibrated(roles: tuple[tuple[str, int], ...], calibrated: bool) -> None:
    assert replace(GOOD, roles=roles).calibrated == calibrated


def test_reasons_are_grouped_most_frequent_first_then_by_name() -> None:
    found = [Refusal("a", "z"), LeftFloat("b", "y"), Refusal("c", "y"), Refusal("d", "x")]
    groups = group_by_text(found, lambda entry: entry.reason)
    subjects = {reason: "".join(one.subject for one in members) for reason, members in groups}
    assert list(subjects.items()) == [("y", "bc"), ("x", "d"), ("z", "a")]


def test_made_up_inputs_have_one_code_and_one_way_out() -> None:
    warnings = [model.SYNTHETIC, model.warn_synthetic("costs were measured")]
    assert {warning.code for warning in warnings} == {"W101"}
    assert all("`data=…`" in warning for warning in warnings)
    assert warnings[1].startswith("no samples were given: costs were measured on made-up inputs")


# ---- Sentences of a summary: what each pass did, or why it did not; what was cut short; sums that can overflow.

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
