"""Plans as tables."""

import numpy as np
import pytest

from onnxq.commands.results import show
from onnxq.plan import PlacementChoice, Plan, SitePlan, from_json, to_json
from onnxq.report.sentences import format_spec, make_site_line
from onnxq.sites import Caution, Edge, LeftFloat, Refusal, Role, TensorId
from onnxq.spec import PerBlock, PerChannel, QParams, QuantSpec
from tests.report.kit import shown


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (QuantSpec(), "int8 symmetric"),
        (QuantSpec(signed=False, symmetric=False), "uint8 asymmetric"),
        (QuantSpec(granularity=PerChannel(0), narrow_range=True), "int8 symmetric per channel 0 narrow"),
        (QuantSpec(bits=5), "5 bits in int8 symmetric"),
        (QuantSpec(bits=4, storage="int4", granularity=PerBlock(1, 32)), "int4 symmetric per 32 of axis 1"),
        (QuantSpec(storage="float8e4m3fn"), "float8e4m3fn symmetric"),
    ],
)
def test_specs_in_words(spec: QuantSpec, text: str) -> None:
    assert format_spec(spec) == text


X = SitePlan(
    site=TensorId("/features/0/Relu_output_0"),
    role=Role.ACTIVATION,
    spec=QuantSpec(signed=False, symmetric=False),
    rule="ort.conv",
    reason="input of Conv_0",
)
W = SitePlan(
    site=Edge("Conv_0", 1),
    role=Role.WEIGHT,
    spec=QuantSpec(granularity=PerChannel(0)),
    rule="ort.conv",
    qparams=QParams(np.array([0.01, 0.02], np.float32), np.zeros(2, np.int32)),
)
PLAN = Plan(
    target="ort",
    model="m",
    topology="t",
    weights="w",
    sites=(X, W),
    prepare=("fold_constants",),
    float_nodes=tuple("abcdef"),
    refusals=(Refusal("Softmax_3", "no kernel", "leave it float", code="R101"),),
    left_float=(LeftFloat("Add_1", "would not pay"), LeftFloat("Add_2", "would not pay")),
    warnings=(Caution("W103", "other CPUs could be served better"),),
    data="8 samples",
    placement=PlacementChoice(),
)

TABLE = """\
site                       role        spec                          rule
/features/0/Relu_output_0  activation  uint8 asymmetric              ort.conv
Conv_0/in1                 weight      int8 symmetric per channel 0  ort.conv

plan        2 sites for ort: 1 activation, 1 weight (without numbers:
            calibration adds them)
prepare     fold_constants
placement   rules
guarded     a, b, c, d, and 2 more; `verbose=True` lists them all
refused     1 x [R101] no kernel (Softmax_3)
                fix: leave it float
left float  2 x [F102] would not pay (Add_1, Add_2)
data        8 samples
warning[W103]: other CPUs could be served better
"""


def test_the_table_at_80_columns_and_with_reasons_and_all_names() -> None:
    assert shown(show, PLAN) == TABLE
    text = shown(show, PLAN, width=None, verbose=True)
    assert "input of Conv_0" in text
    assert "a, b, c, d, e, f" in text


def test_top_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert "and 1 more; a larger `top=…` shows them" in shown(show, PLAN, top=1)
    assert shown(show, PLAN, quiet=True) == ""
    assert capsys.readouterr().err == "warning[W103]: other CPUs could be served better\n"


def test_json_is_the_plan_itself() -> None:
    text = shown(show, PLAN, as_json=True)
    assert text == to_json(PLAN)
    assert [site.site for site in from_json(text).sites] == [X.site, W.site]


def test_a_site_shows_its_least_and_greatest_scale() -> None:
    assert (make_site_line(W).scale, make_site_line(X).scale) == ("0.01..0.02", "")
    assert (make_site_line(W).site, make_site_line(W).role) == ("Conv_0/in1", "weight")
