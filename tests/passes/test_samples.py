"""Which samples judge, and which equalized models are compared on."""

from __future__ import annotations

import numpy as np
import pytest

from onnxq.config import DataConfig
from onnxq.data import Dataset, load_data
from onnxq.graph import GraphIndex
from onnxq.passes.judging import SampleSets
from tests.passes.kit import parse

INPUTS = GraphIndex(parse("g (float[1,2] x) => (float[1,2] y) { y = Relu(x) }")).inputs


def dataset(numbers: range) -> Dataset:
    """One sample for each number."""
    return load_data({"x": np.array([[[k, k]] for k in numbers], np.float32)}, INPUTS, DataConfig())


def numbers(held: Dataset) -> list[int]:
    return [int(sample["x"].ravel()[0]) for sample in held.samples()]


def samples(count: int, seed: int = 0) -> SampleSets:
    """So many for calibration, and four more held back."""
    first, second = dataset(range(count + 4)).split(4, keep=range(count))
    return SampleSets(first, first, second, second, "", {}, "", synthetic=False, seed=seed)


@pytest.mark.parametrize(
    ("count", "judges", "trial"),
    [pytest.param(20, 12, 8, id="some of many"), pytest.param(3, 7, 7, id="all of few")],
)
def test_sets_of_judges_are_some_of_the_calibration_and_all_held_back(count, judges, trial):
    one, validation = samples(count), range(count, count + 4)
    assert numbers(one.judge.samples) == list(validation)
    for found, wanted in ((one.judges.samples, judges), (one.equalizing, trial)):
        held = numbers(found)
        assert len(held) == len(set(held)) == wanted
        assert held[-4:] == list(validation)
        assert set(held[:-4]) <= set(range(count))


def test_the_choice_is_that_of_the_seed_and_made_once():
    one, same = samples(20, 7), samples(20, 7)
    assert one.judges is one.judges
    assert numbers(one.judges.samples) == numbers(same.judges.samples)
    others = [numbers(samples(20, seed).judges.samples) for seed in range(5)]
    assert len({tuple(found) for found in others}) > 1
