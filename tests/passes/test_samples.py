"""Which samples judge, and which equalized models are compared on."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.graph import GraphIndex
from onnxq.passes.samples import Samples
from tests.passes.kit import parse

INPUTS = GraphIndex(parse("g (float[1,2] x) => (float[1,2] y) { y = Relu(x) }")).inputs


def dataset(numbers: range) -> Dataset:
    """One sample for each number."""
    return load_data({"x": np.array([[[k, k]] for k in numbers], np.float32)}, INPUTS, DataConfig())


def numbers(held: Dataset) -> list[int]:
    return [int(sample["x"].ravel()[0]) for sample in held.samples()]


def samples(calibration: range, validation: range, seed: int = 0) -> Samples:
    first, second = dataset(calibration), dataset(validation)
    return Samples(first, first, second, second, "", {}, "", synthetic=False, seed=seed)


@pytest.mark.parametrize(
    ("calibration", "validation", "judges", "trial"),
    [
        pytest.param(range(20), range(100, 104), 12, 8, id="some of many"),
        pytest.param(range(3), range(100, 104), 7, 7, id="all of few"),
    ],
)
def test_sets_of_judges_are_some_of_the_calibration_and_all_held_back(calibration, validation, judges, trial):
    one = samples(calibration, validation)
    assert numbers(one.judge.samples) == list(validation)
    for found, count in ((one.judges.samples, judges), (one.equalizing, trial)):
        held = numbers(found)
        assert len(held) == len(set(held)) == count
        assert held[-4:] == list(validation)
        assert set(held[:-4]) <= set(calibration)


def test_the_choice_is_that_of_the_seed_and_made_once():
    one, same = samples(range(20), range(100, 104), 7), samples(range(20), range(100, 104), 7)
    assert one.judges is one.judges
    assert numbers(one.judges.samples) == numbers(same.judges.samples)
    others = [numbers(samples(range(20), range(100, 104), seed).judges.samples) for seed in range(5)]
    assert len({tuple(found) for found in others}) > 1
