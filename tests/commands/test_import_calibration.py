"""Imports of calibration caches as tables and JSON."""

import json

from onnxq.commands.results import show, write_json
from onnxq.interop import Imported
from onnxq.interop.base import UnmatchedKind, UnusedLine
from onnxq.interop.matching import MatchedSite, MissingSite
from onnxq.plan import Plan
from onnxq.sites import Caution
from tests.report.kit import shown, warned

FOUND = Imported(
    plan=Plan(target="trt", model="m", topology="t", weights="w"),
    cache="/models/calib.cache",
    header="TRT-100300-EntropyCalibration2",
    entries=9,
    matched=(
        MatchedSite(site="x", name="x", line=2, scale=0.0125),
        MatchedSite(site="h", name="h_old", line=3, scale=0.5, through="Relu_1 keeps it"),
    ),
    unmatched=(
        UnusedLine(name="conv1_bn", line=4, why=UnmatchedKind.FOLDED, reason="fused into conv1"),
        UnusedLine(name="(Unnamed Layer* 5)", line=5, why=UnmatchedKind.TENSORRT, reason="made by TensorRT"),
        *(
            UnusedLine(name=f"gone_{k}", line=6 + k, why=UnmatchedKind.UNKNOWN, nearest=("gone",) if k == 0 else ())
            for k in range(5)
        ),
    ),
    unused=(
        UnusedLine(name="a", line=11, reason="are not quantized"),
        UnusedLine(name="b", line=12, reason="are not quantized"),
    ),
    missing=(MissingSite(site="y", tensor="y", done="stays float"), MissingSite(site="z", tensor="z")),
    notes=(Caution("W118", "two scales were joined"),),
)

TABLE = """\
calib.cache  (TRT-100300-EntropyCalibration2)
cache                  9 scales, 2 of them used
plan                   0 sites for trt
no scale               y: stays float
                       z
fused away             1: conv1_bn (line 4)
TensorRT's own layers  1: (Unnamed Layer* 5) (line 5)
not in the model       5: gone_0 (line 6), nearest gone
                       gone_1 (line 7)
                       gone_2 (line 8)
                       gone_3 (line 9)
                       and 1 more; `verbose=True` lists them all
not used               2 are not quantized
warning[W118]: two scales were joined
"""


def test_the_sheet_at_80_columns_with_every_line_and_with_the_notes_alone() -> None:
    assert shown(show, FOUND) == TABLE
    text = shown(show, FOUND, width=None, verbose=True)
    for word in ("h_old", "Relu_1 keeps it", "0.0125", "gone_4", "2 are not quantized: a, b", "fused into conv1"):
        assert word in text
    assert warned(show, FOUND, quiet=True) == ("", "warning[W118]: two scales were joined\n")


def test_json_leaves_out_the_plan_but_counts_it() -> None:
    found = json.loads(write_json(FOUND))
    # Its keys stand in test_results.py.
    assert "plan" not in found
    assert (found["target"], found["sites"], found["applied"]) == ("trt", 0, None)
    assert [one["why"] for one in found["unmatched"][:3]] == ["folded", "tensorrt", "unknown"]
