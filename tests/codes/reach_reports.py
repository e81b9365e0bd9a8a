"""What provokes refusals, what is left float, and warnings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

import onnxq
from onnxq.backends import load_config
from onnxq.pipeline.finalize import warn_unmeasured_cpu
from onnxq.report.model import EngineCheck, LatencyRatio, OutputCheck, Report
from onnxq.runtime import tap_tensors
from onnxq.sites import Refusal, TensorId
from tests.codes.kit import (
    EVERYTHING,
    FORCE,
    gemm,
    model,
    quantized,
    reach,
    reach_each,
    rows,
    saved,
    written,
)
from tests.interop.models import cache, network, ranges
from tests.planner.test_balance import net


def planned(proto: onnx.ModelProto, data: Any = None, **config: Any) -> list[Any]:
    """Everything a plan says no to or warns of."""
    plan = onnxq.make_plan(proto, data, load_config(None, config))
    return [*plan.refusals, *plan.left_float, *plan.warnings]


@reach("R107")
def out_of_reach(_: Path):
    loop = model(
        """g (int64 n, bool c, float[3] x) => (float[3] y) {
        yes = Constant <value = bool {1}> ()
        y = Loop (n, yes, x) <body = b (int64 i, bool c_in, float[3] v) => (bool c_out, float[3] w) {
            [go] c_out = Identity(c_in)
            [choose] w = If (c) <then_branch = t () => (float[3] a) { [n] k = Neg(v) [r] a = Relu(k) },
                                 else_branch = e () => (float[3] z) { [i] z = Identity(v) }> }> }"""
    )
    return list(tap_tensors(loop, [TensorId("k", "y.body/choose.then_branch")]).refusals)


@reach("R116")
def a_node_left_to_the_cpu(folder: Path):
    from onnxq.backends.qnn.kernels import TRACE, read_placement

    entry = {"node_name": "y", "reason": "Operators of type `Erf` are not supported by QNN EP."}
    written(folder, json.dumps({"subgraph_traces": [], "unsupported_nodes": [entry]}), TRACE)
    written(folder, "", "build.log")
    return list(read_placement(model("g (float[4] x) => (float[4] y) { y = Erf(x) }"), folder).left)


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


@reach("W106")
def damaged_notes(_: Path):
    proto = gemm()
    proto.metadata_props.add(key="onnxq.bits", value="oops")
    return onnxq.inspect(proto).warnings


def judged(*sqnr: float, **more: Any) -> list[Any]:
    check = OutputCheck(name="y", sqnr_db=(sqnr[0], sqnr[1]), cosine=(1.0, 1.0), agreement_db=30.0)
    return list(Report(target="ort", pairs=1, checks=(check,), **more).alarms())


@reach("W118")
def joined_scales(folder: Path):
    proto = network()
    proto.graph.node[4].CopyFrom(helper.make_node("MaxPool", ["c2"], ["s"], name="pool", kernel_shape=[1, 1]))
    scales = ranges(proto)
    scales["s"] = np.float32(1.5 * scales["c2"])
    config = load_config(None, {"activations": {"bits": 8, "signed": True, "scheme": "symmetric"}, "rules": [FORCE]})
    return onnxq.import_calibration(
        written(folder, cache(scales), "c"), saved(folder, proto), overrides={"target": "ort"}, config=config
    ).notes


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
