"""The summary that people see: nothing missing, nothing wider than the terminal, JSON that any parser reads."""

import io
import json
from dataclasses import replace

import pytest

from onnxq.commands.quantize import describe_promotion, find_unmet_accuracy, make_promotion
from onnxq.commands.results import show
from onnxq.passes.journal import Promotion, PromotionStep, StageCost
from onnxq.planner import Forced
from onnxq.report.model import LatencyRatio, OpCount, OutputCheck, Report, SiteLine
from onnxq.report.terminal import TextView
from onnxq.sites import Caution, LeftFloat, Refusal
from tests.report.kit import Terminal, make_view, printed

LONG = "encoder/layer.11/attention/self/query/MatMul_output_0_with_a_name_far_wider_than_a_terminal_of_80_columns"
REPORT = Report(
    source="/models/net.onnx",
    output="/models/net.q.onnx",
    target="ort",
    config="ort-int8",
    data="32 samples from calib.npz",
    source_bytes=18_600_000,
    output_bytes=4_800_000,
    checks=(OutputCheck(name=LONG, sqnr_db=(17.04, 16.91), cosine=(0.99012, 0.98976), agreement_db=52.1),),
    checked=8,
    latency=LatencyRatio(float_ms=5.31, int8_ms=2.36, shapes={"ids": (1, 192), "mask": (1, 192), "x": (3,)}),
    pairs=118,
    roles=(("activation", 60), ("bias", 1), ("weight", 57)),
    ops=(OpCount(op="Conv", quantized=47, total=49), OpCount(op="Add", quantized=9, total=9)),
    sites=(SiteLine(site=LONG, role="activation", spec="uint8 asymmetric", scale="0.02", rule="ort.conv"),),
    refusals=tuple(Refusal(f"{LONG}.{k}", "many groups", "none needed") for k in range(4))
    + tuple(Refusal(f"n{k}", f"reason {k}") for k in range(8)),
    rewrites=tuple(f"pass_{k}: 1 (a)" for k in range(9)),
    kept=("x/QuantizeLinear",),
    warnings=(Caution("W113", "opset raised from 12 to 13"),),
    stages=(
        StageCost(name="prepare", seconds=0.4, peak_bytes=200_000_000),
        StageCost(name="plan", seconds=0.04, peak_bytes=200_000_000),
        StageCost(name="calibrate", seconds=95.2, peak_bytes=812_000_000),
    ),
)


def shown(report: Report, **how) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    show(report, make_view(how, stream=out, errors=err), **how)
    return out.getvalue(), err.getvalue()


def test_a_file_that_grew_says_why():
    report = replace(REPORT, source_bytes=20_000, output_bytes=25_000, note_bytes=4_000, rewrites=("constants: 3 (c)",))
    text, _ = shown(report, width=200)
    assert "1.2x larger: 4.0 kB are notes, which `notes='none'` leaves out; constants that the model" in text
    text, _ = shown(replace(report, source_bytes=40_000, note_bytes=15_000), width=200)
    assert "1.6x smaller: 15.0 kB are notes, which `notes='none'` leaves out\n" in text
    assert "are notes" not in shown(REPORT)[0]


@pytest.mark.parametrize(
    ("changes", "shows"),
    [({}, True), ({"output_bytes": 9_000}, False), ({"mode": "weight-only"}, False), ({"left_float": ()}, False)],
)
def test_a_large_file_says_what_makes_it_smaller(changes: dict[str, object], shows: bool) -> None:
    report = replace(REPORT, source_bytes=20_000, output_bytes=15_000, left_float=(LeftFloat("conv1", "it is small"),))
    assert ("`mode: weight-only`" in shown(replace(report, **changes), width=200)[0]) is shows


@pytest.mark.parametrize("verbose", [False, True])
def test_summary_fits_80_columns_and_breaks_no_name(verbose):
    text, _ = shown(REPORT, width=80, verbose=verbose)
    assert max(map(len, text.splitlines())) <= 80
    # Each piece of the long name stands in a line with its beginning, its end and what was left out in between.
    pieces = [word for word in text.split() if "…" in word or LONG[:12] in word]
    assert pieces
    assert all("encoder/lay" in one and "…" in one and "columns" in one for one in pieces)
    assert LONG in shown(REPORT, verbose=verbose)[0]


def test_summary_says_everything_once():
    text, err = shown(REPORT)
    assert err == ""
    for part in (
        "net.onnx -> /models/net.q.onnx",
        "18.6 MB -> 4.8 MB, 3.9x smaller",
        "5.31 ms -> 2.36 ms, 2.25x faster (median, 1 thread, ids and mask 1x192, x 3)",
        "SQNR as the file says  SQNR as ORT runs it  cosine as the file says  cosine as ORT runs it  one against",
        "against float on 8 samples (held back from every choice)",
        "118 Q/DQ pairs: 60 activations, 1 bias, 57 weights",
        "Conv 47/49, Add 9/9",
        "and 3 more; `verbose=True` lists them all",
        "x/QuantizeLinear",
        "4 x [R100] many groups",
        "fix: none needed",
        "1 min 36 s (prepare 0.4 s, calibrate 1 min 35 s), peak memory 812 MB",
        "warning[W113]: opset raised from 12 to 13",
    ):
        assert text.count(part) == 1, part
    assert "slower" not in text.lower()


def test_verbose_lists_what_the_summary_counts():
    brief, _ = shown(REPORT)
    full, _ = shown(REPORT, verbose=True)
    assert "and 2 more)" in brief
    assert "more reasons" in brief
    for refusal in REPORT.refusals:
        assert refusal.subject in full
    assert "pass_8" in full
    assert "ort.conv" in full
    assert "more" not in full


def test_pipe_gets_plain_text_and_a_terminal_colours():
    plain, _ = shown(replace(REPORT, synthetic=True))
    assert "\x1b" not in plain
    assert all(line == line.rstrip() for line in plain.splitlines())
    terminal = Terminal()
    show(replace(REPORT, synthetic=True), TextView(stream=terminal))
    assert "\x1b[" in terminal.getvalue()


def test_synthetic_data_cannot_be_missed_in_any_form():
    made_up = replace(REPORT, synthetic=True, warnings=(Caution("W101", "SYNTHETIC DATA: as the plan says it"),))
    text, _ = shown(made_up)
    last = text.splitlines()[-3:]
    assert last[0] == last[2] == "!" * 72
    assert "SYNTHETIC DATA" in last[1]
    assert text.count("SYNTHETIC DATA") == 1
    for how in ({"as_json": True}, {"quiet": True}):
        out, err = shown(made_up, **how)
        assert "SYNTHETIC DATA" in err
        assert "!!!!" not in out
    assert json.loads(shown(made_up, as_json=True)[0])["synthetic"] is True
    # Weights alone need no samples, but the check does.
    text, _ = shown(replace(REPORT, synthetic=True, roles=(("weight", 36),)))
    assert "!!" not in text
    assert text.count("the check ran on made-up inputs") == 1


def test_slower_is_shouted_with_its_reason():
    slow = replace(REPORT, latency=LatencyRatio(float_ms=2.0, int8_ms=4.0, reason="12 convolutions ran in float"))
    text, _ = shown(slow)
    assert "0.50x: SLOWER than float" in text
    assert text.splitlines()[-1].endswith("slower than the float one: 12 convolutions ran in float")
    assert slow.slower
    assert not REPORT.slower
    assert not replace(REPORT, latency=None).slower
    # A float model that is handed back is told however little is shown.
    assert "nothing was quantized" in shown(replace(REPORT, pairs=0), quiet=True)[1]


def test_quiet_shows_only_warnings_and_an_empty_report_is_shown():
    assert shown(REPORT, quiet=True) == ("", "warning[W113]: opset raised from 12 to 13\n")
    assert shown(Report())[0].startswith("model")


def test_letters_the_stream_cannot_encode_do_no_harm():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    show(replace(REPORT, source="größe.onnx"), TextView(stream=stream))
    stream.flush()
    assert b"gr??e.onnx" in raw.getvalue()


def test_what_is_left_float_is_told_apart_from_what_was_refused():
    left = replace(REPORT, refusals=(), left_float=(LeftFloat("conv1", "it is small", "size", "F102"),))
    text, _ = shown(left)
    assert "refused" not in text
    assert "left float  1 x [F102] it is small (conv1)" in text
    found = json.loads(shown(left, as_json=True)[0])
    assert (found["refusals"], found["left_float"]) == (
        [], [{"subject": "conv1", "reason": "it is small", "rule": "size", "code": "F102"}],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "said"), [("a", "1 operator by rules (a)"), ("abc", "3 operators by rules (a, b and 1 more)")]
)
def test_what_rules_force_is_told_with_its_cost(names, said):
    text, _ = shown(replace(REPORT, forced=Forced(tuple(names), 1.25)), width=200)
    assert f"{said}: predicted 1.25x the time of the choice without them" in text
    assert "forced" not in shown(REPORT)[0]


# ---- The outcome of a requested accuracy, in a sentence and a table.

ATTENTION = "/encoder/layer.0/attention/self/MatMul_output_0"
STEPS = (
    PromotionStep(name=ATTENTION, to="uint16", nodes=("a",), before=21.3, after=27.94),
    PromotionStep(name="logits", to="float", nodes=("b", "c"), before=27.94, after=31.2),
)
MET = Promotion(
    asked="at least 30 dB", unit="dB", met=True, value=30.61, least=30.0, steps=STEPS, operators=3, left=40, samples=8
)

TABLE = """\
at least 30 dB: holds with 30.6 dB; 3 operators of 43 promoted
site                                         to      operators   before    after
/encoder/layer.0/atte…/self/MatMul_output_0  uint16          1  21.3 dB  27.9 dB
logits                                       float           2  27.9 dB  31.2 dB
before and after on 8 samples
"""


def test_the_table_at_80_columns() -> None:
    assert printed(make_promotion(MET)) == TABLE


def test_what_does_not_hold_is_said_with_its_reason() -> None:
    failed = replace(MET, met=False, value=27.94, steps=STEPS[:1], operators=1, note="the time was used up")
    assert describe_promotion(failed) == (
        "at least 30 dB: does NOT hold with 27.9 dB; 1 operator of 41 promoted; the time was used up"
    )


def test_a_metric_has_its_own_figures_and_the_float_models() -> None:
    metric = Promotion(asked="accuracy drops by at most 0.01", unit="accuracy", met=True, value=0.91234, least=0.9,
                       float_value=0.92)  # fmt: skip
    assert describe_promotion(metric) == (
        "accuracy drops by at most 0.01: holds with 0.9123 (float 0.92); nothing had to be promoted"
    )
    assert printed(make_promotion(metric)).strip().replace("\n", " ") == describe_promotion(metric)


def test_a_figure_has_its_spread_and_a_verdict_within_it_says_so() -> None:
    sure = replace(MET, value=32.0, spread=1.15, samples=32)
    assert describe_promotion(sure).startswith("at least 30 dB: holds with 32.0 ± 1.1 dB on 32 samples; 3 operators")
    near = describe_promotion(replace(sure, value=30.61))
    assert near.startswith("at least 30 dB: holds with 30.6 ± 1.1 dB on 32 samples, which may not hold on others; 3 op")
    missed = describe_promotion(replace(sure, value=29.2, met=False))
    assert "does NOT hold with 29.2 ± 1.1 dB on 32 samples, which may hold on others; 3 op" in missed
    assert describe_promotion(replace(MET, met=False, steps=(), operators=0)).endswith("; nothing was promoted")


def test_only_an_accuracy_that_was_asked_for_can_be_missed() -> None:
    missed = replace(MET, met=False, value=27.94)
    assert find_unmet_accuracy(Report()) is None
    assert find_unmet_accuracy(Report(promotion=missed)) is None
    assert find_unmet_accuracy(Report(promotion=replace(MET, required=True))) is None
    error = find_unmet_accuracy(Report(promotion=replace(missed, required=True)))
    assert error is not None
    assert (error.code, error.subject, error.cause) == ("Q709", "accuracy", describe_promotion(missed))
