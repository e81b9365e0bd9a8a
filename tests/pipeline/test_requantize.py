"""A model that holds pairs already: they and their kernels are kept, and only what is float is quantized."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnxruntime import InferenceSession
from onnxruntime.quantization import quantize_dynamic

import onnxq
from onnxq.annotate import find_existing, find_pairs, inspect_model
from onnxq.backends import load_config
from onnxq.config import Config
from onnxq.emit import unpack_plan
from onnxq.errors import VerificationError
from onnxq.graph import name_nodes
from onnxq.passes.state import FloatState
from onnxq.pipeline.prepared import prove_equal
from onnxq.plan import Plan, from_json, to_json
from onnxq.sites import Role, TensorId
from tests.backends.graphs import GRAPHS, model
from tests.cli.kit import run
from tests.engines.kit import graph
from tests.graph.kit import model as parse
from tests.networks import add_arrays
from tests.passes.kit import random_weights
from tests.pipeline.models import BALANCED, EVERYTHING, add_rule, images, quantize, residual
from tests.pipeline.requantized import assert_kept, by_onnxruntime, kernels, pair_bytes
from tests.planner.kit import network


def leaving(*nodes: str, config: Config = EVERYTHING) -> Config:
    """The configuration with these nodes float."""
    return add_rule(config, node=nodes, set={"float": True})


def samples(proto: onnx.ModelProto, count: int = 8) -> list[dict[str, np.ndarray]]:
    dims = [dim.dim_value or 1 for dim in proto.graph.input[0].type.tensor_type.shape.dim]
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal(dims).astype(np.float32)} for _ in range(count)]


def quantized(proto: onnx.ModelProto, config: Config = EVERYTHING) -> onnxq.Result:
    return quantize(proto, samples(proto), config)


def named(name: str) -> onnx.ModelProto:
    text, weights, _, _ = GRAPHS[name]
    return model(text, weights=weights)


@cache
def quantize_whole(name: str) -> onnxq.Result:
    """That network with nothing left float, made once for all tests that compare with it."""
    return quantized(residual() if name == "residual" else named(name))


@cache
def quantize_partly() -> onnxq.Result:
    """The residual network with one convolution left float."""
    return quantized(residual(), leaving("c/Conv"))


def slim_plan(proto: onnx.ModelProto) -> Plan:
    """The plan in the file's metadata."""
    return unpack_plan(next(entry.value for entry in proto.metadata_props if entry.key == "onnxq.plan"))


# --- nothing left


@pytest.mark.parametrize("target", ["ort", "trt"])
def test_a_quantized_file_is_refused_and_nothing_is_written(target: str, tmp_path: Path) -> None:
    onnx.save(residual(), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", **images())
    first = ["quantize", tmp_path / "m.onnx", "--data", tmp_path / "data.npz", "--target", target, "-q"]
    assert run(*first).exit_code == 0
    made = tmp_path / "m.q.onnx"
    count = len(find_pairs(onnx.load(made)))
    again = ["quantize", made, "--data", tmp_path / "data.npz", "--target", target, "-o", tmp_path / "twice.onnx"]
    done = run(*again)
    assert done.exit_code == 1
    assert f"already quantized: {count} pairs kept" in " ".join(done.output.split())
    assert not (tmp_path / "twice.onnx").exists()


@pytest.mark.parametrize("name", GRAPHS)
def test_no_rule_asks_for_more_the_second_time(name: str) -> None:
    with pytest.raises(onnxq.OnnxqError, match=r"already quantized: .*\[Q125\]"):
        quantized(quantize_whole(name).model)


@pytest.mark.recent_ort
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
def test_a_file_of_onnxruntime_is_refused_too(form: str, tmp_path: Path) -> None:
    proto = by_onnxruntime(tmp_path, form, per_channel=form == "QDQ")
    counted = "16 pairs" if form == "QDQ" else "1 pair and 6 operators"
    with pytest.raises(onnxq.OnnxqError, match=f"already quantized: {counted} kept"):
        onnxq.quantize(proto, images(), overrides={"latency": False})


def test_what_sizes_leave_float_is_told() -> None:
    """A pair at the input of a convolution that integers would make slower."""
    text = (
        "g (float[1,2,6] x) => (float[1,3,4] y) { q = QuantizeLinear(x, s) d = DequantizeLinear(q, s) y = Conv(d, w) }"
    )
    proto = model(text, weights={"s": (), "w": (3, 2, 3)})
    with pytest.raises(onnxq.OnnxqError, match=r"1 pair kept, and nothing is left .*; what is float .* would not pay"):
        onnxq.quantize(proto, samples(proto), overrides={"latency": False})


def test_a_float_table_is_left_to_quantize(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model builders write products in 4 bits, and tables in float."""
    text = """g (int64[N,T] ids) => (float[N,T,32] y) {
        x = Gather(table, ids) y = MatMul(x, w) }"""
    rng = np.random.default_rng(0)
    table, w = (rng.normal(size=size).astype("f4") for size in ((512, 64), (64, 32)))
    plain = {"latency": False, "embeddings": "float"}
    proto = parse(text, 21, 10, table=table, w=w)
    built = onnxq.quantize(proto, None, "ort-int4-weights", overrides={**plain, "emit": "nbits"}).model
    done = onnxq.quantize(built, None, "ort-int4-weights", overrides={"latency": False})
    assert [site.spec.bits for site in done.plan.sites] == [8]
    assert len(done.model.SerializeToString()) < len(built.SerializeToString()) - 2 * table.size
    with pytest.raises(onnxq.OnnxqError, match="nothing is left"):
        onnxq.quantize(built, None, "ort-int4-weights", overrides=plain)
    monkeypatch.setattr("onnxq.graph.light.LARGE_BYTES", 1)
    assert onnxq.quantize(built, None, "ort-int4-weights", overrides={"latency": False}).plan.sites == done.plan.sites


# --- partly quantized


@pytest.mark.parametrize(("name", "left"), [
    ("conv", "conv0"), ("conv", "conv2"), ("gemm-chain", "gemm2"), ("residual-add", "conv2"),
    ("gate-mul", "conv0"), ("gate-mul", "conv5"), ("concat", "conv1"), ("max-pool", "conv0"), ("move", "conv2"),
    ("global-average-pool", "globalaveragepool1"),
])  # fmt: skip
def test_what_is_float_joins_the_pairs_that_are_there(name: str, left: str) -> None:
    """Quantized in two steps, a network has the kernels that it has quantized in one."""
    whole = kernels(quantize_whole(name).model)
    part = quantized(named(name), leaving(left)).model
    assert kernels(part) != whole
    done = quantized(part)
    assert kernels(done.model) == whole
    assert_kept(part, done.model)
    assert len(done.report.kept) == len(pair_bytes(part))
    assert min(check.sqnr_db[0] for check in done.report.checks) > 20


def test_the_passes_of_default_effort_leave_kept_pairs_alone() -> None:
    part = quantized(residual(), leaving("c/Conv", "y/Gemm")).model
    done = quantize(part, images(), BALANCED)
    assert_kept(part, done.model)
    assert kernels(done.model) == kernels(quantize_whole("residual").model)
    computed = {edge.node for site in done.plan.sites if site.role is Role.WEIGHT for edge in site.consumers or ()}
    assert computed == {"c/Conv", "y/Gemm"}


def test_pairs_for_tensorrt_are_joined() -> None:
    config = load_config("trt-int8", {"activations.observer": "minmax", "effort": "fast"})
    whole = quantize(residual(), images(), config)
    for left in ("a/Conv", "c/Conv", "d/Conv"):
        part = quantize(residual(), images(), leaving(left, config=config))
        done = quantize(part.model, images(), config)
        assert_kept(part.model, done.model)
        assert set(pair_bytes(done.model)) == set(pair_bytes(whole.model))
        assert not any("does not read them" in warning for warning in done.report.warnings)


@pytest.mark.parametrize(("form", "per_channel"), [("QDQ", False), ("QDQ", True), ("QOperator", True)])
def test_what_onnxruntime_left_float_is_quantized(form: str, per_channel: bool, tmp_path: Path) -> None:
    part = by_onnxruntime(tmp_path, form, per_channel=per_channel, leave=("a/Conv", "c/Conv", "y/Gemm"))
    done = quantize(part, images())
    found = kernels(done.model)
    assert (found["QLinearConv"], found["QGemm"]) == (3, 1)
    assert not {"Conv", "Gemm", "Clip"} & set(found)
    assert_kept(part, done.model)
    assert done.report.already.startswith("already quantized: ")


def test_kernels_that_onnxruntime_makes_between_pairs_by_itself_stay(tmp_path: Path) -> None:
    """Nothing is put between kept pairs where the plan leaves a node float."""
    part = by_onnxruntime(tmp_path, "QDQ", leave=("c/Conv", "a/Conv"))
    done = quantize(part, images(), leaving("c/Conv"))
    assert kernels(done.model)["QLinearConv"] == kernels(part)["QLinearConv"] + 1
    assert kernels(done.model)["Clip"] == 0


MODELOPT = """g (float[1,32,14,14] x) => (float[1,32,14,14] y)
    <float s = {0.03}, int8 z = {0}, float t = {0.002}, int8 q = {0}> {
    xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) wq = QuantizeLinear(w, t, q)
    wd = DequantizeLinear(wq, t, q) a = Conv <pads=[1,1,1,1], kernel_shape=[3,3]>(xd, wd, b) r = Relu(a)
    y = Conv <pads=[1,1,1,1], kernel_shape=[3,3]>(r, v, c)
}"""


def test_float_weights_behind_pairs_are_kept_so() -> None:
    """The style of ModelOpt: the weight is a float initializer that goes through QuantizeLinear in the graph."""
    proto = model(MODELOPT, weights={"w": (32, 32, 3, 3), "b": (32,), "v": (32, 32, 3, 3), "c": (32,)})
    config = load_config("trt-int8", {"activations.observer": "minmax"})
    done = quantize(proto, samples(proto), config)
    assert_kept(proto, done.model)
    assert [str(site.site) for site in done.plan.sites] == ["r", "v"]
    assert done.report.already == "already quantized: 2 pairs kept"
    weight = next(tensor for tensor in done.model.graph.initializer if tensor.name == "w")
    assert weight.data_type == TensorProto.FLOAT


@pytest.mark.recent_ort
def test_weight_only_nodes_stay_weight_only() -> None:
    text = "g (float[8,256] x) => (float[8,256] y) { i = Relu(x) a = MatMul(i, w) r = Tanh(a) y = MatMul(r, v) }"
    proto = model(text, weights={"w": (256, 256), "v": (256, 256)})
    config = load_config("ort-int4-weights")
    part = quantized(proto, leaving("matmul1", config=config)).model
    done = quantized(part)
    assert_kept(part, done.model)
    assert [str(site.site) for site in done.plan.sites] == ["i", "w"]
    assert kernels(done.model)["MatMulNBits"] == kernels(part)["MatMulNBits"] == 1
    assert kernels(done.model)["MatMulIntegerToFloat"] == 1
    reasons = {one.subject: one.reason for one in done.plan.left_float}
    assert "its weight is already quantized" in reasons["matmul3"]
    packed = quantized(part, config)
    assert_kept(part, packed.model)
    assert [str(site.site) for site in packed.plan.sites] == ["w"]


def test_narrow_bits_are_kept_with_their_clips() -> None:
    narrow = load_config(EVERYTHING, {"activations.bits": 6, "weights.bits": 4})
    part = quantized(named("conv"), leaving("conv2", config=narrow))
    done = quantized(part.model)
    assert_kept(part.model, done.model)
    bits = {str(pair.site): pair.bits for pair in inspect_model(done.model).pairs}
    assert bits == {"x": 6, "w": 4, "b": 32, "r": 6, "v": 8, "c": 32, "y": 8}
    assert slim_plan(done.model).site(TensorId("r")).spec.bits == 6


def test_operators_that_quantize_as_they_run_are_passed_by(tmp_path: Path) -> None:
    text = "g (float[N,64] x) => (float[N,64] y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, v) }"
    onnx.save(model(text, weights={"w": (64, 64), "v": (64, 64)}), tmp_path / "m.onnx")
    quantize_dynamic(str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx"), nodes_to_exclude=["matmul2"])
    proto = onnx.load(tmp_path / "q.onnx")
    done = quantized(proto)
    assert done.report.already == "already quantized: 2 operators kept"
    assert [str(site.site) for site in done.plan.sites] == ["r", "v"]
    assert {node.op_type for node in proto.graph.node} < {node.op_type for node in done.model.graph.node}


# --- the plan and the report


def test_a_product_of_dynamic_data_is_in_float32_beside_float16() -> None:
    # In float16 its scale, a product of two, would be 0. tf2onnx writes such pairs.
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((64, 64)).astype(np.float32) / 999, "t": np.float32(1e-5)}
    text = """(float[16,64] x) => (float[16,64] y) { a = MatMul(x, w) r = Relu(a) b, s, z = DynamicQuantizeLinear(r)
        d = DequantizeLinear(b, s, z) e = DequantizeLinear(v, t) y = MatMul(d, e) }"""
    proto = graph(text, v=rng.integers(-99, 99, (64, 64)).astype(np.int8), **arrays)
    done = quantize(proto, samples(proto), load_config("trt-int8", {"effort": "fast"}))
    assert "MatMulInteger" in [node.op_type for node in done.model.graph.node]
    assert done.report.checks[0].sqnr_db[0] > 25
    assert any("trt cannot read DynamicQuantizeLinear" in str(warning) for warning in done.report.warnings)


def test_the_plan_describes_both_and_is_carried_out_again() -> None:
    part = quantize_partly()
    done = quantized(part.model)
    kept = {str(site.site) for site in done.plan.existing}
    assert kept == {str(site.site) for site in part.plan.sites}
    assert {site.rule for site in done.plan.existing} == {site.rule for site in part.plan.sites}
    assert not kept & {str(site.site) for site in done.plan.sites}
    noted = slim_plan(done.model)
    assert {site.site for site in noted.all_sites} == {site.site for site in quantize_whole("residual").plan.sites}
    derived = next(site for site in done.plan.sites if site.role is Role.BIAS)
    assert derived.derived is not None
    assert derived.derived[0] in {site.site for site in done.plan.existing}
    read = from_json(to_json(done.plan))
    assert read == done.plan
    again = onnxq.apply(part.model, read)
    assert pair_bytes(again.model) == pair_bytes(done.model)
    assert kernels(again.model) == kernels(done.model)


def test_a_plan_does_not_fit_other_kept_numbers() -> None:
    part = quantize_partly()
    plan = quantized(part.model).plan
    other = onnx.ModelProto.FromString(part.model.SerializeToString())
    scale = next(tensor for tensor in other.graph.initializer if tensor.name == "r/scale")
    scale.CopyFrom(numpy_helper.from_array(np.float32(2) * numpy_helper.to_array(scale), "r/scale"))
    with pytest.raises(onnxq.OnnxqError, match="computed from other weights than this model's"):
        onnxq.apply(other, plan)
    own = onnxq.apply(other, plan, overrides={"new_weights": True})
    assert_kept(other, own.model)
    bias = next(site for site in own.plan.sites if site.role is Role.BIAS)
    was = next(site for site in plan.sites if site.role is Role.BIAS)
    np.testing.assert_allclose(bias.qparams.scale, 2 * was.qparams.scale, rtol=1e-6)


def test_pairs_that_the_target_does_not_read_are_named(tmp_path: Path) -> None:
    part = by_onnxruntime(tmp_path, "QDQ", leave=("a/Conv",))
    config = load_config("trt-int8", {"activations.observer": "minmax", "effort": "fast"})
    done = quantize(part, images(), config)
    assert_kept(part, done.model)
    assert any("kept, though trt does not read them" in warning for warning in done.report.warnings)


def test_it_is_said_first(tmp_path: Path) -> None:
    part = quantize_partly()
    onnx.save(part.model, tmp_path / "part.onnx")
    np.savez(tmp_path / "data.npz", **images())
    (tmp_path / "all.yaml").write_text("target: ort\neffort: fast\nrules:\n  - {op: '*', set: {quantize: true}}\n")
    asked = ["quantize", "part.onnx", "--data", "data.npz", "--config", "all.yaml", "--no-latency"]
    args = [str(tmp_path / arg) if arg.endswith(("onnx", "npz", "yaml")) else arg for arg in asked]
    sentence = f"already quantized: {len(part.plan.sites)} pairs kept"
    shown = run(*args)
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0] == sentence
    told = run(*args, "--json", "--force")
    assert json.loads(told.stdout)["already"] == sentence
    planned = run("plan", *args[1:6])
    assert re.search(rf"{len(part.plan.sites)} pairs that the model came with", planned.stdout)


@pytest.mark.parametrize("constant", [False, True])
def test_scales_of_no_granularity_are_no_pair_or_an_error(constant: bool) -> None:
    """ONNX's checker lets them pass; no engine runs them."""
    read = "w" if constant else "x"
    text = f"""g (float[16,16] x) => (float[16,16] y) {{
        q = QuantizeLinear({read}, s, z) d = DequantizeLinear(q, s, z) y = MatMul(x, d) }}"""
    shape = (16, 16)
    arrays = {"w": np.ones(shape, np.float32), "s": np.full(shape, 0.1, np.float32), "z": np.zeros(shape, np.uint8)}
    proto = parse(text, **arrays)
    if constant:
        with pytest.raises(onnxq.OnnxqError, match="256 values"):
            find_existing(name_nodes(proto))
    else:
        assert find_existing(name_nodes(proto)).sites == ()


def test_pairs_inside_branches_are_kept() -> None:
    text = """g (bool c, float[1,32,8,8] x) => (float[1,32,8,8] y) {
        y = If(c) <
            then_branch = t () => (float[1,32,8,8] p) { p = Conv <pads=[1,1,1,1]>(x, w) },
            else_branch = e () => (float[1,32,8,8] q) { q = Conv <pads=[1,1,1,1]>(x, w) }
        >
    }"""
    proto = parse(text, **random_weights({"w": (32, 32, 3, 3)}))
    value = np.random.default_rng(1).standard_normal((8, 1, 32, 8, 8)).astype(np.float32)
    feeds = [{"c": np.asarray(k % 2 == 0), "x": one} for k, one in enumerate(value)]
    first = quantize(name_nodes(proto), feeds)
    assert len(first.plan.sites) > 2
    with pytest.raises(onnxq.OnnxqError, match="already quantized: "):
        quantize(first.model, feeds)


CONV = "{ wd = DequantizeLinear<axis=0>(wq, ws) y = Conv<pads=[1,1,1,1]>(x, wd, b) }"
PRODUCT = "{ wd = DequantizeLinear<axis=1>(wq, ws) y = MatMul(x, wd) }"
OF_CONV = (f"g (float[1,32,14,14] x) => (float[1,64,14,14] y) {CONV}", (64, 32, 3, 3), 64)
OF_PRODUCT = (f"g (float[64,256] x) => (float[64,128] y) {PRODUCT}", (256, 128), 128)


@pytest.mark.parametrize(
    ("graph", "preset", "kernel"),
    [
        pytest.param(OF_CONV, "ort-int8", "QLinearConv", id="Conv"),
        pytest.param(OF_PRODUCT, "ort-int8", "MatMulIntegerToFloat", id="MatMul"),
        pytest.param(OF_PRODUCT, "ort-dynamic", "DynamicQuantizeMatMul", id="MatMul on scales of each run"),
    ],
)
def test_a_file_of_int8_weights_runs_in_integers_with_the_same_weights(graph, preset, kernel) -> None:
    text, shape, channels = graph
    proto = network(text, b=(channels,))
    rng = np.random.default_rng(0)
    # Seven bits of int8, whose sums no CPU saturates.
    codes = rng.integers(-63, 64, shape).astype(np.int8)
    scale = rng.uniform(0.001, 0.003, channels).astype(np.float32)
    add_arrays(proto.graph, wq=codes, ws=scale)
    rule = {"op": [node.op_type for node in proto.graph.node][-1], "set": {"quantize": True}}
    result = onnxq.quantize(proto, samples(proto), preset, overrides={"latency": False, "rules": [rule]})
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    np.testing.assert_array_equal(stored["wq"], codes)
    np.testing.assert_array_equal(stored["ws"], scale)
    assert kernels(result.model)[kernel] == 1, kernels(result.model)
    feeds = samples(proto)[0]
    expected, computed = (InferenceSession(m.SerializeToString()).run(None, feeds)[0] for m in (proto, result.model))
    assert np.linalg.norm(computed - expected) < 0.03 * np.linalg.norm(expected)


def test_a_value_at_the_edge_of_two_steps_is_no_changed_function() -> None:
    """A rewrite changes the last bit of a float, and a pair makes a whole step of it."""
    values = np.full((1, 64), 20, np.float32)
    values[0, 0] = 0.5

    def prove_rewritten(nodes: str, factor: np.float32) -> None:
        text = f"g (float[1,64] x) => (float[1,64] y) {{ scaled = Mul(x, factor) {nodes} }}"
        constants = {"one": np.float32(1), "zero": np.array(0, np.int8)}
        before, after = (name_nodes(parse(text, factor=f, **constants)) for f in (np.float32(1), factor))
        prove_equal(FloatState(before, before, after), [{"x": values}])

    prove_rewritten(
        "q = QuantizeLinear(scaled, one, zero) y = DequantizeLinear(q, one, zero)", np.nextafter(np.float32(1), 2)
    )
    with pytest.raises(VerificationError, match="preparation changed it"):
        prove_rewritten("y = Neg(scaled)", np.float32(1.01))
