"""Activations on scales of each run: plans, files, kernels, and the runs without samples."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper, parser

import onnxq
from onnxq.annotate import find_saturating
from onnxq.commands.results import show
from onnxq.errors import ConfigError
from onnxq.graph import GraphIndex, name_nodes
from onnxq.graph.integer_products import read_integer_products
from onnxq.numerics import fake_quant_dynamic
from onnxq.plan import from_json, to_json
from onnxq.runtime import Session, optimize_graph
from onnxq.sites import Role

QUIET = {"latency": False}
# Two readers of one tensor, a small product, a product of two activations, and a Gemm.
ENCODER = """g (float[N,T,64] x) => (float[N,T,64] y, float[N,8] z) {
    [query] q = MatMul(x, wq)
    qb = Add(q, b)
    [key] k = MatMul(x, wk)
    [turn] kt = Transpose <perm=[0,2,1]> (k)
    [scores] s = MatMul(qb, kt)
    p = Softmax <axis=-1> (s)
    [values] y = MatMul(p, x)
    [mean] m = ReduceMean <axes=[1], keepdims=0> (x)
    [head] z = Gemm <transB=1> (m, wz, bz)
}"""


def encoder() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{ENCODER}')
    for name, shape in {"wq": (64, 64), "wk": (64, 64), "b": (64,), "wz": (8, 64), "bz": (8,)}.items():
        value = rng.standard_normal(shape).astype(np.float32) / 8
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return proto


def tokens(count: int = 8, length: int = 96, seed: int = 1) -> dict[str, NDArray[np.float32]]:
    return {"x": np.random.default_rng(seed).standard_normal((count, length, 64)).astype(np.float32)}


def count_ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def force(*ops: str) -> dict[str, object]:
    return {**QUIET, "rules": [{"op": list(ops), "set": {"quantize": True}}]}


def measure_db(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(10 * np.log10(np.sum(one**2) / np.sum((one - other) ** 2)))


def test_one_quantizer_serves_all_readers_and_kernels_take_bias_and_scales() -> None:
    result = onnxq.quantize(encoder(), None, "ort-dynamic", overrides=force("MatMul", "Gemm"))
    nodes = {node.name: node for node in result.model.graph.node}
    assert list(nodes["x/DynamicQuantizeLinear"].output) == ["x/quantized", "x/scale", "x/zero_point"]
    assert nodes["query"].op_type == nodes["key"].op_type == nodes["head"].op_type == "MatMulInteger"
    assert nodes["query"].input[0] == nodes["key"].input[0] == "x/quantized"
    assert nodes["scores"].op_type == nodes["values"].op_type == "MatMul"
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(count_ops(result.model))
    fused = count_ops(optimize_graph(result.model))
    assert fused["MatMulIntegerToFloat"] + fused["DynamicQuantizeMatMul"] == 3
    assert not fused["MatMulInteger"]
    assert not fused["Add"]


def test_no_samples_are_needed_and_nothing_warns(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = onnxq.quantize(encoder(), None, "ort-dynamic", overrides=force("MatMul", "Gemm"))
    assert not result.report.warnings
    assert not result.report.alarms()
    assert not result.report.synthetic
    show(result.report)
    shown = capsys.readouterr()
    assert "against float on 8 made-up inputs, seed 0" in " ".join((shown.out + shown.err).split())
    assert "!!" not in shown.out + shown.err
    assert all(check.sqnr_db[0] > 20 for check in result.report.checks)
    # As the file says and as ONNX Runtime runs it.
    assert all(check.agreement_db > 60 for check in result.report.checks)


def test_such_sites_are_complete_in_a_plan_and_come_back_from_json() -> None:
    result = onnxq.quantize(encoder(), None, "ort-dynamic", overrides=force("MatMul", "Gemm"))
    sites = [site for site in result.plan.sites if site.role is Role.ACTIVATION]
    assert {str(site.site) for site in sites} == {"x", "m"}
    assert all(site.spec.dynamic and site.complete and site.qparams is None for site in sites)
    assert result.plan.calibrated
    again = from_json(to_json(result.plan))
    assert again == result.plan
    planned = onnxq.make_plan(encoder(), None, "ort-dynamic", overrides={"rules": force("MatMul", "Gemm")["rules"]})
    assert not planned.warnings
    assert [site.spec for site in planned.sites] == [site.spec for site in result.plan.sites]


def test_a_plan_is_applied_without_samples_to_the_same_bytes() -> None:
    result = onnxq.quantize(encoder(), None, "ort-dynamic", overrides=force("MatMul", "Gemm"))
    again = onnxq.apply(encoder(), from_json(to_json(result.plan)))
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)
    assert again.report.checks
    assert not again.report.synthetic


def test_the_answers_are_those_of_the_reference() -> None:
    result = onnxq.quantize(encoder(), None, "ort-dynamic", overrides=force("Gemm"))
    x = tokens()["x"][:1]
    weight = next(site for site in result.plan.sites if site.role is Role.WEIGHT)
    assert weight.qparams is not None
    stored = next(t for t in result.model.graph.initializer if t.name == "wz/quantized")
    w = numpy_helper.to_array(stored).astype(np.float32) * weight.qparams.scale[:, None]
    bias = next(numpy_helper.to_array(t) for t in encoder().graph.initializer if t.name == "bz")
    want = fake_quant_dynamic(x.mean(axis=1)) @ w.T + bias
    np.testing.assert_allclose(Session(result.model).run({"x": x})["z"], want, rtol=1e-4, atol=1e-5)


def test_products_that_gain_nothing_stay_float_with_a_line() -> None:
    result = onnxq.quantize(encoder(), tokens(length=2), "ort-dynamic", overrides={**QUIET, "effort": "fast"})
    reasons = {one.subject: one.reason for one in result.report.left_float}
    assert "does not pay" in reasons["head"] or "would not pay" in reasons["head"]
    assert "attention" in reasons["scores"]


def test_convolutions_stay_float_with_a_line() -> None:
    from tests.pipeline.models import images, residual

    result = onnxq.quantize(residual(), images(), "ort-dynamic", overrides={**QUIET, "effort": "fast"})
    assert any("ConvInteger" in one.reason for one in result.report.left_float)
    assert not count_ops(result.model)["ConvInteger"]


def test_weights_stay_inside_the_pair_bound() -> None:
    result = onnxq.quantize(encoder(), None, "ort-dynamic", overrides=force("MatMul", "Gemm"))
    found = find_saturating(GraphIndex(read_integer_products(result.model)))
    assert {one.node for one in found} == {"query", "key", "head"}
    assert not any(one.saturates for one in found)


HEAD = """g (float[N,T,64] x) => (float[N,T,32] y) {
    [scale] n = Mul(x, s)
    [product] y = MatMul(n, w)
}"""


def test_samples_help_the_weights() -> None:
    model, samples, rules = (
        parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{HEAD}'),
        tokens(24, 24),
        force("MatMul"),
    )
    # Channels of very different sizes, which SmoothQuant evens out.
    scales = np.exp(np.random.default_rng(2).uniform(-2, 2, 64)).astype(np.float32)
    weight = np.random.default_rng(4).standard_normal((64, 32)).astype(np.float32)
    for name, value in {"s": scales, "w": weight}.items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    plain = onnxq.quantize(model, samples, "ort-dynamic", overrides={**rules, "effort": "fast"})
    helped = onnxq.quantize(model, samples, "ort-dynamic", overrides=rules)
    names = [account for account in helped.report.accounts if "smoothquant" in account or "rounding" in account]
    assert len(names) == 2
    accuracy = [min(check.sqnr_db[0] for check in one.report.checks) for one in (plain, helped)]
    assert accuracy[1] > accuracy[0]
    promoted = onnxq.quantize(model, samples, "ort-dynamic", overrides={**rules, "min_sqnr": 60})
    assert promoted.report.promotion is not None


def test_a_rare_value_does_not_spoil_the_scale_of_a_batch() -> None:
    """Ranges chosen on samples clip in front of the quantizer: alone no sample shows the loss, in a batch all do."""
    rng = np.random.default_rng(0)
    proto = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[N,T,64] x) => (float[N,T,64] y) { [mm] y = MatMul(x, w) }'
    )
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    # What the rare values are read by hardly counts.
    weight[0] /= 1000
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    feeds = tokens(32)
    feeds["x"][::8, 5, 0] = 60
    asked = {**force("MatMul"), "skip": ["smoothquant", "sensitive_ops", "promotion"]}
    found = {}
    for skip in ([], ["ranges"]):
        overrides = {**asked, "skip": [*asked["skip"], *skip]}  # type: ignore[misc]
        result = onnxq.quantize(proto, feeds, "ort-dynamic", overrides=overrides)
        want, got = (Session(one).run(feeds)["y"] for one in (proto, result.model))
        found[not skip] = measure_db(want, got)
        if skip:
            continue
        site = next(site for site in result.plan.sites if site.role is Role.ACTIVATION)
        assert site.clip[1] is not None
        assert 3 < site.clip[1] < 30
        nodes = {node.name: node for node in result.model.graph.node}
        assert nodes["x/DynamicQuantizeLinear"].input[0] == nodes["x/Clip"].output[0] == "x/clipped"
        assert from_json(to_json(result.plan)) == result.plan
        again = onnxq.apply(proto, result.plan)
        assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)
        assert [pair.clip for pair in onnxq.inspect(result.model).pairs if pair.dynamic] == ["x/Clip"]
    assert found[True] > found[False] + 10


def test_inspect_prove_and_profile_know_such_sites(tmp_path: Path) -> None:
    rules = force("MatMul", "Gemm")
    path = tmp_path / "q.onnx"
    onnxq.quantize(encoder(), None, "ort-dynamic", overrides=rules, out=path)
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
    annotated = onnxq.annotate_bits(path)
    assert {str(pair.site) for pair in annotated.pairs} == set(pairs)


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
    result = onnxq.quantize(encoder(), tokens(), overrides={**QUIET, "effort": "fast", "rules": rules})
    specs = {str(site.site): site.spec.dynamic for site in result.plan.sites if site.role is Role.ACTIVATION}
    assert specs["query/in0"]
    assert not specs["x"]
    fused = count_ops(optimize_graph(result.model))
    assert fused["DynamicQuantizeMatMul"] == 1
    assert fused["MatMulIntegerToFloat"] >= 1
    assert all(check.sqnr_db[1] > 20 for check in result.report.checks)
    assert from_json(to_json(result.plan)) == result.plan


LSTM = """g (float[T,N,32] x) => (float[T,D,N,64] y) {
    [lstm] y = LSTM <hidden_size=64, direction="KIND"> (x, w, r, b)
}"""


def tagger(directions: int) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    kind = "bidirectional" if directions == 2 else "forward"
    text = LSTM.replace("KIND", kind).replace("[T,D,", f"[T,{directions},")
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    for name, shape in {"w": (directions, 256, 32), "r": (directions, 256, 64), "b": (directions, 512)}.items():
        value = rng.standard_normal(shape).astype(np.float32) / 6
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return proto


@pytest.mark.parametrize("directions", [1, 2])
def test_an_lstm_runs_in_the_kernel_of_onnx_runtime(directions: int) -> None:
    result = onnxq.quantize(tagger(directions), None, "ort-dynamic", overrides=force("LSTM"))
    assert count_ops(optimize_graph(result.model)) == {"DynamicQuantizeLSTM": 1}
    assert result.report.checks[0].sqnr_db[0] > 25
    assert not any(one.saturates for one in find_saturating(GraphIndex(name_nodes(result.model))))
    proof = onnxq.prove(result.model, overrides={"engine": "ort", "require": [("int8", "LSTM")]})
    assert not any(one.unmet for one in proof.requirements)


def test_a_static_plan_takes_an_lstm_where_it_pays() -> None:
    x = {"x": np.random.default_rng(3).standard_normal((8, 20, 1, 32)).astype(np.float32)}
    left = onnxq.quantize(tagger(1), x, overrides=QUIET)
    assert ["int8 would not pay" in one.reason for one in left.report.left_float if one.subject == "lstm"] == [True]
    result = onnxq.quantize(tagger(1), x, overrides=force("LSTM"))
    assert count_ops(result.model) == {"DynamicQuantizeLSTM": 1}
    assert result.report.checks[0].sqnr_db[0] > 25
    rules = [{"op": "LSTM", "set": {"dynamic": False, "quantize": True}}]
    refused = onnxq.make_plan(tagger(1), x, overrides={"rules": rules})
    assert ["only on scales of each run" in one.reason for one in refused.refusals] == [True]


def test_an_lstm_of_4_bits_has_bytes_in_its_kernel() -> None:
    x = {"x": np.random.default_rng(3).standard_normal((8, 20, 1, 32)).astype(np.float32)}
    result = onnxq.quantize(tagger(2), x, "ort-w4a8", overrides={**force("LSTM"), "effort": "fast"})
    assert count_ops(result.model) == {"DynamicQuantizeLSTM": 1}
    weights = [site.spec.bits for site in result.plan.sites if site.role is Role.WEIGHT]
    assert weights == [4, 4]
    assert 5 < result.report.checks[0].sqnr_db[0] < 30


READER = """g (float[N,8,4,24] x) => (float[24,1,N,32] y) {
    [first] a = Conv <pads=[1,1,1,1]> (x, v)
    [second] b = Conv (a, u)
    [squeeze] s = Squeeze (b, axis)
    [turn] t = Transpose <perm=[2,0,1]> (s)
    [lstm] y = LSTM <hidden_size=32> (t, w, r)
}"""


def test_an_lstm_behind_integers_reads_their_values() -> None:
    """A text recognizer: convolutions on scales in the file, their result to an LSTM on scales of each run."""
    rng, proto = np.random.default_rng(0), parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{READER}')
    shapes = {"v": (32, 8, 3, 3), "u": (32, 32, 4, 1), "w": (1, 128, 32), "r": (1, 128, 32)}
    values = {name: (rng.standard_normal(shape) / 12).astype(np.float32) for name, shape in shapes.items()}
    for name, value in {**values, "axis": np.int64([2])}.items():
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    x = {"x": rng.standard_normal((12, 8, 4, 24)).astype(np.float32)}
    rules = [{"op": ["Conv", "LSTM"], "set": {"quantize": True}}]
    result = onnxq.quantize(proto, x, overrides={**QUIET, "effort": "fast", "rules": rules})
    fused = count_ops(optimize_graph(result.model))
    assert (fused["QLinearConv"], fused["DynamicQuantizeLSTM"], fused["DequantizeLinear"]) == (2, 1, 1)
    assert all(min(check.sqnr_db) > 25 and check.agreement_db > 40 for check in result.report.checks)
    assert {str(site.site) for site in result.plan.sites if site.spec.dynamic} == {"lstm/in0"}
    again = onnxq.apply(proto, from_json(to_json(result.plan)))
    assert again.model.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True)
    proof = onnxq.prove(result.model, overrides={"engine": "ort", "require": [("int8", "*")]})
    assert not any(one.unmet for one in proof.requirements)


def test_what_is_read_by_an_lstm_alone_stays_float() -> None:
    """No pair is put in front of a Transpose because of an LSTM, which quantizes its input itself."""
    text = LSTM.replace("float[T,N,32] x", "float[N,T,32] x").replace("(x,", "(t,").replace("KIND", "forward")
    text = text.replace("[T,D,", "[T,1,").replace("[lstm]", "t = Transpose <perm=[1,0,2]> (x)\n    [lstm]")
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    proto.graph.initializer.extend(tagger(1).graph.initializer)
    x = {"x": np.random.default_rng(3).standard_normal((8, 20, 32)).astype(np.float32)}
    result = onnxq.quantize(proto, x, overrides={**force("LSTM"), "effort": "fast"})
    assert count_ops(result.model) == {"Transpose": 1, "DynamicQuantizeLSTM": 1}


@pytest.mark.parametrize("front", ["", "[conv] c = Conv <pads=[1,1]> (u, v)"])
def test_an_lstm_runs_in_integers_behind_a_transpose_as_exporters_put_it_there(front: str) -> None:
    text = (
        LSTM.replace("KIND", "forward")
        .replace("[T,D,", "[T,1,")
        .replace("x) =>", "u) =>")
        .replace("[T,N,32]", "[N,32,T]")
    )
    moved = f"{front} [move] x = Transpose <perm=[2,0,1]> ({'c' if front else 'u'}) [lstm]"
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text.replace("[lstm]", moved)}')
    proto.graph.initializer.extend(tagger(1).graph.initializer)
    if front:
        value = np.random.default_rng(0).standard_normal((32, 32, 3)).astype(np.float32) / 10
        proto.graph.initializer.append(numpy_helper.from_array(value, "v"))
    u = {"u": np.random.default_rng(3).standard_normal((8, 1, 32, 20)).astype(np.float32)}
    result = onnxq.quantize(proto, u, overrides={**force("Conv", "LSTM"), "mode": "auto"})
    ops = count_ops(optimize_graph(result.model))
    assert ops["DynamicQuantizeLSTM"] == 1
    assert ops["QLinearConv"] == len(front[:1])
    assert not result.report.left_float
    assert result.report.checks[0].sqnr_db[0] > 25


def test_a_gru_is_smaller_and_no_faster() -> None:
    rng = np.random.default_rng(0)
    text = "g (float[T,N,16] x) => (float[T,1,N,32] y) { [gru] y = GRU <hidden_size=32> (x, w, r) }"
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\n{text}')
    for name, shape in {"w": (1, 96, 16), "r": (1, 96, 32)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    dynamic = onnxq.quantize(proto, None, "ort-dynamic", overrides=QUIET)
    assert any("weight-only" in one.reason for one in dynamic.report.refusals)
    weights = onnxq.quantize(proto, None, "ort-int8-weights", overrides=QUIET)
    assert weights.report.output_bytes < 0.7 * proto.ByteSize()
    assert any("slower" in str(warning) for warning in weights.report.warnings)
