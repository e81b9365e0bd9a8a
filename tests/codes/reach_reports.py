"""What provokes refusals, what is left float, and warnings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnxq
from onnxq.backends import find_backend, find_engine, load_config
from onnxq.backends.engine import ENGINE
from onnxq.backends.ort.engine import OPTIMIZED
from onnxq.engines.saturation.emulate import emulate_saturation
from onnxq.graph import load_model, name_nodes
from onnxq.passes.base import RunContext
from onnxq.passes.rewrites.normalizations import fold_scalars
from onnxq.pipeline.finalize import warn_unmeasured_cpu
from onnxq.report.model import EngineCheck, LatencyRatio, OutputCheck, Report
from onnxq.runtime import tap_tensors
from onnxq.sites import Refusal, TensorId
from tests.codes.kit import (
    EVERYTHING,
    FORCE,
    F,
    gemm,
    model,
    quantized,
    reach,
    reach_each,
    rows,
    saturating,
    saved,
    show,
    written,
)
from tests.interop.models import cache, network, ranges
from tests.passes.kit import make_state
from tests.pipeline.models import images, residual
from tests.planner.test_balance import net
from tests.tables import words


def planned(proto: onnx.ModelProto, data: Any = None, **config: Any) -> list[Any]:
    """Everything a plan says no to or warns of."""
    plan = onnxq.make_plan(proto, data, load_config(None, config))
    return [*plan.refusals, *plan.left_float, *plan.warnings]


def conv(group: int = 1, channels: int = 64) -> onnx.ModelProto:
    body = f"g (float[N,{channels},16,16] x) => (float[N,64,A,B] y) {{ y = Conv(x, w) }}"
    return model(body, w=np.random.default_rng(0).standard_normal((64, channels // group, 3, 3)).astype(F) / 20)


@reach("R101")
def no_kernel(_: Path):
    body = 'g (float[2,64] x) => (float[64,2] y) { y = Einsum <equation="ab,bb->ba"> (x, w) }'
    return planned(model(body, w=np.eye(64, dtype=F)))


@reach("R103")
def no_such_type(_: Path):
    uint4 = {"bits": 4, "signed": False, "storage": "uint4", "scheme": "asymmetric", "granularity": "channel"}
    return planned(gemm(64, 64), weights=uint4)


@reach("R104")
def a_branch_that_never_ran(_: Path):
    proto = model(
        """g (float[N,64] x, bool c) => (float[N,64] y) {
        y = If (c) <then_branch = t () => (float[N,64] a) { a = MatMul(x, w) },
                    else_branch = e () => (float[N,64] b) { b = MatMul(x, w) }> }""",
        w=np.eye(64, dtype=F),
    )
    for attribute in proto.graph.node[0].attribute:
        attribute.g.node[0].name = attribute.name
    samples = [{"x": row[None], "c": np.array(True)} for row in rows(8, 64)["x"]]
    return planned(proto, samples)


@reach("R105")
def alone(_: Path):
    rule = {"op": "Flatten", "set": {"quantize": True}}
    return planned(model("g (float[N,64] x) => (float[N,64] y) { y = Flatten(x) }"), rules=[rule])


@reach("R106")
def no_scale(folder: Path):
    scales = {name: scale for name, scale in ranges(network()).items() if name != "r1"}
    path = written(folder, cache(scales), "c")
    return onnxq.import_calibration(path, network(), overrides={"allow_missing": True}).plan.refusals


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


@reach("R111")
def no_tensorrt(_: Path):
    found = find_backend("trt").local.find_obstacle()
    if found is None:
        pytest.skip("TensorRT runs here")
    return found


@reach("R112")
def a_rewrite_that_does_not_fit(_: Path):
    body = "g (float16[N,4,7,7] x) => (float16[N,6,7,7] y) { h = Conv(x, w) y = Mul(h, k) }"
    proto = model(body, w=np.full((6, 4, 1, 1), 2, np.float16), k=np.float16([6e4]))
    return fold_scalars(RunContext(), make_state(name_nodes(proto)))[1].skipped


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


@reach("R114")
def not_emulated(_: Path):
    weights = {
        "w": np.full((1, 4, 32), 127, np.int8), "r": np.full((1, 8, 32), 3, np.int8),
        "s": np.ones((1, 32), F), "z": np.zeros((1, 32), np.int8),
    }  # fmt: skip
    proto = model("g (float[5,1,4] x) => (float[A,B,C,D] y) { y = Relu(x) }", **weights)
    node = proto.graph.node[0]
    node.op_type, node.domain = "DynamicQuantizeLSTM", "com.microsoft"
    node.input[:] = ["x", "w", "r", "", "", "", "", "", "s", "z", "s", "z"]
    node.attribute.append(helper.make_attribute("hidden_size", 8))
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return emulate_saturation(proto).skipped


@reach("F104")
def on_request(_: Path):
    body = "g (float[N,64,64] x, float[N,64,64] z) => (float[N,64,64] y) { y = MatMul(x, z) }"
    return list(onnxq.make_plan(model(body), config="trt-int8").left_float)


@reach("F106")
def promoted(_: Path):
    rules = [{"tensor": "r", "role": "activation", "set": {"quantize": True, "bits": 2}}, FORCE]
    made = onnxq.quantize(residual(), images(32), overrides={"latency": False, "min_sqnr": 30, "rules": rules})
    return made.plan.left_float


@reach("F108")
def an_operator_of_a_library(_: Path):
    proto = model("g (float[N,64] x) => (float[M,64] y) { h = MatMul(x, w) y = Relu(h) }", w=np.ones((64, 64), F))
    proto.graph.node[1].domain = "example.ops"
    proto.opset_import.append(helper.make_opsetid("example.ops", 1))
    return onnxq.make_plan(proto, config="ort-int8-weights").left_float


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


@reach("W112")
def other_kernels(folder: Path):
    saved(folder, saturating(), OPTIMIZED)
    body = "g (float[N,64] x) => (float[N,64] y) { y = QLinearConv(x, x, x, x, x, x, x, x) }"
    saved(folder, model(body), ENGINE)
    return list(find_engine("ort").list_warnings(folder))


@reach("W113")
def initializers_as_inputs(_: Path):
    proto = gemm()
    proto.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [4, 3]))
    return load_model(proto).notes


@reach("W116")
def without_optimizations(_: Path):
    overrides = {"effort": "fast", "high_precision": "float32", "verify.optimized": True}
    report = onnxq.quantize(gemm(64, 64), rows(8, 64), "trt-fp8", overrides=overrides).report
    if report.checks[0].optimized:
        pytest.skip("this ONNX Runtime's optimizations take FP8")
    return report.warnings


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
        "W117": lambda _: renamed(),
        "F101": lambda _: planned(gemm(64, 64), rules=[{"op": "Gemm", "set": {"float": True}}]),
        "F102": lambda _: planned(gemm(2, 2)),
        "F103": lambda _: planned(conv(channels=3)),
        "F105": lambda _: onnxq.make_plan(gemm(2, 2), rows(8, 2), overrides={"placement": "measured"}).left_float,
        "F109": lambda _: onnxq.make_plan(words(), config="trt-int8").left_float,
        "W101": lambda _: onnxq.quantize(gemm(64, 64), config=EVERYTHING, overrides={"latency": False}).report.warnings,
        "W102": lambda _: planned(gemm(64, 64), saturation="allow"),
        "W103": lambda _: planned(net(24, 10, ["dense", "dense"])),
        "W104": lambda _: planned(gemm(64, 64), rules=[FORCE], activations={"bits": 4}),
        "W107": lambda folder: show("prove", saved(folder, saturating()), "--engine", "ort")["warnings"][-1]["code"],
        "W108": lambda _: judged(3.0, 3.0),
        "W109": lambda _: judged(40.0, 20.0),
        "W138": lambda _: judged(
            40.0, 40.0, engines=(EngineCheck(engine="E", latency=LatencyRatio(float_ms=3.0, int8_ms=2.0, own_ms=1.0)),)
        ),
        "W148": lambda _: judged(40.0, 40.0, engines=(EngineCheck(engine="E", reason="no kernel", refusal="it too"),)),
        "W110": lambda _: judged(40.0, 40.0, latency=LatencyRatio(float_ms=1.0, int8_ms=2.0)),
        "W111": lambda _: list(onnxq.quantize(gemm(2, 2), rows(8, 2), overrides={"latency": False}).report.alarms()),
        "W114": lambda _: planned(gemm(64, 64), rows(4, 64), effort="high"),
        "W115": lambda _: warn_unmeasured_cpu(onnxq.make_plan(gemm(64, 64)), "arm64"),
    }
)
