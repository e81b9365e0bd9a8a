"""One file for several engines: placed by all of their costs, right in each, with a row for each and its loss told."""

import io
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.annotate import read_plan_note
from onnxq.backends import find_backend
from onnxq.commands.results import show
from onnxq.pipeline import check
from onnxq.plan import Plan, from_json
from onnxq.report.document import to_json
from onnxq.report.model import EngineCheck, LatencyRatio, Report
from onnxq.report.terminal import TextView
from onnxq.sites import Role
from tests.backends.openvino.graphs import needs_openvino
from tests.cli.kit import run
from tests.engines import kit

pytestmark = pytest.mark.usefixtures("engines_here")

TARGET = "ort,openvino"
TEXT = """(float[1,CH,14,14] x) => (float[1,10] y) {
    a = Conv <pads=[1,1,1,1]> (x, w0)  s = Sigmoid(a)  b = Mul(a, s)
    d = Conv(b, w1)  e = Relu(d)  f = Conv <pads=[1,1,1,1]> (e, w2)
    h = LeakyRelu <alpha=0.1> (f)  r = Add(e, h)  p = AveragePool <kernel_shape=[2,2], strides=[2,2]> (r)
    q = Conv(p, w3)  m = GlobalAveragePool(q)  n = Flatten(m)  y = Gemm(n, w4) }"""


@cache
def make_net(channels: int = 32) -> onnx.ModelProto:
    """Products with what the engines compute differently around them: x * Sigmoid(x), LeakyRelu, AveragePool."""
    c, rng = channels, np.random.default_rng(0)
    shapes = {"w0": (c, c, 3, 3), "w1": (2 * c, c, 1, 1), "w2": (2 * c, 2 * c, 3, 3), "w3": (4 * c, 2 * c, 1, 1)}
    arrays = {name: rng.standard_normal(shape) / np.prod(shape[1:]) ** 0.5 for name, shape in shapes.items()}
    arrays["w4"] = rng.standard_normal((4 * c, 10)) / (4 * c) ** 0.5
    return kit.graph(TEXT.replace("CH", str(c)), 17, **{name: one.astype(np.float32) for name, one in arrays.items()})


@cache
def make_data(channels: int = 32) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((12, channels, 14, 14)).astype(np.float32)}


@cache
def quantize_shared() -> onnxq.Result:
    overrides = {"effort": "fast", "latency": False, "target": TARGET}
    return onnxq.quantize(make_net(), make_data(), overrides=overrides)


def plan_for(target: str, channels: int = 32) -> Plan:
    return onnxq.make_plan(make_net(channels), make_data(channels), overrides={"target": target})


def list_sites(plan: Plan) -> set[str]:
    return {str(site.site) for site in plan.sites}


def test_the_placement_is_of_all_costs_and_no_part_alone() -> None:
    ort, openvino, shared = (list_sites(plan_for(target)) for target in ("ort", "openvino", TARGET))
    assert ort != openvino
    assert shared not in (ort, openvino)
    # Only one engine has an integer kernel of it.
    assert "h" in ort - shared
    assert {"w0", "w2", "w3"} <= shared


def test_weights_move_the_placement_and_none_is_by_the_worst() -> None:
    by_weight = [list_sites(plan_for(f"ort={ort},openvino={10 - ort}", 16)) for ort in (9, 1)]
    assert by_weight[0] != by_weight[1]
    assert plan_for("ort=9,openvino=1", 16).target == "ort=9,openvino=1"


def count_types(result: onnxq.Result) -> dict[str, int]:
    """The products by type, as the plan says."""
    quantized = sum(site.role is Role.WEIGHT for site in result.plan.sites)
    return {"int8": quantized, "float32": 5 - quantized}


@needs_openvino
def test_the_file_is_right_on_each_engine_with_a_row_for_each() -> None:
    result = quantize_shared()
    rows = {row.target: row for row in result.report.engines}
    # The time that engines take, which may be minutes, is in the summary's.
    assert rows.keys() <= {stage.name for stage in result.report.stages}
    assert list(rows) == ["ort", "openvino"]
    for row in rows.values():
        assert not row.reason
        (output,) = row.outputs
        assert output.agreement_db > 30
        assert output.sqnr_db > 25
        assert dict(row.types) == count_types(result)
    found = onnxq.diff(make_net(), result.model, make_data(), overrides={"samples": 2})
    assert {"openvino", "ort-on"} <= {run.name for run in found.runs}
    assert onnxq.prove(result.model).build.engine == "ort"


@needs_openvino
def test_text_and_json_have_each_engine() -> None:
    report, out = quantize_shared().report, io.StringIO()
    show(report, TextView(stream=out, errors=io.StringIO(), width=300))
    lines = out.getvalue().splitlines()
    for title in ("ONNX Runtime", "OpenVINO"):
        assert any(line.startswith(f"on {title} ") and "products 4 in int8, 1 in float32" in line for line in lines)
        assert any(f"SQNR as {title} runs it" in line for line in lines)
    assert not any("as ORT runs it" in line for line in lines)
    told = json.loads(to_json(report))
    assert [row["target"] for row in told["engines"]] == ["ort", "openvino"]
    assert [dict(row["types"]) for row in told["engines"]] == [count_types(quantize_shared())] * 2


@needs_openvino
def test_a_file_of_one_engine_shows_its_column_and_not_that_of_another() -> None:
    overrides = {"effort": "fast", "latency": False}
    report, out = onnxq.quantize(make_net(), make_data(), "openvino-int8", overrides=overrides).report, io.StringIO()
    show(report, TextView(stream=out, errors=io.StringIO(), width=300))
    assert "SQNR as the file says  SQNR as OpenVINO runs it  cosine as the file says" in out.getvalue()
    assert "ORT runs it" not in out.getvalue()


def test_a_plan_remembers_its_targets(tmp_path: Path) -> None:
    plan = quantize_shared().plan
    assert plan.target == TARGET
    assert from_json(quantize_shared().plan_json()) == plan
    path = tmp_path / "plan.json"
    path.write_text(quantize_shared().plan_json(), encoding="utf-8")
    onnx.save(make_net(), tmp_path / "net.onnx")
    again = onnxq.apply(str(tmp_path / "net.onnx"), str(path))
    assert again.model.graph == quantize_shared().model.graph
    assert again.plan.target == TARGET
    again.save(tmp_path / "out.onnx")
    note = read_plan_note(onnx.load(tmp_path / "out.onnx"))
    assert note.target == TARGET
    assert run("inspect", tmp_path / "out.onnx").exit_code == 0


def test_a_configuration_may_list_them_and_a_preset_of_one_may_be_their_base(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("target: [ort, openvino=2]\n", encoding="utf-8")
    assert onnxq.load_config(path).target == "ort,openvino=2"
    plan = onnxq.make_plan(make_net(), make_data(), "ort-int8-mse", overrides={"target": TARGET})
    assert plan.target == TARGET
    assert {site.observer.name for site in plan.sites if site.role.value == "activation"} == {"mse"}


def test_what_cannot_share_a_file_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mode: static\ntarget: [ort, qnn]\n", encoding="utf-8")
    with pytest.raises(onnxq.OnnxqError, match="takes a whole graph") as caught:
        onnxq.load_config(path)
    assert caught.value.code == "Q325"
    assert "mine.yaml:2: target" in str(caught.value)


@pytest.mark.parametrize(("own_ms", "told"), [(2.0, False), (1.83, False), (1.8, True), (float("nan"), False)])
def test_a_loss_beyond_a_tenth_is_said_with_the_engine_and_its_target(own_ms: float, told: bool) -> None:
    latency = LatencyRatio(float_ms=4.0, int8_ms=2.0, own_ms=own_ms)
    alarms = Report(engines=(EngineCheck(engine="OpenVINO", target="openvino", latency=latency),)).alarms()
    lines = [str(alarm) for alarm in alarms if alarm.code == "W138"]
    assert bool(lines) == told
    if told:
        assert "with OpenVINO the file for several engines takes 11% longer" in lines[0]
        assert "`target='openvino'`" in lines[0]


@needs_openvino
def test_each_engine_times_the_shared_file_beside_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer rounds than people get, in the engines themselves."""
    models: dict[str, list[str]] = {}
    whole = check.find_timer

    def find_short(target: str, *settings: Any) -> Any:
        timer = whole(target, *settings)

        def time_few(timed: Mapping[str, Any], feeds: Any, rounds: int | None) -> Any:
            models[target] = [*timed]
            return timer(timed, feeds, 3)

        return time_few

    monkeypatch.setattr(check, "find_timer", find_short)
    report = onnxq.quantize(make_net(), make_data(), overrides={"effort": "fast", "target": TARGET}).report
    assert models == {target: ["float", "int8", "own"] for target in ("ort", "openvino")}
    times = [row.latency for row in report.engines]
    assert all(time is not None and time.own_ms > 0 for time in times)
    assert [time.engine for time in times if time is not None] == ["ONNX Runtime", "OpenVINO"]
    # That of the engine that gains least.
    assert report.latency == min((time for time in times if time is not None), key=lambda time: time.ratio)
    assert {row["latency"]["engine"] for row in json.loads(to_json(report))["engines"]} == {"ONNX Runtime", "OpenVINO"}


@pytest.mark.parametrize("target", ["openvino", "web", TARGET])
def test_sums_that_may_overflow_are_said_of_the_engine_itself(target: str) -> None:
    plan = onnxq.make_plan(make_net(), make_data(), overrides={"target": target, "saturation": "allow"})
    (line,) = [str(warning) for warning in plan.warnings if warning.code == "W102"]
    assert f"kernels of {find_backend(target).title} add" in line
