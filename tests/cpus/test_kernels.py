"""Each integer kernel against numpy: exact where the CPU adds in 32 bits, `multiply_saturating` where it adds in 16."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented  # noqa: A004

import onnxq
from onnxq.annotate import find_saturating
from onnxq.backends.ort.rules import find_sum_order
from onnxq.graph import GraphIndex, name_nodes
from onnxq.numerics import SumOrder, find_partners, find_saturating_sums, limit_sums
from tests.cpus.kernels import CONVS, MATRIX_OPS, Array, cases, conv_case, cpu_saturates, large, matrix_case
from tests.cpus.kernels import multiply_exactly as exactly
from tests.cpus.lstm import run_lstm
from tests.cpus.nets import NETS, agreement, answers, net, quantized, samples
from tests.networks import parse_text
from tests.numerics.reference import multiply_saturating

CASES = cases()
MATRIX_KINDS = (*MATRIX_OPS, "QGemm turned")


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_the_reference_says(name: str) -> None:
    case = CASES[name]()
    # Otherwise the data would not tell 16 bits from 32.
    assert not case.saturates or (case.answer(multiply_saturating) != case.answer(exactly)).any()
    try:
        found = case.run()
    except NotImplemented:
        pytest.skip("this release of ONNX Runtime has no such kernel")
    np.testing.assert_array_equal(found, case.expected())


def node_of(op: str, weight: tuple[int, ...], **attrs: Any) -> Any:
    """The float node that becomes the kernel, as `find_sum_order` sees it."""
    proto = parse_text(f"g (float x) => (float y) {{ [op] y = {op}(x, w) }}", w=np.zeros(weight, np.float32))
    proto.graph.node[0].attribute.extend(helper.make_attribute(*pair) for pair in attrs.items())
    return GraphIndex(name_nodes(proto)).find_node("op")


def matrix_order(kernel: str, turned: bool, shape: tuple[int, ...]) -> SumOrder | None:
    """The order of sums of the float node that becomes the kernel."""
    node = node_of("Gemm" if kernel == "QGemm" else "MatMul", shape, **({"transB": 1} if turned else {}))
    return find_sum_order(node, shape)


@pytest.mark.parametrize("name", CONVS)
def test_a_conv_whose_weights_keep_their_sums_is_exact_everywhere(name: str) -> None:
    shape, weight, group, attrs = CONVS[name]
    rng = np.random.default_rng(5)
    w = rng.integers(-128, 128, weight).astype(np.int8)
    order = find_sum_order(node_of("Conv", weight, group=group), weight)
    if order is not None:
        assert find_saturating_sums(w, order).any()
        w = limit_sums(w, w, [order])
    for x in (large(rng, shape), np.full(shape, 255, np.uint8)):
        case = conv_case("QLinearConv", x, w, group=group, x_zero=100, **attrs)
        np.testing.assert_array_equal(case.run(), case.answer(exactly))


@pytest.mark.parametrize("size", [2, 7, 64, 131])
@pytest.mark.parametrize("kind", MATRIX_KINDS)
def test_a_matrix_whose_weights_keep_their_sums_is_exact_everywhere(kind: str, size: int) -> None:
    op, turned = kind.split()[0], kind.endswith("turned")
    rng = np.random.default_rng(6)
    shape = (24, size) if turned else (size, 24)
    order = matrix_order(op, turned, shape)
    assert order is not None
    w = rng.integers(-128, 128, shape).astype(np.int8)
    assert find_saturating_sums(w, order).any()
    w = limit_sums(w, w, [order])
    case = matrix_case(op, large(rng, (5, size)), w.T.copy() if turned else w, turned=turned)
    np.testing.assert_array_equal(case.run(), case.answer(exactly))


# --- which weights share a sum, found by trying all twos ----------------------------------------------


def all_twos(size: int) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Every two of `size` weights, and for each of them a row of weights, 0 but for these two: int8 [twos, size]."""
    twos = list(itertools.combinations(range(size), 2))
    w = np.zeros((len(twos), size), np.int8)
    for k, two in enumerate(twos):
        w[k, two] = 127
    return twos, w


def said(shape: tuple[int, ...], order: SumOrder | None, row: int = 0, axis: int = 0) -> set[tuple[int, int]]:
    """The same from `find_sum_order`, for one output."""
    if order is None:
        return set()
    flat = np.arange(int(np.prod(shape))).reshape(shape).take(row, axis=axis).ravel()
    at = {int(index): k for k, index in enumerate(flat)}
    beside = find_partners(shape, order).take(row, axis=axis).ravel()
    return {(k, at[int(other)]) for k, other in enumerate(beside) if other >= 0 and k < at[int(other)]}


needs_16_bits = pytest.mark.skipif(not cpu_saturates(), reason="this CPU adds in 32 bits: no weights share a sum")
PROBED = [
    ((4, 3, 3), 1), ((3, 2, 2), 1), ((3, 3, 1), 1), ((4, 5), 1), ((3, 4), 2), ((5, 2, 2, 1), 1),
    ((1, 3, 3), 1), ((1, 5), 1), ((1, 3, 2), 4), ((3, 2, 2), 2), ((2, 3, 1), 3),
]  # fmt: skip


@needs_16_bits
@pytest.mark.parametrize(("inside", "group"), PROBED, ids=str)
def test_sum_order_is_the_one_the_conv_has(inside: tuple[int, ...], group: int) -> None:
    """inside: channels of one group, then the kernel; every group has one output for all twos of its weights."""
    twos, w = all_twos(int(np.prod(inside)))
    weight = np.concatenate([w.reshape(len(w), *inside)] * group)
    x = np.full((1, inside[0] * group, *inside[1:]), 255, np.uint8)
    case = conv_case("QLinearConv", x, weight, group=group)
    wrong = (case.run() != case.answer(exactly)).reshape(group, len(twos))
    found = {two for two, bad in zip(twos, wrong[0], strict=True) if bad}
    assert (wrong == wrong[0]).all()
    assert (
        found == said(weight.shape, find_sum_order(node_of("Conv", weight.shape, group=group), weight.shape)) != set()
    )


@needs_16_bits
@pytest.mark.parametrize("kernel", [(2, 2), (3, 1), (4,)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_depthwise_conv_shares_no_sums(kernel: tuple[int, ...], channels: int) -> None:
    shape = (channels, 1, *kernel)
    assert find_sum_order(node_of("Conv", shape, group=channels), shape) is None
    x = np.full((1, channels, *kernel), 255, np.uint8)
    case = conv_case("QLinearConv", x, np.full(shape, 127, np.int8), group=channels)
    np.testing.assert_array_equal(case.run(), case.answer(exactly))


@needs_16_bits
@pytest.mark.parametrize("size", [2, 5, 8, 17])
@pytest.mark.parametrize("kind", MATRIX_KINDS)
def test_sum_order_is_the_one_the_matrix_has(kind: str, size: int) -> None:
    name, turned = kind.split()[0], kind.endswith("turned")
    twos, w = all_twos(size)
    shape = w.shape if turned else w.T.shape
    order = matrix_order(name, turned, shape)
    case = matrix_case(name, np.full((2, size), 255, np.uint8), w.T.copy(), turned=turned)
    wrong = (case.run() != case.answer(exactly)).any(axis=0)
    found = {two for two, bad in zip(twos, wrong, strict=True) if bad}
    assert found == said(shape, order, axis=0 if turned else 1) != set()


# ---- DynamicQuantizeLSTM against numpy, without and with optimizations, and the features of LSTM that it keeps.

NAMES = ("y", "last_h", "last_c")
OTHERS = ["HardSigmoid", "Softsign", "Relu"]


def lstm(direction: str, given: str, features: int = 9, hidden: int = 7, **attrs: Any) -> onnx.ModelProto:
    """An LSTM whose weights are spread evenly, so that many are large.

    given: the inputs behind the weights, b(ias), l(engths), h, c (first states), p(eepholes).
    """
    rng, two = np.random.default_rng(0), 1 + (direction == "bidirectional")
    shapes = {"w": (two, 4 * hidden, features), "r": (two, 4 * hidden, hidden), "b": (two, 8 * hidden)}
    shapes["p"] = (two, 3 * hidden)
    constants = {name: rng.uniform(-1, 1, shape) / 2 for name, shape in shapes.items() if name in f"wr{given}"}
    kinds = {
        "x": (1, ["T", "N", features]),
        "l": (6, ["N"]),
        "h": (1, [two, "N", hidden]),
        "c": (1, [two, "N", hidden]),
    }
    inputs = [helper.make_tensor_value_info(name, *kinds[name]) for name in kinds if name in f"x{given}"]
    names = [name if name in f"xwr{given}" else "" for name in "xwrblhcp"]
    node = helper.make_node("LSTM", names, NAMES, "lstm", hidden_size=hidden, direction=direction, **attrs)
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()]
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in NAMES]
    graph = helper.make_graph([node], "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def draw_samples(model: onnx.ModelProto) -> dict[str, Array]:
    """Three sequences of up to seven steps, mostly large and positive."""
    rng, found = np.random.default_rng(1), {}
    for value in model.graph.input:
        dims = [dim.dim_value or {"T": 7, "N": 3}[dim.dim_param] for dim in value.type.tensor_type.shape.dim]
        data = rng.uniform(-0.3, 1, dims).astype(np.float32)
        found[value.name] = np.int32([5, 7, 2]) if value.name == "l" else data
    return found


@cache
def quantized_lstm(direction: str, given: str, saturation: str = "avoid", **attrs: Any) -> onnx.ModelProto:
    rules = [{"op": "LSTM", "set": {"quantize": True}}]
    wanted = {"latency": False, "effort": "fast", "saturation": saturation, "rules": rules}
    return onnxq.quantize(lstm(direction, given, **attrs), None, "ort-int8", overrides=wanted).model


@pytest.mark.parametrize(
    ("direction", "given", "attrs"),
    [("forward", "", {}), ("reverse", "bp", {"input_forget": 1}), ("bidirectional", "blhcp", {})],
)
def test_the_kernel_computes_what_the_reference_says(direction: str, given: str, attrs: dict[str, Any]) -> None:
    model = quantized_lstm(direction, given, **attrs)
    assert [node.op_type for node in model.graph.node] == ["DynamicQuantizeLSTM"]
    feeds = draw_samples(model)
    wanted = dict(zip(NAMES, run_lstm(model, model.graph.node[0], feeds), strict=True))
    for optimize in (False, True):
        assert agreement(wanted, answers(model, feeds, optimize=optimize)) > 100
    assert agreement(answers(lstm(direction, given, **attrs), feeds, optimize=True), wanted) > 30


def test_activations_and_clip_are_kept() -> None:
    for attrs in ({"clip": 0.5}, {"activations": OTHERS}):
        float_model = lstm("forward", "b", **attrs)
        rules = [{"op": "LSTM", "set": {"quantize": True}}]
        model = onnxq.quantize(float_model, None, "ort-int8", overrides={"latency": False, "rules": rules}).model
        assert [node.op_type for node in model.graph.node] == ["DynamicQuantizeLSTM"]
        feeds = draw_samples(model)
        wanted = answers(float_model, feeds, optimize=True)
        assert agreement(wanted, answers(model, feeds, optimize=True)) > 30
        assert agreement(wanted, answers(lstm("forward", "b"), feeds, optimize=True)) < 25


def test_weights_keep_their_sums_in_both_directions() -> None:
    kept, allowed = (quantized_lstm("bidirectional", "b", saturation=word) for word in ("avoid", "allow"))
    assert not any(one.saturates for one in find_saturating(GraphIndex(name_nodes(kept))))
    assert any(one.saturates for one in find_saturating(GraphIndex(name_nodes(allowed))))
    feeds, node = draw_samples(kept), allowed.graph.node[0]
    exact, short = (run_lstm(allowed, node, feeds, *way) for way in ((), (multiply_saturating,)))
    wanted = dict(zip(NAMES, short if cpu_saturates() else exact, strict=True))
    assert agreement(wanted, answers(allowed, feeds, optimize=True)) > 100
    assert agreement(dict(zip(NAMES, exact, strict=True)), dict(zip(NAMES, short, strict=True))) < 60


# ---- Networks that onnxq quantized answer alike as their file says and as ONNX Runtime runs them, on every CPU.


def alike(name: str, result: onnxq.Result) -> float:
    """dB between optimizations off and on, on samples that nothing has seen."""
    fresh = samples(net(name), count=8, seed=7)
    off, on = (answers(result.model, fresh, optimize=optimize) for optimize in (False, True))
    return agreement(off, on)


def overflowing(result: onnxq.Result) -> int:
    """Sums of the file's weights that can overflow 16 bits, node by node."""
    index = GraphIndex(result.model)
    weights = {value.name: numpy_helper.to_array(value) for value in result.model.graph.initializer}
    stored = {node.outputs[0]: node.inputs[0] for node in index.nodes if node.op_type == "DequantizeLinear"}
    count = 0
    for node in index.nodes:
        value = weights.get(stored.get(node.inputs[1], "")) if len(node.inputs) > 1 else None
        order = None if value is None or value.dtype.name != "int8" else find_sum_order(node, value.shape)
        count += 0 if order is None or value is None else int(find_saturating_sums(value, order).sum())
    return count


@pytest.mark.parametrize("effort", ["fast", "balanced"])
@pytest.mark.parametrize("name", NETS)
def test_networks_answer_alike_optimized_or_not_and_without_the_bound_only_on_some_cpus(name: str, effort: str) -> None:
    """Without it, only where the CPU adds in 32 bits."""
    result, unbound = (quantized(name, effort=effort, saturation=way) for way in ("avoid", "allow"))
    assert overflowing(result) == 0 < overflowing(unbound)
    assert alike(name, result) > 60
    found = alike(name, unbound)
    assert found < 40 if cpu_saturates() else found > 60


# Where sums saturate conv has 19 dB in int8 and 22 with one of its two operators in float: 30 would take both.
@pytest.mark.parametrize(("name", "wish"), [("conv", 21), ("matmul", 30), ("gemm", 30)])
def test_promotion_looks_at_what_this_cpu_computes(name: str, wish: float) -> None:
    """Where sums saturate, a wish that the file keeps is not one that users keep: operators leave int8 until it is."""
    done = quantized(name, saturation="allow", min_sqnr=wish)
    account = done.report.promotion
    assert account.met
    assert min(done.report.checks[0].sqnr_db) >= wish
    assert bool(account.steps) == cpu_saturates()


@pytest.mark.parametrize("effort", ["balanced", "high"])
def test_the_sweep_is_judged_by_what_this_cpu_computes(effort: str) -> None:
    """Where sums may saturate, too, rounding is never kept where it harms what users run."""
    plain, done = (quantized("conv", effort=one, saturation="allow") for one in ("fast", effort))
    fresh = samples(net("conv"), count=8, seed=7)
    wanted = answers(net("conv"), fresh, optimize=False)
    before, after = (agreement(wanted, answers(one.model, fresh, optimize=True)) for one in (plain, done))
    assert after > before - 1
