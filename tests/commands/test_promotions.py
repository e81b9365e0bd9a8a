"""The outcome of a requested accuracy, in a sentence and a table."""

from dataclasses import replace

from onnxq.commands.quantize import describe_promotion, find_unmet_accuracy, make_promotion
from onnxq.passes.journal import Promotion, PromotionStep
from onnxq.report.model import Report
from tests.report.kit import printed

LONG = "/encoder/layer.0/attention/self/MatMul_output_0"
STEPS = (
    PromotionStep(name=LONG, to="uint16", nodes=("a",), before=21.3, after=27.94),
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
