"""What is placed where: costs of WebAssembly, the table of WebGPU, and the kernels that rules promise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_backend, find_target
from onnxq.backends.base import OpCase
from onnxq.backends.web.costs import COSTS, count_work
from onnxq.backends.web.node import VERSION, find_package, read_version
from onnxq.graph import GraphIndex, name_nodes
from onnxq.sites import Role
from tests.engines import kit

WASM = COSTS["wasm"]


def conv(made: int, read: int, kernel: int, side: int, group: int = 1, activation: str = "") -> OpCase:
    """A convolution of one picture."""
    return OpCase(
        op_type="Conv",
        inputs=((1, read * group, side, side),),
        output=(1, made, side, side),
        weight=(made, read, kernel, kernel),
        group=group,
        kernel=(kernel, kernel),
        strides=(1, 1),
        activation=activation,
    )


def speedup(case: OpCase) -> float:
    cost = WASM.predict_node(case)
    return cost.float_us / cost.int8_us


def test_what_pays_is_dense_and_deep() -> None:
    """As measured: many products for each result, which integer kernels round and clamp one by one."""
    assert speedup(conv(192, 1152, 1, 7)) > 1.8
    assert speedup(conv(64, 64, 3, 14)) > 1.5
    assert speedup(conv(96, 16, 1, 56, activation="Relu")) < 0.8
    # Depthwise: on large maps float kernels fill their vectors.
    assert speedup(conv(96, 1, 3, 56, group=96)) < 0.5
    linear = OpCase(op_type="MatMul", inputs=((64, 384),), output=(64, 1536), weight=(384, 1536))
    assert speedup(linear) > 1.8


def test_sizes_that_are_not_known_do_not_make_int8_look_cheap() -> None:
    unknown = WASM.predict_node(OpCase(op_type="Conv", inputs=(None,), output=None, weight=(192, 1152, 1, 1)))
    assert unknown.int8_us >= unknown.float_us
    nobody = WASM.predict_node(OpCase(op_type="Nobody", inputs=(), output=(1, 100)))
    assert nobody.int8_us > nobody.float_us


def test_an_lstm_is_a_product_of_its_inputs_and_one_of_each_step() -> None:
    short, long = (
        WASM.predict_node(OpCase(op_type="LSTM", inputs=((steps, 1, 64),), output=None, weight=(1, 256, 64)))
        for steps in (1, 10)
    )
    assert 0 < short.float_us < long.float_us < 10.1 * short.float_us
    assert count_work(OpCase(op_type="LSTM", inputs=(), output=None, weight=(1, 256, 64)))[0] == "LSTM"


def _make_block() -> onnx.ModelProto:
    """Expand, depthwise, project, as in MobileNets."""
    rng = np.random.default_rng(0)
    shapes = {"a": (384, 64, 1, 1), "b": (384, 1, 3, 3), "c": (64, 384, 1, 1)}
    arrays = {k: (rng.standard_normal(s) / np.prod(s[1:]) ** 0.5).astype(np.float32) for k, s in shapes.items()}
    text = """(float[1,64,28,28] x) => (float[1,64,28,28] y) {
        e = Conv(x, a) f = Relu(e) d = Conv <pads=[1,1,1,1], group=384> (f, b) g = Relu(d) y = Conv(g, c) }"""
    return kit.graph(text, 17, **arrays)


def test_a_depthwise_block_stays_float_but_for_its_end() -> None:
    samples = {"x": np.random.default_rng(1).standard_normal((8, 64, 28, 28)).astype(np.float32)}
    result = onnxq.quantize(_make_block(), samples, "web-int8", overrides={"effort": "fast", "latency": False})
    assert result.plan.target == "web"
    assert {str(site.site) for site in result.plan.sites if site.role is Role.WEIGHT} == {"c"}
    assert {node.subject for node in result.report.left_float} == {"e/Conv", "d/Conv"}
    (check,) = result.report.engines
    # Kernels of integers count as such, though the graph does not tell the types of tensors between them.
    assert check.reason or dict(check.types)["int8"] == 1


def test_rules_are_those_of_onnx_runtime() -> None:
    ort, web = find_target("ort"), find_target("web")
    assert [rule.kernel for rule in web.rules] == [rule.kernel for rule in ort.rules]
    assert web.costs is COSTS
    assert set(find_backend("web").modes) == set(find_backend("ort").modes)


def test_the_table_of_webgpu_is_that_of_the_package() -> None:
    (table,) = find_backend("web").tables
    assert VERSION in table.source
    package = find_package()
    if package is None or read_version(package) != VERSION:
        pytest.skip(f"no npm package onnxruntime-web {VERSION}")
    text = (package / "docs" / "webgpu-operators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([^|]*\(.*?) \|", text, re.MULTILINE)
    listed = {
        op if domain == "ai.onnx" else f"{domain}.{op}"
        for op, domains in rows
        for domain in re.findall(r"([\w.]+)\(", domains)
        if domain != "com.ms.internal.nhwc"
    }
    assert listed == table.operators


def test_operators_without_a_kernel_in_webgpu_are_named() -> None:
    (table,) = find_backend("web").tables
    missing = table.list_missing(GraphIndex(name_nodes(kit.ort_residual())).nodes)
    assert missing == ("QuantizeLinear",)


def test_the_table_of_costs_says_where_it_is_from() -> None:
    path = Path(onnxq.__file__).parent / "backends" / "web" / "costs.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    assert "Node.js" in table["origin"]
    assert {"pointwise", "dense", "grouped", "depthwise", "MatMul", "Gemm", "unknown", "residual"} <= set(
        table["prices"]
    )
