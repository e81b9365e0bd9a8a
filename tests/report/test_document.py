"""JSON: strict, complete, and the same values when it is read again."""

import json
import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest

from onnxq.commands.results import write_json
from onnxq.passes.journal import StageCost
from onnxq.report.document import to_json
from onnxq.report.model import LatencyRatio, OutputCheck, Report
from onnxq.sites import Caution, LeftFloat, Refusal, Role, TensorId
from onnxq.wording import use_translation


def read(value: object) -> object:
    def refuse(word: str) -> object:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(to_json(value), parse_constant=refuse)


class Kind(Enum):
    FIRST = 1


@dataclass(frozen=True)
class Inner:
    site: TensorId
    values: tuple[float, ...]


@pytest.mark.parametrize(("value", "expected"), [
    (1.5, 1.5), (math.inf, "inf"), (-math.inf, "-inf"), (math.nan, None), (True, True), (None, None),
    (Role.WEIGHT, "weight"), (Kind.FIRST, 1), (np.float32(0.5), 0.5), (np.int64(7), 7), (np.bool_(True), True),
    ((1, (2, 3)), [1, [2, 3]]), ({"a": {"b": (math.nan,)}}, {"a": {"b": [None]}}), ({3: "x"}, {"3": "x"}),
    (Caution("W113", "mended"), {"code": "W113", "text": "mended"}),
    (Inner(TensorId("x"), (1.0, math.inf)), {"site": {"name": "x", "scope": ""}, "values": [1.0, "inf"]}),
    ("a\udcffb", "a\ufffdb"), ({"a\udcffb": 1}, {"a\ufffdb": 1}),
])  # fmt: skip
def test_values(value: object, expected: object) -> None:
    assert read(value) == expected


def test_text_speaks_the_language_of_its_reader() -> None:
    with use_translation(lambda text: text.replace("`force=True`", "--force")):
        assert read({"fix": "`force=True`", "warning": Caution("W114", "`force=True`")}) == {
            "fix": "--force",
            "warning": {"code": "W114", "text": "--force"},
        }


REPORT = Report(
    source="net.onnx", output="net.q.onnx", target="ort", pairs=3, source_bytes=4000, output_bytes=1000,
    checks=(OutputCheck(name="y", sqnr_db=(30.0, math.inf), cosine=(0.999, 1.0), agreement_db=math.nan),),
    latency=LatencyRatio(float_ms=1.0, int8_ms=2.0),
    roles=(("activation", 2), ("weight", 1)),
    refusals=(Refusal("Conv_0", "too many groups", "none", "ort.conv", "R102"),),
    left_float=(LeftFloat("Add_1", "would not pay"),),
    warnings=(Caution("W113", "mended"),),
    stages=(StageCost(name="plan", seconds=0.25, peak_bytes=10),),
)  # fmt: skip


def test_a_report_keeps_every_field_and_adds_the_derived_values() -> None:
    found = json.loads(write_json(REPORT, error={"code": "Q700"}))
    assert set(found) == {*Report.__dataclass_fields__, "schema", "error", "slower", "alarms", "verdict"}
    assert (found["schema"], found["error"], found["slower"]) == (1, {"code": "Q700"}, True)
    assert found["roles"] == {"activation": 2, "weight": 1}
    (check,) = found["checks"]
    assert set(check) == set(OutputCheck.__dataclass_fields__)
    assert (check["sqnr_db"], check["cosine"], check["agreement_db"]) == ([30.0, "inf"], [0.999, 1.0], None)
    assert (check["parts"], check["whole_db"], check["top_1"]) == (["", ""], [None, None], [None, None])
    assert (check["name"], check["optimized"], check["rows"], check["classes"]) == ("y", True, 0, False)
    assert (found["latency"]["ratio"], found["latency"]["float_ms"]) == (0.5, 1.0)
    assert found["refusals"][0]["code"] == "R102"
    assert found["left_float"] == [{"subject": "Add_1", "reason": "would not pay", "rule": "", "code": "F102"}]
    assert [alarm["code"] for alarm in found["alarms"]] == ["W110"]


def test_the_values_survive_reading_and_writing() -> None:
    once = json.loads(write_json(REPORT))
    assert json.loads(to_json(once)) == once
    assert write_json(REPORT) == write_json(REPORT)
    assert to_json({"a": (Role.WEIGHT, None, True, 1.5)}) == '{\n "a": [\n  "weight",\n  null,\n  true,\n  1.5\n ]\n}\n'
