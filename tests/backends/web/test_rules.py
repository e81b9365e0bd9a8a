"""What is placed where: costs of WebAssembly, the table of WebGPU, and the kernels that rules promise."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import find_backend, find_target
from onnxq.backends.costs import OpCase
from onnxq.backends.web.costs import COSTS, count_work, fits_matrix
from onnxq.backends.web.engine import VERSION, find_package, read_version
from onnxq.graph import GraphIndex, name_nodes
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
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


def test_depthwise_convolutions_of_small_maps_are_products_by_matrices() -> None:
    """As measured: where many rows would be copied, and not where the matrix would be large."""
    assert fits_matrix((240, 4, 4), (240, 4, 4), 9)
    assert fits_matrix((144, 7, 7), (144, 4, 4), 9)
    for channels, side in ((16, 4), (144, 7), (96, 14)):
        assert not fits_matrix((channels, side, side), (channels, side, side), 9)
    assert speedup(conv(240, 1, 3, 4, group=240)) < 0.6
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in _make_block().graph.initializer}
    text = """(float[n,64,4,4] x) => (float[n,64,4,4] y) { e = Conv(x, a) f = Clip(e, low, high)
        d = Conv <pads=[1,1,1,1], group=384> (f, b) g = Clip(d, low, high) y = Conv(g, c) }"""
    model = kit.graph(text, 17, **arrays, low=np.float32(0), high=np.float32(6))
    samples = {"x": np.random.default_rng(1).standard_normal((8, 64, 4, 4)).astype(np.float32)}
    settings = {"effort": "fast", "latency": False, "rules": [{"node": "y/Conv", "set": {"quantize": True}}]}
    result = onnxq.quantize(model, samples, "web-int8", overrides=settings)
    ops = [node.op_type for node in result.model.graph.node]
    # Of the data, the result, and what is folded.
    assert ops.count("Transpose") == 3
    assert ops.count("QuantizeLinear") > 0
    again = onnxq.apply(model, from_json(to_json(result.plan)), samples, overrides={"latency": False})
    assert again.model.SerializeToString() == result.model.SerializeToString()
    exact, answer = (Session(each).run(samples)["y"] for each in (model, result.model))
    assert np.square(answer - exact).sum() < 1e-3 * np.square(exact).sum()


_CHAIN = """(float[n,16,8,8] x) => (float[n,16,8,8] z, float[n,16,1,1] f) {
    c = Conv(x, w) r = Relu(c) d = Conv <group=16, pads=[1,1,1,1]>(r, k) l = Clip(d, low, high)
    p = MaxPool <kernel_shape=[2,2], strides=[1,1], pads=[0,0,1,1]>(l) e = Conv(p, w) z = Clip(e, under, high)
    g = GlobalAveragePool(p) h = Conv(g, w) f = Relu(h) }"""
Chain = tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, onnxq.Result]]


@pytest.fixture(scope="module")
def chain() -> Chain:
    """A model, its samples, and its files by preset."""
    draw = np.random.default_rng(3).standard_normal
    arrays = {"w": draw((16, 16, 1, 1)), "k": draw((16, 1, 3, 3)), "low": 0.0, "under": -1.0, "high": 6.0}
    model = kit.graph(_CHAIN, 17, **{name: np.asarray(value, np.float32) for name, value in arrays.items()})
    samples = {"x": draw((16, 16, 8, 8)).astype(np.float32)}
    settings = {"effort": "fast", "latency": False, "rules": [{"node": "*", "set": {"quantize": True}}]}
    presets = ("web-int8", "ort-int8")
    return model, samples, {name: onnxq.quantize(model, samples, name, overrides=settings) for name in presets}


@pytest.mark.recent_ort
def test_activations_behind_products_are_computed_on_integers(chain: Chain) -> None:
    """Kernels in WebAssembly clamp each result with a branch."""
    model, samples, results = chain
    web = results["web-int8"]
    footroom = {str(site.site): site.qparams for site in web.plan.sites if site.spec.footroom}
    # What only moves values has their scale. Where few are clamped, a Max takes longer.
    assert {name: int(qparams.zero_point) for name, qparams in footroom.items()} == {"r": 85, "l": 85, "p": 85}
    kinds = [node.op_type for node in web.model.graph.node if node.op_type not in ("Conv", "DequantizeLinear")]
    quantize = "QuantizeLinear"
    behind = ["MaxPool", quantize, "Clip", quantize, "GlobalAveragePool", quantize, "Relu", quantize]
    assert kinds == [quantize, quantize, "Max", quantize, "Max", *behind]
    exact = Session(model).run(samples)["z"]
    answers = {name: Session(result.model).run(samples)["z"] for name, result in results.items()}
    assert np.array_equal(answers["web-int8"], Session(web.model, optimize=False).run(samples)["z"])
    noise = {name: np.square(answer - exact).mean() for name, answer in answers.items()}
    # Steps are half as large again.
    assert noise["web-int8"] < 1.5**2 * noise["ort-int8"]


@pytest.mark.recent_ort
def test_a_plan_with_footroom_makes_the_same_file(chain: Chain) -> None:
    model, samples, results = chain
    plan = from_json(to_json(results["web-int8"].plan))
    again = onnxq.apply(model, plan, samples, overrides={"latency": False})
    assert again.model.SerializeToString() == results["web-int8"].model.SerializeToString()


@pytest.mark.recent_ort
def test_a_pair_with_a_max_can_be_switched_off(chain: Chain) -> None:
    model, samples, results = chain
    profile = onnxq.profile_model(model, results["web-int8"].model, samples)
    assert not profile.fixed
    assert profile.outputs[0].float_db > 100


def test_rules_are_those_of_onnx_runtime() -> None:
    ort, web = find_target("ort"), find_target("web")
    assert [rule.name for rule in web.rules] == [rule.name for rule in ort.rules]
    assert web.costs is COSTS
    assert set(find_backend("web").modes) == set(find_backend("ort").modes)


def test_the_table_of_webgpu_is_that_of_the_package() -> None:
    (table,) = find_backend("web").tables
    assert VERSION in table.source
    package = find_package()
    if package is None or read_version(package) != VERSION:
        pytest.skip(f"no npm package onnxruntime-web {VERSION}")
    text = (package / "docs" / "webgpu-operators.md").read_text(encoding="utf-8")
    listed = {
        op if domain == "ai.onnx" else f"{domain}.{op}"
        for op, domains in re.findall(r"^\| (\w+) \| ([^|]*\(.*?) \|", text, re.MULTILINE)
        for domain in re.findall(r"([\w.]+)\(", domains)
        if domain != "com.ms.internal.nhwc"
    }
    assert listed == table.operators


def test_operators_without_a_kernel_in_webgpu_are_named() -> None:
    (table,) = find_backend("web").tables
    assert table.list_missing(GraphIndex(name_nodes(kit.ort_residual())).nodes) == ("QuantizeLinear",)


def test_the_table_of_costs_says_where_it_is_from() -> None:
    path = Path(onnxq.__file__).parent / "backends" / "web" / "costs.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    assert "Node.js" in table["origin"]
    assert {"pointwise", "dense", "grouped", "depthwise", "matrix", "MatMul", "Gemm", "unknown", "residual"} <= set(
        table["prices"]
    )
