"""float16 around int8, or alone: right answers, float32 where it is needed, and the summary says where and why."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxq
from onnxq.commands.results import show
from onnxq.config import load_config
from onnxq.graph import name_nodes
from onnxq.graph.precision.widen import emulate_types
from onnxq.plan import KeepReason, to_json
from onnxq.report.terminal import TextView
from onnxq.runtime import Session
from tests.backends.graphs import model
from tests.passes.kit import parse, random_weights

C3 = "<pads=[1,1,1,1], kernel_shape=[3,3]>"
CONVS = f"""g (float[N,32,14,14] x) => (float[N,32,14,14] y) {{
    a = Conv {C3}(x, w, b)
    i = Relu(a)
    c = Conv {C3}(i, v, b)
    d = Add(c, i)
    y = Conv {C3}(d, w, b)
}}"""
CONV_WEIGHTS: dict[str, tuple[int, ...]] = {"w": (32, 32, 3, 3), "v": (32, 32, 3, 3), "b": (32,)}


def convs() -> onnx.ModelProto:
    return model(CONVS, weights=CONV_WEIGHTS)


def images(count: int = 8) -> dict[str, Any]:
    return {"x": np.random.default_rng(1).standard_normal((count, 32, 14, 14)).astype(np.float32)}


def with_constants(text: str, weights: dict[str, tuple[int, ...]], **values: Any) -> onnx.ModelProto:
    """A model with random weights, and constants of these values."""
    shapes = {name: np.shape(value) for name, value in values.items()}
    proto = model(text, weights={**weights, **shapes})
    for tensor in proto.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(values[tensor.name], np.float32), tensor.name))
    return proto


def narrowed(proto: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """The model as a float16 or bfloat16 export has it."""
    out = onnx.ModelProto.FromString(proto.SerializeToString())
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind)
    for tensor in out.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            value = numpy_helper.to_array(tensor).astype(dtype)
            tensor.CopyFrom(
                onnx.TensorProto(name=tensor.name, data_type=kind, dims=value.shape, raw_data=value.tobytes())
            )
    for value in (*out.graph.input, *out.graph.output):
        value.type.tensor_type.elem_type = kind
    return out


def types(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(TensorProto.DataType.Name(tensor.data_type) for tensor in proto.graph.initializer)


def kept(result: onnxq.Result) -> dict[str, KeepReason]:
    assert result.plan.precision is not None
    return {one.node: one.reason for one in result.plan.precision.kept}


def summary(result: onnxq.Result) -> str:
    stream = io.StringIO()
    show(result.report, TextView(stream=stream, width=200))
    return stream.getvalue()


def sqnr(result: onnxq.Result) -> float:
    return min(check.sqnr_db[0] for check in result.report.checks)


def emulated_sqnr(result: onnxq.Result, float_model: onnx.ModelProto, data: dict[str, Any]) -> float:
    """Of the file itself, rounded as its types round, against the float model: nothing of the report is used."""
    runs = [Session(one, optimize=False).run(data) for one in (float_model, emulate_types(name_nodes(result.model)))]
    name = float_model.graph.output[0].name
    wanted, got = (run[name].astype(np.float64) for run in runs)
    return float(10 * np.log10((wanted**2).sum() / max(((wanted - got) ** 2).sum(), 1e-300)))


def test_trt_has_float16_around_int8() -> None:
    result = onnxq.quantize(convs(), images(), "trt-int8", overrides={"effort": "fast"})
    # The input is quantized in its own type; the output gets it back.
    wide_ones = [tensor.name for tensor in result.model.graph.initializer if tensor.data_type == TensorProto.FLOAT]
    assert wide_ones == ["x/scale"]
    assert [node.name for node in result.model.graph.node if node.op_type == "Cast"] == ["y/Cast"]
    assert result.model.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT
    assert result.model.opset_import[0].version >= 19
    wide = onnxq.quantize(convs(), images(), "trt-int8", overrides={"effort": "fast", "high_precision": "float32"})
    assert types(wide.model)["FLOAT16"] == 0
    assert wide.plan.precision is None
    assert sqnr(result) > sqnr(wide) - 0.5
    assert emulated_sqnr(result, convs(), images()) > 30
    assert "5 nodes compute in float16" in summary(result)


def test_plan_is_carried_out_again_to_the_byte() -> None:
    result = onnxq.quantize(convs(), images(), "trt-int8", overrides={"effort": "fast"})
    read = onnxq.plan.from_json(to_json(result.plan))  # type: ignore[attr-defined]
    assert read == result.plan
    assert onnxq.apply(convs(), read).model.SerializeToString() == result.model.SerializeToString()


def test_dry_run_shows_the_types(capsys: pytest.CaptureFixture[str]) -> None:
    from onnxq.commands.results import show

    planned = onnxq.make_plan(convs(), images(), "trt-int8")
    assert planned.precision is not None
    assert planned.precision.nodes == 5
    show(planned)
    assert "float16" in capsys.readouterr().out


def test_inspect_reads_the_types_from_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    result = onnxq.quantize(convs(), images(), "trt-int8", overrides={"effort": "fast"})
    found = onnxq.inspect(result.model)
    assert found.float_types == result.plan.precision
    assert {pair.bits for pair in found.pairs} == {8}
    show(found)
    assert "5 nodes compute in float16" in capsys.readouterr().out


def test_inputs_and_outputs_change_type_when_asked() -> None:
    result = onnxq.quantize(convs(), images(), "trt-int8", overrides={"effort": "fast", "io_types": "float16"})
    assert "Cast" not in {node.op_type for node in result.model.graph.node}
    values = (*result.model.graph.input, *result.model.graph.output)
    assert {value.type.tensor_type.elem_type for value in values} == {TensorProto.FLOAT16}
    assert sqnr(result) > 30


def test_preset_converts_without_pairs() -> None:
    result = onnxq.quantize(convs(), images(), "trt-fp16")
    assert not result.plan.sites
    assert result.model.ByteSize() < 0.6 * convs().ByteSize()
    assert "nothing was quantized" not in summary(result)
    assert types(result.model) == {"FLOAT16": 3}
    assert emulated_sqnr(result, convs(), images()) > 55


def test_ort_with_float16_when_asked() -> None:
    assert onnxq.quantize(convs(), images(), overrides={"effort": "fast", "latency": False}).plan.precision is None
    asked = load_config("ort-int8", {"high_precision": "float16", "mode": "float", "effort": "fast"})
    assert types(onnxq.quantize(convs(), images(), asked, overrides={"latency": False}).model) == {"FLOAT16": 3}


RESIDUAL = """g (float[N,8,64] x) => (float[N,8,64] y) {
    u = Mul(x, big)
    a = LayerNormalization(u, g, z)
    m = MatMul(a, w)
    s = Add(u, m)
    b = LayerNormalization(s, g, z)
    n = MatMul(b, v)
    t = Add(s, n)
    y = LayerNormalization(t, g, z)
}"""


def test_residual_stream_beyond_float16() -> None:
    weights = {"w": (64, 64), "v": (64, 64)}
    net = with_constants(RESIDUAL, weights, big=1e5, g=np.ones(64), z=np.zeros(64))
    data = {"x": np.random.default_rng(2).standard_normal((8, 8, 64)).astype(np.float32)}
    for config in ("trt-int8", "trt-fp16"):
        result = onnxq.quantize(net, data, config, overrides={"effort": "fast"})
        reasons = kept(result)
        assert [reasons[name] for name in ("mul0", "add3", "layernormalization1")] == [KeepReason.OVERFLOW] * 3
        assert not {"matmul2", "matmul5"} & set(reasons)
        assert emulated_sqnr(result, net, data) > 30
        assert "float32: values near or beyond the largest float16" in summary(result)
        # The stream is float32: a Cast in front of each sum, and behind each norm where no pair is.
        casts = sum(node.op_type == "Cast" for node in result.model.graph.node)
        assert casts == (2 if config == "trt-int8" else 4)


MASKED = """g (float[N,2,8,16] q, float[N,1,1,8] keep) => (float[N,2,8,16] y) {
    k = Transpose <perm=[0,1,3,2]>(q)
    s = MatMul(q, k)
    drop = Sub(one, keep)
    mask = Mul(drop, lowest)
    m = Add(s, mask)
    p = Softmax(m)
    y = MatMul(p, q)
}"""


def test_masks_of_the_lowest_float32() -> None:
    net = with_constants(MASKED, {}, one=1.0, lowest=np.finfo(np.float32).min)
    rng = np.random.default_rng(3)
    keep = (rng.random((8, 1, 1, 8)) < 0.7).astype(np.float32)
    keep[..., 0] = 1
    data = {"q": rng.standard_normal((8, 2, 8, 16)).astype(np.float32), "keep": keep}
    result = onnxq.quantize(net, data, "trt-fp16")
    assert kept(result)["mul3"] is KeepReason.OVERFLOW
    # Scores, Softmax and values stay one kernel: the mask is limited where they read it.
    assert not {"matmul1", "add4", "softmax5", "matmul6"} & set(kept(result))
    assert emulated_sqnr(result, net, data) > 55
    told = summary(result)
    assert "mul3: -3.4e+38" in told
    assert "limited to what float16 holds" in told


GROUPED = f"""g (float[N,32,14,14] x) => (float[N,32,14,14] y) {{
    a = Conv <group=4, pads=[1,1,1,1], kernel_shape=[3,3]>(x, w, b)
    r = Relu(a)
    c = Conv <group=32, pads=[1,1,1,1], kernel_shape=[3,3]>(r, d, b)
    y = Conv {C3}(c, v, b)
}}"""


@pytest.mark.parametrize("config", ["trt-int8", "trt-fp16"])
def test_grouped_convolutions(config: str) -> None:
    net = model(GROUPED, weights={"w": (32, 8, 3, 3), "d": (32, 1, 3, 3), "v": (32, 32, 3, 3), "b": (32,)})
    result = onnxq.quantize(net, images(), config, overrides={"effort": "fast"})
    assert kept(result)["conv0"] is KeepReason.KERNEL
    assert not {"conv2", "conv3"} & set(kept(result))
    assert emulated_sqnr(result, net, images()) > 25
    assert "grouped convolutions" in summary(result)


def rescaled(proto: onnx.ModelProto, **factors: float) -> onnx.ModelProto:
    for tensor in proto.graph.initializer:
        value = numpy_helper.to_array(tensor) * np.float32(factors.get(tensor.name, 1.0))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return proto


@pytest.mark.parametrize("config", ["trt-int8", "trt-fp16"])
def test_values_below_the_normal_numbers(config: str) -> None:
    """Values of 1e-5 have scales of 1e-7, which float16 would round by a fifth."""
    net, data = rescaled(convs(), b=0.0), {"x": images()["x"] * np.float32(3e-6)}
    result = onnxq.quantize(net, data, config, overrides={"effort": "fast"})
    scales = [float(site.qparams.scale.max()) for site in result.plan.sites if site.qparams]
    assert min(scales, default=1e-7) < 2e-7
    assert set(kept(result).values()) == {KeepReason.SMALL}
    assert emulated_sqnr(result, net, data) > 28
    assert "values too small for float16" in summary(result)


def test_weight_scales_that_lose_digits() -> None:
    net = rescaled(convs(), b=0.0, w=1e-3, v=1e3)
    result = onnxq.quantize(net, images(), "trt-int8", overrides={"effort": "fast"})
    assert {name for name, reason in kept(result).items() if reason is KeepReason.SCALE} >= {"conv0", "conv4"}
    assert emulated_sqnr(result, net, images()) > 28
    assert "a scale of what it reads" in summary(result)


def test_rules_name_nodes_that_stay_in_float32() -> None:
    config = load_config("trt-fp16", {"rules": [{"node": "conv2", "set": {"high_precision": "float32"}}]})
    result = onnxq.quantize(convs(), images(), config)
    assert kept(result)["conv2"] is KeepReason.RULE
    assert "rule node=conv2" in summary(result)
    alone = load_config("trt-int8", {"rules": [{"node": "conv2", "set": {"high_precision": "float32"}}]})
    quantized = onnxq.quantize(convs(), images(), alone, overrides={"effort": "fast"})
    assert any(edge.node == "conv2" for site in quantized.plan.sites for edge in site.consumers or ())


@pytest.mark.parametrize("target", ["ort", "trt"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_narrow_exports_are_quantized_as_float32_ones(kind: int, target: str) -> None:
    """Every pass runs, as accurately; inputs and outputs keep their types; the plan is of the same network."""
    export = narrowed(convs(), kind)
    wide = onnxq.quantize(convs(), images(), overrides={"target": target, "latency": False, "min_sqnr": 10})
    result = onnxq.quantize(export, images(), overrides={"target": target, "latency": False, "min_sqnr": 10})
    assert result.report.promotion is not None
    assert result.report.promotion.met
    assert {line.partition(":")[0] for line in result.report.accounts} >= {"ranges", "rounding"}
    assert sqnr(result) > sqnr(wide) - (0.5 if kind == TensorProto.FLOAT16 else 3)
    assert result.model.graph.input == export.graph.input
    assert result.model.graph.output == export.graph.output
    assert {str(s.site) for s in result.plan.sites if s.role == "weight"} == {"w", "v"}
    if target == "trt":
        assert types(result.model)[TensorProto.DataType.Name(kind)] > 0
    onnx.checker.check_model(result.model, full_check=True)


GELU = """g (float[N,16,64] x) => (float[N,16,64] y) {
    a = MatMul(x, w)
    q = Div(a, root)
    e = Erf(q)
    f = Add(e, one)
    m = Mul(a, f)
    g = Mul(m, half)
    y = MatMul(g, v)
}"""


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_constants_of_a_chain_are_known_in_the_type_they_were_rounded_to(kind: int) -> None:
    """The root of 2 in float16 is 1e-4 away from itself."""
    net = with_constants(GELU, {"w": (64, 64), "v": (64, 64)}, root=2**0.5, one=1.0, half=0.5)
    export = net if kind == TensorProto.FLOAT else narrowed(net, kind)
    samples = {"x": np.random.default_rng(1).standard_normal((6, 16, 64)).astype(np.float32)}
    result = onnxq.quantize(export, samples, overrides={"effort": "fast", "latency": False})
    made = {node.op_type for node in result.model.graph.node}
    assert "Gelu" in made
    assert "Erf" not in made


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


def test_bfloat16_is_named_and_rounded_as_such() -> None:
    result = onnxq.quantize(convs(), images(), "trt-fp16", overrides={"high_precision": "bfloat16"})
    assert types(result.model) == {"BFLOAT16": 3}
    exact = emulate_types(name_nodes(result.model))
    y = Session(exact, optimize=False).run(images())["y"]
    np.testing.assert_array_equal(y, y.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("config", ["trt-int8", "trt-fp16"])
def test_group_normalization_has_the_type_of_what_stands_around_it(config: str) -> None:
    text = f"""g (float[N,32,14,14] x) => (float[N,32,14,14] y) {{
        a = Conv {C3}(x, w, b)
        n = GroupNormalization <num_groups=8>(a, scale, shift)
        s = Sigmoid(n)
        m = Mul(n, s)
        y = Conv {C3}(m, v, b)
    }}"""
    # Before opset 21 it scales groups, not channels.
    proto = parse(text, opset=21, **random_weights({**CONV_WEIGHTS, "scale": (32,), "shift": (32,)}))
    result = onnxq.quantize(proto, images(), config, overrides={"effort": "fast"})
    Session(result.model, optimize=False)
    assert kept(result) == {}
    assert sqnr(result) > 25
    assert emulated_sqnr(result, proto, images()) > 25


CAST_FIRST = """g (KIND[N,64] x) => (float[N,64] y, KIND[N,64] z) {
    a = Cast <to=1>(x)
    b = MatMul(a, w)
    y = Relu(b)
    z = Cast <to=NUMBER>(y)
}"""


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
    assert [list(part) for part in (result.model.graph.input, result.model.graph.output)] == [
        list(part) for part in (proto.graph.input, proto.graph.output)
    ]
    assert sqnr(result) > 25
    assert [check.name for check in result.report.checks] == ["y", "z"]
    again = onnxq.apply(proto, result.plan, data, overrides={"latency": False})
    assert again.model.SerializeToString() == result.model.SerializeToString()
    assert onnxq.profile_model(proto, result.model, data).groups or not result.plan.sites
