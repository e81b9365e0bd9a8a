"""Models as they are found: every opset, functions, loops, external data, cut off or overridable initializers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxq
from onnxq.errors import ModelError
from onnxq.runtime import optimize_graph
from tests.pipeline.models import EVERYTHING, images, residual


def good(result: onnxq.Result) -> None:
    for check in result.report.checks:
        assert min(check.sqnr_db) > 25, check
        assert check.agreement_db > 35, check


NEW = [pytest.param(opset, marks=pytest.mark.recent_ort) for opset in (23, 24)]


@pytest.mark.parametrize("opset", [*range(11, 23), *NEW])
def test_every_opset(opset: int) -> None:
    result = onnxq.quantize(residual(opset=opset), images(), EVERYTHING, overrides={"latency": False})
    good(result)
    version = result.model.opset_import[0].version
    assert version == max(opset, 13)
    assert Counter(n.op_type for n in optimize_graph(result.model).graph.node)["QLinearConv"] == 3


def test_old_models_list_their_weights_as_inputs() -> None:
    proto = residual(opset=11)
    proto.ir_version = 3
    for tensor in proto.graph.initializer:
        proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    good(result)
    assert [value.name for value in result.model.graph.input] == ["x"]


def test_functions_are_inlined_and_quantized() -> None:
    block = parser.parse_function(
        """<domain: "local", opset_import: ["" : 17]>
        Block (x, w) => (y) {
            a = Conv <pads=[1,1,1,1]>(x, w)
            y = Relu(a)
        }"""
    )
    rng = np.random.default_rng(0)
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        g (float[N,32,8,8] x) => (float[N,32,8,8] y) {
            a = local.Block(x, w)
            y = local.Block(a, v)
        }"""
    )
    proto.functions.append(block)
    for name in ("w", "v"):
        weight = rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 17
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    good(result)
    assert Counter(n.op_type for n in optimize_graph(result.model).graph.node)["QLinearConv"] == 2


def test_a_loop_body_is_refused_and_the_rest_quantized() -> None:
    rng = np.random.default_rng(0)
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["h_in", "w"], ["h_mm"]),
            helper.make_node("Tanh", ["h_mm"], ["h_out"]),
            helper.make_node("Identity", ["go"], ["go_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h_in", TensorProto.FLOAT, ["N", 128]),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h_out", TensorProto.FLOAT, ["N", 128]),
        ],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["h0"], name="before"),
        helper.make_node("Loop", ["count", "", "h0"], ["y"], name="Loop", body=body),
    ]
    weights = {name: rng.standard_normal((128, 128)).astype(np.float32) / 11 for name in ("w", "v")}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 128])],
        [*(numpy_helper.from_array(v, k) for k, v in weights.items()), numpy_helper.from_array(np.array(3), "count")],
    )
    proto = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    data = {"x": rng.standard_normal((32, 128)).astype(np.float32)}
    result = onnxq.quantize(proto, data, EVERYTHING, overrides={"latency": False})
    good(result)
    assert {site.site.scope for site in result.plan.sites} == {""}
    refused = {refusal.subject: refusal for refusal in result.plan.refusals}
    assert "Loop" in refused["Loop.body"].reason
    assert "weight-only" in refused["Loop.body"].fix
    weights = onnxq.quantize(proto, data, "ort-int8-weights", overrides={"latency": False})
    good(weights)
    assert {site.site.scope for site in weights.plan.sites} == {"", "Loop.body"}
    assert weights.report.refusals == ()


def test_external_data_in_and_out(tmp_path: Path) -> None:
    source, target = tmp_path / "in" / "m.onnx", tmp_path / "out" / "m.onnx"
    source.parent.mkdir()
    target.parent.mkdir()
    onnx.save(residual(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    files = {path: path.read_bytes() for path in source.parent.iterdir()}
    result = onnxq.quantize(
        source, images(), EVERYTHING, overrides={"latency": False, "external_data": True}, out=target
    )
    good(result)
    assert {path: path.read_bytes() for path in source.parent.iterdir()} == files
    assert {path.name for path in target.parent.iterdir()} == {"m.onnx", "m.onnx_data"}
    onnx.checker.check_model(target)


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(residual(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights\.bin"):
        onnxq.quantize(source, images(), EVERYTHING)


def test_batch_norm_and_hard_swish_are_folded_first() -> None:
    rng = np.random.default_rng(0)
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 13]>
        g (float[N,32,8,8] x) => (float[N,32,8,8] y)
            <float three = {3.0}, float zero = {0.0}, float six = {6.0}> {
            a = Conv <pads=[1,1,1,1]>(x, w)
            n = BatchNormalization(a, scale, bias, mean, var)
            p = Add(n, three)
            c = Clip(p, zero, six)
            m = Mul(n, c)
            h = Div(m, six)
            y = Conv <pads=[1,1,1,1]>(h, v)
        }"""
    )
    for name in ("w", "v"):
        weight = rng.standard_normal((32, 32, 3, 3)).astype(np.float32) / 8
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    for name in ("scale", "bias", "mean", "var"):
        value = rng.uniform(0.5, 1.5, 32).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    good(result)
    ops = Counter(node.op_type for node in result.model.graph.node)
    assert ops["HardSwish"] == 1
    assert ops["BatchNormalization"] == 0
    assert Counter(n.op_type for n in optimize_graph(result.model).graph.node)["QLinearConv"] == 2


def test_no_data_means_a_warning_nobody_can_miss() -> None:
    result = onnxq.quantize(residual(), config=EVERYTHING, overrides={"latency": False})
    assert result.report.synthetic
    assert "SYNTHETIC" in result.plan.warnings[0]
    again = onnxq.quantize(residual(), config=EVERYTHING, overrides={"latency": False})
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)


def test_lost_answers_are_said() -> None:
    """One channel scaled up by 2**12 and down again behind: per-tensor activations cannot hold it."""
    proto = residual()
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    scales = np.exp2(np.linspace(-9, 9, 32)).astype(np.float32)
    for name, shape in {"w0": (32, 1, 1, 1), "b0": (32,)}.items():
        value = numpy_helper.to_array(held[name]) * scales.reshape(shape)
        held[name].CopyFrom(numpy_helper.from_array(value, name))
    for name in ("w1", "w2"):
        value = numpy_helper.to_array(held[name]) / scales.reshape(1, 32, 1, 1)
        held[name].CopyFrom(numpy_helper.from_array(value, name))
    result = onnxq.quantize(proto, images(), EVERYTHING, overrides={"latency": False})
    assert min(result.report.checks[0].sqnr_db) < 10
    assert any("far from the float model's" in alarm for alarm in result.report.alarms())
