"""Factors from weights: dead channels keep their size; channels that meet are one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxq.passes.equalization.cross_layer_core import equalize_values, equalize_weights, merge_labels


def test_dead_channels_keep_their_size() -> None:
    groups = np.zeros(4, np.intp)
    s = equalize_weights(np.array([1.0, 0.0, 4.0, 1.0]), np.array([4.0, 1.0, 1.0, 0.0]), groups)
    assert s[1] == s[3] == 1.0
    np.testing.assert_allclose(s[[0, 2]], [2.0, 0.5])
    s = equalize_values(np.array([1.0, 16.0, 0.0, np.inf]), np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(s, [2.0, 0.5, 1.0, 1.0])


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=20))
def test_labels_that_meet_are_one(pairs: list[tuple[int, int]]) -> None:
    labels = merge_labels(12, [(np.array([a]), np.array([b])) for a, b in pairs])
    parent = list(range(12))
    for _ in range(12):
        for a, b in pairs:
            parent[a] = parent[b] = min(parent[a], parent[b])
    assert labels.tolist() == parent
