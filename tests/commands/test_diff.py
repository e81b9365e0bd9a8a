"""Comparisons of engines as tables and JSON."""

import json
import math
from dataclasses import replace

import pytest

from onnxq.commands.diff import describe_unmet, find_unmet_tolerance
from onnxq.commands.results import show, write_json
from onnxq.engines.diff.model import OFF, ON, Difference, Error, LayerDiff, OutputDiff, Run, Unmet
from onnxq.sites import Refusal
from tests.report.kit import shown, warned


def error(run: str, against: str, sqnr_db: float) -> Error:
    return Error(
        run=run, against=against, sqnr_db=sqnr_db, cosine=0.99, max_abs=0.5, max_rel=0.01, top_k=0.875, levels=1.0
    )


OUTPUT = OutputDiff(
    name="y", accuracy=(error(OFF, "float", 32.0), error(ON, "float", 31.5)), engines=(error(ON, OFF, 55.0),)
)
LAYER = LayerDiff(
    name="/layers.0/conv/Conv_output_0",
    node="Conv_0",
    op="Conv",
    at="",
    accuracy=(error(OFF, "float", 28.0),),
    engines=(error(ON, OFF, 60.0),),
    drop_db=4.0,
)
FOUND = Difference(
    float_model="/models/m.onnx",
    quantized_model="/models/m.q.onnx",
    data="8 samples",
    samples=8,
    runs=tuple(Run(name=name, engine="ONNX Runtime", samples=8) for name in ("float", OFF, ON)),
    outputs=(OUTPUT,),
    layers=(LAYER,),
    worst=(LAYER.name,),
    skipped=(Refusal("trt", "TensorRT is not installed", 'pip install "onnxq[trt]"', code="R110"),),
)

TABLE = """\
m.q.onnx against m.onnx  (8 samples)
verdict  good: y has 31.5 dB against float as ORT runs it
runs     run               engine        samples
         float             ONNX Runtime        8
         as the file says  ONNX Runtime        8
         as ORT runs it    ONNX Runtime        8
outputs                                                                against
                                                                        as the
                                                     max   max            file
         output  run                  SQNR   cosine  abs   rel  top-1     says
         y       as the file says  32.0 dB  0.99000  0.5  0.01  87.5%
         y       as ORT runs it    31.5 dB  0.99000  0.5  0.01  87.5%  55.0 dB
engines  all agree within rounding
worst    /layers.0/conv/Conv_output_0 (Conv): drops by 4.0 dB
not run  [R110] trt: TensorRT is not installed
             fix: pip install "onnxq[trt]"

                                                    as ORT
                                                   runs it
                                    SQNR as        against
                                        the         as the
                                       file           file
tensor                        op       says  drop     says  levels
/layers.0/conv/Conv_output_0  Conv  28.0 dB   4.0  60.0 dB     1.0
"""


def test_the_tables_at_80_columns() -> None:
    text = shown(show, FOUND)
    assert text == TABLE
    assert max(map(len, text.splitlines())) <= 80


def test_one_engine_has_nothing_to_be_compared_with() -> None:
    outputs = (replace(OUTPUT, accuracy=OUTPUT.accuracy[:1], engines=()),)
    alone = replace(FOUND, runs=FOUND.runs[:2], outputs=outputs, layers=(), worst=())
    assert "only one engine ran (as the file says): nothing to compare it with" in shown(show, alone, width=None)


def test_an_unmet_tolerance_and_made_up_inputs_are_told_in_every_form() -> None:
    unmet = Unmet(output="y", run=ON, measure="SQNR", value=31.5, wanted=35.0)
    found = replace(FOUND, unmet=(unmet,), synthetic=True)
    said = [
        "unmet: output y: as ORT runs it: SQNR is 31.5, at least 35 is wanted",
        "the models were compared on made-up inputs",
    ]
    assert all(one in shown(show, found, width=None) for one in said)
    out, err = warned(show, found, quiet=True)
    assert out == ""
    assert all(one in err.replace("\n", " ") for one in said)


def test_json_says_whether_it_holds() -> None:
    found = json.loads(write_json(FOUND, {"code": "Q115"}))
    assert (found["verdict"]["grade"], found["verdict"]["worst"]["run"]) == ("good", "as ORT runs it")
    assert (found["schema"], found["holds"], found["error"], found["messages"]) == (1, True, {"code": "Q115"}, [])
    nothing = replace(FOUND, outputs=(replace(OUTPUT, accuracy=(error(OFF, "float", math.inf),)),))
    assert json.loads(write_json(nothing))["outputs"][0]["accuracy"][0]["sqnr_db"] == "inf"


LOW = Unmet(output="y", run=ON, measure="SQNR in dB", value=31.5, wanted=40)


@pytest.mark.parametrize(
    ("unmet", "text"),
    [
        (LOW, "as ORT runs it: SQNR in dB is 31.5, at least 40 is wanted"),
        (replace(LOW, part="[:, 4:, :]"), "as ORT runs it: SQNR in dB of [:, 4:, :] is 31.5, at least 40 is wanted"),
        (replace(LOW, measure="max abs", at_most=True), "as ORT runs it: max abs is 31.5, at most 40 is wanted"),
        (replace(LOW, value=math.nan), "as ORT runs it: SQNR in dB is nothing comparable, at least 40 is wanted"),
    ],
)
def test_a_tolerance_in_words(unmet: Unmet, text: str) -> None:
    assert describe_unmet(FOUND, unmet) == text


def test_the_first_tolerance_is_the_error_and_the_others_are_counted() -> None:
    assert find_unmet_tolerance(FOUND) is None
    one = find_unmet_tolerance(replace(FOUND, unmet=(LOW,)))
    assert one is not None
    assert (one.code, one.subject, one.cause) == ("Q703", "output y", describe_unmet(FOUND, LOW))
    for more, tail in ((1, "; and 1 more tolerance not met"), (2, "; and 2 more tolerances not met")):
        error = find_unmet_tolerance(replace(FOUND, unmet=(LOW,) * (more + 1)))
        assert error is not None
        assert error.cause.endswith(tail)


def test_an_engine_that_must_run_and_did_not_is_the_error() -> None:
    error = find_unmet_tolerance(replace(FOUND, missing=("trt",)))
    assert error is not None
    assert (error.code, error.subject) == ("Q704", "engine trt")
    assert error.cause == "must run, and did not: TensorRT is not installed"
    assert error.fix == 'pip install "onnxq[trt]"'
