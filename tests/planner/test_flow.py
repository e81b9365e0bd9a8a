"""The minimum cut is the best assignment: compared with trying every one on small graphs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from onnxq.planner.cut import FlowNetwork

costs = st.floats(0.0, 10.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[tuple[float, float]], list[tuple[int, int, float]]]:
    count = draw(st.integers(1, 6))
    unary = draw(st.lists(st.tuples(costs, costs), min_size=count, max_size=count))
    pairs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), costs), max_size=10))
    return unary, [(a, b, c) for a, b, c in pairs if a != b]


def energy(labels: tuple[int, ...], unary: list[tuple[float, float]], pairs: list[tuple[int, int, float]]) -> float:
    total = sum(cost[label] for cost, label in zip(unary, labels, strict=True))
    return total + sum(c for a, b, c in pairs if labels[a] == 1 and labels[b] == 0)


@given(problems())
def test_no_assignment_is_cheaper(problem: tuple[list[tuple[float, float]], list[tuple[int, int, float]]]) -> None:
    unary, pairs = problem
    net = FlowNetwork()
    for k, (zero, one) in enumerate(unary):
        net.add_edge(k, "sink", one)
        net.add_edge("source", k, zero)
        net.add_vertex(k)
    for a, b, c in pairs:
        net.add_edge(a, b, c)
    side = net.source_side("source", "sink")
    labels = tuple(int(net.names[k] in side) for k in range(len(unary)))
    best = min(energy(each, unary, pairs) for each in itertools.product((0, 1), repeat=len(unary)))
    assert energy(labels, unary, pairs) <= best + 1e-6


def test_a_chain_of_thousands_does_not_overflow_the_stack() -> None:
    net = FlowNetwork()
    for k in range(5000):
        net.add_edge(k, k + 1, 1.0 + k % 3)
    assert net.names[0] in net.source_side(0, 5000)
