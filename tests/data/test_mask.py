"""Masks of positions that do not count."""

from __future__ import annotations

import numpy as np

F = np.float32


def test_masked_positions_do_not_count() -> None:
    from onnxq.data import read_mask

    mask = np.array([[1, 1, 0]])
    feeds = {"x": np.ones((1, 3, 2), F), "attention_mask": mask}
    found = read_mask(feeds, (1, 3, 2))
    assert found is not None
    assert found.tolist() == [[True, True, False]]
    assert read_mask(feeds, (1, 4, 2)) is None
    assert read_mask(feeds, (1, 3)) is None
    assert read_mask({"x": feeds["x"]}, (1, 3, 2)) is None
    assert read_mask(feeds | {"attention_mask": mask * 7}, (1, 3, 2)) is None
    assert read_mask(feeds | {"attention_mask": mask * 0}, (1, 3, 2)) is None
