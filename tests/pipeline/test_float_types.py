"""float16 around int8, or alone: right answers, float32 where it is needed, and the summary says where and why."""

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.commands.results import show
from onnxq.graph import emulate_types, name_nodes
from onnxq.graph.light import LARGE_BYTES
from onnxq.plan import KeepReason, from_json, to_json
from onnxq.runtime import Session
from tests.backends.graphs import model
from tests.passes.kit import parse, random_weights
from tests.pipeline.models import add_rule, find_worst_db, narrowed, quantize
from tests.report.kit import shown

C3 = "<pads=[1,1,1,1], kernel_shape=[3,3]>"
CONVS = f"""g (float[N,32,14,14] x) => (float[N,32,14,14] y) {{
    a = Conv {C3}(x, w, b) i = Relu(a) c = Conv {C3}(i, v, b) d = Add(c, i) y = Conv {C3}(d, w, b)
}}"""
CONV_WEIGHTS: dict[str, tuple[int, ...]] = {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "b": (32,)}


def convs() -> onnx.ModelProto:
    return model(CONVS, weights=CONV_WEIGHTS)


def images(count: int = 8) -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((count, 32, 14, 14)).astype(np.float32)}


def types(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(TensorProto.DataType.Name(tensor.data_type) for tensor in proto.graph.initializer)


def find_kept(result: onnxq.Result) -> dict[str, KeepReason]:
    """The nodes that stay in float32, and why."""
    return {one.node: one.reason for one in result.plan.precision.kept}


def show_text(result: Any) -> str:
    return shown(show, result, width=200)


def measure_emulated_db(result: onnxq.Result, float_model: onnx.ModelProto, data: dict[str, Any]) -> float:
    """Of the file itself, rounded as its types round, against the float model: nothing of the report is used."""
    runs = [Session(one, optimize=False).run(data) for one in (float_model, emulate_types(name_nodes(result.model)))]
    name = float_model.graph.output[0].name
    wanted, got = (run[name].astype(np.float64) for run in runs)
    return float(10 * np.log10((wanted**2).sum() / max(((wanted - got) ** 2).sum(), 1e-300)))


def quantize_fast(
    net: onnx.ModelProto, data: dict[str, Any], config: str, *said: str, least: float = 28.0, **overrides: Any
) -> onnxq.Result:
    """The quantized model, of `least` dB as its types round, whose summary says all of `said`."""
    result = quantize(net, data, config, **{"effort": "fast", **overrides})
    assert measure_emulated_db(result, net, data) > least
    text = show_text(result.report)
    assert [sentence for sentence in said if sentence not in text] == []
    return result


def test_trt_has_float16_around_int8() -> None:
    told = "5 nodes compute in float16"
    result = quantize_fast(convs(), images(), "trt-int8", told, least=30)
    # The input is quantized in its own type; the output gets it back.
    wide_ones = [tensor.name for tensor in result.model.graph.initializer if tensor.data_type == TensorProto.FLOAT]
    assert wide_ones == ["x/scale"]
    assert [node.name for node in result.model.graph.node if node.op_type == "Cast"] == ["y/Cast"]
    assert result.model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert result.model.opset_import[0].version >= 19
    wide = quantize(convs(), images(), "trt-int8", effort="fast", high_precision="float32")
    assert types(wide.model)["FLOAT16"] == 0
    assert wide.plan.precision is None
    assert find_worst_db(result) > find_worst_db(wide) - 0.5
    # A dry run and the file itself say the same, and the plan gives the file again.
    planned = onnxq.make_plan(convs(), images(), "trt-int8")
    assert planned.precision.nodes == 5
    assert "float16" in show_text(planned)
    found = onnxq.inspect(result.model)
    assert found.float_types == result.plan.precision
    assert {pair.bits for pair in found.pairs} == {8}
    assert told in show_text(found)
    read = from_json(to_json(result.plan))
    assert read == result.plan
    assert onnxq.apply(convs(), read).model.SerializeToString() == result.model.SerializeToString()


def test_inputs_and_outputs_change_type_when_asked() -> None:
    result = quantize(convs(), images(), "trt-int8", effort="fast", io_types="float16")
    assert "Cast" not in {node.op_type for node in result.model.graph.node}
    values = (*result.model.graph.input, *result.model.graph.output)
    assert {value.type.tensor_type.elem_type for value in values} == {TensorProto.FLOAT16}
    assert find_worst_db(result) > 30


def test_models_are_converted_without_pairs() -> None:
    result = quantize_fast(convs(), images(), "trt-fp16", least=55)
    assert not result.plan.sites
    assert not result.report.refusals
    assert result.model.ByteSize() < 0.6 * convs().ByteSize()
    assert "nothing was quantized" not in show_text(result.report)
    assert types(result.model) == {"FLOAT16": 3}
    # ONNX Runtime has float16 only where it is asked for.
    assert quantize(convs(), images(), "ort-int8", effort="fast").plan.precision is None
    asked = quantize(convs(), images(), "ort-int8", effort="fast", high_precision="float16", mode="float")
    assert types(asked.model) == {"FLOAT16": 3}


RESIDUAL = """g (float[N,8,64] x) => (float[N,8,64] y) {
    u = Mul(x, big) a = LayerNormalization(u, g, z) m = MatMul(a, w) s = Add(u, m) b = LayerNormalization(s, g, z)
    n = MatMul(b, v) t = Add(s, n) y = LayerNormalization(t, g, z) }"""


@pytest.mark.parametrize(("config", "casts"), [("trt-int8", 2), ("trt-fp16", 4)])
def test_residual_stream_beyond_float16(config: str, casts: int) -> None:
    weights = random_weights({"w": (64, 64), "v": (64, 64)})
    net = parse(RESIDUAL, big=1e5, g=np.ones(64, np.float32), z=np.zeros(64, np.float32), **weights)
    data = {"x": np.random.default_rng(2).standard_normal((8, 8, 64)).astype(np.float32)}
    said = "float32: values near or beyond the largest float16"
    result = quantize_fast(net, data, config, said, least=30)
    reasons = find_kept(result)
    stream = ("u/Mul", "s/Add", "a/LayerNormalization")
    assert [reasons[name] for name in stream] == [KeepReason.OVERFLOW] * 3
    assert not {"m/MatMul", "n/MatMul"} & set(reasons)
    # The stream is float32: a Cast in front of each sum, and behind each norm where no pair is.
    assert sum(node.op_type == "Cast" for node in result.model.graph.node) == casts


MASKED = """g (float[N,2,8,16] q, float[N,1,1,8] keep) => (float[N,2,8,16] y) {
    k = Transpose <perm=[0,1,3,2]>(q) s = MatMul(q, k) drop = Sub(one, keep) mask = Mul(drop, lowest)
    m = Add(s, mask) p = Softmax(m) y = MatMul(p, q) }"""


def test_masks_of_the_lowest_float32() -> None:
    net = parse(MASKED, one=1.0, lowest=float(np.finfo(np.float32).min))
    rng = np.random.default_rng(3)
    keep = (rng.random((8, 1, 1, 8)) < 0.7).astype(np.float32)
    keep[..., 0] = 1
    data = {"q": rng.standard_normal((8, 2, 8, 16)).astype(np.float32), "keep": keep}
    said = ("mask/Mul: -3.4e+38", "limited to what float16 holds")
    reasons = find_kept(quantize_fast(net, data, "trt-fp16", *said, least=55))
    assert reasons["mask/Mul"] is KeepReason.OVERFLOW
    # Scores, Softmax and values stay one kernel: the mask is limited where they read it.
    assert not {"s/MatMul", "m/Add", "p/Softmax", "y/MatMul"} & set(reasons)


GROUPED = f"""g (float[N,32,14,14] x) => (float[N,32,14,14] y) {{
    a = Conv <group=4, pads=[1,1,1,1], kernel_shape=[3,3]>(x, w, b) r = Relu(a)
    c = Conv <group=32, pads=[1,1,1,1], kernel_shape=[3,3]>(r, d, b) y = Conv {C3}(c, v, b) }}"""


@pytest.mark.parametrize("config", ["trt-int8", "trt-fp16"])
def test_grouped_convolutions(config: str) -> None:
    net = model(GROUPED, weights={"w": (32, 8, 3, 3), "d": (32, 1, 3, 3), "v": (32, 32, 3, 3), "b": (32,)})
    reasons = find_kept(quantize_fast(net, images(), config, "grouped convolutions", least=25))
    assert reasons["conv0"] is KeepReason.KERNEL
    assert not {"conv2", "conv3"} & set(reasons)


def rescaled(proto: onnx.ModelProto, **factors: float) -> onnx.ModelProto:
    for tensor in proto.graph.initializer:
        value = numpy_helper.to_array(tensor) * np.float32(factors.get(tensor.name, 1.0))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return proto


@pytest.mark.parametrize("config", ["trt-int8", "trt-fp16"])
def test_values_below_the_normal_numbers(config: str) -> None:
    """Values of 1e-5 have scales of 1e-7, which float16 would round by a fifth."""
    net, data = rescaled(convs(), b=0.0), {"x": images()["x"] * np.float32(3e-6)}
    result = quantize_fast(net, data, config, "values too small for float16")
    scales = [float(site.qparams.scale.max()) for site in result.plan.sites if site.qparams]
    assert min(scales, default=1e-7) < 2e-7
    assert set(find_kept(result).values()) == {KeepReason.SMALL}


def test_weight_scales_that_lose_digits() -> None:
    net = rescaled(convs(), b=0.0, w=1e-3, v=1e3)
    reasons = find_kept(quantize_fast(net, images(), "trt-int8", "a scale of what it reads"))
    assert {name for name, reason in reasons.items() if reason is KeepReason.SCALE} >= {"conv0", "conv4"}


def test_rules_name_nodes_that_stay_in_float32() -> None:
    rules = [{"node": "conv2", "set": {"high_precision": "float32"}}]
    result = quantize(convs(), images(), "trt-fp16", rules=rules)
    assert find_kept(result)["conv2"] is KeepReason.RULE
    assert "rule node=conv2" in show_text(result.report)
    quantized = quantize(convs(), images(), "trt-int8", rules=rules, effort="fast")
    assert any(edge.node == "conv2" for site in quantized.plan.sites for edge in site.consumers or ())


@pytest.mark.parametrize("target", ["ort", "trt"])
def test_narrow_exports_are_quantized_as_float32_ones(target: str) -> None:
    """Every pass runs, as accurately; inputs and outputs keep their types; the plan is of the same network."""
    how = {"target": target, "latency": False, "min_sqnr": 10}
    wide = onnxq.quantize(convs(), images(), overrides=how)
    for kind, tolerance in ((TensorProto.FLOAT16, 0.5), (TensorProto.BFLOAT16, 3)):
        export = narrowed(convs(), kind)
        result = onnxq.quantize(export, images(), overrides=how)
        assert result.report.promotion.met
        assert {line.partition(":")[0] for line in result.report.accounts} >= {"ranges", "rounding"}
        assert find_worst_db(result) > find_worst_db(wide) - tolerance
        assert result.model.graph.input == export.graph.input
        assert result.model.graph.output == export.graph.output
        assert {str(site.site) for site in result.plan.sites if site.role == "weight"} == {"w", "v"}
        if target == "trt":
            assert types(result.model)[TensorProto.DataType.Name(kind)] > 0
        onnx.checker.check_model(result.model, full_check=True)


GELU = """g (float[N,16,64] x) => (float[N,16,64] y) {
    a = MatMul(x, w) q = Div(a, root) e = Erf(q) f = Add(e, one) m = Mul(a, f) g = Mul(m, half) y = MatMul(g, v)
}"""


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_constants_of_a_chain_are_known_in_the_type_they_were_rounded_to(kind: int) -> None:
    """The root of 2 in float16 is 1e-4 away from itself."""
    net = parse(GELU, root=2**0.5, one=1.0, half=0.5, **random_weights({"w": (64, 64), "v": (64, 64)}))
    export = net if kind == TensorProto.FLOAT else narrowed(net, kind)
    samples = {"x": np.random.default_rng(1).standard_normal((6, 16, 64)).astype(np.float32)}
    result = onnxq.quantize(export, samples, overrides={"effort": "fast", "latency": False})
    made = {node.op_type for node in result.model.graph.node}
    assert made & {"Gelu", "Erf"} == {"Gelu"}


def test_metric_sees_models_in_their_own_types() -> None:
    seen = []

    def metric(tried: Any) -> float:
        feeds = {"x": images()["x"].astype(np.float16)}
        seen.append(tried(feeds)["y"].dtype)
        return 1.0

    export = narrowed(convs(), TensorProto.FLOAT16)
    result = onnxq.quantize(export, images(), overrides={"target": "trt", "effort": "fast", "metric": metric})
    assert result.report.promotion is not None
    assert set(seen) == {np.dtype(np.float16)}


@pytest.mark.parametrize("large", [LARGE_BYTES, 1])
def test_bfloat16_is_named_and_rounded_as_such(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxq.graph.light.LARGE_BYTES", large)
    result = quantize(convs(), images(), "trt-fp16", high_precision="bfloat16")
    assert types(result.model) == {"BFLOAT16": 3}
    exact = emulate_types(name_nodes(result.model))
    y = Session(exact, optimize=False).run(images())["y"]
    np.testing.assert_array_equal(y, y.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("config", ["trt-int8", "trt-fp16"])
def test_group_normalization_has_the_type_of_what_stands_around_it(config: str) -> None:
    text = f"""g (float[N,32,14,14] x) => (float[N,32,14,14] y) {{
        a = Conv {C3}(x, w, b) n = GroupNormalization <num_groups=8>(a, scale, shift) s = Sigmoid(n) m = Mul(n, s)
        y = Conv {C3}(m, v, b) }}"""
    # Before opset 21 it scales groups, not channels.
    proto = parse(text, opset=21, **random_weights({**CONV_WEIGHTS, "scale": (32,), "shift": (32,)}))
    result = quantize_fast(proto, images(), config, least=25)
    Session(result.model, optimize=False)
    assert find_kept(result) == {}
    assert find_worst_db(result) > 25


NORM = """g (float[N,8,64] x) => (float[N,8,64] y) {
    a = MatMul(x, w) u = ReduceMean <axes=[-1]>(a) d = Sub(a, u) p = Pow(d, two) q = ReduceMean <axes=[-1]>(p)
    e = Add(q, eps) s = Sqrt(e) n = Div(d, s) m = Mul(n, scale) b = Add(m, shift) y = MatMul(b, v) }"""


@pytest.mark.parametrize("config", ["trt-int8", "openvino-int8"])
def test_a_norm_written_out_loads_beside_float16(config: str) -> None:
    """ONNX Runtime takes a Cast in front of it into the norm, and refuses the node of two types that it makes."""
    shapes = {"w": (64, 64), "v": (64, 64), "scale": (64,), "shift": (64,)}
    proto = parse(NORM, two=2.0, eps=1e-5, **random_weights(shapes))
    data = {"x": 1000 * np.random.default_rng(3).standard_normal((16, 8, 64)).astype(np.float32)}
    chosen = add_rule(onnxq.load_config(config), op="MatMul", set={"quantize": True})
    result = quantize(proto, data, chosen, effort="fast", high_precision="float16")
    Session(result.model)
    assert measure_emulated_db(result, proto, data) > 30
    # So it does where the input alone is float16, and the norm reads it first.
    first = parse(NORM.replace("a = MatMul(x, w)", "a = Identity(x)"), two=2.0, eps=1e-5, **random_weights(shapes))
    halves = {"x": data["x"].astype(np.float16)}
    Session(quantize(narrowed(first, TensorProto.FLOAT16), halves, config, effort="fast").model)


CAST_FIRST = """g (KIND[N,64] x) => (float[N,64] y, KIND[N,64] z) {
    a = Cast <to=1>(x) b = MatMul(a, w) y = Relu(b) z = Cast <to=NUMBER>(y) }"""


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
@pytest.mark.parametrize(
    "overrides", [{}, {"target": "trt"}, {"target": "virtual"}, {"target": "trt", "mode": "float"}, {"mode": "dynamic"}]
)
def test_an_input_that_is_cast_first_keeps_its_type(kind: int, overrides: dict[str, Any]) -> None:
    name = TensorProto.DataType.Name(kind).lower()
    text = CAST_FIRST.replace("KIND", name).replace("NUMBER", str(kind))
    proto = parse(text, **random_weights({"w": (64, 64)}))
    values = np.random.default_rng(1).standard_normal((8, 64))
    data = {"x": values.astype(helper.tensor_dtype_to_np_dtype(kind))}
    result = onnxq.quantize(proto, data, overrides={"effort": "fast", "latency": False, **overrides})
    assert list(result.model.graph.input) == list(proto.graph.input)
    assert list(result.model.graph.output) == list(proto.graph.output)
    assert find_worst_db(result) > 25
    assert [check.name for check in result.report.checks] == ["y", "z"]
    again = onnxq.apply(proto, result.plan, data, overrides={"latency": False})
    assert again.model.SerializeToString() == result.model.SerializeToString()
    assert onnxq.profile_model(proto, result.model, data).groups or not result.plan.sites
