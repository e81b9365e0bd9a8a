"""The static cost model: what it must never get wrong, and the decisions that measurements in ORT settled."""

import itertools
import math
import re
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.backends import find_target, list_costs
from onnxq.backends.costs import Cost, OpCase
from onnxq.backends.cpu_costs import CpuCosts, interpolate, round_up
from onnxq.config import Config

CPU_COSTS = find_target("ort").costs

VNNI, AVX2 = CPU_COSTS["vnni"], CPU_COSTS["avx2"]
Shape = tuple[int, ...]
sizes = st.integers(1, 64)
kinds = st.sampled_from(list(CPU_COSTS.values()))
each_kind = pytest.mark.parametrize("cpu", CPU_COSTS.values(), ids=CPU_COSTS)
OPERATORS = (
    "Add", "Mul", "Concat", "MaxPool", "GlobalAveragePool", "Sigmoid", "LeakyRelu", "Resize", "Transpose", "Erf"
)  # fmt: skip


def op_cost(case: OpCase, cpu: CpuCosts = VNNI) -> Cost:
    return cpu.predict_node(case)


def quantize_us(elements: int | None, cpu: CpuCosts = VNNI, *, from_conv: bool = False) -> float:
    return cpu.predict_quantize(elements, from_conv=from_conv)


def dequantize_us(elements: int | None, cpu: CpuCosts = VNNI, *, to_conv: bool = False) -> float:
    return cpu.predict_dequantize(elements, to_conv=to_conv)


def conv(
    cin: int, cout: int, k: int | Shape, size: Shape, *, group: int = 1, stride: int = 1, activation: str = "Relu"
) -> OpCase:
    """A Conv with "same" padding; `size` is the map it reads."""
    kernel = (k,) * len(size) if isinstance(k, int) else k
    return OpCase(
        op_type="Conv",
        inputs=((1, cin, *size),),
        output=(1, cout, *(-(-dim // stride) for dim in size)),
        weight=(cout, cin // group, *kernel),
        group=group,
        kernel=kernel,
        strides=(stride,) * len(size),
        activation=activation,
    )


def depthwise(channels: int, k: int, size: tuple[int, int], stride: int = 1) -> OpCase:
    return conv(channels, channels, k, size, group=channels, stride=stride)


def linear(op_type: str, rows: int, depth: int, outputs: int) -> OpCase:
    return OpCase(op_type=op_type, inputs=((rows, depth),), output=(rows, outputs), weight=(depth, outputs))


def speedup(case: OpCase, cpu: CpuCosts = VNNI) -> float:
    cost = op_cost(case, cpu)
    return cost.float_us / cost.int8_us


@st.composite
def cases(draw: st.DrawFn) -> OpCase:
    op_type = draw(st.sampled_from(("Conv", "Gemm", "MatMul", *OPERATORS)))
    if op_type == "Conv":
        group = draw(st.sampled_from((1, 1, 2, 16)))
        rank = draw(st.integers(1, 3))
        size = tuple(draw(st.lists(sizes, min_size=rank, max_size=rank)))
        kernel = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 5, 7)), min_size=rank, max_size=rank)))
        into, out = group * draw(sizes), group * draw(sizes)
        activation = draw(st.sampled_from(("", "Relu", "Clip")))
        return conv(into, out, kernel, size, group=group, stride=draw(st.integers(1, 3)), activation=activation)
    if op_type in ("Gemm", "MatMul"):
        return linear(op_type, draw(sizes), draw(sizes), draw(sizes))
    shape = tuple(draw(st.lists(sizes, min_size=1, max_size=5)))
    return OpCase(op_type=op_type, inputs=(shape, shape), output=shape, kernel=(3, 3))


@given(cases(), kinds)
def test_costs_are_finite_and_positive(case: OpCase, cpu: CpuCosts) -> None:
    cost = op_cost(case, cpu)
    assert 0 < cost.float_us < math.inf
    assert 0 < cost.int8_us < math.inf


@given(cases(), st.integers(2, 8), kinds)
def test_a_larger_batch_costs_more(case: OpCase, times: int, cpu: CpuCosts) -> None:
    def grown(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if shape is None else (shape[0] * times, *shape[1:])

    large = op_cost(replace(case, inputs=tuple(map(grown, case.inputs)), output=grown(case.output)), cpu)
    small = op_cost(case, cpu)
    assert large.float_us >= small.float_us
    assert large.int8_us >= small.int8_us


@each_kind
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("size", [(1, 1), (7, 7), (14, 14), (12, 80)])
def test_more_channels_cost_more(k: int, size: tuple[int, int], cpu: CpuCosts) -> None:
    """In whole blocks: between them time goes up and down, in ORT as in the model."""
    blocks = (16, 32, 64, 128, 256, 512)
    for make in (lambda c: conv(c, c, k, size), lambda c: conv(64, c, k, size), lambda c: conv(c, 64, k, size)):
        for low, high in itertools.pairwise([op_cost(make(c), cpu) for c in blocks]):
            assert low.float_us < high.float_us
            assert low.int8_us < high.int8_us


@given(st.integers(0, 10**7), st.integers(1, 10**6), kinds)
def test_boundaries_grow_with_elements_and_cost_more_beside_a_conv(elements: int, more: int, cpu: CpuCosts) -> None:
    assert 0 < quantize_us(elements, cpu) < quantize_us(elements + more, cpu)
    assert 0 < dequantize_us(elements, cpu) < dequantize_us(elements + more, cpu)
    assert quantize_us(elements, cpu, from_conv=True) > quantize_us(elements, cpu)
    assert dequantize_us(elements, cpu, to_conv=True) > dequantize_us(elements, cpu)


def test_a_pair_costs_what_it_was_measured_to() -> None:
    """0.1 to 0.18 ns an element without layout changes, 0.35 to 0.6 with them."""
    n = 100_000
    assert 10 < quantize_us(n) + dequantize_us(n) < 18
    assert 35 < quantize_us(n, from_conv=True) + dequantize_us(n, to_conv=True) < 60


@each_kind
@pytest.mark.parametrize("op_type", [*OPERATORS, "Conv", "Gemm", "MatMul"])
def test_nothing_known_never_favours_int8(op_type: str, cpu: CpuCosts) -> None:
    cost = op_cost(OpCase(op_type=op_type, inputs=(None, None), output=None), cpu)
    assert 0 < cost.float_us <= cost.int8_us


@each_kind
@pytest.mark.parametrize(("channels", "group"), [(128, 1), (256, 256), (64, 1)])
def test_a_conv_of_unknown_size_counts_as_a_small_one(channels: int, group: int, cpu: CpuCosts) -> None:
    weight, known = (channels, channels // group, 3, 3), (1, channels, 28, 28)
    unknown = op_cost(OpCase(op_type="Conv", inputs=(None,), output=None, weight=weight, group=group), cpu)
    sized = op_cost(OpCase(op_type="Conv", inputs=(known,), output=known, weight=weight, group=group), cpu)
    assert 0 < unknown.float_us < sized.float_us / 4
    assert 0 < unknown.int8_us < sized.int8_us / 4


@each_kind
@pytest.mark.parametrize("op_type", ["Gemm", "MatMul"])
def test_unknown_rows_count_as_one(op_type: str, cpu: CpuCosts) -> None:
    unknown = OpCase(op_type=op_type, inputs=(None,), output=None, weight=(384, 384))
    assert op_cost(unknown, cpu) == op_cost(linear(op_type, 1, 384, 384), cpu)


@each_kind
def test_an_operator_without_a_kernel_pays_for_its_pair(cpu: CpuCosts) -> None:
    shape = (1, 64, 28, 28)
    cost = op_cost(OpCase(op_type="Softmax", inputs=(shape,), output=shape), cpu)
    pair = quantize_us(math.prod(shape), cpu) + dequantize_us(math.prod(shape), cpu)
    assert cost.int8_us == pytest.approx(cost.float_us + pair)


@each_kind
def test_folded_activations_are_free(cpu: CpuCosts) -> None:
    shape = (1, 64, 28, 28)
    assert op_cost(OpCase(op_type="Relu", inputs=(shape,), output=shape), cpu) == Cost(0.0, 0.0)


# (what, case, the least and the most float/int8 may be): measured in chains, one thread, AVX512-VNNI
SPEEDUPS: list[tuple[str, OpCase, float, float]] = [
    ("one channel, 1x255", conv(1, 1, (1, 255), (1, 512)), 0.0, 0.7),
    ("one channel, 3x3", conv(1, 1, 3, (28, 28)), 0.0, 0.5),
    ("stem on a grey image", conv(1, 16, 3, (28, 28)), 0.0, 0.6),
    ("stem on a photo", conv(3, 32, 3, (224, 224), stride=2), 0.0, 0.85),
    ("depthwise 3x3, 16", depthwise(16, 3, (14, 14)), 0.2, 0.6),
    ("depthwise 3x3, 64", depthwise(64, 3, (14, 14)), 0.5, 0.95),
    ("depthwise 3x3, 256", depthwise(256, 3, (14, 14)), 0.9, 1.4),
    ("depthwise 3x3, 200, not whole vectors", depthwise(200, 3, (2, 96)), 0.0, 0.6),
    ("depthwise 5x5, 72", depthwise(72, 5, (14, 14)), 0.0, 0.6),
    ("dense 3x3, 4", conv(4, 4, 3, (28, 28)), 0.35, 0.7),
    ("dense 3x3, 8", conv(8, 8, 3, (28, 28)), 0.6, 0.99),
    ("dense 3x3, 12", conv(12, 12, 3, (28, 28)), 0.8, 1.2),
    ("dense 3x3x3, 8", conv(8, 8, 3, (32, 32, 32)), 0.3, 0.6),
    ("dense 3x3x3, 16", conv(16, 16, 3, (16, 16, 16)), 1.0, 1.5),
    ("dense 3x3x3, 64", conv(64, 64, 3, (8, 8, 8)), 3.0, 5.0),
    ("depthwise 3x3x3, 32", conv(32, 32, 3, (16, 16, 16), group=32), 0.8, 1.6),
    ("dense 3x3, 16", conv(16, 16, 3, (28, 28)), 1.4, 2.4),
    ("dense 3x3, 20", conv(20, 20, 3, (28, 28)), 2.5, 4.5),
    ("dense 3x3, 64", conv(64, 64, 3, (28, 28)), 3.0, 4.2),
    ("1x1, 8", conv(8, 8, 1, (14, 14)), 0.7, 1.05),
    ("1x1, 16", conv(16, 16, 1, (14, 14)), 0.8, 1.15),
    ("1x1, 32", conv(32, 32, 1, (14, 14)), 1.3, 1.9),
    ("1x1, 64", conv(64, 64, 1, (14, 14)), 2.0, 2.8),
    ("1x1, 256", conv(256, 256, 1, (14, 14)), 3.2, 4.1),
    ("1x1 on a point, 64 to 16", conv(64, 16, 1, (1, 1)), 0.0, 0.95),
    ("1x1 on a point, 120 to 32", conv(120, 32, 1, (1, 1)), 0.0, 1.05),
    ("1x1 on a point, 1152 to 192", conv(1152, 192, 1, (1, 1)), 1.2, 3.0),
    ("2 groups", conv(128, 128, 3, (28, 28), group=2), 2.0, 3.0),
    ("4 groups", conv(128, 128, 3, (28, 28), group=4), 1.2, 2.1),
    ("32 groups", conv(128, 128, 3, (28, 28), group=32), 0.0, 0.6),
    ("Conv1d", conv(64, 64, 3, (256,)), 3.0, 5.0),
    ("Gemm, one row", linear("Gemm", 1, 512, 512), 1.6, 2.8),
    ("Gemm, 16 rows", linear("Gemm", 16, 512, 512), 2.4, 3.6),
    ("Gemm, 128 rows", linear("Gemm", 128, 512, 512), 2.8, 3.6),
    ("small Gemm, one row", linear("Gemm", 1, 64, 64), 0.0, 0.7),
    ("MatMul, 96 rows", linear("MatMul", 96, 384, 1536), 2.7, 3.8),
]


# the same on AVX2 without VNNI
SPEEDUPS_AVX2: list[tuple[str, OpCase, float, float]] = [
    ("one channel, 3x3", conv(1, 1, 3, (28, 28)), 0.0, 0.6),
    ("stem on a photo", conv(3, 32, 3, (224, 224), stride=2), 0.0, 1.0),
    ("depthwise 3x3, 16", depthwise(16, 3, (14, 14)), 0.2, 0.7),
    ("depthwise 3x3, 64", depthwise(64, 3, (14, 14)), 0.4, 0.8),
    ("depthwise 3x3, 256", depthwise(256, 3, (14, 14)), 0.6, 0.95),
    ("dense 3x3, 8", conv(8, 8, 3, (28, 28)), 0.3, 0.9),
    ("dense 3x3, 16", conv(16, 16, 3, (28, 28)), 1.2, 2.0),
    ("dense 3x3, 24", conv(24, 24, 3, (28, 28)), 0.9, 1.4),
    ("dense 3x3, 64", conv(64, 64, 3, (28, 28)), 1.6, 2.2),
    ("1x1, 16", conv(16, 16, 1, (14, 14)), 0.6, 1.1),
    ("1x1, 64", conv(64, 64, 1, (14, 14)), 1.2, 1.8),
    ("1x1, 256", conv(256, 256, 1, (14, 14)), 1.6, 2.3),
    ("Conv1d", conv(64, 64, 3, (256,)), 1.6, 2.6),
    ("Gemm, one row", linear("Gemm", 1, 512, 512), 2.0, 6.0),
    ("Gemm, 128 rows", linear("Gemm", 128, 512, 512), 1.5, 2.2),
    ("small Gemm, one row", linear("Gemm", 1, 64, 64), 0.0, 0.9),
    ("MatMul, 96 rows", linear("MatMul", 96, 384, 1536), 1.5, 2.2),
]


@pytest.mark.parametrize(
    ("cpu", "case", "least", "most"),
    [pytest.param(cpu, *row, id=f"{what}, {cpu.name}")
     for cpu, table in ((VNNI, SPEEDUPS), (AVX2, SPEEDUPS_AVX2)) for what, *row in table],
)  # fmt: skip
def test_speedup_of_a_node(cpu: CpuCosts, case: OpCase, least: float, most: float) -> None:
    assert least <= speedup(case, cpu) <= most


@pytest.mark.parametrize(
    "case", [conv(64, 64, 3, (28, 28)), conv(256, 256, 1, (14, 14)), linear("Gemm", 128, 512, 512)]
)
def test_products_gain_less_without_vnni_and_pairs_cost_more(case: OpCase) -> None:
    assert speedup(case, AVX2) < 0.8 * speedup(case, VNNI)
    n = 100_000
    assert quantize_us(n, AVX2) + dequantize_us(n, AVX2) > 2 * (quantize_us(n, VNNI) + dequantize_us(n, VNNI))


@each_kind
def test_every_table_says_where_it_is_from(cpu: CpuCosts) -> None:
    assert re.search(r"onnxruntime \d+\.\d+\.\d+, \d{4}-\d\d-\d\d$", cpu.origin)
    assert CPU_COSTS[cpu.name] is cpu


def test_the_configuration_knows_the_kinds_that_have_a_table() -> None:
    assert get_args(Config.model_fields["cpu"].annotation) == ("any", *CPU_COSTS)


def best_sides(chain: list[OpCase], tail: bool) -> tuple[bool, ...]:
    """The cheapest int8 (True) or float choice of each node of a chain that starts in float and ends in `tail`."""

    def total(sides: tuple[bool, ...]) -> float:
        tensors = [math.prod(chain[0].inputs[0]), *(math.prod(case.output) for case in chain)]
        time = 0.0
        for k, (elements, before, after) in enumerate(zip(tensors, (False, *sides), (*sides, tail), strict=True)):
            if before != after:
                time += quantize_us(elements, from_conv=k > 0) if after else dequantize_us(elements, to_conv=True)
        found = map(op_cost, chain)
        return time + sum(cost.int8_us if side else cost.float_us for cost, side in zip(found, sides, strict=True))

    return min(itertools.product((False, True), repeat=len(chain)), key=total)


def test_efficientnet_starts_in_float_and_keeps_its_other_depthwise_in_int8() -> None:
    chain = [
        conv(3, 32, 3, (224, 224), stride=2, activation="Clip"),
        conv(32, 32, 3, (112, 112), group=32, activation="Clip"),
        conv(32, 16, 1, (112, 112), activation=""),
        conv(16, 96, 1, (112, 112), activation="Clip"),
        conv(96, 96, 3, (112, 112), group=96, stride=2, activation="Clip"),
        conv(96, 24, 1, (56, 56), activation=""),
        conv(24, 144, 1, (56, 56), activation="Clip"),
        conv(144, 144, 3, (56, 56), group=144, activation="Clip"),
        conv(144, 24, 1, (56, 56), activation=""),
    ]
    sides = best_sides(chain, tail=True)
    assert sides[:2] == (False, False)
    assert all(sides[3:])


def test_a_small_resnet_leaves_only_its_stem_in_float_and_a_late_inverted_residual_nothing() -> None:
    layers = [conv(16, 16, 3, (28, 28))] * 4
    chain = [conv(1, 16, 3, (28, 28)), *layers, conv(16, 32, 3, (28, 28), stride=2)]
    assert best_sides(chain, tail=True) == (False, True, True, True, True, True)
    chain = [conv(192, 1152, 1, (7, 7)), depthwise(1152, 5, (7, 7)), conv(1152, 192, 1, (7, 7))]
    assert best_sides(chain, tail=True) == (True, True, True)


@pytest.mark.parametrize(
    ("case", "pays"),
    [
        (conv(16, 16, 1, (14, 14)), False),
        (conv(32, 32, 1, (14, 14)), False),
        (conv(128, 128, 1, (14, 14)), True),
        (conv(240, 240, 1, (12, 80)), True),
        (conv(64, 64, 3, (28, 28)), True),
        (depthwise(16, 3, (14, 14)), False),
        (depthwise(128, 3, (14, 14)), False),
        (depthwise(512, 3, (14, 14)), False),
        (depthwise(240, 5, (12, 80)), False),
    ],
)
def test_between_float_activations_only_large_dense_convs_pay(case: OpCase, pays: bool) -> None:
    """Hard-swish on both sides: int8 pays for a pair of its own at its input and at its output."""
    cost = op_cost(case)
    pairs = quantize_us(math.prod(case.inputs[0])) + dequantize_us(math.prod(case.output))
    assert (cost.int8_us + pairs < cost.float_us) == pays


def test_average_pooling_is_left_in_float_and_max_pooling_is_not_worth_a_pair() -> None:
    shape = (1, 64, 28, 28)
    average = op_cost(OpCase(op_type="AveragePool", inputs=(shape,), output=shape, kernel=(3, 3)))
    assert average.int8_us > 10 * average.float_us
    largest = op_cost(OpCase(op_type="MaxPool", inputs=(shape,), output=shape, kernel=(3, 3)))
    n = math.prod(shape)
    assert largest.float_us < largest.int8_us < quantize_us(n, from_conv=True) + dequantize_us(n, to_conv=True)


def test_residual_add_is_cheap_on_either_side_of_a_map() -> None:
    shape = (1, 64, 28, 28)
    add = op_cost(OpCase(op_type="Add", inputs=(shape, shape), output=shape))
    assert max(add.float_us, add.int8_us) < quantize_us(math.prod(shape), from_conv=True)


def test_a_gate_costs_more_than_multiplying_equal_shapes() -> None:
    shape = (1, 24, 28, 28)
    gate = op_cost(OpCase(op_type="Mul", inputs=(shape, (1, 24, 1, 1)), output=shape))
    equal = op_cost(OpCase(op_type="Mul", inputs=(shape, shape), output=shape))
    assert gate.float_us > equal.float_us
    assert gate.int8_us > equal.int8_us


def test_clip_costs_float_convs_a_second_pass() -> None:
    relu, clip = (conv(24, 144, 1, (28, 28), activation=name) for name in ("Relu", "Clip"))
    assert op_cost(clip).float_us > op_cost(relu).float_us
    assert op_cost(clip).int8_us == op_cost(relu).int8_us


# ---- Tables of the cost model between their points and beyond them.

tables = st.dictionaries(st.integers(1, 10**6), st.floats(0.01, 100), min_size=1, max_size=6)


@given(tables, st.floats(0.5, 2e6))
@settings(max_examples=40)
def test_values_lie_between_those_of_the_neighbours(table: dict[int, float], x: float) -> None:
    points = sorted(table)
    below = [p for p in points if p <= x] or points[:1]
    above = [p for p in points if p >= x] or points[-1:]
    ends = table[below[-1]], table[above[0]]
    assert min(ends) - 1e-9 <= interpolate(table, x) <= max(ends) + 1e-9


@given(tables)
@settings(max_examples=40)
def test_points_are_exact_and_the_ends_go_on(table: dict[int, float]) -> None:
    for point, value in table.items():
        assert interpolate(table, point) == pytest.approx(value)
    least, most = min(table), max(table)
    assert interpolate(table, least / 10) == table[least]
    assert interpolate(table, most * 10) == table[most]


def test_the_middle_is_that_of_the_logarithms() -> None:
    assert interpolate({1: 0.0, 100: 1.0}, 10) == pytest.approx(0.5)
    assert interpolate({1: 2.0, 8: 8.0}, 2) == pytest.approx(4.0)
    assert interpolate({4: 1.0, 16: 3.0, 64: 0.0}, math.sqrt(16 * 64)) == pytest.approx(1.5)


@pytest.mark.parametrize(("n", "multiple", "rounded"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (17, 1, 17)])
def test_whole_blocks(n: int, multiple: int, rounded: int) -> None:
    assert round_up(n, multiple) == rounded


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
@pytest.mark.parametrize("engine", ["openvino", "ort"])
def test_groups_of_more_channels_are_computed_faster(engine: str, cpu: str) -> None:
    """A fit leaves any rate that no sample shows: groups of four channels had 0 in OpenVINO's table."""
    conv = find_target(engine).costs[cpu].conv
    rates = list(conv.grouped_float_gmacs.values())
    assert rates == sorted(rates)
    assert min(*rates, *conv.float_gmacs.values(), *conv.line_gmacs.values()) > 0.5


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_openvino_computes_one_axis_with_its_kernels_for_two(cpu: str) -> None:
    """The fit had rates of 134 to 56600 in float, so that nets of sound stayed float."""
    conv = find_target("openvino").costs[cpu].conv
    rates = list(conv.line_gmacs.values())
    assert rates == sorted(rates)
    assert rates[-1] < 1.3 * max(conv.float_gmacs.values())


def lstm(units: int, steps: int, batch: int, directions: int = 1) -> OpCase:
    return OpCase(
        op_type="LSTM",
        inputs=((steps, batch, units),),
        output=(steps, directions, batch, units),
        weight=(directions, 4 * units, units),
    )


# Microseconds of the session beside the node, which no model of nodes has.
SESSION_US = 7.0


@pytest.mark.parametrize(
    ("case", "float_us", "int8_us"),
    [
        (lstm(32, 10, 1), 12.1, 13.3),
        (lstm(48, 30, 1), 30.0, 25.4),
        (lstm(64, 10, 1), 19.9, 16.5),
        (lstm(64, 100, 1), 122.8, 79.7),
        (lstm(96, 30, 1, 2), 152.0, 90.3),
        (lstm(128, 10, 1), 49.7, 28.8),
        (lstm(128, 30, 1), 127.3, 66.1),
        (lstm(128, 100, 1), 395.8, 198.4),
        (lstm(192, 30, 1), 263.7, 112.6),
        (lstm(256, 30, 1), 509.5, 173.3),
        (lstm(512, 100, 1), 7283.8, 2065.9),
    ],
)
def test_an_lstm_of_one_sequence_takes_the_time_it_took_on_zen_4(case: OpCase, float_us: float, int8_us: float) -> None:
    """One thread, onnxruntime 1.32.0, 2026-11-30. Its launch was paid again at every step of the state."""
    (vnni,) = (cpu.predict_node(case) for cpu in list_costs(find_target("ort"), "vnni").values())
    assert vnni.float_us + SESSION_US == pytest.approx(float_us, rel=0.28)
    assert vnni.int8_us + SESSION_US == pytest.approx(int8_us, rel=0.28)
    assert (vnni.float_us > vnni.int8_us) == (float_us > 1.1 * int8_us)


@pytest.mark.parametrize(("units", "batch"), [(64, 4), (128, 4), (256, 4), (64, 16), (512, 16)])
def test_several_sequences_gain_too(units: int, batch: int) -> None:
    """1.5 to 3.4 times as fast on Zen 4, whose float products of several rows are slower than the table's."""
    assert speedup(lstm(units, 30, batch)) > 1.15


@pytest.mark.parametrize(
    ("units", "batch", "gain"),
    [(64, 1, 0.67), (128, 1, 0.91), (192, 1, 1.07), (256, 1, 1.36), (64, 4, 0.9), (128, 4, 1.04), (256, 4, 1.69)],
)
def test_a_file_for_any_cpu_counts_with_the_lstms_of_those_with_amx(units: int, batch: int, gain: float) -> None:
    """The speeds of Sapphire Rapids in docs/dynamic.md."""
    costs = list_costs(find_target("ort"), "any")
    cost = costs["vnni"].predict_node(lstm(units, 50, batch))
    assert cost.float_us / cost.int8_us == pytest.approx(gain, rel=0.15)
    assert (cost.float_us > cost.int8_us) == (gain > 1)
