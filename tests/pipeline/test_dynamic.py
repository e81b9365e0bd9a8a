"""Activations on scales of each run: plans, files, kernels, and the runs without samples."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

import onnxq
from onnxq.annotate import find_saturating
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.graph.integer_products import read_integer_products
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session
from onnxq.sites import Role
from tests.numerics.reference import fake_quant_dynamic
from tests.passes.kit import ops, parse, random_weights
from tests.pipeline.models import assert_faithful, find_worst_db, images, quantize, residual, to_bytes
from tests.pipeline.requantized import kernels

FORCED = [{"op": ["MatMul", "Gemm", "LSTM"], "set": {"quantize": True}}]
# Two readers of one tensor, a small product, a product of two activations, and a Gemm.
ENCODER = """g (float[N,T,64] x) => (float[N,T,64] y, float[N,8] z) {
    [query] q = MatMul(x, wq) qb = Add(q, b) [key] k = MatMul(x, wk) [turn] kt = Transpose <perm=[0,2,1]> (k)
    [scores] s = MatMul(qb, kt) p = Softmax <axis=-1> (s) [values] y = MatMul(p, x)
    [mean] m = ReduceMean <axes=[1], keepdims=0> (x) [head] z = Gemm <transB=1> (m, wz, bz)
}"""


def encoder() -> onnx.ModelProto:
    shapes = {"wq": (64, 64), "wk": (64, 64), "b": (64,), "wz": (8, 64), "bz": (8,)}
    return parse(ENCODER, **random_weights(shapes))


@pytest.fixture(scope="module")
def encoded() -> onnxq.Result:
    """The encoder quantized without samples, and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return quantize(encoder(), None, "ort-dynamic", rules=FORCED)


def tokens(count: int = 8, length: int = 96, seed: int = 1) -> dict[str, NDArray[np.float32]]:
    return {"x": np.random.default_rng(seed).standard_normal((count, length, 64)).astype(np.float32)}


def test_one_quantizer_serves_all_readers_and_kernels_take_bias_and_scales(encoded: onnxq.Result) -> None:
    nodes = {node.name: node for node in encoded.model.graph.node}
    assert list(nodes["x/DynamicQuantizeLinear"].output) == ["x/quantized", "x/scale", "x/zero_point"]
    assert nodes["query"].op_type == nodes["key"].op_type == nodes["head"].op_type == "MatMulInteger"
    assert nodes["query"].input[0] == nodes["key"].input[0] == "x/quantized"
    assert nodes["scores"].op_type == nodes["values"].op_type == "MatMul"
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(ops(encoded.model))
    fused = kernels(encoded.model)
    assert fused["MatMulIntegerToFloat"] + fused["DynamicQuantizeMatMul"] == 3
    assert not fused["MatMulInteger"]
    assert not fused["Add"]
    # No weight of theirs overflows sums of 16 bits.
    found = find_saturating(GraphIndex(read_integer_products(encoded.model)))
    assert {one.node for one in found} == {"query", "key", "head"}
    assert not any(one.saturates for one in found)


def test_no_samples_are_needed(encoded: onnxq.Result) -> None:
    report = encoded.report
    assert (report.warnings, report.alarms(), report.synthetic) == ((), (), False)
    assert "against float on 8 made-up inputs, seed 0" in " ".join(onnxq.summarize(encoded).split())
    assert all(check.sqnr_db[0] > 20 for check in report.checks)
    # As the file says and as ONNX Runtime runs it.
    assert all(check.agreement_db > 60 for check in report.checks)


def test_such_sites_are_complete_in_a_plan_that_is_applied_without_samples(encoded: onnxq.Result) -> None:
    sites = [site for site in encoded.plan.sites if site.role is Role.ACTIVATION]
    assert {str(site.site) for site in sites} == {"x", "m"}
    assert all(site.spec.dynamic and site.complete and site.qparams is None for site in sites)
    assert encoded.plan.calibrated
    planned = onnxq.make_plan(encoder(), None, "ort-dynamic", overrides={"rules": FORCED})
    assert not planned.warnings
    assert [site.spec for site in planned.sites] == [site.spec for site in encoded.plan.sites]
    read = from_json(to_json(encoded.plan))
    assert read == encoded.plan
    again = onnxq.apply(encoder(), read)
    assert to_bytes(again) == to_bytes(encoded)
    assert again.report.checks
    assert not again.report.synthetic


@pytest.mark.usefixtures("engines_here")
def test_inspect_prove_and_profile_know_such_sites(encoded: onnxq.Result, tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    onnx.save(encoded.model, path)
    pairs = {str(pair.site): pair for pair in onnxq.inspect(path).pairs}
    assert set(pairs) == {"x", "m", "wq", "wk", "wz"}
    assert pairs["x"].dynamic
    assert not pairs["wq"].dynamic
    proof = onnxq.prove(path, overrides={"engine": "ort", "require": [("int8", "query"), ("int8", "head")]})
    assert not any(one.unmet for one in proof.requirements)
    assert {one.site for one in proof.sites} == set(pairs)
    assert all(str(one.state) == "fused" for one in proof.sites)
    profile = onnxq.profile_model(encoder(), path, tokens(4))
    assert not profile.fixed
    assert {site for group in profile.groups for site in group.sites} >= {"x", "wq", "wz"}
    assert {str(pair.site) for pair in onnxq.annotate_bits(path).pairs} == set(pairs)


def test_the_answers_are_those_of_the_reference() -> None:
    result = quantize(encoder(), None, "ort-dynamic", rules=[{"op": "Gemm", "set": {"quantize": True}}])
    x = tokens()["x"][:1]
    (weight,) = (site for site in result.plan.sites if site.role is Role.WEIGHT)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.model.graph.initializer}
    w = stored["wz/quantized"].astype(np.float32) * weight.qparams.scale[:, None]
    bias = numpy_helper.to_array(encoder().graph.initializer[-1])
    want = fake_quant_dynamic(x.mean(axis=1)) @ w.T + bias
    np.testing.assert_allclose(Session(result.model).run({"x": x})["z"], want, rtol=1e-4, atol=1e-5)


def test_what_gains_nothing_stays_float_with_a_line() -> None:
    result = quantize(encoder(), tokens(length=2), "ort-dynamic", effort="fast")
    reasons = {one.subject: one.reason for one in result.report.left_float}
    assert "does not pay" in reasons["head"] or "would not pay" in reasons["head"]
    assert "attention" in reasons["scores"]
    convolved = quantize(residual(), images(), "ort-dynamic", effort="fast")
    assert any("ConvInteger" in one.reason for one in convolved.report.left_float)
    assert not ops(convolved.model)["ConvInteger"]


def test_samples_help_the_weights() -> None:
    # Channels of very different sizes, which SmoothQuant evens out.
    scales = np.exp(np.random.default_rng(2).uniform(-2, 2, 64)).astype(np.float32)
    weight = np.random.default_rng(4).standard_normal((64, 32)).astype(np.float32)
    text = "g (float[N,T,64] x) => (float[N,T,32] y) { [scale] n = Mul(x, s) [product] y = MatMul(n, w) }"
    model, samples = parse(text, s=scales, w=weight), tokens(24, 24)
    plain = quantize(model, samples, "ort-dynamic", rules=FORCED, effort="fast")
    helped = quantize(model, samples, "ort-dynamic", rules=FORCED)
    names = [account for account in helped.report.accounts if "smoothquant" in account or "rounding" in account]
    assert len(names) == 2
    assert find_worst_db(helped) > find_worst_db(plain)
    promoted = quantize(model, samples, "ort-dynamic", rules=FORCED, min_sqnr=60)
    assert promoted.report.promotion is not None


def test_a_rare_value_does_not_spoil_the_scale_of_a_batch() -> None:
    """Ranges chosen on samples clip in front of the quantizer: alone no sample shows the loss, in a batch all do."""
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    # What the rare values are read by hardly counts.
    weight[0] /= 1000
    proto = parse("g (float[N,T,64] x) => (float[N,T,64] y) { [mm] y = MatMul(x, w) }", w=weight)
    feeds = tokens(32)
    feeds["x"][::8, 5, 0] = 60
    skip = ["smoothquant", "sensitive_ops", "promotion"]
    clipped, free = (
        quantize(proto, feeds, "ort-dynamic", rules=FORCED, skip=[*skip, *more]) for more in ([], ["ranges"])
    )
    want, *got = (Session(one).run(feeds)["y"] for one in (proto, clipped.model, free.model))
    losses = [np.sum((want - one) ** 2) for one in got]
    assert losses[0] < losses[1] / 10
    (site,) = (site for site in clipped.plan.sites if site.role is Role.ACTIVATION)
    assert 3 < site.clip[1] < 30
    nodes = {node.name: node for node in clipped.model.graph.node}
    assert nodes["x/DynamicQuantizeLinear"].input[0] == nodes["x/Clip"].output[0] == "x/clipped"
    assert from_json(to_json(clipped.plan)) == clipped.plan
    assert to_bytes(onnxq.apply(proto, clipped.plan)) == to_bytes(clipped)
    assert [pair.clip for pair in onnxq.inspect(clipped.model).pairs if pair.dynamic] == ["x/Clip"]


@pytest.mark.parametrize(
    ("target", "overrides", "path"),
    [
        ("trt-int8", {"mode": "dynamic"}, "mode"),
        ("virtual-int8", {"mode": "dynamic"}, "mode"),
        ("ort-dynamic", {"activations.bits": 4}, "activations"),
        ("ort-dynamic", {"high_precision": "float16"}, "high_precision"),
        ("ort-dynamic", {"placement": "measured"}, "placement"),
    ],
)
def test_what_has_no_scales_of_each_run_is_refused(target: str, overrides: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError, match=path) as error:
        onnxq.quantize(encoder(), None, target, overrides=overrides)
    assert error.value.code == "Q307"
    assert error.value.fix


def test_a_rule_makes_one_operator_of_a_static_plan_dynamic() -> None:
    rules = [{"node": "query", "set": {"dynamic": True, "quantize": True}}, {"op": "MatMul", "set": {"quantize": True}}]
    result = quantize(encoder(), tokens(), "ort-int8", effort="fast", rules=rules)
    specs = {str(site.site): site.spec.dynamic for site in result.plan.sites if site.role is Role.ACTIVATION}
    assert specs["query/in0"]
    assert not specs["x"]
    fused = kernels(result.model)
    assert fused["DynamicQuantizeMatMul"] == 1
    assert fused["MatMulIntegerToFloat"] >= 1
    assert all(check.sqnr_db[1] > 20 for check in result.report.checks)
    assert from_json(to_json(result.plan)) == result.plan


LSTM = '[lstm] y = LSTM <hidden_size=64, direction="{}"> ({}, w, r, b)'
SEQUENCE = {"x": np.random.default_rng(3).standard_normal((8, 20, 1, 32)).astype(np.float32)}


def tagger(
    directions: int = 1, front: str = "", given: str = "float[T,N,32] x", **arrays: np.ndarray
) -> onnx.ModelProto:
    """An LSTM, behind `front` if that is given, which makes t of x."""
    lstm = LSTM.format("bidirectional" if directions == 2 else "forward", "t" if front else "x")
    shapes = {"w": (directions, 256, 32), "r": (directions, 256, 64), "b": (directions, 512)}
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float32) / 6 for name, shape in shapes.items()}
    return parse(f"g ({given}) => (float[T,{directions},N,64] y) {{ {front} {lstm} }}", **weights, **arrays)


@pytest.mark.usefixtures("engines_here")
@pytest.mark.parametrize("directions", [1, 2])
def test_an_lstm_runs_in_the_kernel_of_onnx_runtime(directions: int) -> None:
    result = quantize(tagger(directions), None, "ort-dynamic", rules=FORCED)
    assert kernels(result.model) == {"DynamicQuantizeLSTM": 1}
    assert result.report.checks[0].sqnr_db[0] > 25
    assert not any(one.saturates for one in find_saturating(GraphIndex(name_nodes(result.model))))
    proof = onnxq.prove(result.model, overrides={"engine": "ort", "require": [("int8", "LSTM")]})
    assert not any(one.unmet for one in proof.requirements)
    # Read back as pairs it computes the same, but for the hidden state, which the kernel rounds too.
    back = read_integer_products(result.model)
    assert ops(back) == {"DynamicQuantizeLinear": 1, "DequantizeLinear": 3, "LSTM": 1}
    feeds = {"x": SEQUENCE["x"][0]}
    want, got = (Session(proto, optimize=False).run(feeds)["y"] for proto in (back, result.model))
    assert 10 * np.log10(np.sum(want**2) / np.sum((want - got) ** 2)) > 30


def test_a_static_plan_takes_an_lstm_where_it_pays() -> None:
    left = quantize(tagger(), SEQUENCE, "ort-int8")
    assert ["int8 would not pay" in one.reason for one in left.report.left_float if one.subject == "lstm"] == [True]
    result = quantize(tagger(), SEQUENCE, "ort-int8", rules=FORCED)
    assert ops(result.model) == {"DynamicQuantizeLSTM": 1}
    assert result.report.checks[0].sqnr_db[0] > 25
    rules = [{"op": "LSTM", "set": {"dynamic": False, "quantize": True}}]
    refused = onnxq.make_plan(tagger(), SEQUENCE, overrides={"rules": rules})
    assert ["only on scales of each run" in one.reason for one in refused.refusals] == [True]
    # With 4 bits, it has bytes in its kernel.
    narrow = quantize(tagger(2), SEQUENCE, "ort-w4a8", rules=FORCED, effort="fast")
    assert ops(narrow.model) == {"DynamicQuantizeLSTM": 1}
    assert [site.spec.bits for site in narrow.plan.sites if site.role is Role.WEIGHT] == [4, 4]
    assert 5 < narrow.report.checks[0].sqnr_db[0] < 30


READER = """g (float[N,8,4,24] x) => (float[24,1,N,32] y) {
    [first] a = Conv <pads=[1,1,1,1]> (x, v) [second] b = Conv (a, u) [squeeze] s = Squeeze (b, axis)
    [turn] t = Transpose <perm=[2,0,1]> (s) [lstm] y = LSTM <hidden_size=32> (t, w, r)
}"""


@pytest.mark.usefixtures("engines_here")
def test_an_lstm_behind_integers_reads_their_values() -> None:
    """A text recognizer: convolutions on scales in the file, their result to an LSTM on scales of each run."""
    rng = np.random.default_rng(0)
    shapes = {"v": (32, 8, 3, 3), "u": (32, 32, 4, 1), "w": (1, 128, 32), "r": (1, 128, 32)}
    values = {name: (rng.standard_normal(shape) / 12).astype(np.float32) for name, shape in shapes.items()}
    proto = parse(READER, axis=np.array([2]), **values)
    x = {"x": rng.standard_normal((12, 8, 4, 24)).astype(np.float32)}
    rules = [{"op": ["Conv", "LSTM"], "set": {"quantize": True}}]
    result = quantize(proto, x, "ort-int8", effort="fast", rules=rules)
    fused = kernels(result.model)
    assert (fused["QLinearConv"], fused["DynamicQuantizeLSTM"], fused["DequantizeLinear"]) == (2, 1, 1)
    assert_faithful(result, 25, 40)
    assert {str(site.site) for site in result.plan.sites if site.spec.dynamic} == {"lstm/in0"}
    assert to_bytes(onnxq.apply(proto, from_json(to_json(result.plan)))) == to_bytes(result)
    proof = onnxq.prove(result.model, overrides={"engine": "ort", "require": [("int8", "*")]})
    assert not any(one.unmet for one in proof.requirements)


def test_what_is_read_by_an_lstm_alone_stays_float() -> None:
    """No pair is put in front of a Transpose because of an LSTM, which quantizes its input itself."""
    proto = tagger(front="t = Transpose <perm=[1,0,2]> (x)", given="float[N,T,32] x")
    result = quantize(proto, {"x": SEQUENCE["x"][:, :, 0]}, "ort-int8", rules=FORCED, effort="fast")
    assert ops(result.model) == {"Transpose": 1, "DynamicQuantizeLSTM": 1}


@pytest.mark.parametrize("conv", [False, True])
def test_an_lstm_runs_in_integers_behind_a_transpose_as_exporters_put_it_there(conv: bool) -> None:
    turn = "t = Transpose <perm=[2,0,1]>"
    front = f"[conv] c = Conv <pads=[1,1]> (x, v) {turn} (c)" if conv else f"{turn} (x)"
    weights = random_weights({"v": (32, 32, 3)}) if conv else {}
    proto = tagger(front=front, given="float[N,32,T] x", **weights)
    data = {"x": SEQUENCE["x"].transpose(0, 2, 3, 1)}
    rules = [{"op": ["Conv", "LSTM"], "set": {"quantize": True}}]
    result = quantize(proto, data, "ort-dynamic", rules=rules, mode="auto")
    fused = kernels(result.model)
    assert (fused["DynamicQuantizeLSTM"], fused["QLinearConv"]) == (1, int(conv))
    assert not result.report.left_float
    assert result.report.checks[0].sqnr_db[0] > 25


def test_a_gru_is_smaller_and_no_faster() -> None:
    text = "g (float[T,N,16] x) => (float[T,1,N,32] y) { [gru] y = GRU <hidden_size=32> (x, w, r) }"
    proto = parse(text, **random_weights({"w": (1, 96, 16), "r": (1, 96, 32)}))
    dynamic = quantize(proto, None, "ort-dynamic")
    assert any("weight-only" in one.reason for one in dynamic.report.refusals)
    weights = quantize(proto, None, "ort-int8-weights")
    assert weights.report.output_bytes < 0.7 * proto.ByteSize()
    assert any("slower" in str(warning) for warning in weights.report.warnings)


# A Keras LSTM as tf2onnx writes it, in short: the loop hands its weight on, and its first step stands in front of it.
LOOPED = """g (float[N,512] x) => (float[N,512] y) {
    [first] h = MatMul(x, w) [loop] all, last = Loop(steps, , h, w) <
        body = b (int64 k, bool on, float[N,512] s, float[512,512] m) => (bool on, float[N,512] t, float[512,512] m) {
            [product] p = MatMul(s, m) t = Tanh(p) }> y = Tanh(all)
}"""


@pytest.mark.parametrize(("effort", "product"), [("fast", "MatMul"), ("balanced", "MatMul"), ("balanced", "Gemm")])
def test_weights_of_a_loop_are_integers_once_and_its_data_have_scales_of_each_run(effort: str, product: str) -> None:
    text = LOOPED.replace("p = MatMul", f"p = {product}")
    proto = parse(text, steps=np.asarray(6), **random_weights({"w": (512, 512)}))
    x = np.random.default_rng(0).standard_normal((64, 4, 512)).astype(np.float32) * 8
    result = quantize(proto, {"x": x}, "ort-int8", effort=effort)
    dynamic = {str(site.site): site.spec.dynamic for site in result.plan.sites if site.role is Role.ACTIVATION}
    assert dynamic == {"x": False, "loop.body::product/in0": True}
    assert not result.report.refusals
    assert result.report.output_bytes < 0.3 * proto.ByteSize()
    fused = kernels(result.model)
    assert fused["DynamicQuantizeMatMul"] + fused["MatMulIntegerToFloat"] == 1
    assert_faithful(result, 22, 40)
