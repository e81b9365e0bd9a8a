"""Samples that ranges hang on are not the ones held back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxq.config import Config
from onnxq.data import find_extremes, load_data
from onnxq.graph import ValueInfo
from onnxq.pipeline.prepared import load_state
from onnxq.pipeline.samples import read_data
from tests.pipeline.models import images, residual

INPUT = (ValueInfo("x", 1, (None, 2)),)


def test_the_least_the_greatest_the_loudest_and_the_longest_are_found() -> None:
    rows = [np.array([0.0, 1.0]), np.array([-3.0, 0.1]), np.array([0.5, 2.0]), np.array([1.9, 1.9, 1.9]), np.zeros(2)]
    found = find_extremes({"x": row.astype(np.float32), "name": np.array([k])} for k, row in enumerate(rows))
    assert found == {1, 2, 3}


def test_names_and_what_is_the_same_everywhere_count_for_nothing() -> None:
    assert find_extremes({"ids": np.array([k]), "rate": np.array(16000.0)} for k in range(4)) == frozenset()


@given(st.integers(0, 2**16), st.integers(1, 7), st.sets(st.integers(0, 7), max_size=8))
def test_what_is_to_be_kept_is_held_back_only_when_nothing_else_is_left(seed: int, hold: int, keep: set[int]) -> None:
    data = load_data({"x": np.arange(16, dtype=np.float32).reshape(8, 2)}, INPUT)
    kept, held = data.split(hold, seed, keep)
    mine = [int(sample["x"].flat[0]) // 2 for sample in kept.samples()]
    others = [int(sample["x"].flat[0]) // 2 for sample in held.samples()]
    assert sorted([*mine, *others]) == list(range(8))
    assert len(others) == hold
    assert not keep & set(others) or 8 - len(keep) < hold


def test_a_run_never_holds_back_its_loudest_sample() -> None:
    prepared = load_state(residual())
    for loud in range(8):
        feeds = images(8)
        feeds["x"][loud] *= 9.0
        for seed in range(4):
            inputs = read_data(prepared, feeds, Config.model_validate({"effort": "balanced", "data": {"seed": seed}}))
            most = max(float(np.abs(sample["x"]).max()) for sample in inputs.calibration.samples())
            assert most == float(np.abs(feeds["x"]).max())
