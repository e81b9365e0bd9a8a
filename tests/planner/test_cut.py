"""The cut: given sides hold, followers never start a region, and a tensor's pair is paid once however many read it."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.backends.ort.costs import CPU_COSTS
from onnxq.planner.cut import CutProblem, FlowNetwork
from onnxq.sites import TensorId
from tests.planner.kit import draft, network

MAP = "float[1,64,14,14]"
DENSE, POINT = (64, 64, 3, 3), (64, 64, 1, 1)
PADS = "<pads=[1,1,1,1]>"
# A stem and two branches that meet in an Add; a pooling behind.
TEXT = f"""g ({MAP} x) => (float[1,64,7,7] y) {{
    a = Conv{PADS}(x, w) r = Relu(a) b = Conv{PADS}(r, w) c = Conv(r, v) s = Add(b, c)
    m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(s) y = Conv{PADS}(m, w)
}}"""
CONVS, ALL = ("a", "b", "c", "y"), frozenset(("a", "b", "c", "s", "m", "y"))
kinds = st.sampled_from(sorted(CPU_COSTS))


@lru_cache(maxsize=1)
def problem() -> CutProblem:
    return CutProblem(draft(network(TEXT, w=DENSE, v=POINT)).ops)


@given(st.dictionaries(st.sampled_from(sorted(ALL)), st.booleans()), kinds)
@settings(max_examples=25)
def test_given_sides_hold_and_nothing_follows_into_the_void(fixed: dict[str, bool], cpu: str) -> None:
    convs = {name: side for name, side in fixed.items() if name in CONVS}
    floats = {name: False for name, side in fixed.items() if name not in CONVS and not side}
    chosen = problem().minimum_cut(problem().compute_costs(CPU_COSTS[cpu]), {**convs, **floats})
    for name, side in {**convs, **floats}.items():
        assert (name in chosen) is side
    # The Add needs what makes both of its inputs, the pooling the Add.
    assert "s" not in chosen or {"b", "c"} <= chosen
    assert "m" not in chosen or "s" in chosen


def test_everything_in_integers_needs_one_pair_in_front_and_one_behind() -> None:
    cut = problem()
    costs = cut.compute_costs(CPU_COSTS["vnni"])
    alone = sum(cost.int8_us for cost in costs.ops.values())
    pairs = costs.quantize[TensorId("x")] + costs.dequantize[TensorId("y")]
    assert cut.time_us(costs, ALL) == pytest.approx(alone + pairs)
    assert cut.time_us(costs, frozenset()) == pytest.approx(sum(cost.float_us for cost in costs.ops.values()))


def test_a_tensor_is_quantized_and_dequantized_once() -> None:
    cut = problem()
    costs = cut.compute_costs(CPU_COSTS["vnni"])

    def pairs(*chosen: str) -> float:
        units = sum(c.int8_us if name in chosen else c.float_us for name, c in costs.ops.items())
        return cut.time_us(costs, frozenset(chosen)) - units

    quantize = {t.name: us for t, us in costs.quantize.items()}
    dequantize = {t.name: us for t, us in costs.dequantize.items()}
    # r is read by both branches.
    assert pairs("b", "c") == pytest.approx(quantize["r"] + dequantize["b"] + dequantize["c"])
    assert pairs("b") == pytest.approx(quantize["r"] + dequantize["b"])
    assert pairs("a") == pytest.approx(quantize["x"] + dequantize["r"])
    # One of two readers in float: the tensor is needed both ways.
    assert pairs("a", "b") == pytest.approx(quantize["x"] + dequantize["r"] + dequantize["b"])


MIXED = """g (float[16,256] x) => (float[16,256] y, float[16,256] z) {
    a = MatMul(x, w) h = Tanh(a) y = MatMul(h, w) g = Gemm(x, w, b) z = Tanh(g)
}"""


def test_kernels_that_write_float_need_nothing_behind_them() -> None:
    cut = CutProblem(draft(network(MIXED, w=(256, 256), b=(256,))).ops)
    costs = cut.compute_costs(CPU_COSTS["vnni"])
    units = {name: cost.int8_us for name, cost in costs.ops.items()}
    everything = frozenset(units)
    # MatMul writes float, Gemm may: no DequantizeLinear for either.
    pairs = costs.quantize[TensorId("x")] + costs.quantize[TensorId("h")]
    assert cut.time_us(costs, everything) == pytest.approx(sum(units.values()) + pairs)
    assert cut.minimum_cut(costs, {}) == everything


def test_sizes_decide() -> None:
    """The same network, narrow: no convolution repays its pair."""
    narrow = network(TEXT.replace("64", "4"), w=(4, 4, 3, 3), v=(4, 4, 1, 1))
    small = CutProblem(draft(narrow).ops)
    for table in CPU_COSTS.values():
        assert small.minimum_cut(small.compute_costs(table), {}) == frozenset()
        assert problem().minimum_cut(problem().compute_costs(table), {}) == ALL


def test_a_chain_of_thousands_does_not_overflow_the_stack() -> None:
    net = FlowNetwork()
    for k in range(5000):
        net.add_edge(k, k + 1, 1.0 + k % 3)
    assert net.names[0] in net.source_side(0, 5000)
