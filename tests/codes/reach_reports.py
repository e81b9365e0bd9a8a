"""What provokes refusals, what is left float, and warnings."""

from pathlib import Path
from typing import Any

import onnx

import onnxq
from onnxq.backends import load_config
from onnxq.pipeline.finalize import warn_unmeasured_cpu
from onnxq.report.model import EngineCheck, LatencyRatio, OutputCheck, Report
from onnxq.sites import Refusal
from tests.codes.kit import (
    EVERYTHING,
    gemm,
    model,
    quantized,
    reach,
    reach_each,
    rows,
)
from tests.planner.test_balance import net


def planned(proto: onnx.ModelProto, data: Any = None, **config: Any) -> list[Any]:
    """Everything a plan says no to or warns of."""
    plan = onnxq.make_plan(proto, data, load_config(None, config))
    return [*plan.refusals, *plan.left_float, *plan.warnings]


def renamed() -> list[Any]:
    other = gemm(64, 64)
    other.graph.node[0].name = "other"
    for tensor in other.graph.initializer:
        tensor.name = f"o{tensor.name}"
    other.graph.node[0].input[1:] = ["ow", "ob"]
    found = onnxq.profile_model(other, quantized().model, rows(8, 64))
    return [*found.fixed, *found.warnings]


@reach("W105")
def bits_attribute(_: Path):
    return onnxq.annotate_bits(quantized().model, overrides={"bits_attribute": True}).warnings


def judged(*sqnr: float, **more: Any) -> list[Any]:
    check = OutputCheck(name="y", sqnr_db=(sqnr[0], sqnr[1]), cosine=(1.0, 1.0), agreement_db=30.0)
    return list(Report(target="ort", pairs=1, checks=(check,), **more).alarms())


reach_each(
    {
        "R100": lambda _: Refusal("mine", "is odd"),
        "R102": lambda _: planned(
            model("g (float[1,64,8,8] x, float[64,64,3,3] w) => (float[1,64,6,6] y) { y = Conv(x, w) }")
        ),
        "R113": lambda _: renamed(),
        "F105": lambda _: onnxq.make_plan(gemm(2, 2), rows(8, 2), overrides={"placement": "measured"}).left_float,
        "W101": lambda _: onnxq.quantize(gemm(64, 64), config=EVERYTHING, overrides={"latency": False}).report.warnings,
        "W103": lambda _: planned(net(24, 10, ["dense", "dense"])),
        "W148": lambda _: judged(40.0, 40.0, engines=(EngineCheck(engine="E", reason="no kernel", refusal="it too"),)),
        "W110": lambda _: judged(40.0, 40.0, latency=LatencyRatio(float_ms=1.0, int8_ms=2.0)),
        "W114": lambda _: planned(gemm(64, 64), rows(4, 64), effort="high"),
        "W115": lambda _: warn_unmeasured_cpu(onnxq.make_plan(gemm(64, 64)), "arm64"),
    }
)
