"""Costs of sites as tables and JSON."""

import json
import math
from dataclasses import replace

from onnxq.commands.results import show, write_json
from onnxq.evaluation.sensitivity import GroupCost, OutputProfile, Profile
from onnxq.sites import Caution
from tests.report.kit import shown, warned

NODE = GroupCost(
    kind="node",
    name="/encoder/layer.0/attention/output/dense/MatMul",
    ops=("MatMul",),
    sites=("a", "b"),
    isolated_db=21.25,
    leave_one_out_db=math.inf,
    gain_db=3.141,
)
SITE = GroupCost(
    kind="site",
    name="a",
    ops=("A", "B", "C", "D"),
    sites=("a",),
    isolated_db=math.nan,
    leave_one_out_db=30.0,
    gain_db=math.nan,
)
FOUND = Profile(
    sqnr_db=18.04,
    samples=8,
    outputs=tuple(
        OutputProfile(name=name, sqnr_db=sqnr, float_db=math.inf) for name, sqnr in (("y", 18.0), ("z", 20.0))
    ),
    groups=(NODE, SITE),
    source="/models/m.onnx",
    quantized="m.q.onnx",
    data="8 samples from calib.npz",
    warnings=(Caution("W117", "two pairs could not be switched off"),),
)

TABLE = """\
m.onnx  (m.q.onnx)
all      18.0 dB with everything quantized, 8 samples
data     8 samples from calib.npz
outputs  output     SQNR
         y       18.0 dB
         z       20.0 dB
read     isolated: only it is quantized; left out: all but it; gain: what
         leaving it float would bring back

nodes, each with all it reads
                                                                  left
name                                    op      pairs  isolated    out      gain
/encoder/layer.0/a…output/dense/MatMul  MatMul      2   21.2 dB  exact  +3.14 dB

sites
name  op       pairs  isolated  left out  gain
a     A/B/C/…      1       n/a   30.0 dB   n/a
warning[W117]: two pairs could not be switched off
"""


def test_the_tables_at_80_columns_are_cut_unless_verbose() -> None:
    assert shown(show, FOUND) == TABLE
    assert "with everything quantized, 1 sample\n" in shown(show, replace(FOUND, samples=1))
    many = replace(FOUND, groups=tuple(replace(NODE, name=f"node_{k}") for k in range(15)))
    assert "and 3 more; `verbose=True` lists them all" in shown(show, many)
    assert "node_14" in shown(show, many, verbose=True)
    assert "and 14 more; a larger `top=…` shows them" in shown(show, many, top=1)


def test_made_up_inputs_are_a_warning_in_every_form() -> None:
    made_up = replace(FOUND, synthetic=True)
    said = "warning[W101]: no samples were given: costs were measured on made-up inputs"
    assert said in shown(show, made_up, width=None)
    for form in ({"quiet": True}, {"as_json": True}):
        out, err = warned(show, made_up, **form)
        assert said in err.replace("\n", " ")
        assert (out == "") == ("quiet" in form)


def test_json_is_strict() -> None:
    found = json.loads(write_json(FOUND))
    assert (found["groups"][0]["leave_one_out_db"], found["groups"][1]["gain_db"]) == ("inf", None)
    assert found["outputs"][1] == {"name": "z", "sqnr_db": 20.0, "float_db": "inf", "part": ""}
