"""Tables of the cost model between their points and beyond them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.backends import find_target
from onnxq.backends.cpu_costs import interpolate, round_up

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
