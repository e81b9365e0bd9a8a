from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxq.observers.base import flatten_values
from onnxq.observers.histogram import Histogram, HistogramView

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ARRAYS = hnp.arrays(np.float32, st.integers(1, 60), elements=FINITE)


def _count(histogram: Histogram, values: Any) -> Histogram:
    found = flatten_values(values)
    if found is not None:
        histogram.count_values(found)
    return histogram


def _seen(values: Any, bins: int = 2048) -> Histogram:
    return _count(Histogram(bins), values)


def _inside(view: HistogramView, values: Any) -> None:
    """Every non-zero value is counted in the bin whose edges enclose it."""
    edges = view.edges
    assert edges[0] == view.minimum == values.min()
    assert edges[-1] == view.maximum == values.max()
    assert (np.diff(edges) >= 0).all()
    numbers = np.trunc(np.ldexp(values[values != 0].astype(np.float64), -view.exponent)).astype(np.int64) - view.first
    np.testing.assert_array_equal(np.bincount(numbers, minlength=view.counts.size), view.counts)
    exact = values[values != 0].astype(np.float64)
    assert (edges[numbers] <= exact).all()
    assert (exact <= edges[numbers + 1]).all()
    assert view.zeros == (values == 0).sum()
    assert view.count == values.size


@given(ARRAYS)
def test_counts_equal_those_of_one_exact_pass(values: Any) -> None:
    histogram = Histogram(2048)
    for part in np.array_split(values, 3):
        _count(histogram, part)
    _inside(histogram.make_view(), values)
    assert histogram.count == values.size


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    x = np.random.default_rng(0).standard_normal(100_000)
    kinds = {"normal": x, "relu": np.maximum(x, 0), "far": 1000 + x, "negative": -np.abs(x)}
    kinds |= {"relu6": np.clip(3 * x, 0, 6), "gap": x + 40 * (x > 0), "negative relu": -np.maximum(x, 0)}
    return {name: values.astype(np.float32) for name, values in kinds.items()}


@pytest.mark.parametrize("name", ["normal", "relu", "far", "negative", "relu6"])
def test_no_data_waste_half_of_the_bins(data: dict[str, Any], name: str) -> None:
    view = _seen(data[name], 4096).make_view()
    _inside(view, data[name])
    assert 4096 <= view.counts.size <= 8192
    assert view.zeros == (data[name] == 0).sum()


def test_memory_does_not_grow_with_the_data() -> None:
    histogram = Histogram(4096)
    rng = np.random.default_rng(0)
    for k in range(40):
        _count(histogram, (rng.standard_normal(1000) * 3.0**k).astype(np.float32))
        assert histogram.make_view().counts.size <= 8192


def test_bins_halve_exactly_when_the_range_grows() -> None:
    rng = np.random.default_rng(1)
    small, large = rng.standard_normal(50_000).astype(np.float32), np.float32([-900.0, 5e4])
    grown = _seen(small)
    fine = grown.make_view()
    assert fine.exponent <= -8
    _count(grown, large)
    _inside(grown.make_view(), np.concatenate([small, large]))
    assert grown.make_view().exponent > fine.exponent + 8


@given(ARRAYS, st.integers(1, 600))
def test_coarser_views_keep_every_count_in_its_place(values: Any, bins: int) -> None:
    view = _seen(values).make_view()
    coarse = view.merge_bins(bins)
    _inside(coarse, values)
    assert coarse.counts.size >= min(bins, view.counts.size) - 1
    assert coarse.counts.size <= max(2 * bins + 1, 1) or coarse.exponent == view.exponent


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("name", ["normal", "relu", "far", "negative relu", "gap"])
def test_quantiles_are_right_to_a_bin(data: dict[str, Any], name: str, share: float) -> None:
    values = data[name]
    view = _seen(values).make_view()
    got = view.find_quantile(share * values.size, (1 - share) * values.size)
    low, high = np.quantile(values, [max(share - 2e-5, 0), min(share + 2e-5, 1)])
    width = 2.0**view.exponent
    assert low - 2 * width <= got <= high + 2 * width
    if share in (0.0, 1.0):
        assert got == (values.max() if share else values.min())


@given(ARRAYS, st.floats(0, 1))
def test_quantiles_of_the_mirrored_data_are_mirrored(values: Any, share: float) -> None:
    below = share * values.size
    above = values.size - below
    if below == above:
        return
    view = _seen(values).make_view()
    mirrored = _seen(-values).make_view().find_quantile(above, below)
    # Exact but for cumulated counts that float64 rounds.
    assert view.find_quantile(below, above) == pytest.approx(-mirrored, abs=1e-9 * 2.0**view.exponent, rel=0)


def test_other_bins_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="4096 bins into 2048"):
        Histogram(2048).add_histogram(Histogram(4096))
    empty = Histogram(2048)
    empty.add_histogram(Histogram(2048))
    assert empty.count == 0
