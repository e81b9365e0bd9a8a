"""What provokes refusals, what is left float, and warnings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper

import onnxq
from onnxq.backends import load_config
from onnxq.cli import cli
from onnxq.engines.saturation.emulate import emulate_saturation
from onnxq.graph import load_model, name_nodes
from onnxq.pipeline.finalize import warn_unmeasured_cpu
from onnxq.report.model import LatencyRatio, OutputCheck, Report
from onnxq.runtime import tap_tensors
from onnxq.sites import Refusal, TensorId
from tests.codes.kit import EVERYTHING, FORCE, F, gemm, model, reach, rows, saved, written
from tests.interop.models import cache, network, ranges
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


@reach("R100")
def a_refusal_of_an_extension(_: Path):
    return Refusal("mine", "is odd")


@reach("R101")
def no_kernel(_: Path):
    body = 'g (float[2,64] x) => (float[2,64] y) { y = Einsum <equation="ab,bc->ac"> (x, w) }'
    return planned(model(body, w=np.eye(64, dtype=F)))


@reach("R102")
def weight_at_run_time(_: Path):
    return planned(model("g (float[1,64,8,8] x, float[64,64,3,3] w) => (float[1,64,6,6] y) { y = Conv(x, w) }"))


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
    from onnxq.backends import find_backend

    found = find_backend("trt").local.find_obstacle()
    if found is None:
        pytest.skip("TensorRT runs here")
    return found


@reach("R112")
def a_rewrite_that_does_not_fit(_: Path):
    from onnxq.passes.base import RunContext
    from onnxq.passes.rewrites.normalizations import fold_scalars
    from tests.passes.kit import make_state

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
    quantized = onnxq.quantize(gemm(64, 64), rows(8, 64), EVERYTHING, overrides={"latency": False}).model
    other = gemm(64, 64)
    other.graph.node[0].name = "other"
    for tensor in other.graph.initializer:
        tensor.name = f"o{tensor.name}"
    other.graph.node[0].input[1:] = ["ow", "ob"]
    found = onnxq.profile_model(other, quantized, rows(8, 64))
    return [*found.fixed, *found.warnings]


@reach("R113")
def not_switched(_: Path):
    return renamed()


@reach("W117")
def not_the_whole_account(_: Path):
    return renamed()


def saturating() -> onnx.ModelProto:
    return model(
        """g (float[N,64] x) => (float[N,64] y) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s) y = MatMul(d, v) }""",
        s=np.asarray(0.1, F), z=np.asarray(0, np.uint8), w=np.full((64, 64), 127, np.int8),
    )  # fmt: skip


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


@reach("F101")
def a_rule_says_float(_: Path):
    return planned(gemm(64, 64), rules=[{"op": "Gemm", "set": {"float": True}}])


@reach("F102")
def too_small(_: Path):
    return planned(gemm(2, 2))


@reach("F103")
def the_first_convolution(_: Path):
    return planned(conv(channels=3))


@reach("F104")
def on_request(_: Path):
    body = "g (float[N,64,64] x, float[N,64,64] z) => (float[N,64,64] y) { y = MatMul(x, z) }"
    return list(onnxq.make_plan(model(body), config="trt-int8").left_float)


@reach("F105")
def float_was_faster(_: Path):
    return onnxq.make_plan(gemm(2, 2), rows(8, 2), overrides={"placement": "measured"}).left_float


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


@reach("F109")
def embeddings_for_tensorrt(_: Path):
    return onnxq.make_plan(words(), config="trt-int8").left_float


@reach("W101")
def made_up(_: Path):
    return onnxq.quantize(gemm(64, 64), config=EVERYTHING, overrides={"latency": False}).report.warnings


@reach("W102")
def allowed(_: Path):
    return planned(gemm(64, 64), saturation="allow")


@reach("W103")
def other_cpus(_: Path):
    return planned(net(24, 10, ["dense", "dense"]))


@reach("W104")
def slower_type(_: Path):
    return planned(gemm(64, 64), rules=[FORCE], activations={"bits": 4})


@reach("W105")
def bits_attribute(_: Path):
    quantized = onnxq.quantize(gemm(64, 64), rows(8, 64), EVERYTHING, overrides={"latency": False}).model
    return onnxq.annotate_bits(quantized, overrides={"bits_attribute": True}).warnings


@reach("W106")
def damaged_notes(_: Path):
    proto = gemm()
    proto.metadata_props.add(key="onnxq.bits", value="oops")
    return onnxq.inspect(proto).warnings


@reach("W107")
def sums_overflow(folder: Path):
    shown = CliRunner().invoke(cli, ["prove", str(saved(folder, saturating())), "--engine", "ort", "--json"])

    class Shown:
        code = json.loads(shown.stdout)["warnings"][-1]["code"]

    return Shown()


def judged(*sqnr: float, **more: Any) -> list[Any]:
    check = OutputCheck(name="y", sqnr_db=(sqnr[0], sqnr[1]), cosine=(1.0, 1.0), agreement_db=30.0)
    return list(Report(target="ort", pairs=1, checks=(check,), **more).alarms())


@reach("W108")
def far_away(_: Path):
    return judged(3.0, 3.0)


@reach("W109")
def changed_by_optimizations(_: Path):
    return judged(40.0, 20.0)


@reach("W110")
def slower(_: Path):
    return judged(40.0, 40.0, latency=LatencyRatio(float_ms=1.0, int8_ms=2.0))


@reach("W111")
def nothing_done(_: Path):
    return list(onnxq.quantize(gemm(2, 2), rows(8, 2), overrides={"latency": False}).report.alarms())


@reach("W112")
def other_kernels(folder: Path):
    from onnxq.backends import find_engine
    from onnxq.backends.engine import ENGINE
    from onnxq.backends.ort.engine import OPTIMIZED

    saved(folder, saturating(), OPTIMIZED)
    body = "g (float[N,64] x) => (float[N,64] y) { y = QLinearConv(x, x, x, x, x, x, x, x) }"
    saved(folder, model(body), ENGINE)
    return list(find_engine("ort").list_warnings(folder))


@reach("W113")
def initializers_as_inputs(_: Path):
    proto = gemm()
    proto.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [4, 3]))
    return load_model(proto).notes


@reach("W114")
def left_out(_: Path):
    return planned(gemm(64, 64), rows(4, 64), effort="high")


@reach("W115")
def another_processor(_: Path):
    return warn_unmeasured_cpu(onnxq.make_plan(gemm(64, 64)), "arm64")


@reach("W116")
def without_optimizations(_: Path):
    overrides = {"effort": "fast", "high_precision": "float32"}
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
        written(folder, cache(scales), "c"), network_file(folder, proto), overrides={"target": "ort"}, config=config
    ).notes


def network_file(folder: Path, proto: onnx.ModelProto) -> Path:
    """The model as a file, as TensorRT read it."""
    return saved(folder, proto)
