"""One placement for all kinds of CPU: no slower than float on any, close to each kind's own; and the cut behind it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser, shape_inference

from onnxq.backends.ort.costs import CPU_COSTS
from onnxq.config import Config, Rule
from onnxq.graph import name_nodes
from onnxq.plan import PlacementChoice
from onnxq.planner.build import OnnxPlacement, state_placement
from onnxq.planner.cut import TOLERATED, Balance, CutProblem, add_costs, find_balance

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
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>\ng ({shape} x) => ({shape} y) {{\n{body}\n}}')
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return shape_inference.infer_shapes(name_nodes(proto))


def drafted(name: str, **config: object) -> OnnxPlacement:
    return state_placement(net(*NETS[name]), Config(**config))  # type: ignore[arg-type]


def balance(name: str, cpu: str = "any") -> Balance:
    return find_balance(CutProblem(drafted(name).ops), {}, cpu)


nets = st.tuples(
    st.sampled_from((8, 16, 24, 32, 64, 128)),
    st.sampled_from((4, 7, 14, 28, 56)),
    st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=12),
)


@given(nets)
@settings(max_examples=40, deadline=None)
def test_one_graph_for_all_kinds_is_no_slower_than_float_on_any_and_says_where_it_loses(
    shape: tuple[int, int, list[str]],
) -> None:
    found = find_balance(CutProblem(state_placement(net(*shape), Config()).ops), {})
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
        own = {cpu: find_balance(problem, {}, cpu) for cpu in CPU_COSTS}
        differ += own["avx2"].chosen != own["vnni"].chosen
        worst = max(one.loss for one in find_balance(problem, {}).forecasts)
        for found in own.values():
            if all(one.speedup >= 1 for one in found.forecasts):
                assert worst <= max(one.loss for one in found.forecasts) + 1e-9
    assert differ


def test_a_kind_of_its_own_gets_its_own_minimum() -> None:
    for cpu in CPU_COSTS:
        for one in balance("narrow residual", cpu).forecasts:
            assert one.loss == pytest.approx(1) or one.cpu != cpu


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
    named = net(24, 10, ["swish", "swish"])
    problem = CutProblem(state_placement(named, Config()).ops)
    first = problem.ops.all[0].name
    found = find_balance(problem, {first: True})
    assert found.chosen == {first}
    assert find_balance(problem, {}).chosen == frozenset()


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
