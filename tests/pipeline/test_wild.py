"""Models as they are found: every opset, functions, loops, external data, undeclared shapes, tensors of no elements."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import onnxq
from onnxq.errors import DataError
from onnxq.runtime import find_runnable_opset
from tests.graph.kit import model
from tests.networks import open_session, parse_text
from tests.passes.kit import random_weights
from tests.pipeline.models import EVERYTHING, assert_faithful, images, quantize, residual, to_bytes
from tests.pipeline.requantized import kernels

HOW: dict[str, Any] = {"latency": False, "effort": "fast"}
SAME = "Conv <pads=[1,1,1,1]>"
SAMPLES = np.random.default_rng(0).standard_normal((12, 3, 16, 16)).astype(np.float32)
WEIGHTS = random_weights({"w0": (32, 3, 3, 3), "b0": (32,), "w1": (32, 32, 3, 3), "b1": (32,)})
MATRICES = random_weights({"w": (128, 128), "v": (128, 128)})
KERNELS = random_weights({"u": (8, 8, 3, 3), "v": (8, 8, 3, 3)})
MAPS = np.random.default_rng(1).standard_normal((8, 1, 8, 16, 16)).astype(np.float32)


def network(tail: str = "y = Relu(d)", *, opset: int = 17, ir: int = 8, x: str = "float[N,3,16,16]") -> onnx.ModelProto:
    body = f"c = {SAME}(x, w0, b0) r = Relu(c) d = {SAME}(r, w1, b1) {tail}"
    return model(f"g ({x} x) => (float[N,32,16,16] y) {{ {body} }}", opset, ir, **WEIGHTS)


def run(proto: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    """The first output, as ONNX Runtime gives it to a user."""
    return np.asarray(open_session(proto).run(None, feeds)[0])


NEW = [pytest.param(opset, marks=pytest.mark.recent_ort) for opset in (23, 24)]


@pytest.mark.parametrize("opset", [7, *range(9, 23), *NEW])
def test_every_opset(opset: int) -> None:
    result = quantize(residual(opset=opset), images())
    assert_faithful(result)
    assert result.model.opset_import[0].version == max(opset, 13)
    assert (f"opset: {opset} -> 13" in result.report.rewrites) == (opset < 13)
    assert kernels(result.model)["QLinearConv"] == 3


def test_an_opset_that_onnx_runtime_no_longer_runs_is_refused_in_words() -> None:
    with pytest.raises(onnxq.OnnxqError, match=r"Relu.*ONNX Runtime cannot load it"):
        onnxq.quantize(network(opset=5), {"x": SAMPLES}, overrides=HOW)


@pytest.mark.recent_ort
@pytest.mark.parametrize("target", ["ort", "trt", "virtual"])
def test_an_opset_without_kernels_for_pairs_is_lowered_and_the_summary_says_so(target: str) -> None:
    opset = onnx.defs.onnx_opset_version()
    runnable = find_runnable_opset(opset)
    if runnable == opset:
        pytest.skip(f"this ONNX Runtime has kernels for pairs at opset {opset}")
    result = onnxq.quantize(network(opset=opset, ir=10), {"x": SAMPLES}, overrides={**HOW, "target": target})
    assert result.report.pairs
    assert result.model.opset_import[0].version == runnable
    assert f"opset: {opset} -> {runnable}" in result.report.rewrites
    run(result.model, x=SAMPLES[:1])


@pytest.mark.recent_ort
def test_what_is_newer_in_a_narrow_type_is_lowered_in_float32() -> None:
    text = 'g (bfloat16[4,8] x, bfloat16[8,8] z) => (bfloat16[4,8] y) { y = Einsum<equation = "ij,jk->ik">(x, z) }'
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((4, 8)), "z": rng.standard_normal((8, 8))} for _ in range(4)]
    result = onnxq.quantize(model(text, opset=28, ir=14), samples, overrides=HOW)
    assert result.report.checks[0].sqnr_db[0] > 20


def test_version_3_is_quantized_whether_its_weights_are_inputs_or_not() -> None:
    bare, listed = network(opset=8, ir=3), network(opset=8, ir=3)
    for tensor in listed.graph.initializer:
        listed.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    results = [onnxq.quantize(proto, {"x": SAMPLES}, overrides=HOW) for proto in (bare, listed)]
    assert [[value.name for value in one.model.graph.input] for one in results] == [["x"], ["x"]]
    np.testing.assert_array_equal(*(run(one.model, x=SAMPLES[:1]) for one in results))


def test_without_shapes_the_samples_say_what_shapes_there_are() -> None:
    proto = network()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].ClearField("type")
    result, whole = (onnxq.quantize(one, {"x": SAMPLES}, overrides=HOW) for one in (proto, network()))
    assert result.report.pairs == whole.report.pairs > 0
    np.testing.assert_array_equal(run(result.model, x=SAMPLES[:1]), run(whole.model, x=SAMPLES[:1]))
    with pytest.raises(onnxq.OnnxqError, match=r"input 'x': .*of any shape"):
        onnxq.quantize(proto, overrides=HOW)


def test_a_tensor_of_no_elements_is_carried_along() -> None:
    """A cache that is empty at first, joined to what is new."""
    proto = network("y = Concat <axis=0>(past, d)")
    proto.graph.input.append(helper.make_tensor_value_info("past", onnx.TensorProto.FLOAT, [0, 32, 16, 16]))
    samples = [{"x": one[None], "past": np.zeros((0, 32, 16, 16), np.float32)} for one in SAMPLES]
    result = onnxq.quantize(proto, samples, overrides=HOW)
    assert result.report.pairs
    assert result.report.checks[0].sqnr_db[0] > 25
    empty = onnxq.quantize(network(x="float[0,3,16,16]"), overrides=HOW)
    assert run(empty.model, x=SAMPLES[:0]).size == 0


def test_a_model_of_another_domain_alone_has_nothing_to_quantize() -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { y = ai.onnx.ml.Binarizer<threshold = 0.0>(x) }"
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["ai.onnx.ml" : 3]> {text}')
    rows = SAMPLES[:8, 0, :2, :3]
    result = onnxq.quantize(proto, {"x": rows}, overrides=HOW)
    assert result.report.pairs == 0
    np.testing.assert_array_equal(run(result.model, x=rows[0]), rows[0] > 0)


def test_functions_are_inlined_and_quantized() -> None:
    proto = parse_text(
        f"""g (float[N,3,16,16] x) => (float[N,32,16,16] y) {{ a = local.Block(x, w0) y = local.Block(a, w1) }}
        <domain: "local", opset_import: ["" : 17]> Block (p, w) => (q) {{ c = {SAME}(p, w) q = Relu(c) }}""",
        "local",
        w0=WEIGHTS["w0"],
        w1=WEIGHTS["w1"],
    )
    result = quantize(proto, {"x": SAMPLES})
    assert_faithful(result)
    assert kernels(result.model)["QLinearConv"] == 2


def test_a_loop_body_is_refused_and_the_rest_quantized() -> None:
    text = """g (float[N,128] x) => (float[N,128] y) {
        [before] h = MatMul(x, v)
        [Loop] y = Loop(count, , h) <body = b (int64 i, bool go, float[N,128] s) => (bool on, float[N,128] t) {
            m = MatMul(s, w) t = Tanh(m) on = Identity(go) }> }"""
    proto = model(text, count=np.array(3), **MATRICES)
    data = {"x": np.random.default_rng(0).standard_normal((32, 128)).astype(np.float32)}
    result = quantize(proto, data, "virtual-int8")
    assert result.report.checks[0].sqnr_db[0] > 25
    assert {site.site.scope for site in result.plan.sites} == {""}
    refused = {refusal.subject: refusal for refusal in result.plan.refusals}
    assert "Loop" in refused["Loop.body"].reason
    assert "weight-only" in refused["Loop.body"].fix
    weights = quantize(proto, data, "ort-int8-weights")
    assert_faithful(weights)
    assert {site.site.scope for site in weights.plan.sites} == {"", "Loop.body"}
    assert weights.report.refusals == ()


def test_weights_of_a_convolution_in_a_loop_are_rounded_for_all_its_steps() -> None:
    text = """g (float[1,4,8,8] x) => (float[1,4,8,8] y) {
        y = Loop(count, , x) <body = b (int64 i, bool go, float[1,4,8,8] s) => (bool on, float[1,4,8,8] t) {
            m = Conv<pads=[1,1,1,1]>(s, w) t = Tanh(m) on = Identity(go) }> }"""
    rng = np.random.default_rng(0)
    proto = model(text, count=np.array(3), w=rng.standard_normal((4, 4, 3, 3)).astype(np.float32) / 3)
    weights = quantize(proto, {"x": rng.standard_normal((16, 4, 8, 8)).astype(np.float32)}, "ort-int8-weights")
    assert_faithful(weights)
    assert [(count.op, count.quantized) for count in weights.report.ops] == [("Conv", 1)]


def test_a_loop_over_layers_reads_its_stack_of_weights_in_integers() -> None:
    """As JAX writes a scan over layers: each step gets its own of the weights that all hand on."""
    text = """g (float[1,128] x) => (float[1,128] y) {
        y, rest = Loop(count, , x, w) <body = b (int64 i, bool go, float[1,128] s, float[6,128,128] m)
            => (bool on, float[1,128] t, float[6,128,128] n) {
            k = Gather(m, i) p = MatMul(s, k) t = Tanh(p) n = Identity(m) on = Identity(go) }> }"""
    rng = np.random.default_rng(0)
    proto = model(text, count=np.array(6), w=rng.standard_normal((6, 128, 128)).astype(np.float32) / 8)
    result = quantize(proto, {"x": rng.standard_normal((16, 128)).astype(np.float32)}, "ort-int8-weights")
    assert_faithful(result)
    assert result.report.figures[0].sqnr_db > 20
    assert result.report.output_bytes < 0.3 * result.report.source_bytes


def test_external_data_in_and_out(tmp_path: Path) -> None:
    source, target = tmp_path / "in" / "m.onnx", tmp_path / "out" / "m.onnx"
    source.parent.mkdir()
    target.parent.mkdir()
    onnx.save(residual(), source, save_as_external_data=True, location="weights.bin", size_threshold=0)
    files = {path: path.read_bytes() for path in source.parent.iterdir()}
    how = {"latency": False, "external_data": True}
    assert_faithful(onnxq.quantize(source, images(), EVERYTHING, overrides=how, out=target))
    assert {path: path.read_bytes() for path in source.parent.iterdir()} == files
    assert {path.name for path in target.parent.iterdir()} == {"m.onnx", "m.onnx_data"}
    onnx.checker.check_model(target)


def test_batch_norm_and_hard_swish_are_folded_first() -> None:
    text = f"""g (float[N,3,16,16] x) => (float[N,32,16,16] y)
        <float three = {{3.0}}, float zero = {{0.0}}, float six = {{6.0}}> {{
        a = {SAME}(x, w0) n = BatchNormalization(a, scale, bias, mean, var)
        p = Add(n, three) c = Clip(p, zero, six) m = Mul(n, c) h = Div(m, six) y = {SAME}(h, w1) }}"""
    rng = np.random.default_rng(0)
    numbers = {name: rng.uniform(0.5, 1.5, 32) for name in ("scale", "bias", "mean", "var")}
    arrays = {name: value.astype(np.float32) for name, value in numbers.items()}
    result = quantize(model(text, 13, w0=4 * WEIGHTS["w0"], w1=WEIGHTS["w1"], **arrays), {"x": SAMPLES})
    assert_faithful(result)
    ops = [node.op_type for node in result.model.graph.node]
    assert (ops.count("HardSwish"), ops.count("BatchNormalization")) == (1, 0)
    assert kernels(result.model)["QLinearConv"] == 2


def test_no_data_means_a_warning_nobody_can_miss() -> None:
    result, again = (quantize(residual()) for _ in range(2))
    assert result.report.synthetic
    assert "SYNTHETIC" in result.plan.warnings[0]
    assert to_bytes(again) == to_bytes(result)


def test_lost_answers_are_said() -> None:
    """One channel scaled up by 2**12 and down again behind: per-tensor activations cannot hold it."""
    proto = residual()
    scales = np.exp2(np.linspace(-9, 9, 32)).astype(np.float32)
    behind = 1 / scales.reshape(1, 32, 1, 1)
    factors = {"w0": scales.reshape(32, 1, 1, 1), "b0": scales, "w1": behind, "w2": behind}
    for tensor in proto.graph.initializer:
        value = numpy_helper.to_array(tensor) * factors.get(tensor.name, np.float32(1))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    result = quantize(proto, images())
    assert min(result.report.checks[0].sqnr_db) < 10
    assert any("far from the float model's" in alarm for alarm in result.report.alarms())


# Text of the network, the type of its input n, a value of n, and constants.
ARITHMETIC: dict[str, tuple[str, str, Any, dict[str, np.ndarray]]] = {
    # Shape arithmetic on an input of integers, of which no target may make pairs.
    "integers": (
        f"""c = {SAME}(x, u) less = Sub(n, one) most = Max(less, one) same = Mul(most, one)
        more = Add(same, one) s = Slice(c, one, more, three) y = {SAME}(s, v)""",
        "int64[1]",
        [9],
        {"one": np.array([1]), "three": np.array([3])},
    ),
    "sizes": (f"c = {SAME}(x, u) s = Resize(c, , , n) y = {SAME}(s, v)", "int64[4]", [1, 8, 24, 24], {}),
    # Double precision between two products.
    "doubles": (
        f"""c = {SAME}(x, u) d = Cast <to = 11>(c) e = Mul(d, d) f = MatMul(e, wide) s = Cast <to = 1>(f)
        y = {SAME}(s, v)""",
        "bool",
        True,
        {"wide": np.random.default_rng(2).standard_normal((16, 16)) / 4},
    ),
}


@pytest.mark.parametrize("target", ["ort", "trt", "virtual"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_integers_and_doubles_between_products_stay_as_they_are(name: str, target: str) -> None:
    text, kind, given, constants = ARITHMETIC[name]
    graph = f"g (float[1,8,16,16] x, {kind} n) => (float[A,B,C,D] y) {{ {text} }}"
    proto = model(graph, opset=18, **KERNELS, **constants)
    feeds = [{"x": row, "n": np.array(given)} for row in MAPS]
    result = onnxq.quantize(proto, feeds, overrides={"latency": False, "target": target})
    assert result.report.checks[0].sqnr_db[0] > 30
    exact, found = (run(one, **feeds[0]) for one in (proto, result.model))
    assert np.abs(found - exact).max() < 0.1 * np.abs(exact).max()


BODIES = {
    "loop": f"""s = Loop(three, yes, r) <body = turn (int64 i, bool go, float[1,8,16,16] state)
        => (bool on, float[1,8,16,16] sum) {{
        on = Identity(go) h = {SAME}(r, v) p = Relu(h) sum = Add(p, state) }}>""",
    "branch": f"""s = If(yes) <then_branch = here () => (float[1,8,16,16] h) {{ p = {SAME}(r, v) h = Relu(p) }},
        else_branch = there () => (float[1,8,16,16] z) {{ z = Identity(r) }}>""",
}


@pytest.mark.parametrize("body", BODIES)
def test_ranges_are_chosen_around_bodies_with_convolutions(body: str) -> None:
    text = f"""g (float[1,8,16,16] x, bool yes) => (float[1,8,16,16] y) {{
        c = {SAME}(x, u) r = Relu(c) {BODIES[body]} y = {SAME}(s, v) }}"""
    constants = {"three": np.array(3)} if body == "loop" else {}
    feeds = [{"x": row, "yes": np.array(True)} for row in np.concatenate([MAPS, 2 * MAPS])]
    how = {"latency": False, "target": "virtual", "effort": "balanced"}
    result = onnxq.quantize(model(text, opset=18, **KERNELS, **constants), feeds, overrides=how)
    assert any(line.startswith("ranges: ") for line in result.report.accounts)
    assert result.report.checks[0].sqnr_db[0] > 30


@pytest.mark.parametrize(("hidden", "observed"), [(0, True), (7, True), (11, False)])
def test_a_mask_that_only_one_sample_has_spoils_no_check(hidden: int, observed: bool) -> None:
    """Samples that choose leave no pair where they hold -inf; one held back for the figures decides nothing."""
    rng = np.random.default_rng(0)
    text = """g (float[16,32] x, bool[16,32] keep) => (float[16,32] y) {
        a = MatMul(x, q) n = Where(keep, a, low) c = Concat <axis = 1>(n, a) s = Slice(c, zero, wide, one)
        p = Softmax <axis = -1>(s) y = MatMul(p, k) }"""
    numbers = {"zero": np.array([0]), "wide": np.array([32]), "one": np.array([1]), "low": np.float32(-np.inf)}
    proto = model(text, opset=18, **random_weights({"q": (32, 32), "k": (32, 32)}), **numbers)
    keep = [np.ones((16, 32), bool) for _ in range(16)]
    keep[hidden][:, ::3] = False
    feeds = [{"x": rng.standard_normal((16, 32)).astype(np.float32), "keep": one} for one in keep]
    result = onnxq.quantize(proto, feeds, overrides={**HOW, "target": "virtual"})
    assert any("-inf" in refusal.reason for refusal in result.plan.refusals) == observed
    assert all(check.sqnr_db[0] > 25 for check in result.report.checks)
    assert np.isfinite(run(result.model, **feeds[hidden])).all()


def test_weights_alone_are_rounded_where_no_inputs_can_be_made_up() -> None:
    proto = model(
        'g (string[N] s) => (float[N,128] y) { i = ai.onnx.ml.LabelEncoder<keys_strings=["a"], values_int64s=[1]>(s)'
        " e = Gather(v, i) y = MatMul(e, w) }",
        **MATRICES,
    )
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    with pytest.raises(DataError, match="quantize weights alone"):
        onnxq.quantize(proto, None, overrides=HOW)
    result = onnxq.quantize(proto, None, "ort-int8-weights", overrides=HOW)
    assert len(result.plan.sites) == 2
    assert not result.report.checks
    assert len(onnxq.make_plan(proto, config="ort-int8-weights").sites) == 2
