"""Bits by an average, against brute force."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from onnxq.passes.mixed_precision.weight_bits import WeightChoice, compute_mean_bits, spend_budget


def left(weights: list[WeightChoice], bits: tuple[int, ...] | list[int]) -> float:
    return sum(one.error * 4.0 ** (one.bits - b) for one, b in zip(weights, bits, strict=True))


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(1e-6, 1.0)), min_size=1, max_size=4),
    st.floats(4.0, 8.0),
    st.sampled_from([(8,), (5, 6, 7, 8), (6, 8)]),
)
@settings(max_examples=80)
def test_the_average_is_kept_and_little_is_left_that_could_be_had(
    sizes: list[tuple[int, float]], average: float, widths: tuple[int, ...]
) -> None:
    weights = [WeightChoice(n, 4, error, widths) for n, error in sizes]
    bits = spend_budget(weights, average)
    counts = [one.elements for one in weights]
    assert compute_mean_bits(counts, bits) <= average + 1e-9
    assert set(bits) <= {4, *widths}
    fitting = [
        way
        for way in itertools.product((4, *widths), repeat=len(weights))
        if compute_mean_bits(counts, list(way)) <= average + 1e-9
    ]
    # Greedy misses at most what the room for one more weight would have bought.
    most = max(one.elements for one in weights) * (max(widths) - 4) / sum(counts)
    poorer = [way for way in fitting if compute_mean_bits(counts, list(way)) <= average - most]
    if poorer:
        assert left(weights, bits) <= min(left(weights, way) for way in poorer) * (1 + 1e-9)


def test_error_per_bit_decides_and_not_size() -> None:
    small, large = WeightChoice(100, 4, 1e-6, (8,)), WeightChoice(400, 4, 1e-2, (8,))
    assert spend_budget([small, large], 7.2) == [4, 8]
    # The same error in fewer elements is had first.
    assert spend_budget([WeightChoice(100, 4, 1e-2, (8,)), large], 5.0) == [8, 4]


def test_what_cannot_change_counts() -> None:
    one = WeightChoice(100, 4, 1.0, (8,))
    assert spend_budget([one], 6.0, others=(100, 400)) == [8]
    assert spend_budget([one], 5.9, others=(100, 400)) == [4]
    assert spend_budget([one], 4.0, others=(100, 800)) == [4]
    assert spend_budget([], 4.0) == []
