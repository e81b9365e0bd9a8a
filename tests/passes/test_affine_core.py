"""Factors and sums along channels, in the types of weights."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxq.passes.affine_core import per_channel, round_to_type, scale_outputs, sum_inputs

F = np.float32


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_scale_outputs_of_groups(groups: int, inputs: int, outputs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((groups * inputs, outputs, 2)).astype(F)
    factor = rng.uniform(0.5, 2, groups * outputs)
    scaled = scale_outputs(weight, factor, 1, groups)
    assert scaled is not None
    for g in range(groups):
        for j in range(outputs):
            part = weight[g * inputs : (g + 1) * inputs, j] * factor[g * outputs + j]
            np.testing.assert_allclose(scaled[g * inputs : (g + 1) * inputs, j], part, rtol=1e-6)


def test_per_channel_reads_broadcasting() -> None:
    six = np.arange(6, dtype=F)
    for shape, rank, axis in [((6, 1, 1), 4, 1), ((1, 6, 1, 1), 4, 1), ((6,), 2, 1), ((1, 6), 2, 1), ((6,), 3, -1)]:
        found = per_channel(six.reshape(shape), rank, axis, 6)
        assert found is not None
        np.testing.assert_array_equal(found, six)
    for shape, rank, axis in [((6,), 4, 1), ((6, 1), 4, 1), ((6, 1, 1), 2, 1), ((1, 6, 1, 1), 3, 1)]:
        assert per_channel(six.reshape(shape), rank, axis, 6) is None
    assert per_channel(six, 2, 1, 5) is None
    assert per_channel(np.full((1, 1, 1), 3, F), 4, 1, 6) == 3.0
    assert per_channel(np.full((1, 1, 1), 3, F), 2, 1, 6) is None


def test_rounded_keeps_digits() -> None:
    assert round_to_type(np.array([1e39]), np.dtype(F)) is None
    assert round_to_type(np.array([1e5]), np.dtype(np.float16)) is None
    assert round_to_type(np.array([1e-7]), np.dtype(np.float16)) is None
    assert round_to_type(np.array([1.0, 1e-7]), np.dtype(np.float16)) is not None  # too small to count beside 1
    assert round_to_type(np.array([0.0]), np.dtype(F)) is not None
    np.testing.assert_array_equal(sum_inputs(np.ones((2, 3, 4), F), 0), [12.0, 12.0])
