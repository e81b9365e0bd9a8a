"""The integer programme against all choices that there are."""

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxq.passes.mixed_precision.program import (
    QUANTITIES,
    Condition,
    Costs,
    Implication,
    PrecisionProgram,
    SharedCosts,
)
from onnxq.passes.mixed_precision.promotion_search import bisect_noise

PRECISIONS = ("float", "w8a8", "w4a8")
INTEGERS = frozenset(PRECISIONS[1:])
# Noise spans decades, as it does between 4 and 8 bits.
NOISE = st.floats(-7, -1).map(lambda power: 10.0**power)
TIME = st.floats(0.1, 50)


@st.composite
def programs(draw: st.DrawFn) -> PrecisionProgram:
    """Chains of operators with conversions between them, tensors that both sides round, and a tie."""
    names = [f"op{k}" for k in range(draw(st.integers(2, 4)))]
    operators = {
        name: {
            "float": Costs(size=400, time=draw(TIME)),
            "w8a8": Costs(noise=draw(NOISE), size=100, time=draw(TIME)),
            "w4a8": Costs(noise=draw(NOISE), size=50, time=draw(TIME)),
        }
        for name in names
    }
    shared = []
    for before, after in itertools.pairwise(names):
        ends = Condition(before, INTEGERS), Condition(after, INTEGERS)
        shared.append(SharedCosts(Costs(noise=draw(NOISE)), ends))
        shared.append(SharedCosts(Costs(time=draw(TIME)), (ends[1],), Condition(before, frozenset(["float"]))))
    ties = [Implication((Condition(names[0], INTEGERS),), Condition(names[1], INTEGERS))]
    return PrecisionProgram(operators, shared, ties, Costs(size=draw(st.sampled_from([0.0, 1000.0]))))


def list_choices(program: PrecisionProgram) -> list[dict[str, str]]:
    names = list(program.operators)
    every = (dict(zip(names, chosen, strict=True)) for chosen in itertools.product(PRECISIONS, repeat=len(names)))
    return [
        chosen
        for chosen in every
        if all(tie.then.is_met(chosen) or not all(one.is_met(chosen) for one in tie.all_of) for tie in program.ties)
    ]


@given(program=programs(), minimized=st.sampled_from(QUANTITIES), data=st.data())
def test_nothing_within_the_limits_costs_less(program: PrecisionProgram, minimized: str, data: st.DataObject) -> None:
    choices = list_choices(program)
    # Limits that some choice just keeps.
    limiting = program.add_costs(data.draw(st.sampled_from(choices)))
    limits = {name: getattr(limiting, name) for name in QUANTITIES if name != minimized and data.draw(st.booleans())}
    found = program.solve(minimized, limits)
    assert found in choices
    costs = program.add_costs(found)
    for name, limit in limits.items():
        assert getattr(costs, name) <= limit * (1 + 1e-6) + 1e-12
    kept = [one for one in map(program.add_costs, choices) if all(getattr(one, n) <= v for n, v in limits.items())]
    least = min(getattr(one, minimized) for one in kept)
    # The other quantities count a little, and the solver stops close to the optimum.
    assert getattr(costs, minimized) <= least * 1.01 + 2e-3 * program.find_units()[minimized]


def test_there_is_no_choice_below_the_least_size() -> None:
    program = PrecisionProgram({"op": {"float": Costs(size=400), "w4a8": Costs(noise=1, size=50)}}, fixed=Costs(size=7))
    assert program.solve("noise", {"size": 56}) is None
    assert program.solve("noise", {"size": 6}) is None
    assert program.solve("noise", {"size": 57}) == {"op": "w4a8"}
    assert program.solve("size", {"noise": 0}) == {"op": "float"}


def test_a_limit_of_nothing_allows_no_cost_below_the_tolerance_of_the_solver() -> None:
    options = {"float": Costs(size=400), "w8a8": Costs(noise=1e-9, size=100)}
    assert PrecisionProgram({"op": options}).solve("size", {"noise": 0}) == {"op": "float"}


def test_a_cost_that_the_solver_cannot_hold_beside_the_limit_is_none() -> None:
    operators = {
        name: {"float": Costs(size=400), "w8a8": Costs(noise=noise)} for name, noise in (("a", 1e-12), ("b", 1))
    }
    assert PrecisionProgram(operators).solve("size", {"noise": 0.1}) == {"a": "w8a8", "b": "float"}


@given(program=programs(), factors=st.tuples(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)))
def test_noise_is_scaled_by_precision(program: PrecisionProgram, factors: tuple[float, float, float]) -> None:
    eight, four, shared = factors
    scaled = program.scale_noise({"w8a8": eight, "w4a8": four}, shared)
    for chosen in list_choices(program):
        # By `sum`, which rounds once since Python 3.12.
        own = {
            precision: sum(program.operators[name][one].noise for name, one in chosen.items() if one == precision)
            for precision in ("w8a8", "w4a8", "float")
        }
        assert {precision: program.sum_noise(chosen, precision) for precision in own} == own
        paid = program.add_costs(chosen).noise - sum(own.values())
        expected = eight * own["w8a8"] + four * own["w4a8"] + shared * paid
        assert scaled.add_costs(chosen).noise == pytest.approx(expected, abs=1e-9)
        assert scaled.add_costs(chosen).size == program.add_costs(chosen).size


def test_the_solver_prints_nothing() -> None:
    code = "from onnxq.passes.mixed_precision.program import *; "
    code += "PrecisionProgram({'op': {'float': Costs()}}).solve('noise', {}); print('answer')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "answer\n"


NOISES = st.lists(st.floats(1e-9, 1e3), max_size=5)


@given(failing=NOISES, holding=NOISES)
def test_a_noise_lies_between_what_fails_and_what_holds_below(failing: list[float], holding: list[float]) -> None:
    """Between predictions that failed and those that held when they were measured."""
    noise = bisect_noise(failing, holding)
    if not failing:
        assert noise == math.inf
        return
    assert noise < min(failing)
    assert all(noise > one for one in holding if one < min(failing) * (1 - 1e-9))
