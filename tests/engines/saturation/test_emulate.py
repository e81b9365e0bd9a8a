"""Weights that can overflow 16-bit sums: found in files of any tool, and computed on any CPU as such kernels do."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnxq.annotate import WeightSums, find_saturating
from onnxq.commands.quantize import quantize
from onnxq.engines.saturation import SaturatingRun, emulate_saturation, measure_saturation
from onnxq.graph import GraphIndex, name_nodes
from onnxq.runtime import Session, optimize_graph
from tests.engines.saturation import kit
from tests.networks import add_arrays
from tests.numerics.reference import multiply_saturating

# onnxruntime.quantization warns of what it deprecates in itself.
pytestmark = pytest.mark.filterwarnings("ignore")
QUANTIZED = ("Conv", "MatMul", "Gemm", "MatMulInteger", "QLinearConv", "QLinearMatMul", "QGemm")


def found_in(proto: onnx.ModelProto) -> tuple[WeightSums, ...]:
    return find_saturating(GraphIndex(name_nodes(proto)))


def sqnr(reference: np.ndarray, value: np.ndarray) -> float:
    noise = float(np.square(value.astype(np.float64) - reference).sum())
    return np.inf if noise == 0 else 10 * np.log10(float(np.square(reference.astype(np.float64)).sum()) / noise)


@pytest.fixture(scope="module", params=kit.TOOLS)
def file(request, tmp_path_factory) -> onnx.ModelProto:
    return kit.by_tool(request.param, tmp_path_factory.mktemp("tool"))


def test_rows_are_those_for_which_an_input_can_be_found(file):
    found = found_in(file)
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in file.graph.initializer}
    nodes = {node.name: node for node in file.graph.node}
    dynamic = any(node.op_type == "ConvInteger" for node in file.graph.node)
    assert len(found) == (2 if dynamic else 3)
    for one in found:
        weight = arrays[one.weight]
        if weight.dtype != np.int8:
            axis = 1 if one.op == "MatMul" else 0
            shape = [-1 if k == axis else 1 for k in range(weight.ndim)]
            weight = np.clip(np.rint(weight / arrays[f"{one.weight}_s"].reshape(shape)), -128, 127).astype(np.int8)
        transposed = any(attr.name == "transB" and attr.i for attr in nodes[one.node].attribute)
        rows = kit.stored_rows(one.op, weight, transposed=transposed)
        assert one.op in QUANTIZED
        assert (one.rows, one.all_rows) == (kit.rows_by_search(rows), len(rows)), one
        assert one.all_sums == len(rows) * -(-rows.shape[1] // 2)
        assert one.rows > 0


def test_our_own_files_have_none_unless_they_are_allowed(tmp_path):
    (tmp_path / "allow.yaml").write_text("target: ort\nsaturation: allow\n")
    data = {"x": np.random.default_rng(5).standard_normal((4, 3, 24, 24)).astype(np.float32)}
    bound = quantize(kit.wide_net(), data, overrides={"latency": False, "effort": "fast"})
    free = quantize(kit.wide_net(), data, tmp_path / "allow.yaml", overrides={"latency": False, "effort": "fast"})
    assert len(found_in(bound.model)) == len(found_in(free.model)) > 0
    assert not any(one.rows for one in found_in(bound.model))
    assert any(one.saturates for one in found_in(free.model))
    assert measure_saturation(bound.model, [{"x": data["x"][:1]}]).saturated == 0


def test_relus_in_front_of_symmetric_int8_pairs_keep_products_float():
    """ONNX Runtime drops a Relu only if no level lies below 0."""
    proto = kit.model_optimizer(activations=True)
    assert {one.node: one.saturates for one in found_in(proto)} == {"conv": False, "matmul": False, "gemm": True}
    kinds = {node.op_type for node in optimize_graph(proto).graph.node}
    assert "QGemm" in kinds
    assert not {"QLinearConv", "QLinearMatMul", "MatMulIntegerToFloat"} & kinds


@pytest.mark.parametrize("case", ["float data", "float16", "shared int8", "no result", "uint8 weight", "one channel"])
def test_what_is_computed_exactly_does_not_count(case):
    shape = (4, 1, 3, 3) if case == "one channel" else (4, 4, 3, 3)
    groups = 4 if case == "one channel" else 1
    proto, _ = kit.product("Conv", (1, 4, 6, 6), shape, kind=np.int8 if case == "shared int8" else np.uint8, zero=0,
                           quantized=True, group=groups)  # fmt: skip
    nodes = {node.output[0]: node for node in proto.graph.node}
    if case == "float data":
        nodes["c"].input[0] = "x"
    elif case == "shared int8":
        proto.graph.node.append(helper.make_node("Abs", ["xd"], ["z"]))
        proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    elif case == "no result":
        nodes["yq"].input[0] = "x"
        proto.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, None))
    for tensor in proto.graph.initializer:
        if case == "uint8 weight" and tensor.name in ("w", "wz"):
            value = onnx.numpy_helper.to_array(tensor).astype(np.uint8)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
        if case == "float16" and tensor.name in ("xs", "ws", "ys"):
            value = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))
    assert not any(one.saturates for one in found_in(proto))
    assert not emulate_saturation(proto).counters


def test_bodies_and_recurrent_weights_are_seen():
    inner, arrays = kit.product("MatMul", (2, 6), (6, 3))
    body = onnx.GraphProto()
    body.CopyFrom(inner.graph)
    del body.input[:]
    other = helper.make_graph([helper.make_node("Constant", [], ["k"], value_float=0.0),
                               helper.make_node("Reshape", ["k", "n"], ["o"])], "else", [],
                              [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)])  # fmt: skip
    add_arrays(other, n=np.array([1, 1]))
    proto = kit.model(
        [helper.make_node("If", ["b"], ["y"], name="if", then_branch=body, else_branch=other)],
        {"b": (TensorProto.BOOL, ()), "x": (TensorProto.FLOAT, (2, 6))}, ["y"], {},
    )  # fmt: skip
    (one,) = found_in(proto)
    assert (one.node, one.rows) == ("product", kit.rows_by_search(arrays["w"].T))
    x = np.full((2, 6), 9.0, np.float32)
    cost = measure_saturation(proto, [{"b": np.array(True), "x": x}, {"b": np.array(False), "x": x}])
    assert cost.nodes[0].sums == 2 * 3 * 3
    assert cost.nodes[0].saturated == _count(kit.levels(x, arrays), arrays["w"])
    weights = {"w": np.full((1, 4, 32), 127, np.int8), "r": np.full((1, 8, 32), 3, np.int8)}
    weights |= {"s": np.ones((1, 32), np.float32), "z": np.zeros((1, 32), np.int8)}
    lstm = helper.make_node("DynamicQuantizeLSTM", ["x", "w", "r", "", "", "", "", "", "s", "z", "s", "z"], ["y"],
                            name="lstm", domain="com.microsoft", hidden_size=8)  # fmt: skip
    proto = kit.model([lstm], {"x": (TensorProto.FLOAT, (5, 1, 4))}, ["y"], weights)
    assert [(one.weight, one.rows, one.all_rows) for one in found_in(proto)] == [("w", 32, 32), ("r", 0, 32)]
    assert [(str(one.subject), one.code) for one in emulate_saturation(proto).skipped] == [("lstm", "R114")]


def _count(x: np.ndarray, w: np.ndarray) -> int:
    """Saturated sums of x [positions, K] times w [K, rows]."""
    count = 0
    for k in range(0, w.shape[0] - 1, 2):
        total = x[:, k : k + 2].astype(np.int64) @ w[k : k + 2].astype(np.int64)
        count += int(((total > 32767) | (total < -32768)).sum())
    return count


CONVS = [
    ((2, 3, 9, 8), (6, 3, 3, 3), {"pads": [1, 2, 0, 1], "strides": [2, 1], "dilations": [1, 2]}),
    ((1, 6, 7, 7), (4, 3, 3, 3), {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((2, 3, 6, 6), (6, 1, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    ((1, 5, 11), (3, 5, 4), {"pads": [2, 1], "strides": [2]}),
    ((1, 8, 5, 5), (7, 8, 1, 1), {}),
    ((1, 1, 8, 8), (5, 1, 3, 3), {"pads": [1, 1, 1, 1]}),
]


@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
@pytest.mark.parametrize(("kind", "zero"), [(np.uint8, 77), (np.int8, -5)])
def test_a_conv_saturates_as_multiplied_in_numpy(x, w, attrs, kind, zero):
    proto, arrays = kit.product("Conv", x, w, kind=kind, zero=zero, **attrs)
    data = np.random.default_rng(3).uniform(-3, 6, x).astype(np.float32)
    patches = _patches(data, arrays, w, attrs)  # [N, group, positions, K], raw levels
    groups, zero_point = attrs.get("group", 1), int(arrays["xz"]) + (128 if kind is np.int8 else 0)
    rows = kit.stored_rows("Conv", arrays["w"]).reshape(groups, w[0] // groups, -1)
    parts, count = [], 0
    for g in range(groups):
        matrix = rows[g].T
        raw = np.stack([multiply_saturating(sample[g], matrix) for sample in patches])
        parts.append(raw - zero_point * matrix.astype(np.int64).sum(axis=0))
        count += sum(_count(sample[g], matrix) for sample in patches)
    wanted = np.concatenate(parts, axis=2) * (arrays["ws"] * arrays["xs"])
    run = SaturatingRun(emulate_saturation(proto))
    got = run.run({"x": data})["c"].reshape(x[0], w[0], -1).transpose(0, 2, 1)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)
    assert count > 0
    assert [one.saturated for one in run.list_nodes()] == [count]
    assert run.list_nodes()[0].sums == got.size * -(-rows.shape[2] // 2)


def _patches(data: np.ndarray, arrays: dict, w: tuple[int, ...], attrs: dict) -> np.ndarray:
    """im2col of the raw levels by ONNX Runtime's float Conv with one filter a tap, padded with the zero point."""
    zero = int(arrays["xz"]) + (128 if arrays["xz"].dtype == np.int8 else 0)
    groups, size = attrs.get("group", 1), int(np.prod(w[1:]))
    filters = np.eye(size, dtype=np.float32).reshape(*w[2:], w[1], size)
    filters = np.tile(np.moveaxis(filters, (-1, -2), (0, 1)), (groups, *[1] * (len(w) - 1)))
    nodes = [helper.make_node("Conv", ["x", "f"], ["y"], **attrs)]
    proto = kit.model(nodes, {"x": (TensorProto.FLOAT, data.shape)}, ["y"], {"f": np.ascontiguousarray(filters)})
    centred = kit.levels(data, arrays).astype(np.float32) - zero
    made = Session(proto, optimize=False).run({"x": centred})["y"] + zero
    return made.reshape(len(data), groups, size, -1).transpose(0, 1, 3, 2).astype(np.uint8)


@pytest.mark.parametrize(
    ("op", "x", "w", "attrs"),
    [
        ("MatMul", (2, 3, 9), (9, 5), {}),
        ("MatMul", (3, 8), (8,), {}),
        ("Gemm", (3, 9), (9, 5), {}),
        ("Gemm", (3, 9), (5, 9), {"transB": 1, "alpha": 0.5}),
        ("Gemm", (9, 3), (5, 9), {"transA": 1, "transB": 1}),
    ],
)
@pytest.mark.parametrize(("kind", "zero"), [(np.uint8, 60), (np.int8, 3)])
def test_a_matrix_product_saturates_as_multiplied_in_numpy(op, x, w, attrs, kind, zero):
    proto, arrays = kit.product(op, x, w, kind=kind, zero=zero, **attrs)
    data = np.random.default_rng(4).uniform(-2, 9, x).astype(np.float32)
    raw = kit.levels(data, arrays)
    raw = raw.T if attrs.get("transA") else raw
    matrix = arrays["w"].T if attrs.get("transB") else arrays["w"].reshape(w[0], -1)
    middle = zero + (128 if kind is np.int8 else 0)
    total = multiply_saturating(raw, matrix) - middle * matrix.astype(np.int64).sum(axis=0)
    wanted = total * (arrays["xs"] * arrays["ws"]) * attrs.get("alpha", 1.0)
    run = SaturatingRun(emulate_saturation(proto))
    got = run.run({"x": data})["y"]
    np.testing.assert_allclose(got, wanted if len(w) > 1 else wanted[..., 0], rtol=2e-5, atol=2e-5)
    assert run.list_nodes()[0].saturated == _count(raw.reshape(-1, raw.shape[-1]), matrix) > 0


def test_many_rows_are_taken_in_chunks(monkeypatch):
    proto, _ = kit.product("MatMul", (4, 40), (40, 30))
    whole, x = emulate_saturation(proto), {"x": np.full((4, 40), 4.0, np.float32)}
    monkeypatch.setattr("onnxq.engines.saturation._CHUNK", 7)
    parts = emulate_saturation(proto)
    assert len(parts.saturating.graph.node) > len(whole.saturating.graph.node)
    first, second = (SaturatingRun(one) for one in (whole, parts))
    np.testing.assert_array_equal(first.run(x)["y"], second.run(x)["y"])
    assert first.list_nodes() == second.list_nodes()


@pytest.mark.recent_ort
def test_integer_operators_become_pairs_with_the_same_answers(file):
    x = kit.samples()
    made = emulate_saturation(file)
    assert len(made.counters) == sum(one.saturates for one in found_in(file))
    plain = Session(file, optimize=False).run({"x": x})["y"]
    exact = Session(made.exact, optimize=False).run({"x": x})["y"]
    if not kit.this_cpu_saturates():
        # Off, integer operators run in integers, and requantize in another order.
        assert sqnr(plain, exact) > 40
    cost = measure_saturation(file, ({"x": one[None]} for one in x))
    assert cost.samples == len(x)
    assert [one.output for one in cost.outputs] == ["y"]
    assert not cost.skipped


needs_saturating_cpu = pytest.mark.skipif(
    not kit.this_cpu_saturates(), reason="this CPU's kernels are exact (it has VNNI, or is no x86)"
)


@needs_saturating_cpu
def test_ort_computes_what_is_emulated(file):
    x = 4 * kit.samples()
    made = emulate_saturation(file)
    run = SaturatingRun(made)
    saturating, exact = run.run({"x": x})["y"], Session(made.exact, optimize=False).run({"x": x})["y"]
    fast = Session(file).run({"x": x})["y"]
    assert sqnr(fast, saturating) > 45
    if sum(one.saturated for one in run.list_nodes()):
        assert sqnr(fast, exact) < sqnr(fast, saturating) - 10
    else:
        assert any(node.op_type == "MatMulInteger" for node in file.graph.node)


@needs_saturating_cpu
@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
def test_ort_computes_a_conv_as_emulated(x, w, attrs):
    proto, _ = kit.product("Conv", x, w, quantized=True, **attrs)
    data = {"x": np.random.default_rng(3).uniform(-3, 6, x).astype(np.float32)}
    fast, saturating = Session(proto).run(data)["y"], SaturatingRun(emulate_saturation(proto)).run(data)["y"]
    # A value next to the border of two levels may fall to either side.
    assert np.abs(fast - saturating).max() <= 0.5 + 1e-6
    assert (fast != saturating).mean() < 0.02


def test_dynamically_quantized_products_saturate_too():
    weight = (np.random.default_rng(1).integers(90, 128, (12, 5))).astype(np.int8)
    body = """g (float[4,12] x) => (float[4,5] y, uint8[4,12] q, uint8 z) {
        q, s, z = DynamicQuantizeLinear(x) [product] i = MatMulInteger(q, w, z) c = Cast <to=1>(i) y = Mul(c, s) }"""
    proto = kit.parse(body, w=weight)
    x = {"x": np.random.default_rng(2).uniform(-1, 4, (4, 12)).astype(np.float32)}
    run = SaturatingRun(emulate_saturation(proto))
    got = run.run(x)
    total = multiply_saturating(got["q"], weight) - int(got["z"]) * weight.astype(np.int64).sum(axis=0)
    span = (x["x"].max() - x["x"].min()) / 255
    np.testing.assert_allclose(got["y"], total * span, rtol=1e-5)
    assert run.list_nodes()[0].saturated == _count(got["q"], weight) > 0
    if kit.this_cpu_saturates():
        np.testing.assert_allclose(Session(proto).run(x)["y"], got["y"], rtol=1e-5)


def _dynamic_product() -> onnx.ModelProto:
    weight = (np.random.default_rng(1).integers(90, 128, (12, 5))).astype(np.int8)
    body = """g (float[4,12] x) => (float[4,5] y) {
        q, s, z = DynamicQuantizeLinear(x) [product] i = MatMulInteger(q, w, z, wz) c = Cast <to=1>(i)
        both = Mul(s, ws) m = Mul(c, both) y = Add(m, b) }"""
    arrays = {"w": weight, "wz": np.zeros((), np.int8), "ws": np.float32(0.01), "b": np.ones(5, np.float32)}
    return kit.parse(body, **arrays)


@pytest.mark.parametrize(
    ("kernel", "make"),
    [
        ("MatMulIntegerToFloat", lambda: kit.product("MatMul", (4, 12), (12, 5))[0]),
        ("QLinearMatMul", lambda: kit.product("MatMul", (4, 12), (12, 5), quantized=True)[0]),
        ("QGemm", lambda: kit.product("Gemm", (4, 12), (5, 12), transB=1)[0]),
        ("QGemm", lambda: kit.product("Gemm", (4, 12), (5, 12), quantized=True, transB=1, alpha=0.5)[0]),
        ("QLinearConv", lambda: kit.product("Conv", (4, 3, 6, 6), (5, 3, 3, 3), quantized=True)[0]),
        ("DynamicQuantizeMatMul", _dynamic_product),
    ],
)
def test_kernels_saved_as_a_file_are_found_and_emulated(kernel, make):
    """The graph that ONNX Runtime makes of a file, taken as a file."""
    source = make()
    made = name_nodes(optimize_graph(source, layout=False))
    assert kernel in {node.op_type for node in made.graph.node}
    (before,), (after,) = found_in(source), found_in(made)
    assert (after.op, after.rows, after.sums) == (kernel, before.rows, before.sums)
    shape = [dim.dim_value for dim in source.graph.input[0].type.tensor_type.shape.dim]
    x = {"x": np.random.default_rng(6).uniform(-2, 9, shape).astype(np.float32)}
    runs = [SaturatingRun(emulate_saturation(proto)) for proto in (source, made)]
    first, second = (one.run(x)["y"] for one in runs)
    assert runs[0].list_nodes()[0].saturated == runs[1].list_nodes()[0].saturated > 0
    # A rounded result may fall to the other side of a border.
    np.testing.assert_allclose(second, first, rtol=1e-5, atol=0.5 + 1e-5 if "QLinear" in kernel else 1e-4)
