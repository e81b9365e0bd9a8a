"""From odd files to quantized ones: undeclared shapes and types, tensors of no elements, operators of old opsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

import onnxq
from onnxq.runtime import find_runnable_opset

HOW: dict[str, Any] = {"latency": False, "effort": "fast"}
RNG = np.random.default_rng(0)
SAMPLES = RNG.standard_normal((12, 3, 16, 16)).astype(np.float32)
WEIGHTS = {
    "w0": RNG.standard_normal((32, 3, 3, 3)) / 5,
    "b0": RNG.standard_normal(32) / 8,
    "w1": RNG.standard_normal((32, 32, 3, 3)) / 17,
    "b1": RNG.standard_normal(32) / 8,
}
CONVS = """c = Conv <pads=[1,1,1,1]>(x, w0, b0)
    r = Relu(c)
    d = Conv <pads=[1,1,1,1]>(r, w1, b1)"""


def network(tail: str = "y = Relu(d)", *, opset: int = 17, ir: int = 8, x: str = "float[N,3,16,16]") -> onnx.ModelProto:
    header = f'<ir_version: {ir}, opset_import: ["" : {opset}]>'
    proto = parser.parse_model(f"{header} g ({x} x) => (float[N,32,16,16] y) {{ {CONVS}\n {tail} }}")
    for name, value in WEIGHTS.items():
        proto.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return proto


def runs(result: onnxq.Result, x: np.ndarray = SAMPLES[:1]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": x})
    return found


def test_without_shapes_the_samples_say_what_shapes_there_are() -> None:
    proto = network()
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].ClearField("type")
    result = onnxq.quantize(proto, {"x": SAMPLES}, overrides=HOW)
    whole = onnxq.quantize(network(), {"x": SAMPLES}, overrides=HOW)
    assert result.report.pairs == whole.report.pairs > 0
    np.testing.assert_array_equal(runs(result)[0], runs(whole)[0])
    with pytest.raises(onnxq.OnnxqError, match=r"input 'x': .*of any shape"):
        onnxq.quantize(proto, overrides=HOW)


def test_version_3_is_quantized_whether_its_weights_are_inputs_or_not() -> None:
    bare, listed = network(opset=8, ir=3), network(opset=8, ir=3)
    for name, value in WEIGHTS.items():
        listed.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, value.shape))
    answers = [runs(onnxq.quantize(proto, {"x": SAMPLES}, overrides=HOW))[0] for proto in (bare, listed)]
    np.testing.assert_array_equal(*answers)


def test_a_tensor_of_no_elements_is_carried_along() -> None:
    """A cache that is empty at first, joined to what is new."""
    proto = network("y = Concat <axis=0>(past, d)")
    past = helper.make_tensor_value_info("past", onnx.TensorProto.FLOAT, [0, 32, 16, 16])
    proto.graph.input.append(past)
    samples = [{"x": one[None], "past": np.zeros((0, 32, 16, 16), np.float32)} for one in SAMPLES]
    result = onnxq.quantize(proto, samples, overrides=HOW)
    assert result.report.pairs
    assert result.report.checks[0].sqnr_db[0] > 25
    empty = onnxq.quantize(network(x="float[0,3,16,16]"), overrides=HOW)
    assert runs(empty, SAMPLES[:0])[0].size == 0


# One operator each whose form changed between opset 7 and 13, as the older opset has it.
OLD = {
    "Clip": "y = Clip <min=0.0, max=6.0>(d)",
    "Dropout": "y = Dropout <ratio=0.5>(d)",
    "Pad": "y = Pad <pads=[0,0,1,1,0,0,1,1]>(d)",
    "ReduceSum": "y = ReduceSum <axes=[2,3]>(d)",
    "Slice": "y = Slice <axes=[2,3], ends=[4,4], starts=[0,0]>(d)",
    "Softmax": "y = Softmax <axis=1>(d)",
    "Split": "s, t = Split <axis=1>(d)\n y = Add(s, t)",
    "Squeeze": "p = GlobalAveragePool(d)\n q = Squeeze <axes=[2,3]>(p)\n y = Unsqueeze <axes=[2]>(q)",
    "TopK": "y, i = TopK <axis=1, k=3>(d)",
    "Upsample": "y = Upsample <scales=[1.0,1.0,2.0,2.0]>(d)",
}
LAST = {"Clip": 10, "Dropout": 11, "Pad": 10, "Slice": 9, "TopK": 9, "Upsample": 8}


@pytest.mark.parametrize(("name", "opset"), [(n, o) for n in OLD for o in sorted({7, LAST.get(n, 12)})])
def test_old_opsets_are_brought_up_to_date(name: str, opset: int) -> None:
    proto = network(OLD[name], opset=opset)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    result = onnxq.quantize(proto, {"x": SAMPLES}, overrides=HOW)
    assert result.report.rewrites[0] == f"opset: {opset} -> 13"
    assert result.report.pairs
    assert result.report.checks[0].sqnr_db[0] > 20


def test_an_opset_that_onnx_runtime_no_longer_runs_is_refused_in_words() -> None:
    with pytest.raises(onnxq.OnnxqError, match=r"Relu.*ONNX Runtime cannot load it"):
        onnxq.quantize(network(opset=5), {"x": SAMPLES}, overrides=HOW)


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
    runs(result)


def test_what_is_newer_in_a_narrow_type_is_lowered_in_float32() -> None:
    text = 'g (bfloat16[4,8] x, bfloat16[8,8] z) => (bfloat16[4,8] y) { y = Einsum<equation = "ij,jk->ik">(x, z) }'
    proto = parser.parse_model(f'<ir_version: 14, opset_import: ["" : 28]> {text}')
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((4, 8)), "z": rng.standard_normal((8, 8))} for _ in range(4)]
    result = onnxq.quantize(proto, samples, overrides=HOW)
    assert result.report.checks[0].sqnr_db[0] > 20


def test_a_model_of_another_domain_alone_has_nothing_to_quantize() -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { y = ai.onnx.ml.Binarizer<threshold = 0.0>(x) }"
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["ai.onnx.ml" : 3]> {text}')
    result = onnxq.quantize(proto, {"x": SAMPLES[:8, 0, :2, :3]}, overrides=HOW)
    assert result.report.pairs == 0
    np.testing.assert_array_equal(runs(result, SAMPLES[0, 0, :2, :3])[0], SAMPLES[0, 0, :2, :3] > 0)


def build(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items())
    return proto


KERNELS = {name: (RNG.standard_normal((8, 8, 3, 3)) / 9).astype(np.float32) for name in ("u", "v")}
MAPS = RNG.standard_normal((8, 1, 8, 16, 16)).astype(np.float32)
ARITHMETIC = {
    # Shape arithmetic on an input of integers, of which no target may make pairs.
    "integers": (
        """c = Conv <pads=[1,1,1,1]>(x, u) less = Sub(n, one) most = Max(less, one) same = Mul(most, one)
        more = Add(same, one) s = Slice(c, one, more, three) y = Conv <pads=[1,1,1,1]>(s, v)""",
        {"one": np.array([1]), "three": np.array([3])},
    ),
    "sizes": (
        "c = Conv <pads=[1,1,1,1]>(x, u) s = Resize(c, , , n) y = Conv <pads=[1,1,1,1]>(s, v)",
        {},
    ),
    # Double precision between two products.
    "doubles": (
        """c = Conv <pads=[1,1,1,1]>(x, u) d = Cast <to = 11>(c) e = Mul(d, d) f = MatMul(e, wide) s = Cast <to = 1>(f)
        y = Conv <pads=[1,1,1,1]>(s, v)""",
        {"wide": RNG.standard_normal((16, 16)) / 4},
    ),
}


@pytest.mark.parametrize("target", ["ort", "trt", "virtual"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_integers_and_doubles_between_products_stay_as_they_are(name: str, target: str) -> None:
    text, constants = ARITHMETIC[name]
    number = {"integers": "int64[1] n", "sizes": "int64[4] n", "doubles": "bool n"}[name]
    proto = build(f"(float[1,8,16,16] x, {number}) => (float[A,B,C,D] y) {{ {text} }}", **KERNELS, **constants)
    given = {"integers": np.array([9]), "sizes": np.array([1, 8, 24, 24]), "doubles": np.array(True)}[name]
    feeds = [{"x": row, "n": given} for row in MAPS]
    result = onnxq.quantize(proto, feeds, overrides={"latency": False, "target": target})
    assert result.report.checks[0].sqnr_db[0] > 30
    exact = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds[0])[0]
    (found,) = onnxruntime.InferenceSession(result.model.SerializeToString()).run(None, feeds[0])
    assert np.abs(found - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("body", ["loop", "branch"])
def test_ranges_are_chosen_around_bodies_with_convolutions(body: str) -> None:
    conv, same = "Conv <pads=[1,1,1,1]>", "float[1,8,16,16]"
    inner = {
        "loop": f"""s = Loop(three, yes, r) <body = turn (int64 i, bool go, {same} state) => (bool on, {same} sum) {{
            on = Identity(go) h = {conv}(r, v) p = Relu(h) sum = Add(p, state) }}>""",
        "branch": f"""s = If(yes) <then_branch = here () => ({same} h) {{ p = {conv}(r, v) h = Relu(p) }},
            else_branch = there () => ({same} z) {{ z = Identity(r) }}>""",
    }[body]
    text = f"({same} x, bool yes) => ({same} y) {{ c = {conv}(x, u) r = Relu(c) {inner} y = {conv}(s, v) }}"
    proto = build(text, **KERNELS, **({"three": np.array(3)} if body == "loop" else {}))
    feeds = [{"x": row, "yes": np.array(True)} for row in np.concatenate([MAPS, 2 * MAPS])]
    result = onnxq.quantize(proto, feeds, overrides={"latency": False, "target": "virtual", "effort": "balanced"})
    assert any(line.startswith("ranges: ") for line in result.report.accounts)
    assert result.report.checks[0].sqnr_db[0] > 30


@pytest.mark.parametrize(("hidden", "observed"), [(0, True), (7, True), (9, False)])
def test_a_mask_that_only_one_sample_has_spoils_no_check(hidden: int, observed: bool) -> None:
    """Samples that choose leave no pair where they hold -inf; one held back for the figures decides nothing."""
    square = {name: (RNG.standard_normal((32, 32)) / 6).astype(np.float32) for name in ("q", "k")}
    text = """(float[16,32] x, bool[16,32] keep) => (float[16,32] y) {
        a = MatMul(x, q) n = Where(keep, a, low) c = Concat <axis = 1>(n, a) s = Slice(c, zero, wide, one)
        p = Softmax <axis = -1>(s) y = MatMul(p, k) }"""
    numbers = {"zero": np.array([0]), "wide": np.array([32]), "one": np.array([1]), "low": np.float32(-np.inf)}
    proto = build(text, **square, **numbers)
    keep = [np.ones((16, 32), bool) for _ in range(16)]
    keep[hidden][:, ::3] = False
    feeds = [{"x": RNG.standard_normal((16, 32)).astype(np.float32), "keep": one} for one in keep]
    how = {"latency": False, "target": "virtual", "effort": "fast"}
    result = onnxq.quantize(proto, feeds, overrides=how)
    assert any("-inf" in refusal.reason for refusal in result.plan.refusals) == observed
    assert all(db > 25 for check in result.report.checks for db in check.sqnr_db)
    session = onnxruntime.InferenceSession(result.model.SerializeToString())
    assert np.isfinite(session.run(None, feeds[hidden])[0]).all()
