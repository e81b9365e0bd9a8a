"""The cut between integers and float: the best there is, for one kind of CPU and for all of them in balance."""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import shape_inference

from onnxq.backends import find_target, list_costs
from onnxq.config import Config, Rule
from onnxq.graph import name_nodes
from onnxq.plan import PlacementChoice
from onnxq.planner.build import OnnxPlacement, state_placement
from onnxq.planner.cut import TOLERATED, Balance, CutProblem, FlowNetwork, add_costs, find_balance
from onnxq.sites import TensorId
from tests.networks import parse_text
from tests.planner.kit import draft, network

CPU_COSTS = find_target("ort").costs

# A layer of each kind, from a tensor of {c} channels to another.
LAYERS = {
    "dense": ["{y}a = Conv <pads=[1,1,1,1]>({x}, {y}w)", "{y} = Relu({y}a)"],
    "point": ["{y}a = Conv({x}, {y}w)", "{y} = Relu({y}a)"],
    "depthwise": ["{y}a = Conv <pads=[1,1,1,1], group={c}>({x}, {y}w)", "{y} = Relu({y}a)"],
    "swish": ["{y}a = Conv({x}, {y}w)", "{y} = HardSwish({y}a)"],
    "residual": ["{y}a = Conv <pads=[1,1,1,1]>({x}, {y}w)", "{y}r = Relu({y}a)", "{y} = Add({x}, {y}r)"],
    "sigmoid": ["{y} = Sigmoid({x})"],
}
KERNELS = {"dense": (1, 3), "residual": (1, 3), "depthwise": (0, 3), "point": (1, 1), "swish": (1, 1)}

# Channels, side and layers: a mobile net, a residual net, narrow and wide ones, activations that stay float.
NETS = {
    "wide residual": (64, 28, ["dense", "residual", "residual", "residual"]),
    "narrow residual": (16, 28, ["dense", "residual", "residual"]),
    "mobile": (96, 14, ["point", "depthwise", "point", "point", "depthwise", "point"]),
    "swish": (128, 14, ["swish", "point", "swish", "depthwise", "swish"]),
    "one small": (8, 14, ["dense"]),
    "points": (256, 7, ["point"] * 4),
}


def net(channels: int, side: int, layers: Sequence[str]) -> onnx.ModelProto:
    lines, weights, x = [], {}, "x"
    for k, kind in enumerate(layers):
        y = f"t{k}"
        lines += [line.format(x=x, y=y, c=channels) for line in LAYERS[kind]]
        if kind in KERNELS:
            dense, size = KERNELS[kind]
            weights[f"{y}w"] = np.ones((channels, channels if dense else 1, size, size), np.float32)
        x = y
    shape = f"float[1,{channels},{side},{side}]"
    body = "\n".join([*lines, f"y = Identity({x})"])
    proto = parse_text(f"g ({shape} x) => ({shape} y) {{\n{body}\n}}", **weights)
    return shape_inference.infer_shapes(name_nodes(proto))


def drafted(name: str, **config: object) -> OnnxPlacement:
    return state_placement(net(*NETS[name]), Config(**config))  # type: ignore[arg-type]


def balance(name: str, cpu: str = "any") -> Balance:
    return find_balance(CutProblem(drafted(name).ops), {}, list_costs(find_target("ort"), cpu))


nets = st.tuples(
    st.sampled_from((8, 16, 24, 32, 64, 128)),
    st.sampled_from((4, 7, 14, 28, 56)),
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=12),
)


@given(nets)
@settings(max_examples=40, deadline=None)
def test_one_graph_for_all_kinds_is_never_slower_than_float_and_says_losses(shape: tuple[int, int, list[str]]) -> None:
    found = find_balance(CutProblem(state_placement(net(*shape), Config()).ops), {}, CPU_COSTS)
    assert {one.cpu for one in found.forecasts} == set(CPU_COSTS)
    for one in found.forecasts:
        assert one.placed_us <= one.float_us + 1e-6
        assert (one.loss > TOLERATED) == any(f"kind {one.cpu} " in line for line in found.make_warnings())


@pytest.mark.parametrize("name", NETS)
def test_one_graph_is_close_to_the_best_of_each_kind(name: str) -> None:
    found = balance(name)
    assert found.make_warnings() == ()
    for one in found.forecasts:
        assert one.loss <= TOLERATED
        assert one.speedup >= 1


def test_where_the_kinds_disagree_the_graph_for_all_loses_least_on_its_worst_kind() -> None:
    shapes = [(64, 4, ["residual"] * 4), (32, 14, ["point", "depthwise", "point"] * 3), (24, 20, ["residual"] * 6)]
    differ = 0
    for shape in shapes:
        problem = CutProblem(state_placement(net(*shape), Config()).ops)
        costs = {cpu: problem.compute_costs(table) for cpu, table in CPU_COSTS.items()}
        own = {cpu: problem.minimum_cut(cost, {}) for cpu, cost in costs.items()}
        differ += own["avx2"] != own["vnni"]
        worst = max(one.loss for one in find_balance(problem, {}, CPU_COSTS).forecasts)
        for chosen in own.values():
            times = {cpu: problem.time_us(cost, chosen) for cpu, cost in costs.items()}
            if all(time <= problem.time_us(costs[cpu], frozenset()) for cpu, time in times.items()):
                assert worst <= max(time / problem.time_us(costs[cpu], own[cpu]) for cpu, time in times.items()) + 1e-9
    assert differ


def test_a_kind_of_its_own_gets_its_own_minimum() -> None:
    for cpu in CPU_COSTS:
        (one,) = balance("narrow residual", cpu).forecasts
        assert (one.cpu, one.loss) == (cpu, pytest.approx(1))


def test_what_no_graph_can_serve_is_left_float_with_a_warning() -> None:
    """Int8 wins with VNNI and loses without: float for all, and a line that says who would gain."""
    plan = state_placement(net(24, 10, ["dense", "dense"]), Config()).default()
    assert not plan.sites
    assert [line for line in plan.warnings if "kind vnni " in line and "`cpu='vnni'`" in line]
    alone = state_placement(net(24, 10, ["dense", "dense"]), Config(cpu="vnni")).default()
    assert alone.sites
    assert not alone.warnings
    assert alone.placement == PlacementChoice(cpu="vnni")


def test_what_the_person_forces_is_quantized_on_every_kind() -> None:
    force = Rule(op="Conv", set={"quantize": True})  # type: ignore[arg-type]
    for cpu in ("any", *CPU_COSTS):
        assert drafted("one small", cpu=cpu, rules=(force,)).default().sites


def test_beside_what_is_forced_nothing_makes_another_kind_slower() -> None:
    """The first of two convolutions that lose without VNNI is forced; the second is not taken along."""
    problem = CutProblem(state_placement(net(24, 10, ["swish", "swish"]), Config()).ops)
    first = problem.ops.all[0].name
    assert find_balance(problem, {first: True}, CPU_COSTS).chosen == {first}
    assert find_balance(problem, {}, CPU_COSTS).chosen == frozenset()


def test_the_plan_names_the_kind_it_was_made_for() -> None:
    for cpu in ("any", *CPU_COSTS):
        assert drafted("wide residual", cpu=cpu).default().placement == PlacementChoice(cpu=cpu)
    assert drafted("wide residual", target="virtual").default().placement == PlacementChoice()
    assert drafted("wide residual", mode="weight-only").default().placement == PlacementChoice()


@pytest.mark.parametrize("cpu", CPU_COSTS)
@pytest.mark.parametrize("layers", [["dense", "swish", "residual"], ["point", "depthwise", "point", "residual"]])
@pytest.mark.parametrize("channels", [16, 32, 64])
def test_the_cut_is_the_best_of_all_placements(channels: int, layers: list[str], cpu: str) -> None:
    problem = CutProblem(state_placement(net(channels, 14, layers), Config()).ops)
    costs = problem.compute_costs(CPU_COSTS[cpu])

    def energy(chosen: frozenset[str]) -> float:
        """Predicted time, and what int8 must earn besides."""
        margin = sum(0.03 * costs.ops[name].float_us for name in chosen)
        margin += 0.2 * sum(op.rule.compute for op in problem.ops if op.name in chosen)
        return problem.time_us(costs, chosen) + margin

    every = [op.name for op in problem.ops]
    subsets = itertools.chain.from_iterable(itertools.combinations(every, k) for k in range(len(every) + 1))
    adds = {op.name for op in problem.ops if not op.rule.compute}
    # An Add alone may not start a region: only placements that hold what it reads count.
    legal = [frozenset(one) for one in subsets if not adds & set(one) or set(one) >= set(every)]
    chosen = problem.minimum_cut(costs, {})
    assert energy(chosen) <= min(map(energy, legal)) + 1e-6


def test_a_weighted_sum_weighs_times() -> None:
    problem = CutProblem(drafted("swish").ops)
    one, other = (problem.compute_costs(table) for table in CPU_COSTS.values())
    both = add_costs([(one, 0.25), (other, 2.0)])
    chosen = problem.minimum_cut(both, {})
    assert problem.time_us(both, chosen) == pytest.approx(
        0.25 * problem.time_us(one, chosen) + 2 * problem.time_us(other, chosen)
    )


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


def test_kernels_that_write_float_need_nothing_behind_them() -> None:
    text = """g (float[16,256] x) => (float[16,256] y, float[16,256] z) {
        a = MatMul(x, w) h = Tanh(a) y = MatMul(h, w) g = Gemm(x, w, b) z = Tanh(g)
    }"""
    cut = CutProblem(draft(network(text, w=(256, 256), b=(256,))).ops)
    costs = cut.compute_costs(CPU_COSTS["vnni"])
    units = {name: cost.int8_us for name, cost in costs.ops.items()}
    everything = frozenset(units)
    # MatMul writes float, Gemm may: no DequantizeLinear for either.
    pairs = costs.quantize[TensorId("x")] + costs.quantize[TensorId("h")]
    assert cut.time_us(costs, everything) == pytest.approx(sum(units.values()) + pairs)
    assert cut.minimum_cut(costs, {}) == everything


def test_sizes_decide() -> None:
    """The same network, narrow: no convolution repays its pair."""
    small = CutProblem(draft(network(TEXT.replace("64", "4"), w=(4, 4, 3, 3), v=(4, 4, 1, 1))).ops)
    for table in CPU_COSTS.values():
        assert small.minimum_cut(small.compute_costs(table), {}) == frozenset()
        assert problem().minimum_cut(problem().compute_costs(table), {}) == ALL


def test_a_chain_of_thousands_does_not_overflow_the_stack() -> None:
    net = FlowNetwork()
    for k in range(5000):
        net.add_edge(k, k + 1, 1.0 + k % 3)
    assert net.names[0] in net.source_side(0, 5000)
